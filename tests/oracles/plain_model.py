"""A decoder-only MoE language model in plain torch, written from the published equations alone.

It knows a `ModelCard` and torch, and neither an engine nor a kernel: loops over layers, heads' groups, tokens and
experts, in whatever dtype its weights have (float64 makes it the truth that fp32 engines are measured against).
Weights are a dict by the engine's parameter names; `PlainModel` says which name holds which matrix of the equations.

Sources: RMSNorm (Zhang and Sennrich, 2019), rotary embedding (Su et al., 2021), YaRN (Peng et al., 2023), MLA and
groups (DeepSeek-V2, 2024), aux-free bias, sequence-wise balance loss and MTP (DeepSeek-V3, 2024), balance loss (Fedus
et al., 2021), z-loss (Zoph et al., 2022), sinks and clamped SwiGLU (GPT-OSS, 2025).

Shapes: B sequences, S positions, D hidden, H query heads, G key/value heads, C head size, R rotated part of a head,
V vocabulary, E experts, K chosen a token, F intermediate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from maniple.models.card import ModelCard

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """What is added to the language-model loss, and with which coefficients."""

    aux_kind: Literal["none", "sequence", "micro_batch", "global_batch"] = "none"
    aux: float = 0.0
    z: float = 0.0
    mtp: float = 0.0


@dataclass
class Forward:
    """One micro-batch. `losses_BS` are nats a position, whatever the mask; sums are over what the mask keeps."""

    logits_BSV: torch.Tensor
    losses_BS: torch.Tensor
    loss_sum: torch.Tensor
    tokens: int  # positions whose label counts
    mtp: list[tuple[torch.Tensor, int]]  # by depth: summed loss and number of the positions that still have a label
    aux: dict[int, torch.Tensor] = field(default_factory=dict)  # balance loss by layer; MTP depth d is num_layers + d
    z: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)  # tokens by expert


class PlainModel:
    """The model of a card over given weights, which it reads in forward: let them require gradients to differentiate.

    One object is for one step: the loads that the global balance loss sees are those of all its forward passes so far.
    """

    def __init__(self, card: ModelCard, weights: Weights, objective: Objective) -> None:
        self.card, self.weights, self.objective = card, weights, objective
        self.loads: dict[int, list[int]] = {}  # by layer: tokens by expert

    def total(self, passes: list[Forward]) -> torch.Tensor:
        """The scalar that a step over these micro-batches descends.

        Mean loss over all labelled positions, plus the mean of the MTP depths' summed losses over the same number of
        positions (DeepSeek-V3, eq. 24 and 25), plus, for each micro-batch, weighted by its positions over all labelled
        positions, the router's losses.
        """
        labelled = sum(p.tokens for p in passes)
        total = sum(p.loss_sum for p in passes)
        for p in passes:
            if p.mtp:
                total = total + self.objective.mtp * sum(loss for loss, _ in p.mtp) / len(p.mtp)
            router = self.objective.aux * sum(p.aux.values()) + self.objective.z * sum(p.z.values())
            total = total + p.losses_BS.numel() * router
        return total / labelled

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, mask_BS: torch.Tensor) -> Forward:
        card, w = self.card, self.weights
        out = Forward(*[torch.empty(0)] * 3, tokens=int(mask_BS.sum()), mtp=[])
        x_BSD = w["embedding.word_embeddings.weight"][tokens_BS]
        for layer in range(card.num_layers):
            x_BSD = self._layer(f"decoder.layers.{layer}.", layer, x_BSD, out)
        x_BSD = self._norm("decoder.final_layernorm.weight", x_BSD)
        out.logits_BSV = self._head(x_BSD)
        out.losses_BS = _cross_entropy(out.logits_BSV, labels_BS)
        out.loss_sum = (out.losses_BS * mask_BS).sum()
        for depth in range(card.num_mtp_layers):
            name = f"mtp.layers.{depth}."
            # depth d sees the token that the one before it was asked for, and is asked for the next
            tokens_BS, labels_BS, mask_BS = (_one_ahead(t) for t in (tokens_BS, labels_BS, mask_BS))
            next_BSD = self._norm(name + "enorm.weight", w["embedding.word_embeddings.weight"][tokens_BS])
            past_BSD = self._norm(name + "hnorm.weight", x_BSD)
            x_BSD = torch.cat([next_BSD, past_BSD], -1) @ w[name + "eh_proj.weight"].T
            x_BSD = self._layer(name + "mtp_model_layer.", card.num_layers + depth, x_BSD, out)
            x_BSD = self._norm(name + "final_layernorm.weight", x_BSD)
            losses_BS = _cross_entropy(self._head(x_BSD), labels_BS) * mask_BS
            out.mtp.append((losses_BS.sum(), int(mask_BS.sum())))
        return out

    def _head(self, x_BSD: torch.Tensor) -> torch.Tensor:
        tied = self.card.tied_embeddings
        return x_BSD @ self.weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T

    def _norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        eps = self.card.norm_eps if eps is None else eps
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[name]

    def _linear(self, name: str, x: torch.Tensor, bias: bool = False) -> torch.Tensor:
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if bias else y

    def _layer(self, name: str, layer: int, x_BSD: torch.Tensor, out: Forward) -> torch.Tensor:
        attention = self._mla if self.card.mla else self._gqa
        x_BSD = x_BSD + attention(name + "self_attention.", layer, self._norm(name + "input_layernorm.weight", x_BSD))
        h_BSD = self._norm(name + "pre_mlp_layernorm.weight", x_BSD)
        if not self.card.is_moe_layer(layer):
            return x_BSD + self._swiglu(name + "mlp.", h_BSD)
        return x_BSD + self._moe(name + "mlp.", layer, h_BSD, out)

    # Attention

    def _gqa(self, name: str, layer: int, x_BSD: torch.Tensor) -> torch.Tensor:
        card = self.card
        heads, groups, size = card.num_heads, card.num_kv_heads, card.head_dim
        shape = x_BSD.shape[:2]
        # rows of linear_qkv: for each key/value head its query heads, then its key, then its value
        qkv = self._linear(name + "linear_qkv", x_BSD, card.qkv_bias).view(*shape, groups, heads // groups + 2, size)
        q_BSHC = qkv[:, :, :, :-2].reshape(*shape, heads, size)
        k_BSGC, v_BSGC = qkv[:, :, :, -2], qkv[:, :, :, -1]
        if card.qk_norm == "per_head":
            q_BSHC = self._norm(name + "q_layernorm.weight", q_BSHC)
            k_BSGC = self._norm(name + "k_layernorm.weight", k_BSGC)
        elif card.qk_norm == "full_width":
            q_BSHC = self._norm(name + "q_layernorm.weight", q_BSHC.flatten(2)).view(q_BSHC.shape)
            k_BSGC = self._norm(name + "k_layernorm.weight", k_BSGC.flatten(2)).view(k_BSGC.shape)
        rotated = int(size * card.rope.partial)
        q_BSHC, k_BSGC = (self._rotate(t, rotated) for t in (q_BSHC, k_BSGC))
        k_BSHC, v_BSHC = (t.repeat_interleave(heads // groups, dim=2) for t in (k_BSGC, v_BSGC))
        sinks_H = self.weights[name + "core_attention.softmax_offset"] if card.attention_sinks else None
        mixed = _attend(q_BSHC, k_BSHC, v_BSHC, 1 / math.sqrt(size), card.window(layer), sinks_H)
        return self._linear(name + "linear_proj", mixed, card.output_bias)

    def _mla(self, name: str, layer: int, x_BSD: torch.Tensor) -> torch.Tensor:
        card, mla = self.card, self.card.mla
        heads, plain, rotated = card.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim
        shape = x_BSD.shape[:2]
        if mla.q_lora_rank is None:
            q = self._linear(name + "linear_q_proj", x_BSD)
        else:
            latent = self._norm(name + "q_layernorm.weight", self._linear(name + "linear_q_down_proj", x_BSD), 1e-6)
            q = self._linear(name + "linear_q_up_proj", latent)
        q_BSHC = q.view(*shape, heads, plain + rotated)
        down = self._linear(name + "linear_kv_down_proj", x_BSD)
        latent, shared_BSR = down[..., : mla.kv_lora_rank], down[..., mla.kv_lora_rank :]
        latent = self._norm(name + "kv_layernorm.weight", latent, 1e-6)
        kv = self._linear(name + "linear_kv_up_proj", latent).view(*shape, heads, plain + mla.v_head_dim)
        # one rotated key for all heads
        shared_BSHR = self._rotate(shared_BSR[:, :, None], rotated).expand(-1, -1, heads, -1)
        q_BSHC = torch.cat([q_BSHC[..., :plain], self._rotate(q_BSHC[..., plain:], rotated)], -1)
        k_BSHC = torch.cat([kv[..., :plain], shared_BSHR], -1)
        scale = 1 / math.sqrt(plain + rotated)
        if yarn := card.rope.yarn:
            scale *= _yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
        mixed = _attend(q_BSHC, k_BSHC, kv[..., plain:], scale, card.window(layer), None)
        return self._linear(name + "linear_proj", mixed)

    def _rotate(self, x_BSHC: torch.Tensor, rotated: int) -> torch.Tensor:
        """Turns each pair of the first `rotated` numbers of a head by its position times the pair's frequency."""
        rope = self.card.rope
        frequencies, magnitude = _frequencies(rope.base, rotated, rope.yarn, x_BSHC.dtype)
        angles_SP = torch.arange(x_BSHC.shape[1], dtype=x_BSHC.dtype)[:, None] * frequencies
        cos, sin = (magnitude * f(angles_SP)[None, :, None] for f in (torch.cos, torch.sin))
        x, rest = x_BSHC[..., :rotated], x_BSHC[..., rotated:]
        if rope.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            x = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = x[..., : rotated // 2], x[..., rotated // 2 :]
            x = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([x, rest], -1)

    # Feed-forward

    def _swiglu(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(name + "linear_fc1", x).chunk(2, -1)
        return self._linear(name + "linear_fc2", F.silu(gate) * up)

    def _moe(self, name: str, layer: int, x_BSD: torch.Tensor, out: Forward) -> torch.Tensor:
        moe, w = self.card.moe, self.weights
        logits_BSE = self._linear(name + "router", x_BSD, moe.router.linear_bias)
        bias_E = w[name + "router.expert_bias"].tolist() if moe.router.expert_bias else [0.0] * moe.num_experts
        chosen: list[list[list[int]]] = []
        rows = []
        for b in range(x_BSD.shape[0]):
            chosen.append([])
            for s in range(x_BSD.shape[1]):
                ids, weights_K = self._choose(logits_BSE[b, s], bias_E)
                chosen[b].append(ids)
                rows.append(
                    sum(weights_K[k] * self._expert(name + "experts.", e, x_BSD[b, s]) for k, e in enumerate(ids))
                )
        y_BSD = torch.stack(rows).view(x_BSD.shape)
        if moe.num_shared_experts:
            y_BSD = y_BSD + self._swiglu(name + "shared_experts.", x_BSD)
        loads_BE = [[sum(ids.count(e) for ids in rows) for e in range(moe.num_experts)] for rows in chosen]
        out.counts[layer] = [sum(loads) for loads in zip(*loads_BE, strict=True)]
        before = self.loads.get(layer, [0] * moe.num_experts)
        self.loads[layer] = [old + new for old, new in zip(before, out.counts[layer], strict=True)]
        out.z[layer] = logits_BSE.logsumexp(-1).square().mean()
        if self.objective.aux_kind == "sequence":
            parts = [self._balance(logits_SE, loads) for logits_SE, loads in zip(logits_BSE, loads_BE, strict=True)]
            out.aux[layer] = sum(parts) / len(parts)
        elif self.objective.aux_kind == "micro_batch":
            out.aux[layer] = self._balance(logits_BSE.flatten(0, 1), out.counts[layer])
        elif self.objective.aux_kind == "global_batch":
            out.aux[layer] = self._balance(logits_BSE.flatten(0, 1), self.loads[layer])
        return y_BSD

    def _choose(self, logits_E: torch.Tensor, bias_E: list[float]) -> tuple[list[int], torch.Tensor]:
        """Ids of one token's experts by falling selection score (ties: lowest id first), and their weights."""
        moe, router = self.card.moe, self.card.moe.router
        scores_E = logits_E
        if router.score_before_topk:
            scores_E = logits_E.softmax(-1) if router.score == "softmax" else logits_E.sigmoid()
        selection = [score + bias for score, bias in zip(scores_E.tolist(), bias_E, strict=True)]
        size = moe.num_experts // router.num_groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(router.num_groups)]
        best = [sorted((selection[e] for e in group), reverse=True) for group in members]
        group_scores = [b[0] if router.group_score == "max" else sum(b[:2]) for b in best]
        kept = sorted(range(router.num_groups), key=lambda g: (-group_scores[g], g))[: router.group_topk]
        candidates = [e for g in kept for e in members[g]]
        ids = sorted(candidates, key=lambda e: (-selection[e], e))[: moe.topk]
        weights_K = scores_E[ids]
        if not router.score_before_topk:
            weights_K = weights_K.softmax(-1) if router.score == "softmax" else weights_K.sigmoid()
        if router.renormalize:
            weights_K = weights_K / weights_K.sum()
        return ids, weights_K * router.route_scale

    def _expert(self, name: str, expert: int, x_D: torch.Tensor) -> torch.Tensor:
        moe, w = self.card.moe, self.weights
        h = w[name + "w13"][expert] @ x_D
        if moe.linear_bias:
            h = h + w[name + "b13"][expert]
        gate_F, up_F = h[: moe.expert_ffn_size], h[moe.expert_ffn_size :]
        if moe.activation == "clamped_swiglu":
            gate_F = gate_F.clamp(max=moe.activation_limit)
            up_F = up_F.clamp(-moe.activation_limit, moe.activation_limit)
        act_F = gate_F * torch.sigmoid(moe.activation_alpha * gate_F) * (up_F + moe.activation_up_offset)
        y_D = w[name + "w2"][expert] @ act_F
        return y_D + w[name + "b2"][expert] if moe.linear_bias else y_D

    def _balance(self, logits_TE: torch.Tensor, loads: list[int]) -> torch.Tensor:
        """sum_e f_e P_e: f_e is E times the expert's share of `loads`, P_e its mean score (a token's sum to 1)."""
        scores_TE = logits_TE.softmax(-1)
        if self.card.moe.router.score == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        f_E = torch.tensor(loads, dtype=logits_TE.dtype) * len(loads) / sum(loads)
        return (f_E * scores_TE.mean(0)).sum()


def _attend(q_BSHC, k_BSHC, v_BSHV, scale: float, window: int | None, sinks_H: torch.Tensor | None) -> torch.Tensor:
    length = q_BSHC.shape[1]
    scores_BHSS = torch.einsum("bihc,bjhc->bhij", q_BSHC, k_BSHC) * scale
    for i in range(length):
        first = 0 if window is None else max(0, i - window + 1)
        scores_BHSS[:, :, i, :first] = -math.inf
        scores_BHSS[:, :, i, i + 1 :] = -math.inf
    if sinks_H is not None:
        sinks = sinks_H[None, :, None, None].expand(*scores_BHSS.shape[:3], 1)
        weights = torch.cat([scores_BHSS, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores_BHSS.softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v_BSHV).flatten(2)


def _frequencies(base: float, rotated: int, yarn, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Radians a position for each of the `rotated / 2` pairs, and what cos and sin are multiplied by."""
    pairs = torch.arange(rotated // 2, dtype=dtype)
    frequencies = base ** (-2 * pairs / rotated)
    if yarn is None:
        return frequencies, 1.0

    def pair_that_turns(times: float) -> float:  # so many full turns within the original context
        return rotated * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = frequencies * (1 - stretched) + frequencies / yarn.factor * stretched
    return frequencies, _yarn_magnitude(yarn.factor, yarn.mscale) / _yarn_magnitude(yarn.factor, yarn.mscale_all_dim)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _cross_entropy(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    return logits_BSV.logsumexp(-1) - logits_BSV.gather(-1, labels_BS[..., None])[..., 0]


def _one_ahead(x_BS: torch.Tensor) -> torch.Tensor:
    return torch.cat([x_BS[:, 1:], torch.zeros_like(x_BS[:, :1])], 1)
