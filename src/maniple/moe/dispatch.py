"""Expert exchange: tokens go to the ranks that hold their experts, and the weighted results come back.

A dispatcher has six stages, so that a schedule can run other work between them and cut the graph there:

    rows, probs, handle = dispatch_preprocess(x_TD, ids_TK, probs_TK)      sort by expert
    rows, probs         = token_dispatch(rows, probs, handle)              communication
    rows_SD, probs_S, ends_G = dispatch_postprocess(rows, probs, handle)   group by local expert
    ...                                                                    experts: rows_SD -> weighted rows [S, D]
    rows                = combine_preprocess(rows_SD, handle)
    rows                = token_combine(rows, handle)                      communication
    out_TD              = combine_postprocess(rows, handle)                unweighted sum over K

Combine is the adjoint of dispatch. A dispatcher keeps nothing between calls: all that the later stages need is in the
handle, which holds integers only, so that several may be in flight. An id outside [0, E) is dropped: its row goes
nowhere. A rank without tokens, or one that receives none, takes part in every collective, forward and backward.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from maniple.kernels.forgotten import active, forget, hold
from maniple.kernels.permute import Permutation, permute, permute_probs, sort_by_expert, unpermute
from maniple.moe.room import Room

Pair = tuple[torch.Tensor, torch.Tensor]


class Dispatcher(Protocol):
    """The six stages. `handle` is opaque to callers."""

    num_experts: int

    def dispatch_preprocess(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, probs_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]: ...
    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor, handle: Any) -> Pair: ...
    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def combine_preprocess(self, rows_SD: torch.Tensor, handle: Any) -> torch.Tensor: ...
    def token_combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor: ...
    def combine_postprocess(self, rows: torch.Tensor, handle: Any) -> torch.Tensor: ...


class LocalDispatcher:
    """Nothing leaves this rank. The host never waits for the device.

    All experts are here, and S is T * K whatever the routing; or, with `experts`, a run of them only, as on one rank of
    an expert-parallel group: choices of others go nowhere. Then `room` may bound S by a factor of their balanced load;
    rows that do not fit go nowhere either, and `room` says how many came. Raises ValueError for an empty run.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        experts: range | None = None,
        room: Room | None = None,
        kernels: str | None = None,
    ) -> None:
        self.num_experts = num_experts
        self.experts = range(num_experts) if experts is None else experts
        if not self.experts or self.experts.step != 1:
            raise ValueError(f"experts of a rank are a run of some, not {self.experts}")
        self.room = room
        self.kernels = kernels  # an implementation of permute, or None or "auto" for the best
        # inside `forgotten.forgetting()`: backward keeps x_TD in place of the rows; or lets them go before it is done
        self.gathers_again = self.lets_go = False

    def dispatch_preprocess(self, x_TD, ids_TK, probs_TK) -> tuple[torch.Tensor, torch.Tensor, Permutation]:
        local, slots = len(self.experts), ids_TK.numel()
        ids_TK = ids_TK - self.experts.start if self.experts.start else ids_TK
        handle = sort_by_expert(ids_TK, local, kernels=self.kernels)
        if self.room is not None:
            worst = ids_TK.shape[0] * min(ids_TK.shape[1], local)
            slots = self.room.size(math.ceil(slots * local / self.num_experts), worst)
            self.room.note(handle.ends_E[-1])
            handle = replace(handle, ends_E=handle.ends_E.clamp(max=slots))
        rows_SD = permute(x_TD, handle, slots=slots, kernels=self.kernels)
        if (self.gathers_again or self.lets_go) and active():
            x = hold(x_TD)
            again = partial(permute, slots=slots, kernels=self.kernels)
            forget([rows_SD], lambda: [again(x(), handle)], late=not self.gathers_again)
        return rows_SD, permute_probs(probs_TK, handle, slots=slots, kernels=self.kernels), handle

    def token_dispatch(self, rows, probs, handle: Permutation) -> Pair:
        return rows, probs

    def dispatch_postprocess(self, rows, probs, handle: Permutation):
        return rows, probs, handle.ends_E

    def combine_preprocess(self, rows_SD, handle: Permutation) -> torch.Tensor:
        return rows_SD

    def token_combine(self, rows, handle: Permutation) -> torch.Tensor:
        return rows

    def combine_postprocess(self, rows, handle: Permutation) -> torch.Tensor:
        return unpermute(rows, handle, kernels=self.kernels)


