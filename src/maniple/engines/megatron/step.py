"""One optimizer step and one evaluation, over Megatron-Core's schedules (plain, 1F1B, interleaved)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import context, gradients
from maniple.engines.megatron.buffers import Buffers, Overflow, Replay
from maniple.engines.megatron.documents import padding
from maniple.engines.megatron.model import routers, settle, unwrap
from maniple.engines.megatron.optimizer import clip
from maniple.engines.megatron.optimizer import grad_norm as norm_of
from maniple.kernels.quantize import bump
from maniple.metrics import pulse

Batch = dict[str, torch.Tensor]
_MOST_PASSES = 20  # of a step: each enlarges what was too small, and the worst case is soon reached


@dataclass(frozen=True)
class StepStats:
    """Of one optimizer step, the same on every rank. Losses are means a token, in nats."""

    loss: float
    mtp_loss: float | None
    aux_loss: float
    z_loss: float
    tokens: int
    grad_norm: float
    updated: bool
    expert_counts: dict[int, list[int]]  # by layer from 0; MTP depth d is num_layers + d
    stop: bool  # some rank asked to stop after this step
    hurry: bool  # and was asked by a signal
    overflows: tuple[tuple[Overflow, ...], ...] = ()  # of each pass that was thrown away before the one that counts


def forward_step(
    device: torch.device, batches: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
):
    """The forward function that Megatron-Core's schedules call: (per-token losses, how to reduce them).

    return_schedule_plan: nothing is computed yet, and a plan of it takes the place of the losses, whose layers the
    schedule runs beside the backward pass of another micro-batch (`moe.overlap_exchange`).
    """
    pulse.enter(pulse.DATA)
    batch = {key: value.to(device, non_blocking=True) for key, value in next(batches).items()}
    pulse.enter(pulse.FORWARD)
    documents_BS = batch.get("documents")
    run = model.build_schedule_plan if return_schedule_plan else model
    losses_BS = run(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=documents_BS,
        padding_mask=None if documents_BS is None else padding(documents_BS),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    if torch.is_grad_enabled():
        pulse.enter(pulse.BACKWARD)
    mask_BS = context.cut(batch["loss_mask"], parallel_state.get_context_parallel_group())
    return losses_BS, partial(_reduced, partial(reduce_loss, mask_BS))


def reduce_loss(loss_mask_BS: torch.Tensor, losses_BS: torch.Tensor):
    """(sum of the losses that count, how many count, both for the log): what `calculate_per_token_loss` asks for."""
    loss_mask_BS = loss_mask_BS.float()
    total = (losses_BS.float() * loss_mask_BS).sum()
    tokens = loss_mask_BS.sum().to(torch.int)
    return total, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}


def _reduced(reduce: Callable, losses_BS: torch.Tensor):
    """What `reduce` gives. Of two values Megatron-Core (schedules.py, `forward_step_calc_loss`) takes the first for a
    mean and counts no token, though the job's loss is a sum over tokens: gradients would be off by the batch's size."""
    given = reduce(losses_BS)
    if not isinstance(given, tuple) or len(given) != 3:
        size = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise TypeError(f"a loss function gives (sum of losses, number of tokens, what is logged), and it gave {size}")
    return given


def connect(chunks: list, optimizer, job: TrainConfig) -> None:
    """Tells Megatron-Core's schedules how this job's gradients are finished, scaled and kept back."""
    config = chunks[0].config
    gradients.write_first(chunks)
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = optimizer.scale_loss
    if job.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if len(chunks) == 1 else no_sync
    if job.parallel.overlap_param_gather:
        sync = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = sync[0] if len(chunks) == 1 else sync


def _finalize(chunks: list, *args, **kwargs) -> None:
    gradients.zero_unwritten(chunks)
    finalize_model_grads(chunks, *args, **kwargs)


def micro_batches(job: TrainConfig) -> int:
    """Forward passes a step and data-parallel rank."""
    return job.train.global_batch_size // (job.train.micro_batch_size * parallel_state.get_data_parallel_world_size())


def run_schedule(chunks: list, batches: list[Iterator[Batch]], job: TrainConfig, device, *, forward_only: bool):
    """Runs one global batch through forward (and backward); the last stage's list of `{"loss": [sum, tokens]}`."""
    return get_forward_backward_func()(
        forward_step_func=partial(forward_step, device),
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks,
        num_microbatches=micro_batches(job),
        seq_length=job.data.sequence_length,
        micro_batch_size=job.train.micro_batch_size,
        forward_only=forward_only,
    )


