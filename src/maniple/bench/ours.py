"""Our own products as they take part: by recipe, the implementations that the registry has for the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from maniple.bench.contender import Absent, Contender, Role
from maniple.bench.operands import Operands
from maniple.kernels import quantize, registry

PRODUCTS = {"bf16": "grouped_gemm"}  # the registry's op by recipe
QUANTIZED = "quantized_grouped_gemm"
OUR_BF16 = "our bf16"


def candidates(recipe: str, device: torch.device, kernels: str | None) -> tuple[registry.Implementation, ...]:
    """The registry's implementations of a recipe's products. Raises UserError where there is none."""
    return registry.candidates(PRODUCTS.get(recipe, QUANTIZED), recipe, device.type, kernels)


def ours(op: str, recipe: str, o: Operands, kernels: str | None) -> Iterator[Contender | Absent]:
    """What can compute an op: first what the registry selects. `kernels` pins one.

    On a GPU the reference takes part only where it is pinned: it is an oracle, and slow. Raises UserError where nothing
    serves the recipe on the device.
    """
    dtype = float8(recipe, o.device)
    bf16 = o.x_SK, o.w_GNK, "nk"
    operands = bf16 if recipe == "bf16" else (o.x_SK.dtype, o.shape.n, o.shape.k, dtype, dtype)
    role: Role = "selected"
    for found in candidates(recipe, o.device, kernels):
        if found.name == "reference" and o.device.type == "cuda" and kernels != "reference":
            continue
        reason = found.refuses(*operands) if found.refuses else None
        if reason is not None:
            yield Absent(found.name, "alternative", reason)
            continue
        if recipe == "bf16":
            yield Contender(found.name, role, _bf16(op, found.fn, o))
        elif found.name == "emulated":
            yield _emulated(op, found, o, role)
        else:
            yield Contender(found.name, role, _quantized(op, recipe, found.fn, o, dtype))
        role = "alternative"


def bf16_baseline(op: str, o: Operands) -> list[Contender]:
    """Our selected bf16 product, to measure another recipe against; empty where there is none."""
    for found in ours(op, "bf16", o, None):
        if isinstance(found, Contender):
            return [Contender(OUR_BF16, "alternative", found.call)]
    return []


def format_of(recipe: str, device: torch.device, kernels: str | None) -> str:
    """The format of the matrix instructions that a recipe's products take here: bf16 where mxfp8 is emulated."""
    if recipe == "mxfp8" and candidates(recipe, device, kernels)[0].name == "emulated":
        return "bf16"
    return {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "mxfp8": "mxfp8"}[recipe]


def float8(recipe: str, device: torch.device) -> torch.dtype:
    """The e4m3 of a recipe on a device: gfx942 multiplies FNUZ numbers, and mxfp8 has OCP's everywhere."""
    if recipe == "mxfp8":
        return torch.float8_e4m3fn
    name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")) if device.type == "cuda" else ""
    return torch.float8_e4m3fnuz if name.startswith("gfx942") else torch.float8_e4m3fn


def _bf16(op: str, fn: Any, o: Operands) -> Callable[[], torch.Tensor]:
    splits = _splits(o)
    if op == "forward":
        return lambda: fn.forward(o.x_SK, o.w_GNK, o.ends_G, splits=splits)
    if op == "dgrad":
        return lambda: fn.dgrad(o.grad_SN, o.w_GNK, o.ends_G, splits=splits)
    if op == "wgrad":
        return lambda: fn.wgrad(o.x_SK, o.grad_SN, o.ends_G, splits=splits)
    return lambda: fn.wgrad(o.x_SK, o.grad_SN, o.ends_G, out=o.main_grad_GNK, accumulate=True, splits=splits)


def _quantized(op: str, recipe: str, fn: Any, o: Operands, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """The product of operands that were quantized before: the time of quantization has rows of its own."""
    splits = _splits(o)
    if op in ("forward", "dgrad"):
        rows_S = o.x_SK if op == "forward" else o.grad_SN
        rows = quantize.quantize_rows(rows_S, o.ends_G, recipe, dtype=dtype, columnwise=False).rowwise
        both = quantize.quantize_weight(o.w_GNK, recipe, dtype=dtype, dgrad=op == "dgrad")
        weight = both.forward if op == "forward" else both.dgrad
        return lambda: fn.rows(rows, weight, o.ends_G, splits=splits)
    x, grad = (quantize.quantize_rows(r, o.ends_G, recipe, dtype=dtype, rowwise=False) for r in (o.x_SK, o.grad_SN))
    if op == "wgrad":
        return lambda: fn.wgrad(grad.columnwise, x.columnwise, x.padded_ends_G)
    return lambda: fn.wgrad(grad.columnwise, x.columnwise, x.padded_ends_G, out=o.main_grad_GNK, accumulate=True)


def _emulated(op: str, found: registry.Implementation, o: Operands, role: Role) -> Contender:
    """mxfp8 without its instructions. Rounding x to its grid, both ways, is in forward's time, grad's in dgrad's."""
    fn, splits = found.fn, _splits(o)
    note = "emulated in bf16"
    if op in ("forward", "dgrad"):
        rows_S = o.x_SK if op == "forward" else o.grad_SN
        weight = quantize.emulate_weight(o.w_GNK)
        weight = weight if op == "forward" else weight.transpose(1, 2)

        def product() -> torch.Tensor:
            along, _ = quantize.emulate_rows(rows_S, o.ends_G)
            return fn.rows(along, weight, o.ends_G, splits=splits)

        return Contender(found.name, role, product, note=f"{note}; its rows are rounded within the time")
    _, x = quantize.emulate_rows(o.x_SK, o.ends_G, rowwise=False)
    _, grad = quantize.emulate_rows(o.grad_SN, o.ends_G, rowwise=False)
    assert x is not None
    assert grad is not None
    operands, into = (grad.t(), x.t(), o.ends_G), o.main_grad_GNK
    if op == "wgrad":
        return Contender(found.name, role, lambda: fn.wgrad(*operands), note=note)
    return Contender(found.name, role, lambda: fn.wgrad(*operands, out=into, accumulate=True), note=note)


def _splits(o: Operands) -> list[int] | None:
    """Sizes for the reference, which a CPU runs; kernels read them on the device."""
    return list(o.shape.sizes) if o.device.type == "cpu" else None
