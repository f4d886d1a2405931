"""Hardware cards: peaks, memory, links, and what was attained. Imports no torch until something is measured."""

from __future__ import annotations

import re
import time
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import yaml

from maniple.errors import UserError
from maniple.hardware.calibration import with_calibration
from maniple.hardware.card import GPU, Attained, Dtype, Link

__all__ = [
    "GPU",
    "Attained",
    "Dtype",
    "Link",
    "list_gpus",
    "load_gpu",
    "lookup",
    "measure_cpu_peak",
    "with_calibration",
]

# Words in a device's name which say that it is not the whole, socketed GPU whose figures the card gives: PCIe and NVL
# boards run at other clocks, and a MIG slice is a fraction of a GPU.
_OTHER_PRODUCT = {"PCIE", "NVL", "MIG"}


@cache
def _gpus() -> dict[str, GPU]:
    cards = yaml.safe_load((files(__package__) / "gpus.yaml").read_text(encoding="utf-8"))
    return {name: GPU.model_validate({"name": name, **figures}) for name, figures in cards.items()}


def list_gpus() -> list[str]:
    """Names that `load_gpu` takes, in the order of the file."""
    return list(_gpus())


def load_gpu(name: str) -> GPU:
    """The card of that name, e.g. `h200-sxm`, in any case. Raises UserError, with the nearest names there are, if there
    is none."""
    gpus, asked = _gpus(), name.lower()
    if asked not in gpus:
        near = [known for known in gpus if known.startswith(asked)] or get_close_matches(asked, gpus, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? There are" if asked and near else "choose one of"
        raise UserError(f"no GPU card is named {name!r}: {hint} {', '.join(gpus)}")
    return gpus[asked]


def lookup(device_name: str) -> GPU | None:
    """The card for a `torch.cuda.get_device_name()` string, or None where no card is certainly about that device.

    A whole word of the name must be the card's (`NVIDIA GB200` is not a B200, `NVIDIA H20` not an H200), and PCIe
    boards, NVL boards and MIG slices have no card: a wrong peak would be worse than none.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _OTHER_PRODUCT:
        return None
    return next((gpu for gpu in _gpus().values() if gpu.device_token in words), None)


def measure_cpu_peak(seconds: float = 0.3) -> float:
    """FLOP/s that this process attains in fp32 products of 1024 x 1024 matrices, with torch's current threads.

    This stands in for a peak in the MFU of runs on a CPU. It is attained, not a vendor's figure: other load on the
    machine lowers it, so that an MFU against it can be flattering. The fastest product within about `seconds` counts.
    """
    import torch

    size = 1024
    a_MK, b_KN = torch.rand(size, size), torch.rand(size, size)
    out_MN = torch.empty(size, size)
    fastest = float("inf")
    with torch.inference_mode():
        torch.matmul(a_MK, b_KN, out=out_MN)  # the first product pays for threads and pages
        end = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            torch.matmul(a_MK, b_KN, out=out_MN)
            now = time.perf_counter()
            fastest = min(fastest, now - start)
            if now >= end:
                return 2.0 * size**3 / fastest