@dataclass(frozen=True)
class AllToAllHandle:
    """Where the rows of one dispatch went. Sizes are on the host: the collectives need them there."""

    by_expert: Permutation  # of this rank's (token, k)
    by_local_expert: Permutation  # of the rows that came
    ends_G: torch.Tensor  # int32
    splits_G: list[int] | None  # the sizes of the groups, for kernels that want them on the host; None: not there
    sent: list[int]  # rows to each expert-parallel rank
    received: list[int]  # rows from each
    gathered: list[int]  # rows that each expert-tensor rank received


class AllToAllDispatcher:
    """Experts are spread over `ep_group`, in runs of E / R by rank; each expert's F may be cut over `etp_group`.

    Expert-tensor ranks hold different tokens: rows are gathered over `etp_group` after the exchange, and partial
    results are summed (fp32, by rank) on the way back. Works on NCCL, RCCL and Gloo. The host waits for the device once
    a dispatch, to read the counts. `static_splits` (for runs without values, or with all loads forced) replaces the
    choice and takes every rank's T to be this rank's; then the host never waits. "even" (or True): k of token t goes to
    expert `(t * K + k) % E`. "here": the k-th choice of every rank's tokens is this rank's k-th expert, and those after
    it: as many rows come here as ever can. Raises ValueError if E does not divide by the group's size.
    """

    def __init__(
        self,
        num_experts: int,
        ep_group: dist.ProcessGroup,
        *,
        etp_group: dist.ProcessGroup | None = None,
        static_splits: bool | Literal["even", "here"] = False,
        kernels: str | None = None,
    ) -> None:
        if num_experts % ep_group.size():
            raise ValueError(f"{num_experts} experts do not divide over {ep_group.size()} expert-parallel ranks")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_group.size()
        self.ep_group = ep_group
        self.etp_group = etp_group
        self.static_splits = static_splits
        self.kernels = kernels

    def dispatch_preprocess(self, x_TD, ids_TK, probs_TK) -> tuple[torch.Tensor, torch.Tensor, AllToAllHandle]:
        if self.static_splits:
            ids_TK = self._forced(ids_TK)
        by_expert = sort_by_expert(ids_TK, self.num_experts, kernels=self.kernels)
        handle = self._plan(by_expert, ids_TK.shape[1])
        slots = sum(handle.sent)
        rows = permute(x_TD, by_expert, slots=slots, kernels=self.kernels)
        return rows, permute_probs(probs_TK, by_expert, slots=slots, kernels=self.kernels), handle

    def token_dispatch(self, rows, probs, handle: AllToAllHandle) -> Pair:
        rows, probs = _exchange(self.ep_group, handle.sent, handle.received, rows, probs)
        if self.etp_group is not None:
            peers = len(handle.gathered)
            sent = [sum(handle.received)] * peers
            rows, probs = _exchange(self.etp_group, sent, handle.gathered, rows.repeat(peers, 1), probs.repeat(peers))
        return rows, probs

    def dispatch_postprocess(self, rows, probs, handle: AllToAllHandle):
        rows_SD = permute(rows, handle.by_local_expert, kernels=self.kernels)
        probs_S = permute_probs(probs[:, None], handle.by_local_expert, kernels=self.kernels)
        return rows_SD, probs_S, handle.ends_G

    def combine_preprocess(self, rows_SD, handle: AllToAllHandle) -> torch.Tensor:
        return unpermute(rows_SD, handle.by_local_expert, kernels=self.kernels)

    def token_combine(self, rows, handle: AllToAllHandle) -> torch.Tensor:
        if self.etp_group is not None:
            peers, own = len(handle.gathered), sum(handle.received)
            (partial,) = _exchange(self.etp_group, handle.gathered, [own] * peers, rows)
            rows = partial.view(peers, own, partial.shape[1]).sum(0, dtype=torch.float32).to(partial.dtype)
        return _exchange(self.ep_group, handle.received, handle.sent, rows)[0]

    def combine_postprocess(self, rows, handle: AllToAllHandle) -> torch.Tensor:
        return unpermute(rows, handle.by_expert, kernels=self.kernels)

    def _forced(self, ids_TK: torch.Tensor) -> torch.Tensor:
        if self.static_splits == "here":
            first = self.ep_group.rank() * self.num_local_experts
            forced = torch.arange(first, first + ids_TK.shape[1], device=ids_TK.device).expand_as(ids_TK)
        else:
            forced = torch.arange(ids_TK.numel(), device=ids_TK.device).view_as(ids_TK)
        return (forced % self.num_experts).to(ids_TK.dtype)

    def _forced_counts(self, slots: int, topk: int) -> list[int]:
        """Rows of one rank by expert, of the choice that `_forced` makes."""
        experts, first = self.num_experts, self.ep_group.rank() * self.num_local_experts
        if self.static_splits == "here":
            return [slots // topk if (expert - first) % experts < topk else 0 for expert in range(experts)]
        return [slots // experts + (expert < slots % experts) for expert in range(experts)]

    def _plan(self, by_expert: Permutation, topk: int) -> AllToAllHandle:
        """Exchanges the counts, reads them on the host, and works out who gets what."""
        device, ranks, local = by_expert.ends_E.device, self.ep_group.size(), self.num_local_experts
        peers = 1 if self.etp_group is None else self.etp_group.size()
        if self.static_splits:
            counts_E = self._forced_counts(by_expert.order_S.shape[0], topk)
            mine = self.ep_group.rank() * local
            sent_RG = list(itertools.batched(counts_E, local))
            come_XRG = [[counts_E[mine : mine + local]] * ranks] * peers
            come = torch.tensor(come_XRG, dtype=torch.int64, device=device)
            if device.type == "meta":
                self._exchange_counts(by_expert)  # a run without values is to communicate all that a real one does
        else:
            sent, come = self._exchange_counts(by_expert)
            sent_RG, *come_XRG = torch.cat([sent[None], come]).tolist()
        by_rank_XR = [[sum(counts_G) for counts_G in counts_RG] for counts_RG in come_XRG]
        own = 0 if self.etp_group is None else self.etp_group.rank()
        gathered = [sum(rows_R) for rows_R in by_rank_XR]
        # rows come by expert-tensor rank, then by source rank, then by local expert
        local_ids = torch.arange(local, device=device).repeat(peers * ranks)
        ids_S1 = torch.repeat_interleave(local_ids, come.flatten(), output_size=sum(gathered))[:, None]
        by_local_expert = sort_by_expert(ids_S1, local, kernels=self.kernels)
        return AllToAllHandle(
            by_expert=by_expert,
            by_local_expert=by_local_expert,
            ends_G=by_local_expert.ends_E,
            splits_G=[sum(counts_G[g] for counts_RG in come_XRG for counts_G in counts_RG) for g in range(local)],
            sent=[sum(counts_G) for counts_G in sent_RG],
            received=by_rank_XR[own],
            gathered=gathered,
        )

    def _exchange_counts(self, by_expert: Permutation) -> Pair:
        """Rows by expert, int64: `[R, G]` that go to each rank, and `[X, R, G]` that come to each expert-tensor one."""
        ends_E, local = by_expert.ends_E, self.num_local_experts
        sent_RG = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).to(torch.int64).view(-1, local)
        received_RG = torch.empty_like(sent_RG)
        dist.all_to_all_single(received_RG, sent_RG, group=self.ep_group)
        if self.etp_group is None:
            return sent_RG, received_RG[None]
        come_XRG = received_RG.new_empty(self.etp_group.size(), *received_RG.shape)
        dist.all_gather_into_tensor(come_XRG.view(-1, local), received_RG, group=self.etp_group)
        return sent_RG, come_XRG


def _exchange(
    group: dist.ProcessGroup, sent: list[int], received: list[int], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """All-to-all of the leading dimension of each tensor, with host-known sizes by rank; differentiable."""
    return _Exchange.apply(group, sent, received, *tensors)


class _Exchange(torch.autograd.Function):
    """One node for all tensors, and no shortcut for empty ones: each rank's backward runs the same collectives in the
    same order, whatever it sent, received or needs a gradient of."""

    @staticmethod
    def forward(ctx, group, sent, received, *tensors):
        ctx.settings = group, sent, received
        return tuple(_all_to_all(group, sent, received, tensor) for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        group, sent, received = ctx.settings
        return None, None, None, *(_all_to_all(group, received, sent, grad) for grad in grads)


def _all_to_all(group: dist.ProcessGroup, sent: list[int], received: list[int], x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
