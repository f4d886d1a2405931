"""Quantization against a second formula in fp64 by search, on every kind of group, with NaN in the tail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from maniple.errors import UserError
from maniple.kernels import registry
from maniple.kernels.quantize import (
    Quantized,
    as_fnuz,
    dequantize,
    emulate_rows,
    emulate_weight,
    padded_size,
    quantize_rows,
    quantize_weight,
    require_one_encoding,
)

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
#              mantissa bits, bias, largest, exponent of the largest
FORMATS = {E4M3: (3, 7, 448.0, 8), E5M2: (2, 15, 57344.0, 15), FNUZ: (3, 8, 240.0, 7)}
BLOCKS = {"fp8": 0, "fp8_block": 128, "mxfp8": 32}
CASES = [(recipe, dtype) for recipe in BLOCKS for dtype in FORMATS if (recipe, dtype) != ("mxfp8", FNUZ)]
FIRST = 0  # bf16 bits of the smallest number where all are tried
FLOORED = [("mxfp8", E4M3, "floor"), ("mxfp8", E5M2, "floor"), ("fp8_block", E4M3, "floor")]
SIZES = {
    "even": [2, 2, 2],
    "uneven": [5, 130, 3],
    "first empty": [0, 40, 2],
    "middle empty": [33, 0, 128],
    "last empty": [2, 64, 0],
    "all empty": [0, 0, 0],
    "one group": [34],
    "one row": [0, 1, 0],
}


def value(byte: int, dtype: torch.dtype) -> float:
    """What a byte of the format is, by the definition of floating point."""
    mantissa, bias, largest, _ = FORMATS[dtype]
    sign, exponent, fraction = byte >> 7, (byte & 0x7F) >> mantissa, byte & ((1 << mantissa) - 1)
    if dtype == FNUZ and byte == 0x80:
        return math.nan
    if exponent == 0:
        magnitude = fraction * 2.0 ** (1 - bias - mantissa)
    else:
        magnitude = (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
    if magnitude > largest:
        magnitude = math.inf if dtype == E5M2 and fraction == 0 else math.nan
    return -magnitude if sign else magnitude


GRIDS = {dtype: np.array([v for v in (value(b, dtype) for b in range(128)) if v < math.inf]) for dtype in FORMATS}


def searched(x: np.ndarray, dtype: torch.dtype, recipe: str, rounding: str = "rceil") -> tuple[np.ndarray, float]:
    """(bytes, scale as it is stored) of the numbers that share a scale."""
    _, _, largest, top = FORMATS[dtype]
    amax = np.abs(x).max() if x.size else 0.0
    if not np.isfinite(amax):
        return np.full(x.shape, 0x80 if dtype == FNUZ else 0x7F), 255 if recipe == "mxfp8" else math.nan
    if recipe != "fp8":
        e = -127
        if amax > 0:
            e = math.frexp(amax)[1] - 1 - top
            while rounding == "rceil" and amax > largest * 2.0**e:
                e += 1
        e = min(max(e, -127 if recipe == "mxfp8" else -126), 127 - top)
        scale, scaled = e + 127 if recipe == "mxfp8" else 2.0**e, x * 2.0**-e
    else:
        scale = max(np.float32(amax) / np.float32(largest), np.float32(2.0**-126))
        scaled = (x.astype(np.float32) * (np.float32(1) / scale)).astype(np.float64)
    grid = GRIDS[dtype]
    magnitude = np.minimum(np.abs(scaled), largest)
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    up, down = grid[above] - magnitude, magnitude - grid[above - 1]
    byte = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    sign = np.signbit(scaled) & ((byte > 0) | (dtype != FNUZ))
    return byte | (sign * 0x80), float(scale)


def in_blocks(x: torch.Tensor, dtype: torch.dtype, recipe: str, block: tuple[int, int], rounding: str = "rceil"):
    """(bytes `[R, C]`, scales) of a matrix, block by block; (0, 0) is the whole."""
    x = x.double().numpy()
    down, across = block if block[0] else (max(x.shape[0], 1), max(x.shape[1], 1))
    data = np.zeros(x.shape, dtype=np.int64)
    scales = np.zeros((-(-x.shape[0] // down), -(-x.shape[1] // across)))
    for i, j in np.ndindex(*scales.shape):
        part = slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across)
        data[part], scales[i, j] = searched(x[part], dtype, recipe, rounding)
    return torch.from_numpy(data), torch.from_numpy(scales)


def bits(t: torch.Tensor) -> torch.Tensor:
    """What two tensors must share to be the same, NaN too."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def case(sizes, k=70, *, tail=3, dtype=torch.bfloat16, rms=1.0, seed=0):
    """Rows with a NaN tail, the ends, and how many rows are in use."""
    used = sum(sizes)
    x_SK = torch.randn(used + tail, k, generator=torch.Generator().manual_seed(seed)).mul(rms).to(dtype)
    x_SK[used:] = torch.nan
    return x_SK, torch.tensor(sizes).cumsum(0).to(torch.int32), used


