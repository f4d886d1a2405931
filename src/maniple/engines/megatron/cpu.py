"""Megatron-Core on a machine without a GPU: what names CUDA is led to the CPU.

Megatron-Core writes `device="cuda"`, `torch.cuda.current_device()`, `tensor.cuda()` and CUDA streams in some five
hundred places. `install()` leads them all to the CPU with a table of `torch.cuda` entry points and one
`TorchFunctionMode`. It is for processes that have no GPU (training on Gloo, dry runs under fake tensors) and is never
called where CUDA is used. Every redirect below names the upstream line that needs it; tests/engines/test_cpu.py fails
when one is no longer needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    """Everything is on one queue on a CPU: a stream that is always in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


_STREAM = _Stream()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _to_cpu(device: Any) -> Any:
    return _CPU if _is_cuda(device) else device


class _CudaMeansCpu(TorchFunctionMode):
    """Leads `device="cuda"`, `.cuda()` and `.to("cuda")` to the CPU and lets CPU tensors pass CUDA type checks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer.py and distrib_optimizer.py compare with 'torch.cuda.FloatTensor' and kin
            return func(*args).replace("torch.", "torch.cuda.", 1)
        elif kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _rng_state(device: Any = None, **_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None, **_: Any) -> None:
    torch.set_rng_state(state)


class _GlooOnOneDevice(ProcessGroupGloo):
    """Gloo groups that share one network device and have one thread each.

    torch (distributed_c10d.py, `_new_process_group_helper`) gives every group a device and three threads, one of which
    wakes up a hundred times a second: Megatron-Core's dozens of groups would keep a core busy with nothing.
    """

    devices: ClassVar[list[ProcessGroupGloo.Device]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if not self.devices:
            names = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch's own constructor reads it
            make = ProcessGroupGloo.create_device
            self.devices.extend(
                [make(interface=name) for name in names.split(",")] if names else [self.create_default_device()]
            )
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = self.devices, 1, timeout
        super().__init__(store, rank, size, options)


_REDIRECTS: dict[str, Any] = {
    "current_device": lambda: _CPU,  # used as a device, e.g. tensor_parallel/layers.py
    "set_device": lambda device: None,
    "device_count": lambda: 1,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": lambda stream: None,
    "stream": lambda stream=None: contextlib.nullcontext(),  # distributed/param_and_grad_buffer.py
    "Stream": _Stream,
    "Event": _Event,
    "synchronize": lambda device=None: None,  # pipeline_parallel/p2p_communication.py
    "manual_seed": torch.manual_seed,  # tensor_parallel/random.py
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "is_current_stream_capturing": lambda: False,
    "get_device_capability": lambda device=None: (0, 0),
}

_installed: _CudaMeansCpu | None = None


def install() -> None:
    """Make this process a CPU device for Megatron-Core. Idempotent. Call before building anything.

    Raises RuntimeError if CUDA is in use in this process already.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is initialised in this process: it cannot become a CPU device")
    for name, replacement in _REDIRECTS.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = _rng_state
    # pipeline_parallel/utils.py, as it frees a stage's input; no mode is asked, since it refuses our stream before
    torch.Tensor.record_stream = lambda self, stream: None
    # utils.py; they raise in a torch that is built without CUDA
    torch.cuda.nvtx.range_push = lambda *args, **kwargs: 0
    torch.cuda.nvtx.range_pop = lambda *args, **kwargs: 0
    # fused ops are decorated with torch.compile at import (jit.py); a CPU gains nothing and waits for a compiler
    torch.compiler.set_stance("force_eager")
    from megatron.core.tensor_parallel import random

    # tensor_parallel/random.py sets the state in a callback that runs when CUDA starts, which never happens here
    random._get_cuda_rng_state = _rng_state
    # its fork() warns at each use when the CPU's stream moves, which on a CPU is the stream that it forks
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    random._set_cuda_rng_state = _set_rng_state
    distributed_c10d.ProcessGroupGloo = _GlooOnOneDevice
    _installed = _CudaMeansCpu()
    _installed.__enter__()


def is_installed() -> bool:
    return _installed is not None
