"""Oracle of quantization, in plain torch.

Exact semantics of a block with the largest magnitude `amax` and a format whose largest number is `largest` = m * 2^top:

- Scales of block recipes are powers of two 2^e: x times the inverse is exact. "rceil" takes the smallest e with
  `amax <= largest * 2^e`; "floor" (OCP MX 1.0, section 6.3) takes `floor(log2(amax)) - top`, so that amax between
  `largest` and `2^(top + 1)` times the scale saturates. `mxfp8` stores the byte e + 127, `fp8_block` an fp32. e is at
  least -127 (fp32: -126, `SMALLEST_SCALE`) and at most 127 - top, where `largest` is still a finite fp32.
- The scale of `fp8` is `amax / largest` in fp32, at least 2^-126.
- data: `x * (1 / scale)` in fp32, clamped to +-largest, then rounded to the nearest number of the format, ties to even,
  as torch's cast does.
- A block of zeros: data 0 and the smallest scale. A block with NaN or infinity: scale NaN (byte 255) and data NaN.
  Padding counts as zero.

Functions read group ends on the host. Shapes: S rows, K columns, G groups, P padded rows (`quantized.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from maniple.kernels.quantize.formats import (
    FORMATS,
    GROUP_ALIGNMENT,
    RECIPES,
    SMALLEST_SCALE,
    Format,
)
from maniple.kernels.quantize.quantized import padded_size


def rows(
    x_TK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data `[S, K]`, scales `[S, .]`, transposed data `[K, P]`, its scales `[K, .]`, padded ends int32 `[G]`).

    What is not asked for is empty. The arguments are those of `quantize_rows`.
    """
    form, block = format_of(dtype), RECIPES[recipe].rows
    slots = (x_TK if source_S is None else source_S).shape[0]
    padded = padded_size(slots, ends_G.shape[0])
    data_SK, scales_S, data_KP, scales_K = empty_rows(x_TK, slots, padded, recipe, dtype, rowwise, columnwise)
    whole = None
    if not block:
        used_UK = gathered(x_TK, source_S, 0, int(ends_G[-1]))
        whole = amax(used_UK.float().reshape(-1))
        for scales in (scales_S, scales_K):
            if scales.numel():
                scales.copy_(tensor_scale(whole, form))
    for start, end, first, last in groups(ends_G, slots):
        x_RK = gathered(x_TK, source_S, start, end).float()
        if rowwise:
            data, scales = quantized(x_RK, (1, block), recipe, form, rounding, whole)
            data_SK[start:end] = data.to(dtype)
            if block:
                scales_S[start:end] = scales
        if columnwise:
            x_KR = F.pad(x_RK.t(), (0, last - first - (end - start)))
            data, scales = quantized(x_KR, (1, block), recipe, form, rounding, whole)
            data_KP[:, first:last] = data.to(dtype)
            if block:
                scales_K[:, first // block : last // block] = scales
    return data_SK, scales_S, data_KP, scales_K, padded_ends(ends_G)


def gathered(x_TK: torch.Tensor, source_S: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
    """Rows start to end of x, or of `x[source]`: zeros where the source is none of T."""
    if source_S is None:
        return x_TK[start:end]
    source_R = source_S[start:end].long()
    there_R = (source_R >= 0) & (source_R < x_TK.shape[0])
    if not x_TK.shape[0]:
        return x_TK.new_zeros(end - start, x_TK.shape[1])
    return torch.where(there_R[:, None], x_TK[source_R.where(there_R, 0)], 0)


def weight(
    w_GNK: torch.Tensor, recipe: str, dtype: torch.dtype, rounding: str, dgrad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data `[G, N, K]`, its transpose `[G, K, N]`, empty unless `dgrad`; scales `[G, ., .]`)."""
    block = RECIPES[recipe].weight
    data_GNK, scales_G = quantized(w_GNK.float(), (block, block), recipe, format_of(dtype), rounding)
    data_GNK = data_GNK.to(dtype).contiguous()
    return data_GNK, data_GNK.transpose(1, 2).contiguous() if dgrad else data_GNK.new_empty(0), scales_G


def emulated_rows(
    x_TK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    dtype: torch.dtype,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x rounded to what mxfp8 keeps of it, `[S, K]` in x's dtype: in blocks along K, and along its group's rows."""
    form, block = format_of(dtype), RECIPES["mxfp8"].rows
    slots, k = (x_TK if source_S is None else source_S).shape[0], x_TK.shape[1]
    along_SK = x_TK.new_empty(slots if rowwise else 0, k)
    down_SK = x_TK.new_empty(slots if columnwise else 0, k)
    for start, end, _, _ in groups(ends_G, slots):
        x_RK = gathered(x_TK, source_S, start, end).float()
        if rowwise:
            along_SK[start:end] = multiplied(*quantized(x_RK, (1, block), "mxfp8", form, rounding), (1, block))
        if columnwise:
            x_KR = x_RK.t()
            down_SK[start:end] = multiplied(*quantized(x_KR, (1, block), "mxfp8", form, rounding), (1, block)).t()
    return along_SK, down_SK


def emulated_weight(w_GNK: torch.Tensor, dtype: torch.dtype, rounding: str) -> torch.Tensor:
    """w rounded to what mxfp8 keeps of it, `[G, N, K]` in w's dtype."""
    block = (RECIPES["mxfp8"].weight,) * 2
    return multiplied(*quantized(w_GNK.float(), block, "mxfp8", format_of(dtype), rounding), block).to(w_GNK.dtype)


def quantized(
    x: torch.Tensor,
    block: tuple[int, int],
    recipe: str,
    form: Format,
    rounding: str,
    whole: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 `[..., R, C]` in numbers of the format, scales). A block of 0 is the matrix, whose amax may be given."""
    *outer, r, c = x.shape
    down, across = block if block[1] else (max(r, 1), max(c, 1))
    tall, wide = -(-r // down), -(-c // across)
    padded = F.pad(x, (0, wide * across - c, 0, tall * down - r)).reshape(*outer, tall, down, wide, across)
    largest = amax(padded.transpose(-3, -2).flatten(-2)) if whole is None else whole.expand(*outer, tall, wide)
    if not RECIPES[recipe].rows:
        scales = tensor_scale(largest, form)
    else:
        scales = block_scale(largest, form, rounding, RECIPES[recipe].e8m0)
    inverse = (1 / decoded(scales))[..., :, None, :, None]
    data = (padded * inverse).clamp(-form.largest, form.largest)
    data = torch.where(inverse.isnan(), torch.nan, data)  # NaN of one sign, whatever x's was
    data = data.to(getattr(torch, f"float8_{form.name}")).float()
    return data.reshape(*outer, tall * down, wide * across)[..., :r, :c], scales


def multiplied(data: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """`data * scales` with the scales spread over their blocks ((0, 0): over the matrix), in data's dtype."""
    scales = decoded(scales).to(data.dtype)
    if block[0]:
        r, c = data.shape[-2:]
        scales = scales.repeat_interleave(block[0], -2)[..., :r, :].repeat_interleave(block[1], -1)[..., :c]
    return data * scales


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last dimension, 0 of nothing, not finite if one of them is not."""
    return F.pad(x.abs(), (0, 1)).amax(-1)


def tensor_scale(amax: torch.Tensor, form: Format) -> torch.Tensor:
    """fp32 scales of `fp8` for fp32 amax."""
    return torch.where(amax.isfinite(), (amax / form.largest).clamp(min=SMALLEST_SCALE), torch.nan)


def block_scale(amax: torch.Tensor, form: Format, rounding: str, e8m0: bool) -> torch.Tensor:
    """Power-of-two scales for fp32 amax, read off its bits: no logarithm that could be off by one."""
    bits = amax.view(torch.int32)
    byte = (bits >> 23) - form.top
    if rounding == "rceil":
        byte = byte + ((bits & 0x7FFFFF) > form.extra)
    byte = torch.where(amax.isfinite(), byte.clamp(0 if e8m0 else 1, form.largest_byte), 255).to(torch.uint8)
    return byte if e8m0 else decoded(byte)


def decoded(scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of fp32 scales or E8M0 bytes, exactly."""
    if scales.dtype != torch.uint8:
        return scales
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, 0x00400000, torch.where(scales == 255, 0x7FC00000, bits))
    return bits.to(torch.int32).view(torch.float32)


def padded_ends(ends_G: torch.Tensor) -> torch.Tensor:
    """Where each group ends when all start at multiples of 128: int32 `[G]`."""
    sizes_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    return ((sizes_G + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT).cumsum(0).to(torch.int32)


def groups(ends_G: torch.Tensor, slots: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end, first padded column, end) of every group, empty ones too."""
    start = first = 0
    for end, last in zip(ends_G.tolist(), padded_ends(ends_G).tolist(), strict=True):
        if not start <= end <= slots:
            raise ValueError(f"ends {ends_G.tolist()} do not rise from 0 to at most {slots} rows")
        yield start, end, first, last
        start, first = end, last


def empty_rows(
    x: torch.Tensor, slots: int, padded: int, recipe: str, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `rows` fills, unwritten. Block scales of neighbouring rows lie side by side: a tile's are whole sectors."""
    k, block = x.shape[1], RECIPES[recipe].rows

    def pair(asked: bool, r: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not asked:
            return x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
        data = x.new_empty(r, c, dtype=dtype)
        if not block:
            return data, x.new_empty(1, 1, dtype=torch.float32)
        return data, x.new_empty(-(-c // block), r, dtype=torch.uint8 if RECIPES[recipe].e8m0 else torch.float32).t()

    return *pair(rowwise, slots, k), *pair(columnwise, k, padded)


def empty_weight(
    w_GNK: torch.Tensor, recipe: str, dtype: torch.dtype, dgrad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `weight` returns, unwritten."""
    (g, n, k), block = w_GNK.shape, RECIPES[recipe].weight
    shape = (g, -(-n // block), -(-k // block)) if block else (g, 1, 1)
    return (
        w_GNK.new_empty(g, n, k, dtype=dtype),
        w_GNK.new_empty((g, k, n) if dgrad else (0,), dtype=dtype),
        w_GNK.new_empty(shape, dtype=torch.uint8 if RECIPES[recipe].e8m0 else torch.float32),
    )


def format_of(dtype: torch.dtype) -> Format:
    return FORMATS[str(dtype).removeprefix("torch.float8_")]
