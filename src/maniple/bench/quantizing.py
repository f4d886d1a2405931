"""Contests of quantization: how near it comes to copying the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from maniple.bench.contender import Absent, Contender, Role
from maniple.bench.contest import Contest
from maniple.bench.operands import BOUNDS, Operands
from maniple.bench.ours import float8, format_of
from maniple.bench.shapes import OPERAND_BYTES
from maniple.errors import UserError
from maniple.kernels import quantize, registry

OPS = {"quantize_rows": "rows", "quantize_weight": "weight", "emulate_rows": "emulation"}  # what each quantizes
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # what came out, and what it is of


def contests(recipe: str, o: Operands) -> Iterator[Contest]:
    """Rows and weights of a shape, both orientations in one call; where mxfp8 is emulated, rounding rows too."""
    shape, dtype = o.shape, float8(recipe, o.device)
    width = OPERAND_BYTES[recipe]
    padded = sum(-(-size // 128) * 128 for size in shape.sizes)
    reads = 2 if recipe == "fp8" else 1  # the one scale of a tensor must be known before anything can be written
    elements = shape.groups * shape.n * shape.k

    def rows(name: str) -> Pairs:
        made = quantize.quantize_rows(o.x_SK, o.ends_G, recipe, dtype=dtype, kernels=name)
        assert made.rowwise is not None
        assert made.columnwise is not None
        yield quantize.dequantize(made.rowwise), o.x_SK
        yield quantize.dequantize(made.columnwise).t()[_padded_places(o)], o.x_SK

    def weight(name: str) -> Pairs:
        made = quantize.quantize_weight(o.w_GNK, recipe, dtype=dtype, kernels=name)
        assert made.dgrad is not None
        yield quantize.dequantize(made.forward), o.w_GNK
        yield quantize.dequantize(made.dgrad).transpose(1, 2), o.w_GNK

    def emulated(name: str) -> Pairs:
        for made in quantize.emulate_rows(o.x_SK, o.ends_G, kernels=name):
            assert made is not None
            yield made, o.x_SK

    def time_rows(name: str) -> Callable[[], object]:
        return lambda: quantize.quantize_rows(o.x_SK, o.ends_G, recipe, dtype=dtype, kernels=name)

    def time_weight(name: str) -> Callable[[], object]:
        return lambda: quantize.quantize_weight(o.w_GNK, recipe, dtype=dtype, kernels=name)

    def time_emulated(name: str) -> Callable[[], object]:
        return lambda: quantize.emulate_rows(o.x_SK, o.ends_G, kernels=name)

    moved = 2 * reads * shape.rows * shape.k + width * (shape.rows + padded) * shape.k
    yield _contest("quantize_rows", recipe, o, moved, time_rows, rows)
    yield _contest("quantize_weight", recipe, o, (2 * reads + 2) * elements, time_weight, weight)
    if recipe == "mxfp8" and format_of(recipe, o.device, None) == "bf16":
        yield _contest("emulate_rows", recipe, o, 6 * shape.rows * shape.k, time_emulated, emulated)


def _contest(
    op: str,
    recipe: str,
    o: Operands,
    moved: float,
    time: Callable[[str], Callable[[], object]],
    pairs: Callable[[str], Pairs],
) -> Contest:
    entrants: list[Contender | Absent] = []
    role: Role = "selected"
    try:
        for found in registry.candidates("quantize", recipe, o.device.type):
            if found.refuses and found.refuses(*_operands(op, recipe, o)):
                continue
            if found.name != "reference" or o.device.type == "cpu":
                entrants.append(Contender(found.name, role, time(found.name)))
                role = "alternative"
    except UserError as error:
        entrants.append(Absent("ours", "selected", str(error)))

    def error_of(contender: Contender) -> float:
        return max(_error(found, wanted) for found, wanted in pairs(contender.name))

    return Contest(op, recipe, o.shape, entrants, 0.0, moved, "bf16", ("quantize",), error_of, BOUNDS[recipe])


def _operands(op: str, recipe: str, o: Operands) -> tuple[object, ...]:
    """What the implementations of `quantize` are chosen by."""
    what = OPS[op]
    return what, o.w_GNK if what == "weight" else o.x_SK, None, recipe, float8(recipe, o.device)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wrong = right = 0.0  # a part at a time: in fp32 the whole would take several times the tensor
    for f, w in zip(found.split(4096), wanted.split(4096), strict=True):
        wrong += (f.float() - w.float()).square().sum(dtype=torch.float64).item()
        right += w.float().square().sum(dtype=torch.float64).item()
    return (wrong / right) ** 0.5


def _padded_places(o: Operands) -> torch.Tensor:
    """Where each row stands among the columns of `Rows.columnwise`: groups start at multiples of 128 there."""
    places, start = [], 0
    for size in o.shape.sizes:
        places.append(torch.arange(start, start + size))
        start += -(-size // 128) * 128
    return torch.cat(places).to(o.device)
