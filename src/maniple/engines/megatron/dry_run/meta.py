"""Megatron-Core on torch's meta device: tensors with shapes and no values, any rank of a world of any size.

Nothing is computed and nothing is sent, so that a rank that needs 60 GiB of a GPU runs in a second of a laptop's core.
Where a program asks for a value it gets a made-up one: 1 for one number, 0 for each of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CheckpointFunction
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import cpu, parallel
from maniple.engines.megatron.dry_run import fused, stage_shapes
from maniple.engines.megatron.dry_run.collectives import Recorder

META = torch.device("meta")


class _NoValues(TorchFunctionMode):
    """Leads every device to meta, and answers for values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if func in fused.BY_FUNCTION:
            return fused.BY_FUNCTION[func](*args, **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            args = (args[0], META, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace(".meta.", ".")  # cpu.py makes it a type of CUDA's
        elif args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__):
                return 1.0 if args[0].is_floating_point() and func is not torch.Tensor.__int__ else 1
            if func is torch.Tensor.tolist:
                return _zeros(args[0].shape)
        return func(*args, **kwargs)


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


@contextlib.contextmanager
def _recomputed_alike() -> Iterator[None]:
    """Inside, what a backward pass computes again goes the way that the forward pass went: torch runs backward passes
    without function modes."""
    compute_again = CheckpointFunction.backward

    def backward(ctx, *gradients):
        with META, _NoValues():
            return compute_again(ctx, *gradients)

    CheckpointFunction.backward = staticmethod(backward)
    try:
        yield
    finally:
        CheckpointFunction.backward = staticmethod(compute_again)


@contextlib.contextmanager
def stand_in(job: TrainConfig, rank: int, world_size: int) -> Iterator[Recorder]:
    """In this process, which must be in no group, the engine is rank `rank` of the job's world; what it communicates is
    recorded. The groups are there inside, and gone after it."""
    cpu.install()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    device = torch.cuda.current_device
    # torch.autograd.backward runs without function modes, and upstream makes gradients on the current device
    torch.cuda.current_device = lambda: META
    try:
        with Recorder(really=False) as recorder:
            parallel.start_groups(job)
            with META, _NoValues(), _recomputed_alike(), stage_shapes.known(job):
                yield recorder
    finally:
        torch.cuda.current_device = device
        parallel.stop()
