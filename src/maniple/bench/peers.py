"""What our kernels are measured beside, in the same process: torch's grouped products, DeepGEMM, one dense product.

A peer gets its operands prepared as it wants them; what it does inside the call is within its time. One that takes only
groups of certain multiples gets its rows as its users must hand them over, each group padded, and its row says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from maniple.bench.contender import Absent, Contender, Role
from maniple.bench.operands import Operands
from maniple.bench.ours import float8
from maniple.kernels import quantize

_DEEP_GEMM_ROWS = 128  # that its groups' sizes are multiples of


Builder = Callable[[str, Operands], Contender | Absent]


def peers(op: str, recipe: str, operands: Operands) -> Iterator[Contender | Absent]:
    """Every peer of an op and recipe, and the dense ceiling; one that cannot take part as the reason."""
    for name, role, needs, build in _BUILDERS.get(recipe, ()):
        gpu = operands.device.type == "cuda"
        if needs and not (gpu and (needs == "a GPU" or not torch.version.hip)):
            yield Absent(name, role, f"needs {needs}")
            continue
        try:
            yield build(op, operands)
        except Exception as error:  # preparing its operands may fail in as many ways as running it
            yield Absent(name, role, f"{type(error).__name__}: {_line(error)}")


def torch_grouped(op: str, o: Operands) -> Contender:
    """`torch._grouped_mm`; it has no accumulation, so that the sum is a second pass over the weights' gradient."""
    name, x, w, grad, ends, main = "torch._grouped_mm", o.x_SK, o.w_GNK, o.grad_SN, o.ends_G, o.main_grad_GNK
    if op == "forward":
        return Contender(name, "peer", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends))
    if op == "dgrad":
        return Contender(name, "peer", lambda: torch._grouped_mm(grad, w, offs=ends))
    if op == "wgrad":
        return Contender(name, "peer", lambda: torch._grouped_mm(grad.t(), x, offs=ends))
    return Contender(
        name,
        "peer",
        lambda: main.add_(torch._grouped_mm(grad.t(), x, offs=ends)),
        note="rounded to bf16, then added in a second pass",
    )


def dense_bf16(op: str, o: Operands) -> Contender:
    """One product of the vendor's library over all rows, with the first expert's matrix."""
    x, w, grad = o.x_SK, o.w_GNK[0], o.grad_SN
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: x @ w.t(),
        "dgrad": lambda: grad @ w,
        "wgrad": lambda: grad.t() @ x,
    }
    note = "" if op in calls else "one bf16 result, nothing added"
    return Contender("dense", "ceiling", calls.get(op, calls["wgrad"]), checked=False, note=note)


def torch_scaled_grouped(op: str, o: Operands) -> Contender | Absent:
    """`torch._scaled_grouped_mm`: e4m3 with one scale a row (of a group, in the weight gradient)."""
    name, note = "torch._scaled_grouped_mm", "a scale a row"
    if op == "wgrad_accumulate":
        return Absent(name, "peer", "does not accumulate")
    if op == "wgrad":
        padded = o.padded(16)
        ends = padded.ends_G
        a_NS, a_scale = _per_group(padded.grad_SN, padded.shape.sizes)
        b_KS, b_scale = _per_group(padded.x_SK, padded.shape.sizes)

        def wgrad() -> torch.Tensor:
            return torch._scaled_grouped_mm(
                a_NS, b_KS.t(), a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return Contender(name, "peer", wgrad, multiple=16, note=note)
    rows, weight = (o.x_SK, o.w_GNK) if op == "forward" else (o.grad_SN, o.w_GNK.transpose(1, 2))
    (a, a_scale), (b, b_scale), ends = _per_row(rows), _per_row(weight), o.ends_G

    def product() -> torch.Tensor:
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Contender(name, "peer", product, note=note)


def dense_fp8(op: str, o: Operands) -> Contender:
    """One `torch._scaled_mm` over all rows with one scale a tensor."""
    a, b = {
        "forward": (o.x_SK, o.w_GNK[0]),
        "dgrad": (o.grad_SN, o.w_GNK[0].t()),
    }.get(op, (o.grad_SN.t(), o.x_SK.t()))
    dtype = float8("fp8", o.device)
    a8, b8, one = a.contiguous().to(dtype), b.contiguous().to(dtype), torch.ones((), device=o.device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Contender("dense", "ceiling", product, checked=False, note="a scale a tensor")


def deep_gemm_bf16(op: str, o: Operands) -> Contender | Absent:
    """DeepGEMM's contiguous grouped products; its weight gradient exists as a sum into fp32 only."""
    library = _deep_gemm()
    if isinstance(library, Absent):
        return library
    if op == "wgrad":
        return Absent("DeepGEMM", "peer", "has wgrad_accumulate only")
    o = o.padded(_DEEP_GEMM_ROWS)
    if op == "wgrad_accumulate":
        sizes, counts = list(o.shape.sizes), _counts(o)

        def wgrad() -> torch.Tensor:
            library.k_grouped_bf16_gemm_tn_contiguous(
                o.grad_SN, o.x_SK, o.main_grad_GNK, sizes, counts, o.main_grad_GNK
            )
            return o.main_grad_GNK

        return Contender("DeepGEMM", "peer", wgrad, multiple=o.shape.multiple)
    groups_S = _group_of_each_row(o)
    rows = o.x_SK if op == "forward" else o.grad_SN
    function = getattr(library, f"m_grouped_bf16_gemm_{'nt' if op == 'forward' else 'nn'}_contiguous")
    columns = o.shape.n if op == "forward" else o.shape.k

    def product() -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], columns)
        function(rows, o.w_GNK, out, groups_S)
        return out

    return Contender("DeepGEMM", "peer", product, multiple=o.shape.multiple)


