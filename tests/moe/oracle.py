"""The layer as loops over tokens and experts, dtype of its inputs throughout: what every dispatcher must equal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from maniple.kernels.routing import RouterSpec
from maniple.moe.experts import ExpertActivation

D, F, E, K = 6, 5, 8, 2
SPEC = RouterSpec(E, K, score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2", route_scale=2.5)
GPT_OSS = ExpertActivation(alpha=1.702, limit=7.0, up_offset=1.0)


@dataclass
class Weights:
    router_ED: torch.Tensor
    w13_GFD: torch.Tensor
    w2_GDF: torch.Tensor
    b13_GF: torch.Tensor | None = None
    b2_GD: torch.Tensor | None = None

    @classmethod
    def random(cls, seed: int = 0, *, biases: bool = True) -> Weights:
        g = torch.Generator().manual_seed(seed)
        shapes = [(E, D), (E, 2 * F, D), (E, D, F), *([(E, 2 * F), (E, D)] if biases else [])]
        return cls(*(torch.randn(*shape, generator=g) / shape[-1] ** 0.5 for shape in shapes))

    def named(self) -> dict[str, torch.Tensor]:
        return {f.name: t for f in fields(self) if (t := getattr(self, f.name)) is not None}

    def leaves(self, dtype=None) -> Weights:
        """Copies that collect gradients."""
        return replace(self, **{n: t.detach().to(dtype, copy=True).requires_grad_() for n, t in self.named().items()})

    def rank(self, rank: int, ranks: int, etp_rank: int = 0, etp: int = 1) -> Weights:
        """The part of an expert-parallel, expert-tensor-parallel rank; only expert-tensor rank 0 adds b2."""
        mine = slice(rank * E // ranks, (rank + 1) * E // ranks)
        columns = torch.arange(F).tensor_split(etp)[etp_rank]
        rows = torch.cat([columns, columns + F])
        return Weights(
            self.router_ED,
            self.w13_GFD[mine][:, rows],
            self.w2_GDF[mine][:, :, columns],
            None if self.b13_GF is None else self.b13_GF[mine][:, rows],
            None if self.b2_GD is None or etp_rank else self.b2_GD[mine],
        )


def dense_moe_oracle(x_TD, weights: Weights, ids_TK, probs_TK, activation: ExpertActivation | None = None):
    """`out[t] = sum_k probs[t, k] * expert_ids[t, k](x[t])`; an id outside [0, E) adds nothing."""
    act = activation or ExpertActivation()
    rows = []
    for t in range(x_TD.shape[0]):
        row_D = torch.zeros_like(x_TD[t])
        for k in range(ids_TK.shape[1]):
            e = int(ids_TK[t, k])
            if not 0 <= e < weights.w13_GFD.shape[0]:
                continue
            gate_up = weights.w13_GFD[e] @ x_TD[t]
            if weights.b13_GF is not None:
                gate_up = gate_up + weights.b13_GF[e]
            gate, up = gate_up.chunk(2)
            if act.limit is not None:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            y_D = weights.w2_GDF[e] @ ((up + act.up_offset) * gate * torch.sigmoid(act.alpha * gate))
            if weights.b2_GD is not None:
                y_D = y_D + weights.b2_GD[e]
            row_D = row_D + probs_TK[t, k] * y_D
        rows.append(row_D)
    return torch.stack(rows) if rows else x_TD.clone()