def train_step(
    chunks,
    optimizer,
    scheduler,
    batches,
    job: TrainConfig,
    device,
    *,
    ask_stop: bool = False,
    ask_hurry: bool = False,
    may_update: Callable[[float, float], bool] = lambda loss, grad_norm: True,
) -> StepStats:
    """Forward, backward and update of one global batch. Expert counts are read and zeroed here, once a step.

    may_update: called with the loss and the gradient norm, which are the same on every rank, before anything is
    changed; where it is false weights, moments, schedule and balancing biases stay as they were. A pass in which a
    bounded buffer was too small (`buffers.py`) is thrown away, whatever came out of it, and run again with larger ones.
    """
    buffers = Buffers(chunks)
    replay = Replay(batches) if buffers else None
    overflows: list[tuple[Overflow, ...]] = []
    while True:
        zero_gradients(chunks, optimizer)
        buffers.reset()
        counts = _CountSnapshot(chunks)
        with counts:
            source = batches if replay is None else replay.batches
            reduced = run_schedule(chunks, source, job, device, forward_only=False)
        pulse.enter(pulse.STATISTICS)
        stats, overflow = _gather(chunks, reduced, counts, buffers, job, device, ask_stop, ask_hurry)
        if not overflow or replay is None:
            break
        overflows.append(overflow)
        if len(overflows) == _MOST_PASSES:
            raise RuntimeError(f"buffers are still too small after {_MOST_PASSES} passes: {overflow[0]}")
        counts.restore_biases()
        replay.rewind()
    pulse.enter(pulse.UPDATE)
    grad_norm = prepare_update(optimizer)
    updated = may_update(stats.loss, grad_norm)
    if updated:
        apply_update(optimizer, grad_norm)
        scheduler.step(increment=1)
    else:
        counts.restore_biases()
    return replace(stats, grad_norm=grad_norm, updated=updated, overflows=tuple(overflows))


