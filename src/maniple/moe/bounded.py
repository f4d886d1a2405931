"""Expert exchange with static shapes: the host never reads a count, over any backend of torch.distributed.

From each rank to each other goes a segment of as many slots, C, whatever the routing. A segment's rows stand at its
front, sorted by expert; what is behind them is never read. C is a factor of the balanced load, T * K / R, and never
more than the worst case, T * min(K, G). Counts are exchanged and used on the device.

A pair of ranks that has more rows than C sends the first C; the rest go nowhere in this pass, and `Room.asked` says how
many there were (`room.py`). Where all fit the result is `AllToAllDispatcher`'s bit for bit: the rows of each expert
stand in the same order at the same places, and nothing else reaches a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from maniple.kernels.permute import Permutation, permute, permute_probs, sort_by_expert
from maniple.moe.dispatch import AllToAllDispatcher, AllToAllHandle
from maniple.moe.room import Room


@dataclass(frozen=True)
class BoundedHandle(AllToAllHandle):
    """Sizes are those of the buffers, and `by_expert` says where in its segment each (token, k) stands."""

    tokens: int  # on this rank


class BoundedDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` with buffers of `room`. S is X * R * C, with X expert-tensor ranks.

    tokens: the most that any rank of the groups has; None: all have as many. Raises ValueError for a rank with more.
    """

    def __init__(
        self,
        num_experts: int,
        ep_group: dist.ProcessGroup,
        *,
        room: Room,
        etp_group: dist.ProcessGroup | None = None,
        tokens: int | None = None,
        kernels: str | None = None,
    ) -> None:
        super().__init__(num_experts, ep_group, etp_group=etp_group, kernels=kernels)
        self.room = room
        self.tokens = tokens

    def dispatch_preprocess(self, x_TD, ids_TK, probs_TK) -> tuple[torch.Tensor, torch.Tensor, BoundedHandle]:
        tokens, topk = ids_TK.shape
        most = tokens if self.tokens is None else self.tokens
        if tokens > most:
            raise ValueError(f"{tokens} tokens on this rank, and its buffers are for {most}")
        if not tokens:  # a token that goes nowhere, so that there is a row to read
            x_TD, probs_TK = F.pad(x_TD, (0, 0, 0, 1)), F.pad(probs_TK, (0, 0, 0, 1))
            ids_TK = F.pad(ids_TK, (0, 0, 0, 1), value=-1)
        ranks = self.ep_group.size()
        slots = self.room.size(math.ceil(most * topk / ranks), most * min(topk, self.num_local_experts))
        by_expert = sort_by_expert(ids_TK, self.num_experts, kernels=self.kernels)
        sent_RG, come_XRG = self._exchange_counts(by_expert)
        self.room.note(sent_RG.sum(1).amax())
        placed = self._placed(by_expert, slots)
        handle = self._static_plan(placed, come_XRG, slots, tokens)
        rows = permute(x_TD, placed, kernels=self.kernels)
        return rows, permute_probs(probs_TK, placed, kernels=self.kernels), handle

    def combine_postprocess(self, rows, handle: AllToAllHandle) -> torch.Tensor:
        assert isinstance(handle, BoundedHandle)
        out_TD = super().combine_postprocess(rows, handle)
        return out_TD if handle.tokens else out_TD[:0]

    def _placed(self, by_expert: Permutation, slots: int) -> Permutation:
        """The permutation to R segments of `slots` slots. A slot that no row has holds some token's row."""
        ends_R = by_expert.ends_E[self.num_local_experts - 1 :: self.num_local_experts].to(torch.int64)
        starts_R = F.pad(ends_R[:-1], (1, 0))
        within_S = torch.arange(slots, device=ends_R.device)
        sorted_RS = starts_R[:, None] + within_S
        used_RS = sorted_RS < ends_R[:, None]
        order_S = torch.where(used_RS, by_expert.order_S[sorted_RS.clamp(max=by_expert.order_S.shape[0] - 1)], 0)
        position_TK = by_expert.position_TK
        rank_TK = torch.searchsorted(ends_R, position_TK, right=True)  # R for the rows of none
        within_TK = position_TK - F.pad(starts_R, (0, 1))[rank_TK]
        fits_TK = (rank_TK < ends_R.shape[0]) & (within_TK < slots)
        total = ends_R.shape[0] * slots
        return Permutation(
            order_S=order_S.flatten(),
            position_TK=torch.where(fits_TK, rank_TK * slots + within_TK, total),
            ends_E=by_expert.ends_E.new_full((1,), total),
        )

    def _static_plan(self, placed: Permutation, come_XRG: torch.Tensor, slots: int, tokens: int) -> BoundedHandle:
        peers, ranks, local = come_XRG.shape
        ends_XRG = come_XRG.cumsum(2)
        within_S = torch.arange(slots, device=come_XRG.device).expand(peers, ranks, slots).contiguous()
        ids_XRS = torch.searchsorted(ends_XRG, within_S, right=True)  # G, which is none, behind a segment's rows
        by_local_expert = sort_by_expert(ids_XRS.reshape(-1, 1), local, kernels=self.kernels)
        return BoundedHandle(
            by_expert=placed,
            by_local_expert=by_local_expert,
            ends_G=by_local_expert.ends_E,
            splits_G=None,
            sent=[slots] * ranks,
            received=[slots] * ranks,
            gathered=[ranks * slots] * peers,
            tokens=tokens,
        )
