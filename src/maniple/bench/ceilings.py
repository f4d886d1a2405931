"""What this device attains, measured in this process: dense products and copies, from which floors are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maniple.bench.timing import interleaved


@dataclass(frozen=True)
class Ceilings:
    """flops_per_s: by format, of one large dense product; absent where the device has none. copy: bytes a second, read
    plus written."""

    flops_per_s: dict[str, float]
    copy: float

    def floor(self, flops: float, moved: float, format: str) -> tuple[float, str] | None:
        """Least milliseconds, and what they are spent on: "operations" or "bytes"; None where no peak was measured.

        Of an op without products (`flops` 0) the bytes alone count.
        """
        by_bytes = moved / self.copy * 1e3
        if not flops:
            return by_bytes, "bytes"
        if format not in self.flops_per_s:
            return None
        by_operations = flops / self.flops_per_s[format] * 1e3
        return (by_operations, "operations") if by_operations >= by_bytes else (by_bytes, "bytes")


def measure(device: torch.device, *, rounds: int = 15) -> Ceilings:
    """Medians of a dense 8192³ product a format and of a 2 GiB copy (on a CPU 512³ and 64 MiB)."""
    on_gpu = device.type == "cuda"
    size, count = (8192, 2**29) if on_gpu else (512, 2**24)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b.t(), "copy": lambda: target.copy_(source)}
    if on_gpu:
        calls |= _low_precision(a, b)
    else:
        wide = a.float(), b.float()
        calls["fp32"] = lambda: wide[0] @ wide[1].t()
    times = interleaved(calls, device, rounds)
    moved = 2 * count * source.element_size()
    peaks = {name: 2 * size**3 / each.median * 1e3 for name, each in times.items() if name != "copy"}
    if not on_gpu:  # a CPU may be faster in fp32, which is what the reference computes in, whatever the recipe
        peaks = dict.fromkeys(("bf16", "fp8", "mxfp8"), max(peaks.values()))
    return Ceilings(peaks, moved / times["copy"].median * 1e3)


def _low_precision(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Dense products in fp8 and mxfp8, as far as this GPU and this torch have them."""
    dtype = torch.float8_e4m3fnuz if "gfx942" in _architecture(a.device) else torch.float8_e4m3fn
    a8, b8, one = a.to(dtype), b.to(dtype), torch.ones((), device=a.device)
    scales = torch.full((a.numel() // 32,), 127, dtype=torch.uint8, device=a.device).view(torch.float8_e8m0fnu)
    found: dict[str, Callable[[], object]] = {}
    for name, pair in (("fp8", (one, one)), ("mxfp8", (scales, scales))):

        def product(pair: tuple[torch.Tensor, torch.Tensor] = pair) -> torch.Tensor:
            return torch._scaled_mm(a8, b8.t(), *pair, out_dtype=torch.bfloat16, use_fast_accum=True)

        try:
            product()
        except (RuntimeError, ValueError):  # the device has no such product: rows of such recipes have no floor
            continue
        found[name] = product
    return found


def _architecture(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