def deep_gemm_fp8(op: str, o: Operands) -> Contender | Absent:
    """DeepGEMM's 1 x 128 by 128 x 128 product; quantized, and scales laid out as it wants them, beforehand."""
    library = _deep_gemm()
    if isinstance(library, Absent):
        return library
    if op.startswith("wgrad"):
        return Absent("DeepGEMM", "peer", "not measured: its fp8 weight gradient wants every group flattened by itself")
    o = o.padded(_DEEP_GEMM_ROWS)
    rows, weight = (o.x_SK, o.w_GNK) if op == "forward" else (o.grad_SN, o.w_GNK.transpose(1, 2).contiguous())
    a = quantize.quantize_rows(rows, o.ends_G, "fp8_block", columnwise=False).rowwise
    b = quantize.quantize_weight(weight, "fp8_block").forward
    assert a is not None
    a_scales, groups_S = _turned(a.scales), _group_of_each_row(o)
    a_pair, b_pair = (a.data, a_scales), (b.data, b.scales.contiguous())

    def product() -> torch.Tensor:
        out = torch.empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16, device=rows.device)
        library.m_grouped_fp8_fp4_gemm_nt_contiguous(a_pair, b_pair, out, groups_S)
        return out

    return Contender("DeepGEMM", "peer", product, multiple=o.shape.multiple)


def _deep_gemm() -> Any:
    """The library, or why it cannot be used."""
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:  # a library built for another torch fails in many ways
        return Absent("DeepGEMM", "peer", f"cannot be imported: {_line(error)}")


def _turned(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[S, K / 128]` with S contiguous and its stride a multiple of 16 bytes, which spares the call a copy."""
    rows, columns = scales.shape
    buffer = torch.empty(columns, -(-rows // 4) * 4, dtype=scales.dtype, device=scales.device)
    buffer[:, :rows] = scales.t()
    return buffer.t()[:rows]


def _group_of_each_row(o: Operands) -> torch.Tensor:
    groups = torch.arange(o.shape.groups, dtype=torch.int32, device=o.device)
    return groups.repeat_interleave(_counts(o), output_size=o.shape.rows)


def _counts(o: Operands) -> torch.Tensor:
    return torch.tensor(o.shape.sizes, dtype=torch.int32, device=o.device)


def _per_row(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `[..., R, C]` contiguous, and its fp32 scales `[..., R]`."""
    dtype = float8("fp8", values.device)
    scales = values.abs().amax(-1).float() / torch.finfo(dtype).max
    return (values / scales[..., None]).to(dtype).contiguous(), scales


def _per_group(rows_SC: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose `[C, S]` in e4m3 with a scale for each of a group's columns, `[G * C]`."""
    dtype = float8("fp8", rows_SC.device)
    data_CS = torch.empty(rows_SC.shape[1], rows_SC.shape[0], dtype=dtype, device=rows_SC.device)
    scales_GC = torch.ones(len(sizes), rows_SC.shape[1], device=rows_SC.device)
    start = 0
    for g, size in enumerate(sizes):
        if size:
            part_RC = rows_SC[start : start + size]
            scales_GC[g] = part_RC.abs().amax(0).float() / torch.finfo(dtype).max
            data_CS[:, start : start + size] = (part_RC / scales_GC[g]).to(dtype).t()
        start += size
    return data_CS, scales_GC.flatten()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# name, role, what it needs ("": nothing), how it is made
_BUILDERS: dict[str, tuple[tuple[str, Role, str, Builder], ...]] = {
    "bf16": (
        ("torch._grouped_mm", "peer", "", torch_grouped),
        ("DeepGEMM", "peer", "an NVIDIA GPU", deep_gemm_bf16),
        ("dense", "ceiling", "", dense_bf16),
    ),
    "fp8": (
        ("torch._scaled_grouped_mm", "peer", "a GPU", torch_scaled_grouped),
        ("dense", "ceiling", "a GPU", dense_fp8),
    ),
    "fp8_block": (
        ("torch._scaled_grouped_mm", "peer", "a GPU", torch_scaled_grouped),
        ("DeepGEMM", "peer", "an NVIDIA GPU", deep_gemm_fp8),
        ("dense", "ceiling", "a GPU", dense_fp8),
    ),
}
