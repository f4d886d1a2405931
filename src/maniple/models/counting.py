"""Exact parameter counts of a card, by formula.

What counts is what an optimizer updates: matrices, their biases, norm weights, attention sinks. The aux-free balancing
bias of a router (E numbers a layer, moved by a rule and not by a gradient) is a buffer and counts nowhere. The
vocabulary is the card's own: engines pad it, so compare with `card.with_overrides({"vocab_size": padded})`.

"Active" is what one token's forward pass through the base model reads: everything, except that of each layer's E
routed experts only the top k count. The table lookup of the input embedding is part of it, MTP layers are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from maniple.models.card import ModelCard


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `layers` and `mtp_layers` split each layer by component; the rest are sums."""

    total: int  # base model: without MTP layers
    mtp: int  # what the MTP layers add; they share embedding and head with the base model
    active: int
    active_no_embedding: int
    active_no_embedding_and_head: int
    embedding: int
    head: int  # 0 if tied to the embedding
    final_norm: int
    routed_experts: int  # all experts of all base layers
    layers: tuple[dict[str, int], ...]  # one dict a decoder layer, in order
    mtp_layers: tuple[dict[str, int], ...]

    @property
    def total_with_mtp(self) -> int:
        return self.total + self.mtp


def count(card: ModelCard) -> ParameterCount:
    """Parameters of the whole model, on one device, without padding or copies."""
    layers = tuple(layer_parameters(card, layer) for layer in range(card.num_layers))
    mtp_layers = tuple(
        layer_parameters(card, card.num_layers + layer) | mtp_extras(card) for layer in range(card.num_mtp_layers)
    )
    embedding = card.vocab_size * card.hidden_size
    head = 0 if card.tied_embeddings else embedding
    total = embedding + card.hidden_size + head + sum(sum(layer.values()) for layer in layers)
    routed = sum(layer["routed_experts"] for layer in layers)
    active = total - routed + routed // card.moe.num_experts * card.moe.topk
    return ParameterCount(
        total=total,
        mtp=sum(sum(layer.values()) for layer in mtp_layers),
        active=active,
        active_no_embedding=active - embedding,
        active_no_embedding_and_head=active - embedding - head,
        embedding=embedding,
        head=head,
        final_norm=card.hidden_size,
        routed_experts=routed,
        layers=layers,
        mtp_layers=mtp_layers,
    )


def layer_parameters(card: ModelCard, layer: int) -> dict[str, int]:
    """One decoder layer by component (every key present, 0 where absent). MTP layers follow the last layer."""
    moe, width = card.moe, card.hidden_size
    parts = {
        "attention": attention_parameters(card),
        "norms": 2 * width,
        "dense_mlp": 0,
        "router": 0,
        "routed_experts": 0,
        "shared_experts": 0,
    }
    if not card.is_moe_layer(layer):
        return parts | {"dense_mlp": 3 * width * card.dense_ffn_size}
    return parts | {
        "router": moe.num_experts * (width + moe.router.linear_bias),
        "routed_experts": moe.num_experts * expert_parameters(card),
        "shared_experts": 3 * width * moe.shared_ffn_size,
    }


def expert_parameters(card: ModelCard) -> int:
    """One routed expert: gate, up (D to F each) and down (F to D), with 2F + D biases if it has any."""
    width, ffn = card.hidden_size, card.moe.expert_ffn_size
    return 3 * width * ffn + (2 * ffn + width if card.moe.linear_bias else 0)


def attention_parameters(card: ModelCard, tensor: int = 1) -> int:
    """One layer's attention: projections, their biases, norms of queries and keys (or of MLA's latents), sinks.

    tensor: tensor-parallel ranks; then what one of them holds. Norms are whole on each, and the bias of the result.
    """
    width, heads, dim = card.hidden_size, card.num_heads // tensor, card.head_dim
    sinks = heads if card.attention_sinks else 0
    if card.mla is not None:
        mla = card.mla
        if mla.q_lora_rank is None:
            query = width * heads * dim
        else:
            query = width * mla.q_lora_rank // tensor + mla.q_lora_rank + mla.q_lora_rank * heads * dim
        down = width * (mla.kv_lora_rank + mla.qk_rope_head_dim) // tensor + mla.kv_lora_rank
        up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + down + up + heads * mla.v_head_dim * width + sinks
    qkv = (heads + 2 * card.num_kv_heads // tensor) * dim
    biases = (qkv if card.qkv_bias else 0) + (width if card.output_bias else 0)
    norms = {"none": 0, "per_head": 2 * dim, "full_width": (card.num_heads + card.num_kv_heads) * dim}[card.qk_norm]
    return width * qkv + heads * dim * width + biases + norms + sinks


def mtp_extras(card: ModelCard) -> dict[str, int]:
    """What an MTP layer has beside a decoder layer (DeepSeek-V3 report, section 2.2): norms of the hidden state and of
    the next token's embedding, the projection of both together from 2D to D, and a norm before the shared head."""
    return {"mtp_norms": 3 * card.hidden_size, "mtp_projection": 2 * card.hidden_size**2}
