"""What surrounds routing in training: the load-balance loss over process groups, its way into the gradient."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from maniple.kernels.routing import Routing


def load_balance_loss(
    routing: Routing,
    *,
    kind: Literal["sequence", "micro_batch", "global_batch"],
    sequence_length: int,
    batch_size: int,
    valid_T: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    running_counts_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share of `sum_i f_i * P_i`, an fp32 scalar; the sum of the shares over `group` is the loss.

    `f_i = E / (K N) * (tokens that chose expert i)` and `P_i = mean over tokens of scores_i` (Switch Transformer, Fedus
    et al., 2021; DeepSeek-V3, eq. 17 to 20): 1 where the experts are equally loaded. N tokens are counted

    - "sequence": within each sequence; the loss is the mean over sequences that have a valid token;
    - "micro_batch", "global_batch": over all of this rank's tokens at once. The two differ in the `group` they want.

    The choice that is counted is `routing.ids_TK`, the one that dispatch follows: with bias and with groups. Counts are
    summed over `group` (ranks that hold other parts of the same sequences or batch) as int64; they carry no gradient,
    the scores do. Token t is of sequence `t % batch_size` (`[S, B]` flattened). Tokens outside `valid_T` (bool `[T]`)
    take no part. With `running_counts_E` (int64 `[E]`, not with "sequence") the counts are added to it in place, and
    `f` is taken from it: the load over all micro-batches since it was last zeroed (Qiu et al., 2025). Every rank of
    `group` must call this, also one without tokens. Raises ValueError for shapes or a kind that do not fit.
    """
    tokens, experts = routing.scores_TE.shape
    if kind not in ("sequence", "micro_batch", "global_batch"):
        raise ValueError(f"the balance loss is by sequence, micro_batch or global_batch, not {kind!r}")
    if tokens != sequence_length * batch_size:
        raise ValueError(f"{tokens} tokens are not {batch_size} sequences of {sequence_length}")
    if running_counts_E is not None and kind == "sequence":
        raise ValueError("running counts are of a batch, not of a sequence")
    sequences = batch_size if kind == "sequence" else 1
    counts_BE = routing.sequence_counts(sequences, valid_T)
    if group is not None and group.size() > 1:
        dist.all_reduce(counts_BE, group=group)
    tokens_B = counts_BE.sum(1) / routing.ids_TK.shape[1]
    if running_counts_E is not None:
        running_counts_E += counts_BE[0]
        counts_BE = running_counts_E[None]
    load_BE = experts * counts_BE / counts_BE.sum(1, keepdim=True).clamp(min=1)
    scores_TE = routing.scores_TE if valid_T is None else routing.scores_TE.masked_fill(~valid_T[:, None], 0)
    sums_BE = scores_TE.reshape(tokens // sequences, sequences, experts).sum(0)
    share_B = (load_BE * sums_BE).sum(1) / tokens_B.clamp(min=1)
    return share_B.sum() / (tokens_B > 0).sum().clamp(min=1)


def attach_aux_loss(carrier: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """`carrier` itself; where its gradient passes in backward, `loss` (a scalar) receives `scale` as its gradient.

    So a loss deep in the model is trained on without being handed to the top. `scale` is what the engine multiplies the
    main loss by (1 / micro-batches, a loss scale); a tensor is read in backward, so that it may be set until then.
    """
    return _AttachAuxLoss.apply(carrier, loss, scale)


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carrier, loss, scale):
        ctx.scale, ctx.like = scale, loss.detach()
        return carrier.view_as(carrier)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_carrier):
        return grad_carrier, torch.ones_like(ctx.like) * ctx.scale, None
