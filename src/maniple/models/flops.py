"""The one FLOP formula: model FLOPs a token, by component. Every MFU that Maniple prints or plans comes from here.

Convention
- A multiply-add is 2 FLOPs; only matrix products count. Norms, rotary embedding, softmax, activations, biases, gates,
  residuals, top-k and the embedding lookup are left out: together well under 1 % at these widths.
- Training is 3 x forward (each product has two in backward). Recomputed activations do not count: model FLOPs.
- Causal attention is half of full attention: a query sees sequence_length / 2 keys on average. In a sliding-window
  layer it sees the exact average of min(i, window) over positions i = 1 .. sequence_length, never more than that half.
- Only the top-k routed experts that a token uses count. No padding of vocabulary or rows counts.
- MLA is counted as trained: latents are projected up to full heads, of nope + rope dims for queries and keys, and
  v_head_dim for values (no absorption of the up-projections, which only pays in decoding).
- An MTP layer is a decoder layer, its 2D-to-D projection, and one more pass of the shared head.
"""

from __future__ import annotations

from maniple.models.card import ModelCard


def forward_flops_per_token(card: ModelCard, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs of one token at this sequence length (tokens), by component. `mtp` holds all of the MTP layers."""
    parts = dict.fromkeys(
        ("attention_projections", "attention_core", "router", "routed_experts", "shared_experts", "dense_mlp"), 0.0
    )
    for layer in range(card.num_layers):
        for part, flops in layer_flops_per_token(card, layer, sequence_length).items():
            parts[part] += flops
    parts["head"] = head_flops_per_token(card)
    parts["mtp"] = sum(
        sum(layer_flops_per_token(card, card.num_layers + layer, sequence_length).values())
        + 2.0 * 2 * card.hidden_size * card.hidden_size
        + head_flops_per_token(card)
        for layer in range(card.num_mtp_layers)
    )
    return parts


def training_flops_per_token(card: ModelCard, sequence_length: int, *, with_mtp: bool = True) -> float:
    """Forward and backward FLOPs of one token; `with_mtp=False` leaves the MTP layers out."""
    parts = forward_flops_per_token(card, sequence_length)
    return 3.0 * (sum(parts.values()) - (0.0 if with_mtp else parts["mtp"]))


def mfu(
    tokens_per_second_per_gpu: float,
    card: ModelCard,
    sequence_length: int,
    peak_flops: float,
    *,
    with_mtp: bool = True,
) -> float:
    """Model FLOPs utilisation, 0 to 1: model FLOP/s that a device attains over `peak_flops` (FLOP/s, dense)."""
    if peak_flops <= 0:
        raise ValueError(f"peak_flops {peak_flops} must be positive")
    return tokens_per_second_per_gpu * training_flops_per_token(card, sequence_length, with_mtp=with_mtp) / peak_flops


def layer_flops_per_token(card: ModelCard, layer: int, sequence_length: int) -> dict[str, float]:
    """One decoder layer's forward FLOPs of one token, by component. MTP layers follow the last layer."""
    moe, width = card.moe, card.hidden_size
    parts = {
        "attention_projections": attention_projection_flops_per_token(card),
        "attention_core": attention_core_flops_per_token(card, sequence_length, card.window(layer)),
    }
    if not card.is_moe_layer(layer):
        return parts | {"dense_mlp": 2.0 * 3 * width * card.dense_ffn_size}
    return parts | {
        "router": 2.0 * width * moe.num_experts,
        "routed_experts": 2.0 * moe.topk * 3 * width * moe.expert_ffn_size,
        "shared_experts": 2.0 * 3 * width * moe.shared_ffn_size,
    }


def attention_projection_flops_per_token(card: ModelCard) -> float:
    """Projections into and out of one layer's attention."""
    width, heads, dim = card.hidden_size, card.num_heads, card.head_dim
    if card.mla is None:
        return 2.0 * (width * (heads + 2 * card.num_kv_heads) * dim + heads * dim * width)
    mla = card.mla
    query = width * heads * dim if mla.q_lora_rank is None else (width + heads * dim) * mla.q_lora_rank
    down = width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return 2.0 * (query + down + up + heads * mla.v_head_dim * width)


def attention_core_flops_per_token(card: ModelCard, sequence_length: int, window: int | None) -> float:
    """Scores and weighted values of one layer: heads x average keys x (query-key dim + value dim)."""
    value_dim = card.mla.v_head_dim if card.mla is not None else card.head_dim
    return 2.0 * average_keys(sequence_length, window) * card.num_heads * (card.head_dim + value_dim)


def average_keys(sequence_length: int, window: int | None) -> float:
    """Keys a query sees, averaged over a sequence of that many tokens (see the module's convention)."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length {sequence_length} must be at least 1")
    half = sequence_length / 2
    if window is None or window >= sequence_length:
        return half
    seen = window * (window + 1) / 2 + (sequence_length - window) * window
    return min(half, seen / sequence_length)


def head_flops_per_token(card: ModelCard) -> float:
    """One pass of the output projection, hidden size to vocabulary."""
    return 2.0 * card.hidden_size * card.vocab_size