def zero_gradients(chunks, optimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def prepare_update(optimizer) -> float:
    """Gives the optimizer this step's gradients and returns their norm over the whole model.

    With `apply_update` what upstream's `ChainedOptimizer.step` does, which looks at no gradient in bf16 and fp32 before
    it takes a step (its check for NaN needs fp16's loss scaler): a NaN would be in every weight.
    """
    optimizer.prepare_grads()
    return norm_of(optimizer)


def apply_update(optimizer, grad_norm: float) -> None:
    """Clips the prepared gradients by their norm and takes the optimizer's step; says that the weights have changed."""
    clip(optimizer, grad_norm)
    optimizer.step_with_ready_grads()
    bump()


@torch.no_grad()
def evaluate(chunks, batches, job: TrainConfig, device) -> float:
    """Mean loss a token (nats) over `train.eval_batches` global batches; the same on every rank."""
    settle(chunks)
    for chunk in chunks:
        chunk.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for _ in range(job.train.eval_batches):
        for record in run_schedule(chunks, batches, job, device, forward_only=True):
            totals += record["loss"].double()
    for chunk in chunks:
        chunk.train()
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        totals.zero_()  # tensor-parallel ranks computed the same losses
    dist.all_reduce(totals)
    return (totals[0] / totals[1].clamp(min=1)).item()


class _CountSnapshot:
    """Copies each router's expert counts just before Megatron-Core zeroes them at the end of the backward pass, and its
    balancing bias before Megatron-Core moves it by them."""

    def __init__(self, chunks: list) -> None:
        self.chunks, self.config = chunks, chunks[0].config
        self.counts: dict[int, torch.Tensor] = {}
        self._biases: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        finish = self.config.finalize_model_grads_func
        self._finish = finish

        def finish_and_copy(*args, **kwargs):
            pulse.enter(pulse.REDUCTION)
            found = routers(self.chunks)
            self.counts = {number: router.local_tokens_per_expert.clone() for number, router in found.items()}
            biases = [router.expert_bias for router in found.values() if router.expert_bias is not None]
            self._biases = [(bias_E, bias_E.clone()) for bias_E in biases]
            return finish(*args, **kwargs)

        self.config.finalize_model_grads_func = finish_and_copy

    def __exit__(self, *exc) -> None:
        self.config.finalize_model_grads_func = self._finish
        for router in routers(self.chunks).values():
            router.local_tokens_per_expert.zero_()

    def restore_biases(self) -> None:
        for bias_E, former_E in self._biases:
            bias_E.copy_(former_E)


def _gather(
    chunks, reduced, counts, buffers: Buffers, job, device, ask_stop, ask_hurry
) -> tuple[StepStats, tuple[Overflow, ...]]:
    """Sums this rank's part of every figure over the world. Every rank enters, whatever layers it holds.

    Buffers that were too small are enlarged, and named beside the figures, which then mean nothing.
    """
    config = chunks[0].config
    found = routers(chunks)
    first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0
    depths = config.mtp_num_layers or 0
    layers = config.num_layers + depths
    # counts are exact in float64 up to 2^53; all in one, since the host waits for what it reads
    first_count = 6 + 2 * depths
    figures = torch.zeros(first_count + layers * config.num_moe_experts, dtype=torch.float64, device=device)
    sums, table = figures[:first_count], figures[first_count:].view(layers, config.num_moe_experts)
    if first_of_tp:
        for record in reduced:
            sums[:2] += record["loss"].double()
    for router in found.values():
        sums[2:4] += router.loss_sums.double()
        router.loss_sums.zero_()
    sums[4].fill_(ask_stop)
    sums[5].fill_(ask_hurry)
    for chunk in chunks:
        mtp = unwrap(chunk).take_mtp_sums()
        if mtp is not None and first_of_tp:
            sums[6:] += mtp.flatten()
    for layer, counts_E in counts.counts.items():
        table[layer] = counts_E
    dist.all_reduce(figures)
    size = figures.shape[0]
    values = (torch.cat([figures, buffers.figures(device)]) if buffers else figures).tolist()
    overflow = buffers.grow(values[size:]) if buffers else ()
    loss, tokens, aux, z, stop, hurry, *rest = values[:size]
    mtp_sums, all_counts = rest[: 2 * depths], [int(count) for count in rest[2 * depths :]]
    rows = [
        all_counts[first : first + config.num_moe_experts]
        for first in range(0, len(all_counts), config.num_moe_experts)
    ]
    mtp_means = [total / max(labels, 1.0) for total, labels in zip(mtp_sums[0::2], mtp_sums[1::2], strict=True)]
    passes = micro_batches(job) * parallel_state.get_data_parallel_world_size()
    dense = config.moe_layer_freq.count(0) if isinstance(config.moe_layer_freq, list) else 0
    stats = StepStats(
        loss=loss / max(tokens, 1.0),
        mtp_loss=sum(mtp_means) / depths if depths else None,
        aux_loss=aux / passes / max(1, layers - dense),
        z_loss=z / passes / max(1, layers - dense),
        tokens=int(tokens),
        grad_norm=0.0,
        updated=False,
        expert_counts={layer: row for layer, row in enumerate(rows) if any(row)},
        stop=stop > 0,
        hurry=hurry > 0,
    )
    return stats, overflow
