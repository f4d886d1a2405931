"""Rows of the table of models: what `maniple models` prints, with every way of counting side by side."""

from __future__ import annotations

from maniple.models import list_cards, load_card
from maniple.models.card import ModelCard
from maniple.models.counting import count

COUNTING = {
    "all": "all parameters",
    "no_embedding": "without the input embedding",
    "no_embedding_and_head": "without embedding and head",
    "base_plus_mtp_minus_embedding_and_head": "with MTP, without embedding and head",
}


def rows() -> list[dict]:
    """One JSON-able dict a card, in the order of `list_cards`. Counts are exact; `published_*` are in billions."""
    return [row(load_card(name)) for name in list_cards()]


def row(card: ModelCard) -> dict:
    counts = count(card)
    published = card.published
    return {
        "name": card.name,
        "family": card.family,
        "total_parameters": counts.total,
        "mtp_parameters": counts.mtp,
        "active_parameters": counts.active,
        "active_parameters_no_embedding": counts.active_no_embedding,
        "active_parameters_no_embedding_and_head": counts.active_no_embedding_and_head,
        "published_total": published and published.total,
        "published_active": published and published.active,
        "published_total_counting": published and COUNTING[published.total_counting],
        "published_active_counting": published and COUNTING[published.active_counting],
        "layers": card.num_layers,
        "mtp_layers": card.num_mtp_layers,
        "hidden_size": card.hidden_size,
        "experts": card.moe.num_experts,
        "topk": card.moe.topk,
        "attention": attention_words(card),
        "router": router_words(card),
    }


def attention_words(card: ModelCard) -> str:
    """E.g. `GQA 64/8 x 64, biases, sinks, sliding 128 (even layers)`: query heads / kv heads x head dim."""
    if card.mla is not None:
        words = [f"MLA {card.num_heads} heads, kv rank {card.mla.kv_lora_rank}"]
    else:
        words = [f"GQA {card.num_heads}/{card.num_kv_heads} x {card.head_dim}"]
    if card.qk_norm != "none":
        words.append({"per_head": "qk-norm", "full_width": "full-width qk-norm"}[card.qk_norm])
    if card.qkv_bias:
        words.append("biases" if card.output_bias else "qkv bias")
    if card.attention_sinks:
        words.append("sinks")
    if card.sliding_layers != "none":
        words.append(f"sliding {card.sliding_window} ({card.sliding_layers} layers)")
    return ", ".join(words)


def router_words(card: ModelCard) -> str:
    """E.g. `sigmoid + bias, 4 of 8 groups, renormalised, x2.5`."""
    router = card.moe.router
    words = [f"{router.score}{'' if router.score_before_topk else ' after top-k'}{' + bias' * router.expert_bias}"]
    if router.num_groups > 1:
        words.append(f"{router.group_topk} of {router.num_groups} groups")
    if router.renormalize:
        words.append("renormalised")
    if router.route_scale != 1.0:
        words.append(f"x{router.route_scale:g}")
    return ", ".join(words)


def markdown() -> str:
    """The table as Markdown, parameters in billions: what docs/models.md shows."""
    lines = [
        "| model | total | MTP adds | active: all / − embedding / − embedding and head | published total / active |"
        " layers | hidden | experts / top-k | attention | router |",
        "|" + "---|" * 10,
    ]
    for r in rows():
        total, mtp, *active = (
            f"{r[key] / 1e9:.3f}"
            for key in (
                "total_parameters",
                "mtp_parameters",
                "active_parameters",
                "active_parameters_no_embedding",
                "active_parameters_no_embedding_and_head",
            )
        )
        cells = [
            f"`{r['name']}`",
            total,
            mtp if r["mtp_layers"] else "",
            " / ".join(active),
            f"{r['published_total']:g} / {r['published_active']:g}",
            f"{r['layers']}{f' + {r["mtp_layers"]}' if r['mtp_layers'] else ''}",
            str(r["hidden_size"]),
            f"{r['experts']} / {r['topk']}",
            r["attention"],
            r["router"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
