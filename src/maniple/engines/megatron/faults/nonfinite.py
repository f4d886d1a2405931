"""Where a NaN or an infinity began: run once a step's loss or gradient norm has turned out not to be finite.

Data is deterministic, so the same micro-batches are run again, this time with every module's output looked at, and then
every parameter's gradient before it is reduced over ranks. That costs one more step, and nothing while all is well.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import step
from maniple.engines.megatron.experts import GroupedExperts
from maniple.engines.megatron.gradients import zero_unwritten
from maniple.engines.megatron.model import routers, unwrap


@dataclass(frozen=True, order=True)
class Found:
    """One tensor that is not finite. Orders as the forward pass runs, over all stages of the pipeline."""

    micro_batch: int
    stage: int
    place: int  # of the parameter in its stage, or of the module in the order in which they end
    rank: int
    text: str


def trace(chunks: list, optimizer, batches: list[Iterator[step.Batch]], job: TrainConfig, device) -> str:
    """Says in words where it began; the same on every rank. Collective. Leaves counts at zero, and gradients
    as before a step.

    batches: the step's micro-batches, from its beginning. Looks at weights first, then at outputs in forward order (the
    first that is not finite), then at gradients in backward order (the first, which is the last in forward order: from
    there it spreads to all layers before).
    """
    if found := _gathered(_weights(chunks)):
        return f"it was in the weights before this step: {min(found).text}"
    outputs: list[Found] = []
    step.zero_gradients(chunks, optimizer)
    with _watched(chunks, outputs), _unreduced(chunks):
        step.run_schedule(chunks, batches, job, device, forward_only=False)
    gradients = _gradients(chunks)
    _forget(chunks, optimizer)
    if found := _gathered(outputs[:1]):
        return f"it began in {min(found).text}"
    if found := _gathered(gradients):
        last = max(found, key=lambda item: (item.stage, item.place, -item.rank))
        return f"it began in {last.text}"
    return (
        "each rank's outputs and gradients are finite when the step is run again: their sum over ranks overflows, or a "
        "device computed wrongly"
    )


def check_weights(chunks: list) -> str | None:
    """Which weight is not finite, in words; None if all are. The same on every rank; collective."""
    flag = torch.zeros(1, dtype=torch.int32, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for tensor in [*chunk.parameters(), *_biases([chunk]).values()]:
            flag |= ~torch.isfinite(tensor.detach()).all()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return min(_gathered(_weights(chunks))).text if flag.item() else None


def _weights(chunks: list) -> list[Found]:
    return [
        Found(0, stage, place, dist.get_rank(), _words("weight", name, parameter.detach()))
        for stage, place, name, parameter in _parameters(chunks)
        if not _is_finite(parameter.detach())
    ] + [
        Found(0, _stage(index), layer, dist.get_rank(), _words("the balancing bias of", f"layer {layer}", bias_E))
        for index, chunk in enumerate(chunks)
        for layer, bias_E in _biases([chunk]).items()
        if not _is_finite(bias_E)
    ]


def _biases(chunks: list) -> dict[int, torch.Tensor]:
    """The routers' balancing biases by layer: no gradient moves them, and no optimizer checks them."""
    found = {layer: router.expert_bias for layer, router in routers(chunks).items()}
    return {layer: bias_E for layer, bias_E in found.items() if bias_E is not None}


def _gradients(chunks: list) -> list[Found]:
    return [
        Found(0, stage, place, dist.get_rank(), _words("the gradient of", name, parameter.main_grad))
        for stage, place, name, parameter in _parameters(chunks)
        if hasattr(parameter, "main_grad") and not _is_finite(parameter.main_grad)
    ]


def _parameters(chunks: list) -> Iterator[tuple[int, int, str, torch.nn.Parameter]]:
    """(stage in the whole pipeline, place in it, name with the layer's number in the whole model, parameter)."""
    for index, chunk in enumerate(chunks):
        model = unwrap(chunk)
        for place, (name, parameter) in enumerate(model.named_parameters()):
            yield _stage(index), place, _whole_name(model, name), parameter


def _stage(chunk: int) -> int:
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return chunk * ranks + parallel_state.get_pipeline_model_parallel_rank()


def _whole_name(model: torch.nn.Module, name: str) -> str:
    if found := re.match(r"decoder\.layers\.(\d+)(.*)", name):
        return f"decoder.layers.{model.decoder.layers[int(found[1])].layer_number - 1}{found[2]}"
    return name


@contextlib.contextmanager
def _watched(chunks: list, found: list[Found]) -> Iterator[None]:
    """Appends every module's output that is not finite to `found`, in the order in which modules end."""
    handles, passes = [], dict.fromkeys(range(len(chunks)), 0)
    ended = itertools.count()  # modules so far, alike on ranks that hold the same layers

    def count(index: int):
        def hook(module, inputs) -> None:
            passes[index] += 1

        return hook

    def look(index: int, name: str):
        def hook(module, inputs, output) -> None:
            place = next(ended)
            rows = int(inputs[1][-1]) if isinstance(module, GroupedExperts) else None  # the rest may hold anything
            for tensor in _tensors(output):
                tensor = tensor if rows is None else tensor[:rows]
                if not _is_finite(tensor.detach()):
                    where = f"{name or 'the loss'}, micro-batch {passes[index]}"
                    text = _words("the output of", where, tensor.detach())
                    found.append(Found(passes[index], _stage(index), place, dist.get_rank(), text))
                    return

        return hook

    for index, chunk in enumerate(chunks):
        model = unwrap(chunk)
        handles.append(model.register_forward_pre_hook(count(index)))
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(look(index, _whole_name(model, name))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _unreduced(chunks: list) -> Iterator[None]:
    """Keeps each rank's gradients its own: nothing is reduced over ranks, during the backward pass or after it."""
    config = chunks[0].config
    finish, overlaps = config.finalize_model_grads_func, [chunk.ddp_config.overlap_grad_reduce for chunk in chunks]
    config.finalize_model_grads_func = lambda chunks, *args, **kwargs: zero_unwritten(chunks)
    for chunk in chunks:
        chunk.ddp_config.overlap_grad_reduce = False
    try:
        yield
    finally:
        config.finalize_model_grads_func = finish
        for chunk, overlap in zip(chunks, overlaps, strict=True):
            chunk.ddp_config.overlap_grad_reduce = overlap


def _forget(chunks: list, optimizer) -> None:
    """Takes back what the extra pass has counted."""
    step.zero_gradients(chunks, optimizer)
    for router in routers(chunks).values():
        router.local_tokens_per_expert.zero_()
        router.loss_sums.zero_()
        router.reset_global_aux_loss_tracker()
    for chunk in chunks:
        unwrap(chunk).take_mtp_sums()


def _gathered(found: list[Found]) -> list[Found]:
    """What all ranks have found."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return [item for items in every for item in items]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _words(what: str, name: str, tensor: torch.Tensor) -> str:
    """`the output of decoder.layers.1.mlp (rank 2): NaN in 3 of 4096 values`."""
    nans = int(torch.isnan(tensor).sum())
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    kind = "NaN" if nans == bad else "infinity" if not nans else "NaN and infinity"
    return f"{what} {name} (rank {dist.get_rank()}): {kind} in {bad:,} of {tensor.numel():,} values"