def check_rows(sizes, k, recipe, dtype, *, rounding="rceil", x_SK=None, **settings):
    made_x, ends_G, used = case(sizes, k)
    x_SK = made_x if x_SK is None else x_SK
    made = quantize_rows(x_SK, ends_G, recipe, dtype=dtype, rounding=rounding, **settings)
    block = (1, BLOCKS[recipe]) if BLOCKS[recipe] else (0, 0)
    along, down = made.rowwise, made.columnwise
    assert along.block == down.block == block
    assert along.data.dtype == down.data.dtype == dtype
    assert down.data.shape == (k, padded_size(len(x_SK), len(sizes)))
    assert made.padded_ends_G.dtype == torch.int32
    wanted_data, wanted_scales = in_blocks(x_SK[:used], dtype, recipe, block, rounding)
    whole = wanted_scales if recipe == "fp8" and used else torch.full((1, 1), 2.0**-126, dtype=torch.float64)
    assert torch.equal(bits(along.data[:used]).long(), wanted_data)
    scales = along.scales if recipe == "fp8" else along.scales[:used]
    assert torch.equal(scales.double(), whole if recipe == "fp8" else wanted_scales)
    start = first = 0
    for size, last in zip(sizes, made.padded_ends_G.tolist(), strict=True):
        assert last == first + -(-size // 128) * 128
        group_KR = x_SK[start : start + size].t()
        if recipe == "fp8":
            wanted_data = wanted_data_of(x_SK[:used], dtype)[start : start + size].t()
        else:
            wanted_data, wanted_scales = in_blocks(group_KR, dtype, recipe, block, rounding)
            got = down.scales[:, first // block[1] : last // block[1]]
            assert torch.equal(got[:, : wanted_scales.shape[1]].double(), wanted_scales)
            assert (got[:, wanted_scales.shape[1] :].double() == (0 if recipe == "mxfp8" else 2.0**-126)).all()
        assert torch.equal(bits(down.data[:, first : first + size]).long(), wanted_data)
        assert (bits(down.data[:, first + size : last]) == 0).all()
        start, first = start + size, last
    if recipe == "fp8":
        assert torch.equal(down.scales.double(), whole)
    assert first <= down.data.shape[1]


def wanted_data_of(x, dtype):
    return in_blocks(x, dtype, "fp8", (0, 0))[0]


# --- bytes and scales


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_is_the_number_that_the_format_defines(dtype):
    all_bytes = torch.arange(256, dtype=torch.uint8)
    q = Quantized(all_bytes.view(dtype)[None], torch.full((1, 1), 0.5), (0, 0))
    expected = torch.tensor([[value(b, dtype) * 0.5 for b in range(256)]], dtype=torch.float64)
    assert torch.equal(dequantize(q, torch.float64).nan_to_num(7e7, 8e8, -8e8), expected.nan_to_num(7e7, 8e8, -8e8))


def test_every_e8m0_byte_is_a_power_of_two():
    q = Quantized(torch.ones(1, 256 * 32).to(E4M3), torch.arange(256, dtype=torch.uint8)[None], (1, 32))
    got = dequantize(q, torch.float64)[0, ::32]
    assert got[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert got[255].isnan()
    assert torch.equal(dequantize(q, torch.float32)[0, ::32][:255].double(), got[:255])


def test_fnuz_is_half_of_ocp_and_its_scales_are_double():
    data = torch.arange(256, dtype=torch.uint8).view(E4M3)[None]
    q = Quantized(data, torch.full((1, 1), 3.0), (0, 0))
    turned = as_fnuz(q)
    assert turned.data.dtype == FNUZ
    assert turned.scales.item() == 6
    before, after = dequantize(q, torch.float64), dequantize(turned, torch.float64)
    assert torch.equal(before.nan_to_num(7e7), after.nan_to_num(7e7))
    with pytest.raises(ValueError, match="as_fnuz"):
        require_one_encoding(q, turned)
    require_one_encoding(q, Quantized(q.data.view(E5M2), q.scales, (0, 0)))
    with pytest.raises(ValueError, match="FNUZ is made of"):
        as_fnuz(turned)


@pytest.mark.parametrize(
    ("amax", "floor", "rceil"),
    [
        (150, (126, 144), (126, 144)),
        (480, (127, 448), (128, 480)),
        (500, (127, 448), (128, 512)),
        (448, (127, 448), (127, 448)),
    ],
)
def test_e8m0_rounding_is_the_named_one(amax, floor, rceil):
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    for rounding, (byte, kept) in (("floor", floor), ("rceil", rceil)):
        q = quantize_rows(x, None, "mxfp8", rounding=rounding).rowwise
        assert q.scales.item() == byte
        assert dequantize(q, torch.float32)[0, 7].item() == -kept


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_magnitude_of_bf16(dtype, rounding):
    """All finite bf16 numbers, 32 neighbours a block: every exponent, both ends of the range, bit for bit."""
    x = torch.arange(FIRST, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([x, -x]).reshape(-1, 32)
    q = quantize_rows(x, None, "mxfp8", dtype=dtype, rounding=rounding, columnwise=False).rowwise
    data, scales = in_blocks(x, dtype, "mxfp8", (1, 32), rounding)
    assert torch.equal(bits(q.data).long(), data)
    assert torch.equal(q.scales.double(), scales)
    assert dequantize(q, torch.float32).isfinite().all()
    block = quantize_rows(
        x.reshape(-1, 128), None, "fp8_block", dtype=dtype, rounding=rounding, columnwise=False
    ).rowwise
    data, scales = in_blocks(x.reshape(-1, 128), dtype, "fp8_block", (1, 128), rounding)
    assert torch.equal(bits(block.data).long(), data)
    assert torch.equal(block.scales.double(), scales)


@pytest.mark.parametrize("dtype", FORMATS)
def test_ties_go_to_the_even_number(dtype):
    grid = GRIDS[dtype]
    largest = FORMATS[dtype][2]
    x = torch.from_numpy(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, -(grid[1:] + grid[:-1]) / 2]))
    x = torch.cat([x, torch.tensor([largest])]).float()  # the scale is 1
    got = quantize_rows(x[None], None, "fp8", dtype=dtype).rowwise
    assert got.scales.item() == 1
    assert torch.equal(bits(got.data).long(), wanted_data_of(x[None], dtype))


@pytest.mark.parametrize("bad", [-math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_what_is_not_finite_makes_its_blocks_nan_and_no_other(recipe, dtype, bad):
    x = torch.randn(128, 256).bfloat16()
    x[40, 130] = bad
    made = quantize_rows(x, None, recipe, dtype=dtype)
    for q, row, column in ((made.rowwise, 40, 130), (made.columnwise, 130, 40)):
        hit = dequantize(q, torch.float32).isnan()
        block = BLOCKS[recipe]
        expected = torch.zeros_like(hit)
        if block:
            expected[row, column // block * block :][:block] = True
        else:
            expected[:] = True
        assert torch.equal(hit, expected)
        assert (bits(q.data)[expected] == (0x80 if dtype == FNUZ else 0x7F)).all()


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_zeros_stay_zero_with_the_smallest_scale(recipe, dtype):
    made = quantize_rows(torch.zeros(3, 40), None, recipe, dtype=dtype)
    for q in (
        made.rowwise,
        made.columnwise,
        *vars(quantize_weight(torch.zeros(2, 3, 40), recipe, dtype=dtype)).values(),
    ):
        assert (bits(q.data) == 0).all()
        assert (q.scales == (0 if recipe == "mxfp8" else 2.0**-126)).all()
        assert (dequantize(q, torch.float32) == 0).all()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("rms", [1.0, 1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize(("recipe", "dtype", "rounding"), [(*c, "rceil") for c in CASES] + FLOORED)
def test_signal_to_noise(recipe, dtype, rounding, rms, outliers):
    x, _, _ = case([256], 256, tail=0, rms=rms)
    if outliers:
        x[::17, ::31] *= 100
    made = quantize_rows(x, None, recipe, dtype=dtype, rounding=rounding)
    weight = quantize_weight(x[None], recipe, dtype=dtype, rounding=rounding)
    back = dequantize(made.rowwise), dequantize(made.columnwise).t(), dequantize(weight.forward)[0]
    for got in back:
        signal, noise = x.double().square().sum(), (got.double() - x.double()).square().sum()
        assert 10 * math.log10(signal / noise) >= (20 if dtype == E5M2 else 25)


# --- rows


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_every_kind_of_group(recipe, dtype, sizes):
    check_rows(sizes, 70, recipe, dtype)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 130), min_size=1, max_size=5),
    k=st.sampled_from([1, 31, 32, 33, 128, 136, 200]),
    which=st.sampled_from(CASES),
    rounding=st.sampled_from(["rceil", "floor"]),
)
def test_any_groups(sizes, k, which, rounding):
    check_rows(sizes, k, *which, rounding=rounding)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_no_rows_at_all(recipe):
    made = quantize_rows(torch.empty(0, 40), torch.zeros(2, dtype=torch.int32), recipe)
    assert made.rowwise.data.shape == (0, 40)
    assert made.padded_ends_G.tolist() == [0, 0]
    assert made.columnwise.data.shape == (40, padded_size(0, 2))


@pytest.mark.parametrize("recipe", BLOCKS)
def test_rows_past_the_groups_are_not_written(recipe):
    x_SK, ends_G, used = case([5, 0, 60], tail=40)
    made = quantize_rows(x_SK, ends_G, recipe)
    assert made.rowwise.data[used:].float().isnan().all()  # as memory is that was never written
    assert made.columnwise.data[:, made.padded_ends_G[-1] :].float().isnan().all()
    along, down = emulate_rows(x_SK, ends_G)
    assert along[used:].isnan().all()
    assert down[used:].isnan().all()


@pytest.mark.parametrize("recipe", BLOCKS)
def test_permuted_on_the_way(recipe):
    x_TK, _, _ = case([50], 40, tail=0)
    source_S = torch.randint(-1, 52, (70,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ends_G = torch.tensor([33, 33, 66], dtype=torch.int32)
    none_S = (source_S < 0) | (source_S >= 50)  # zeros
    assert none_S[:66].any()
    x_SK = torch.where(none_S[:, None], 0, x_TK[source_S.where(~none_S, 0).long()])
    permuted = quantize_rows(x_SK, ends_G, recipe)
    source_S[66:] = 2**31 - 1  # nothing reads it
    fused = quantize_rows(x_TK, ends_G, recipe, source_S=source_S)
    for a, b in ((permuted.rowwise, fused.rowwise), (permuted.columnwise, fused.columnwise)):
        assert same(a.data, b.data)
        assert same(a.scales, b.scales)
    plain = emulate_rows(x_SK[:66], ends_G)
    for a, b in zip(emulate_rows(x_TK, ends_G, source_S=source_S), plain, strict=True):
        assert same(a[:66], b)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_one_orientation_alone_is_the_same(recipe):
    x_SK, ends_G, _ = case([40, 30])
    both = quantize_rows(x_SK, ends_G, recipe)
    along = quantize_rows(x_SK, ends_G, recipe, columnwise=False)
    down = quantize_rows(x_SK, ends_G, recipe, rowwise=False)
    assert along.columnwise is None
    assert down.rowwise is None
    for a, b in ((along.rowwise, both.rowwise), (down.columnwise, both.columnwise)):
        assert same(a.data, b.data)
        assert same(a.scales, b.scales)
    assert emulate_rows(x_SK, ends_G, rowwise=False)[0] is None
    assert emulate_rows(x_SK, ends_G, columnwise=False)[1] is None


@pytest.mark.parametrize("recipe", BLOCKS)
def test_any_strides_and_the_same_bits_each_time(recipe):
    x_SK, ends_G, _ = case([40, 30], 37)
    first = quantize_rows(x_SK, ends_G, recipe)
    wide = torch.full((x_SK.shape[0], 2 * 37 + 5), torch.nan, dtype=x_SK.dtype)
    wide[:, 5::2] = x_SK
    for other in (x_SK, wide[:, 5::2], x_SK.t().contiguous().t(), x_SK.float()):
        again = quantize_rows(other, ends_G, recipe)
        for a, b in ((first.rowwise, again.rowwise), (first.columnwise, again.columnwise)):
            assert same(a.data, b.data)
            assert same(a.scales, b.scales)


# --- weights


@pytest.mark.parametrize("shape", [(2, 136, 200), (1, 31, 1)])
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_weights_are_the_same_for_forward_and_dgrad(recipe, dtype, shape):
    w_GNK = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    w_GNK[0] *= 1000
    made = quantize_weight(w_GNK.transpose(1, 2).contiguous().transpose(1, 2), recipe, dtype=dtype)
    for g in range(shape[0]):
        data, scales = in_blocks(w_GNK[g], dtype, recipe, (BLOCKS[recipe],) * 2)
        assert torch.equal(bits(made.forward.data[g]).long(), data)
        assert torch.equal(made.forward.scales[g].double(), scales)
    assert same(made.dgrad.data, made.forward.data.transpose(1, 2).contiguous())
    assert same(made.dgrad.scales.contiguous(), made.forward.scales.transpose(1, 2).contiguous())
    assert made.dgrad.scales.data_ptr() == made.forward.scales.data_ptr()
    assert quantize_weight(w_GNK, recipe, dgrad=False).dgrad is None


# --- emulation


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulation_has_the_values_of_mxfp8(dtype, rounding, x_dtype):
    sizes = [5, 0, 130, 32]
    x_SK, ends_G, used = case(sizes, 72, dtype=x_dtype)
    x_SK[2, :40] = 0
    x_SK[3, 50] = torch.inf
    x_SK[4] *= 1e30
    x_SK[6] *= 1e-35
    made = quantize_rows(x_SK, ends_G, "mxfp8", dtype=dtype, rounding=rounding)
    along, down = emulate_rows(x_SK, ends_G, dtype=dtype, rounding=rounding)
    turned, start, first = dequantize(made.columnwise, torch.float32).t(), 0, 0
    columns = []
    for size, last in zip(sizes, made.padded_ends_G.tolist(), strict=True):
        columns.append(turned[first : first + size])
        start, first = start + size, last
    wanted = dequantize(made.rowwise, torch.float32)[:used], torch.cat(columns)
    for got, value in zip((along, down), wanted, strict=True):
        assert got.dtype == x_dtype
        assert torch.equal(got[:used].float().nan_to_num(7e7), value.nan_to_num(7e7))
    w_GNK = x_SK[None, :used]
    wanted = dequantize(quantize_weight(w_GNK, "mxfp8", dtype=dtype, rounding=rounding).forward, torch.float32)
    got = emulate_weight(w_GNK, dtype=dtype, rounding=rounding)
    assert torch.equal(got.float().nan_to_num(7e7), wanted.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulation_in_bf16_is_exact_at_both_ends(dtype):
    x = torch.arange(FIRST, 0x7F80, dtype=torch.int16).view(torch.bfloat16).reshape(-1, 32)
    q = quantize_rows(x, None, "mxfp8", dtype=dtype, columnwise=False).rowwise
    along, down = emulate_rows(x, None, dtype=dtype)
    assert along.dtype == torch.bfloat16
    assert torch.equal(along.double(), dequantize(q, torch.float64))
    assert down.isfinite().all()
    assert ((along == 0) == (x == 0)).float().mean() > 0.99  # of the smallest, few are too small beside their block


# --- who may call, and how


@pytest.mark.parametrize(
    "change",
    [
        dict(x_SK=torch.zeros(2, 3, 4)),
        dict(x_SK=torch.zeros(2, 3, dtype=torch.float16)),
        dict(ends_G=torch.tensor([2])),
        dict(ends_G=torch.empty(0, dtype=torch.int32)),
        dict(ends_G=torch.tensor([1, 9], dtype=torch.int32)),
        dict(recipe="bf16"),
        dict(dtype=torch.int8),
        dict(dtype=FNUZ),
        dict(rounding="nearest"),
        dict(source_S=torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_what_does_not_fit_is_refused(change):
    arguments = dict(x_SK=torch.zeros(2, 3), ends_G=torch.tensor([1, 2], dtype=torch.int32), recipe="mxfp8") | change
    with pytest.raises(ValueError, match=r"\w"):
        quantize_rows(**arguments)


def test_parts_that_do_not_fit_are_refused():
    data = torch.zeros(4, 40).to(E4M3)
    for scales, block in (
        (torch.zeros(4, 1), (1, 32)),
        (torch.zeros(4, 2).int(), (1, 32)),
        (torch.zeros(4, 1), (0, 0)),
    ):
        with pytest.raises(ValueError, match="scales"):
            Quantized(data, scales, block)
    with pytest.raises(ValueError, match="contiguous"):
        Quantized(data.t(), torch.zeros(1, 1), (0, 0))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="no implementation"):
        quantize_rows(torch.zeros(2, 3), None, "fp8", kernels="fast")


@pytest.mark.parametrize("recipe", BLOCKS)
def test_results_without_values_have_the_same_shapes_and_strides(recipe):
    x_SK, ends_G, _ = case([5, 60])
    w_GNK = torch.randn(2, 40, 33)
    real = quantize_rows(x_SK, ends_G, recipe)
    with FakeTensorMode() as mode:
        fake = quantize_rows(mode.from_tensor(x_SK), mode.from_tensor(ends_G), recipe)
        weight = quantize_weight(mode.from_tensor(w_GNK), recipe)
    pairs = [(real.rowwise, fake.rowwise), (real.columnwise, fake.columnwise)]
    pairs += zip(vars(quantize_weight(w_GNK, recipe)).values(), vars(weight).values(), strict=True)
    for a, b in pairs:
        for one, other in ((a.data, b.data), (a.scales, b.scales)):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_operators_are_sound():
    ops = torch.ops.maniple
    x, ends = torch.randn(128, 40), torch.tensor([128], dtype=torch.int32)  # nothing of the results is unwritten
    for operator, arguments in (
        (ops.quantize_rows, (x, ends, None, "fp8_block", E4M3, "rceil", True, True, None)),
        (ops.quantize_weight, (x[None], "mxfp8", E4M3, "floor", True, None)),
        (ops.emulate_rows, (x, ends, None, E5M2, "rceil", True, True, None)),
        (ops.emulate_weight, (x[None], E4M3, "rceil", None)),
    ):
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_compiled_without_a_break():
    x_SK, ends_G, used = case([5, 60])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def back_and_forth(x_SK, ends_G):
        return dequantize(quantize_rows(x_SK, ends_G, "mxfp8").rowwise)

    assert same(back_and_forth(x_SK, ends_G)[:used], dequantize(quantize_rows(x_SK, ends_G, "mxfp8").rowwise)[:used])
    assert ("quantize", "mxfp8", "cpu", "reference") in registry.used()
