"""The tensors of each family, by name: where each of Hugging Face's stands in a checkpoint. No torch.

Names of a checkpoint are Megatron-Core's; the fused query, key and value come in groups of the queries that share a key
(`linear_qkv`), gate and up one behind the other (`linear_fc1`), experts in one tensor each for both of their matrices.
Names of Hugging Face's are those of released files, which transformers reads and writes whatever its modules are
called. What is right is decided by the card alone, never by a tensor's shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from maniple.engines.megatron.huggingface.links import Chunk, Link, same, stacked, whole
from maniple.errors import UserError
from maniple.models.card import ModelCard

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_ALL = slice(None)
_NUMBER = re.compile(r"[0-9]{1,9}")


def chunks(card: ModelCard) -> Iterator[Chunk]:
    """Everything that a checkpoint of this model holds, in the order of its layers. Raises UserError for a family whose
    names are not known."""
    if card.family not in FAMILIES:
        raise UserError(f"model family {card.family} has no conversion: choose one of {', '.join(FAMILIES)}")
    return _chunks(card)


def copies(card: ModelCard) -> dict[str, str]:
    """Tensors that a release may hold once more: name of the copy to name of the tensor that it equals.

    Every MTP layer has the embedding and the head (DeepSeek-V3 report, 2.2: shared with the main model); tied models
    may have a head.
    """
    found = {_HEAD: _EMBEDDING} if card.tied_embeddings else {}
    for layer in range(card.num_layers, card.num_layers + card.num_mtp_layers):
        found[f"model.layers.{layer}.embed_tokens.weight"] = _EMBEDDING
        found[f"model.layers.{layer}.shared_head.head.weight"] = _EMBEDDING if card.tied_embeddings else _HEAD
    return found


def is_derived(name: str) -> bool:
    """Whether a tensor of this name follows from the config: older files keep the rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")


def layer_of(name: str) -> int | None:
    """The layer that a Hugging Face tensor belongs to; those from `num_layers` on are MTP layers."""
    parts = name.split(".")
    return (
        int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and _NUMBER.fullmatch(parts[2]) else None
    )


