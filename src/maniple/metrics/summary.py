"""What a run came to, in one file: `summary.json`, with what it ran on and how it was started."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import maniple
from maniple.metrics.records import write_json

COMMAND = "MANIPLE_COMMAND"  # environment: the launcher's command line, which workers do not see otherwise


def write_summary(
    run_dir: Path,
    *,
    validation_loss: float | None,
    unigram_entropy: float | None,
    steps: int,
    tokens_per_second_per_gpu: float | None,
    mfu: float | None,
    peak_memory_bytes: int,
    world_size: int,
    device: Any,
    command: Sequence[str] | None = None,
    **more: Any,
) -> Path:
    """Writes `RUN/summary.json` in one stroke and returns its path.

    validation_loss, unigram_entropy: nats a token. tokens_per_second_per_gpu: a rank's, mean over the run's steps.
    mfu: share of 1; None where the device's peak is not known. peak_memory_bytes: of the heaviest rank.
    device: what the run's tensors were on, e.g. "cpu" or "cuda:0".
    command: the words that started the run; None: the launcher's command line, else this process's.
    `more` is added as it is.
    A NaN or infinite value is written as null and named under `nonfinite`.
    """
    words = list(command) if command is not None else _command()
    path = run_dir / "summary.json"
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "validation_loss": validation_loss,
            "unigram_entropy": unigram_entropy,
            "steps": steps,
            "tokens_per_second_per_gpu": tokens_per_second_per_gpu,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes,
            "world_size": world_size,
            **more,
            **environment(device),
            "command": shlex.join(words),
        },
    )
    return path


def _command() -> list[str]:
    """The words that started the job: those of the launcher where there is one, else this process's own."""
    # `python -m maniple` and the installed script are the same command.
    return shlex.split(os.environ[COMMAND]) if COMMAND in os.environ else ["maniple", *sys.argv[1:]]


def environment(device: Any = "cpu") -> dict[str, Any]:
    """`hardware` (CPU, memory; this node's GPUs if `device` is one) and `versions`, as plain JSON values."""
    import torch  # slow to import, and only asked for when a run ends

    kind = torch.device(device).type
    # A run on the CPU does not ask torch.cuda: the CPU device of the engine answers there in the GPU's place.
    count = torch.cuda.device_count() if kind == "cuda" else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "hardware": {
            "device": kind,
            "cpu": _cpu_model(),
            "cpu_cores": _usable_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        },
        "versions": {
            "maniple": maniple.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron-core": _version("megatron-core"),
            "triton": _version("triton"),
            "cuda": torch.version.cuda if gpus else None,
            "rocm": torch.version.hip if gpus else None,
            "platform": platform.platform(),
        },
    }


def peak_memory_bytes(device: Any = "cpu", *, reserved: bool = False) -> int:
    """Most memory this process has held, in bytes.

    On a GPU: what tensors took since the last reset of the peak, or with `reserved` what PyTorch's allocator took from
    the device for them (fragmentation included). On the CPU: peak resident memory of the process.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) if reserved else torch.cuda.max_memory_allocated(device)
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    # getrusage's maximum is inherited over fork and exec (a worker would report its launcher's peak), Linux's own
    # high-water mark is not.
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(match[1]) * 1024
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return match[1].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Cores this process may run on: less than the machine's inside a container or a scheduler's slot."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # e.g. triton under another name in a ROCm build
        return None
