"""Oracle of permutation: a stable sort by expert, a gather, and its adjoint as K gathers summed in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maniple.kernels.grouped_gemm.reference import gather_sum


@dataclass(frozen=True)
class Permutation:
    """Integers only, all on the device. Slot s holds chosen (token, k) number `order_S[s]` = token * K + k."""

    order_S: torch.Tensor  # int64 [T * K]
    position_TK: torch.Tensor  # int64 [T, K], its inverse: the slot of each (token, k)
    ends_E: torch.Tensor  # int32 [E], inclusive prefix ends; slots from ends_E[-1] on are of no expert

    def flat(self) -> Permutation:
        """The same for T * K tokens that each chose one expert."""
        return Permutation(self.order_S, self.position_TK.reshape(-1, 1), self.ends_E)


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> Permutation:
    """See `maniple.kernels.permute.sort_by_expert`."""
    absent_TK = (ids_TK < 0) | (ids_TK >= num_experts)
    sorted_S, order_S = ids_TK.masked_fill(absent_TK, num_experts).flatten().sort(stable=True)
    slots_S = torch.arange(order_S.shape[0], device=order_S.device)
    position_S = torch.empty_like(order_S).scatter_(0, order_S, slots_S)
    experts_E = torch.arange(num_experts, dtype=sorted_S.dtype, device=order_S.device)
    ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
    return Permutation(order_S, position_S.view_as(ids_TK), ends_E)


def gather(x_TD: torch.Tensor, permutation: Permutation, slots: int) -> torch.Tensor:
    """Row s is the token of slot s, for the first `slots` slots."""
    topk = permutation.position_TK.shape[1]
    return x_TD[permutation.order_S[:slots] // topk]


def scatter_sum(rows_SD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Sum of each token's rows, fp32 or better, k rising; a slot past `ends_E[-1]` or the last row adds nothing."""
    return gather_sum(rows_SD, permutation.position_TK, permutation.ends_E)
