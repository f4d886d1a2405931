"""Quantization to float8, in both of the orientations that forward and backward need, and its emulation in bf16.

An implementation is an object with the functions of `reference.py`, which has the exact semantics: `rows`, `weight`,
`emulated_rows`, `emulated_weight`. Block recipes read their input once; `fp8`, whose one scale must be known first,
reads it twice. Nothing here is differentiable: the GEMMs that use it are.
"""

from maniple.kernels.quantize.cache import QuantizedWeight, bump, generation
from maniple.kernels.quantize.functions import (
    dequantize,
    emulate_rows,
    emulate_weight,
    quantize_rows,
    quantize_weight,
)
from maniple.kernels.quantize.quantized import Quantized, Rows, Weight, as_fnuz, padded_size, require_one_encoding

__all__ = [
    "Quantized",
    "QuantizedWeight",
    "Rows",
    "Weight",
    "as_fnuz",
    "bump",
    "dequantize",
    "emulate_rows",
    "emulate_weight",
    "generation",
    "padded_size",
    "quantize_rows",
    "quantize_weight",
    "require_one_encoding",
]