def _chunks(card: ModelCard) -> Iterator[Chunk]:
    vocabulary = card.vocab_size, card.hidden_size
    width = (card.hidden_size,)
    yield whole("embedding.word_embeddings.weight", vocabulary, same(_EMBEDDING, vocabulary))
    for layer in range(card.num_layers):
        yield from _layer(card, layer, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield whole("decoder.final_layernorm.weight", width, same(_NORM, width))
    for depth in range(card.num_mtp_layers):
        layer = card.num_layers + depth
        ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{layer}."
        for norm in ("enorm", "hnorm"):
            yield whole(f"{ours}{norm}.weight", width, same(f"{theirs}{norm}.weight", width))
        both = card.hidden_size, 2 * card.hidden_size
        yield whole(f"{ours}eh_proj.weight", both, same(f"{theirs}eh_proj.weight", both))
        yield from _layer(card, layer, f"{ours}transformer_layer.", theirs)
        yield whole(f"{ours}final_layernorm.weight", width, same(f"{theirs}shared_head.norm.weight", width))
    if not card.tied_embeddings:
        yield whole("output_layer.weight", vocabulary, same(_HEAD, vocabulary))


def _layer(card: ModelCard, layer: int, ours: str, theirs: str) -> Iterator[Chunk]:
    width = (card.hidden_size,)
    # Megatron-Core names a norm after the linear layer that Transformer Engine would fuse it into
    before_attention = "input_layernorm.weight" if card.mla else "self_attention.linear_qkv.layer_norm_weight"
    before_mlp = "pre_mlp_layernorm.weight" if card.mla else "mlp.linear_fc1.layer_norm_weight"
    yield whole(ours + before_attention, width, same(theirs + "input_layernorm.weight", width))
    attention = _latent_attention if card.mla else _attention
    yield from attention(card, ours + "self_attention.", theirs + "self_attn.")
    yield whole(ours + before_mlp, width, same(theirs + "post_attention_layernorm.weight", width))
    if card.is_moe_layer(layer):
        yield from _moe(card, ours + "mlp.", theirs)
    else:
        yield from _mlp(card.hidden_size, card.dense_ffn_size, ours + "mlp.", theirs + "mlp.")


def _attention(card: ModelCard, ours: str, theirs: str) -> Iterator[Chunk]:
    groups, head = card.num_kv_heads, card.head_dim
    heads = card.num_heads // groups  # a group's queries
    for kind, has, inputs in (("weight", True, (card.hidden_size,)), ("bias", card.qkv_bias, ())):
        if has:
            shape, view = (groups * (heads + 2) * head, *inputs), (groups, heads + 2, head, *inputs)
            links = []
            for name, at, count in (("q_proj", slice(heads), heads), ("k_proj", heads, 1), ("v_proj", heads + 1, 1)):
                split = (groups, heads, head, *inputs) if name == "q_proj" else (groups, head, *inputs)
                links.append(
                    Link(
                        f"{theirs}{name}.{kind}",
                        (groups * count * head, *inputs),
                        *(None, view, (_ALL, at), split, tuple(range(len(split)))),
                    )
                )
            yield whole(f"{ours}linear_qkv.{kind}", shape, *links)
    queries = card.num_heads * head
    yield from _output(card, queries, ours, theirs)
    if card.qk_norm != "none":
        full = card.qk_norm == "full_width"
        for name, count in (("q", card.num_heads), ("k", groups)):
            shape = (count * head if full else head,)
            yield whole(f"{ours}{name}_layernorm.weight", shape, same(f"{theirs}{name}_norm.weight", shape))
    if card.attention_sinks:
        shape = (card.num_heads,)
        yield whole(f"{ours}core_attention.softmax_offset", shape, same(f"{theirs}sinks", shape))


def _latent_attention(card: ModelCard, ours: str, theirs: str) -> Iterator[Chunk]:
    mla, heads, hidden = card.mla, card.num_heads, card.hidden_size
    assert mla is not None
    query, value = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    matrices = [("linear_kv_down_proj", "kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)]
    matrices.append(("linear_kv_up_proj", "kv_b_proj", heads * value, mla.kv_lora_rank))
    norms = [("kv_layernorm", "kv_a_layernorm", mla.kv_lora_rank)]
    if mla.q_lora_rank is None:
        matrices.append(("linear_q_proj", "q_proj", heads * query, hidden))
    else:
        matrices.append(("linear_q_down_proj", "q_a_proj", mla.q_lora_rank, hidden))
        matrices.append(("linear_q_up_proj", "q_b_proj", heads * query, mla.q_lora_rank))
        norms.append(("q_layernorm", "q_a_layernorm", mla.q_lora_rank))
    for name, their_name, outputs, inputs in matrices:
        shape: tuple[int, ...] = outputs, inputs
        yield whole(f"{ours}{name}.weight", shape, same(f"{theirs}{their_name}.weight", shape))
    for name, their_name, size in norms:
        shape = (size,)
        yield whole(f"{ours}{name}.weight", shape, same(f"{theirs}{their_name}.weight", shape))
    yield from _output(card, heads * mla.v_head_dim, ours, theirs)


def _output(card: ModelCard, inputs: int, ours: str, theirs: str) -> Iterator[Chunk]:
    for kind, has, shape in (
        ("weight", True, (card.hidden_size, inputs)),
        ("bias", card.output_bias, (card.hidden_size,)),
    ):
        if has:
            yield whole(f"{ours}linear_proj.{kind}", shape, same(f"{theirs}o_proj.{kind}", shape))


def _mlp(hidden: int, ffn: int, ours: str, theirs: str) -> Iterator[Chunk]:
    names = f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"
    yield whole(f"{ours}linear_fc1.weight", (2 * ffn, hidden), *stacked(names, (ffn, hidden)))
    shape = hidden, ffn
    yield whole(f"{ours}linear_fc2.weight", shape, same(f"{theirs}down_proj.weight", shape))


def _moe(card: ModelCard, ours: str, theirs: str) -> Iterator[Chunk]:
    moe, hidden = card.moe, card.hidden_size
    experts, is_gpt_oss = moe.num_experts, card.family == "gpt_oss"
    block = f"{theirs}block_sparse_moe." if card.family in ("mixtral", "minimax_m2") else f"{theirs}mlp."
    router = f"{block}router." if is_gpt_oss else f"{block}gate."
    shape = experts, hidden
    yield whole(f"{ours}router.weight", shape, same(f"{router}weight", shape))
    if moe.router.linear_bias:
        yield whole(f"{ours}router.bias", (experts,), same(f"{router}bias", (experts,)))
    if moe.router.expert_bias:
        name = f"{block if card.family == 'minimax_m2' else router}e_score_correction_bias"
        yield whole(f"{ours}router.expert_bias", (experts,), same(name, (experts,)), fp32=True)
    yield from (_interleaved_experts if is_gpt_oss else _experts)(card, f"{ours}experts.experts.", f"{block}experts.")
    if moe.num_shared_experts:
        yield from _mlp(hidden, moe.shared_ffn_size, f"{ours}shared_experts.", f"{block}shared_experts.")


def _experts(card: ModelCard, ours: str, theirs: str) -> Iterator[Chunk]:
    """An expert's matrices each in a tensor of its own."""
    experts, ffn, hidden = card.moe.num_experts, card.moe.expert_ffn_size, card.hidden_size
    short = card.family in ("mixtral", "minimax_m2")
    gate, down, up = ("w1", "w2", "w3") if short else ("gate_proj", "down_proj", "up_proj")
    for e in range(experts):
        names = f"{theirs}{e}.{gate}.weight", f"{theirs}{e}.{up}.weight"
        links = stacked(names, (ffn, hidden))
        yield Chunk(
            f"{ours}linear_fc1.weight", (experts, 2 * ffn, hidden), (e, 0, 0), (1, 2 * ffn, hidden), tuple(links)
        )
    shape = hidden, ffn
    for e in range(experts):
        link = Link(f"{theirs}{e}.{down}.weight", shape, None, shape, (), shape, (0, 1))
        yield Chunk(f"{ours}linear_fc2.weight", (experts, *shape), (e, 0, 0), (1, *shape), (link,))


def _interleaved_experts(card: ModelCard, ours: str, theirs: str) -> Iterator[Chunk]:
    """GPT-OSS: all experts in one tensor, inputs before outputs, and gate and up of an output side by side."""
    experts, ffn, hidden = card.moe.num_experts, card.moe.expert_ffn_size, card.hidden_size
    for e in range(experts):
        first = (e, 0, 0)
        link = Link(
            f"{theirs}gate_up_proj", (experts, hidden, 2 * ffn), e, (2, ffn, hidden), (), (hidden, ffn, 2), (2, 1, 0)
        )
        yield Chunk(f"{ours}linear_fc1.weight", (experts, 2 * ffn, hidden), first, (1, 2 * ffn, hidden), (link,))
    for e in range(experts):
        link = Link(f"{theirs}down_proj", (experts, ffn, hidden), e, (hidden, ffn), (), (ffn, hidden), (1, 0))
        yield Chunk(f"{ours}linear_fc2.weight", (experts, hidden, ffn), (e, 0, 0), (1, hidden, ffn), (link,))
    if card.moe.linear_bias:
        both = experts, 2 * ffn
        link = Link(f"{theirs}gate_up_proj_bias", both, None, (experts, 2, ffn), (), (experts, ffn, 2), (0, 2, 1))
        yield whole(f"{ours}linear_fc1.bias", both, link)
        yield whole(f"{ours}linear_fc2.bias", (experts, hidden), same(f"{theirs}down_proj_bias", (experts, hidden)))


def hf_shapes(card: ModelCard) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor that a conversion reads or writes, without copies: its name and shape."""
    return {link.name: link.shape for link in chain.from_iterable(chunk.links for chunk in chunks(card))}
