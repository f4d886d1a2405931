"""The operators `torch.ops.maniple.quantize_rows`, `quantize_weight`, `emulate_rows` and `emulate_weight`.

Each finds its implementation and calls it; the schemas and the shapes without values are for who looks at operators.
Arguments are those of the public functions, results those of `reference.py`.
"""

from __future__ import annotations

import torch

from maniple.kernels import custom_ops, registry
from maniple.kernels.quantize import reference
from maniple.kernels.quantize.quantized import padded_size


def quantize_rows(x, ends, source, recipe, dtype, rounding, rowwise, columnwise, kernels):
    operands = "rows", x, source, recipe, dtype
    implementation = registry.use("quantize", recipe, x.device.type, kernels, operands)
    return implementation.rows(x, ends, source, recipe, dtype, rounding, rowwise, columnwise)


def quantize_weight(w, recipe, dtype, rounding, dgrad, kernels):
    implementation = registry.use("quantize", recipe, w.device.type, kernels, ("weight", w, None, recipe, dtype))
    return implementation.weight(w, recipe, dtype, rounding, dgrad)


def emulate_rows(x, ends, source, dtype, rounding, rowwise, columnwise, kernels):
    operands = "emulation", x, source, "mxfp8", dtype
    implementation = registry.use("quantize", "mxfp8", x.device.type, kernels, operands)
    return implementation.emulated_rows(x, ends, source, dtype, rounding, rowwise, columnwise)


def emulate_weight(w, dtype, rounding, kernels):
    operands = "emulation", w, None, "mxfp8", dtype
    implementation = registry.use("quantize", "mxfp8", w.device.type, kernels, operands)
    return implementation.emulated_weight(w, dtype, rounding)


def _fake_rows(x, ends, source, recipe, dtype, rounding, rowwise, columnwise, kernels):
    slots = (x if source is None else source).shape[0]
    padded = padded_size(slots, ends.shape[0])
    return *reference.empty_rows(x, slots, padded, recipe, dtype, rowwise, columnwise), torch.empty_like(ends)


def _fake_emulated_rows(x, ends, source, dtype, rounding, rowwise, columnwise, kernels):
    slots = (x if source is None else source).shape[0]
    return tuple(x.new_empty(slots if asked else 0, x.shape[1]) for asked in (rowwise, columnwise))


_ROWS = "Tensor x, Tensor ends, Tensor? source"
_FORMAT = "ScalarType dtype, str rounding"
_WHICH = "bool rowwise, bool columnwise, str? kernels"
custom_ops.define(
    f"quantize_rows({_ROWS}, str recipe, {_FORMAT}, {_WHICH}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    quantize_rows,
    _fake_rows,
)
custom_ops.define(
    f"quantize_weight(Tensor w, str recipe, {_FORMAT}, bool dgrad, str? kernels) -> (Tensor, Tensor, Tensor)",
    quantize_weight,
    lambda w, recipe, dtype, rounding, dgrad, kernels: reference.empty_weight(w, recipe, dtype, dgrad),
)
custom_ops.define(f"emulate_rows({_ROWS}, {_FORMAT}, {_WHICH}) -> (Tensor, Tensor)", emulate_rows, _fake_emulated_rows)
custom_ops.define(
    f"emulate_weight(Tensor w, {_FORMAT}, str? kernels) -> Tensor",
    emulate_weight,
    lambda w, dtype, rounding, kernels: torch.empty_like(w, memory_format=torch.contiguous_format),
)
