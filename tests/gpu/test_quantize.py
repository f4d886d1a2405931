"""The quantization kernels on a GPU against the oracle on the CPU, bit for bit: its casts, large tensors, no waits."""

from __future__ import annotations

import pytest
import torch
from tests.poison import poisoned_memory  # noqa: F401 (a fixture for every test here)

from maniple.errors import UserError
from maniple.kernels import chips, registry
from maniple.kernels.quantize import emulate_rows, emulate_weight, quantize_rows, quantize_weight

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
RECIPES = ["fp8", "fp8_block", "mxfp8"]
BLOCKS = [(recipe, dtype) for recipe in ("fp8_block", "mxfp8") for dtype in (E4M3, E5M2)]
CASES = [(recipe, dtype) for recipe in RECIPES for dtype in (E4M3, E5M2, FNUZ) if (recipe, dtype) != ("mxfp8", FNUZ)]
SIZES = {
    "even": [64, 64, 64, 64],
    "unaligned": [5, 0, 130, 1, 77, 64],
    "first empty": [0, 100, 28],
    "last empty": [100, 28, 0],
    "all empty": [0, 0, 0],
    "one group": [200],
    "skewed": [1, 1, 1500, 3, 0, 2],
    "many groups": [3, 0, 1, 130] * 40,
}

hopper = pytest.mark.skipif(chips.no_hopper() is not None, reason="needs a Hopper GPU")


def case(sizes, k, *, tail=50, rms=1.0, seed=0):
    """Rows on the CPU with a NaN tail and a few hard blocks, and the ends."""
    used = sum(sizes)
    x_SK = (torch.randn(used + tail, k, generator=torch.Generator().manual_seed(seed)) * rms).bfloat16()
    x_SK[1:used:7, : k // 2] = 0
    x_SK[3:used:11] *= 1e-30
    x_SK[5:used:13] *= 1e30
    x_SK[2:used:17, ::19] *= 1000
    x_SK[used:] = torch.nan
    return x_SK, torch.tensor(sizes).cumsum(0).to(torch.int32), used


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]).cpu()


def check(x_SK, ends_G, used, recipe, dtype, rounding="rceil", source_S=None, kernels="triton"):
    """All that may be read is the same, bit for bit; NaN scales have the same bits too."""
    gpu = [None if t is None else t.cuda() for t in (x_SK, ends_G, source_S)]
    got = quantize_rows(gpu[0], gpu[1], recipe, dtype=dtype, rounding=rounding, source_S=gpu[2], kernels=kernels)
    wanted = quantize_rows(x_SK, ends_G, recipe, dtype=dtype, rounding=rounding, source_S=source_S)
    padded_G = wanted.padded_ends_G
    assert torch.equal(got.padded_ends_G.cpu(), padded_G)
    columns = padded_G[-1]
    block = wanted.rowwise.block[1]
    for a, b, rows, end in (
        (got.rowwise, wanted.rowwise, used, None),
        (got.columnwise, wanted.columnwise, None, columns),
    ):
        assert a.block == b.block
        assert (a.scales.shape, a.scales.stride()) == (b.scales.shape, b.scales.stride())
        assert torch.equal(bits(a.data)[:rows, :end], bits(b.data)[:rows, :end])
        scales = (slice(rows), slice(None if end is None else end // block)) if block else (slice(None),)
        assert torch.equal(bits(a.scales)[scales], bits(b.scales)[scales])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_every_kind_of_group(recipe, dtype, sizes):
    check(*case(sizes, 320), recipe, dtype)


@pytest.mark.parametrize("k", [1, 31, 136, 200, 768, 2880])
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_width(recipe, k):
    check(*case([70, 0, 61, 260], k), recipe, E4M3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_of_a_group(recipe):
    check(*case(list(range(131)), 96), recipe, E4M3)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_every_magnitude_of_bf16(recipe, dtype, rounding):
    """The chip's own cast where it has one, at every exponent, subnormal too; then with infinity and NaN among them."""
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([x, -x]).reshape(-1, 128)
    ends_G = torch.tensor([len(x)], dtype=torch.int32)
    check(x, ends_G, len(x), recipe, dtype, rounding)
    for bad in (torch.nan, torch.inf, -torch.inf):
        y = x.clone()
        y[100, 5] = bad
        check(y, ends_G, len(x), recipe, dtype, rounding)


@pytest.mark.parametrize("rms", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("recipe", RECIPES)
def test_small_numbers(recipe, rms):
    check(*case([70, 0, 61], 320, rms=rms), recipe, E4M3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_permuted_on_the_way(recipe):
    x_TK, _, _ = case([90], 200, tail=0)
    source_S = torch.randint(90, (300,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ends_G = torch.tensor([131, 131, 280], dtype=torch.int32)
    source_S[280:] = 2**31 - 1
    check(x_TK, ends_G, 280, recipe, E4M3, source_S=source_S)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_strides_and_the_same_bits_each_time(recipe):
    x_SK, ends_G, used = case([300, 0, 41, 700], 203)
    x_SK, ends_G = x_SK.cuda(), ends_G.cuda()
    first = quantize_rows(x_SK, ends_G, recipe)
    wide = torch.full((x_SK.shape[0], 2 * 203 + 5), torch.nan, device="cuda", dtype=x_SK.dtype)
    wide[:, 5::2] = x_SK
    for other in (x_SK, x_SK, wide[:, 5::2], x_SK.t().contiguous().t(), x_SK.float()):
        again = quantize_rows(other, ends_G, recipe)
        assert torch.equal(bits(again.rowwise.data)[:used], bits(first.rowwise.data)[:used])
        end = int(first.padded_ends_G[-1])
        assert torch.equal(bits(again.columnwise.data)[:, :end], bits(first.columnwise.data)[:, :end])


@pytest.mark.parametrize("shape", [(3, 384, 256), (2, 200, 136), (1, 31, 1), (4, 768, 2880)])
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_weights(recipe, dtype, shape):
    w_GNK = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    w_GNK[0, 3, 0] = torch.inf
    w_GNK[-1, -20:] *= 1e-30
    for made in (w_GNK.cuda(), w_GNK.transpose(1, 2).contiguous().cuda().transpose(1, 2)):
        got, wanted = quantize_weight(made, recipe, dtype=dtype), quantize_weight(w_GNK, recipe, dtype=dtype)
        for a, b in ((got.forward, wanted.forward), (got.dgrad, wanted.dgrad)):
            assert torch.equal(bits(a.data), bits(b.data))
            assert torch.equal(bits(a.scales.contiguous()), bits(b.scales.contiguous()))


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulation(dtype, rounding):
    x_SK, ends_G, used = case([5, 0, 130, 1, 77, 64], 320)
    x_SK[4, 7] = torch.nan
    settings = dict(dtype=dtype, rounding=rounding)
    for a, b in zip(
        emulate_rows(x_SK.cuda(), ends_G.cuda(), **settings), emulate_rows(x_SK, ends_G, **settings), strict=True
    ):
        assert torch.equal(a[:used].cpu().nan_to_num(7e7), b[:used].nan_to_num(7e7))
    everything = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).reshape(1, -1, 32)
    got, wanted = (emulate_weight(w, **settings) for w in (everything.cuda(), everything))
    assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_for_nothing(recipe):
    x_SK, ends_G, _ = case([300, 0, 41], 256)
    x_SK, ends_G = x_SK.cuda(), ends_G.cuda()
    w_GNK = torch.randn(2, 256, 128, device="cuda").bfloat16()
    quantize_rows(x_SK, ends_G, recipe), quantize_weight(w_GNK, recipe)  # compile first
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantize_rows(x_SK, ends_G, recipe)
        quantize_rows(x_SK, None, recipe)
        quantize_weight(w_GNK, recipe)
        emulate_rows(x_SK, ends_G)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES)
def test_beyond_2_to_31_elements(recipe):
    rows, k = 524_416, 4224  # 2.2e9
    x_SK = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    x_SK[-300:] = torch.randn(300, k, device="cuda").bfloat16()
    ends_G = torch.tensor([rows - 300, rows], device="cuda", dtype=torch.int32)
    got = quantize_rows(x_SK, ends_G, recipe)
    wanted = quantize_rows(x_SK[-300:].cpu(), None, recipe)
    assert torch.equal(bits(got.rowwise.data[-300:]), bits(wanted.rowwise.data))
    start = int(got.padded_ends_G[0])
    assert torch.equal(bits(got.columnwise.data[:, start : start + 300]), bits(wanted.columnwise.data)[:, :300])
    del got
    w_GNK = x_SK[:524_288].view(64, 8192, k)
    w_GNK[-1] = torch.randn(8192, k, device="cuda").bfloat16()
    made = quantize_weight(w_GNK, recipe)
    alone = quantize_weight(w_GNK[-1:].cpu(), recipe)
    assert torch.equal(bits(made.forward.data[-1:]), bits(alone.forward.data))
    assert torch.equal(bits(made.dgrad.data[-1:]), bits(alone.dgrad.data))


@hopper
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("recipe", "dtype"), BLOCKS)
def test_every_kind_of_group_on_hopper(recipe, dtype, sizes):
    check(*case(sizes, 384), recipe, dtype, kernels="hopper")


@hopper
@pytest.mark.parametrize("k", [16, 144, 768, 2880])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_any_width_on_hopper(recipe, k):
    check(*case([70, 0, 61, 260], k), recipe, E4M3, "floor", kernels="hopper")


@hopper
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_many_tiles_on_hopper(recipe):
    x_SK, ends_G, used = case([*range(0, 300, 7), 0, 4000, 1], 2304, tail=300)
    check(x_SK, ends_G, used, recipe, E4M3, kernels="hopper")


@hopper
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize(("recipe", "dtype"), BLOCKS)
def test_every_magnitude_of_bf16_on_hopper(recipe, dtype, rounding):
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([x, -x]).reshape(-1, 128)
    ends_G = torch.tensor([len(x)], dtype=torch.int32)
    check(x, ends_G, len(x), recipe, dtype, rounding, kernels="hopper")
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for row, column in ((100, 5), (400, 32)):
            y = x.clone()
            y[row, column] = bad
            check(y, ends_G, len(x), recipe, dtype, rounding, kernels="hopper")


@hopper
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_one_orientation_strided_rows_and_the_same_bits_on_hopper(recipe):
    x_SK, ends_G, used = case([300, 0, 41, 700], 1152)
    x_SK, ends_G = x_SK.cuda(), ends_G.cuda()
    first = quantize_rows(x_SK, ends_G, recipe, kernels="hopper")
    end = int(first.padded_ends_G[-1])
    wide = torch.full((x_SK.shape[0], 2 * 1152), torch.nan, device="cuda", dtype=x_SK.dtype)
    wide[:, 1144 - 8 : -8 - 8] = x_SK
    for x in (x_SK, wide[:, 1144 - 8 : -8 - 8]):
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            again = quantize_rows(x, ends_G, recipe, rowwise=rowwise, columnwise=columnwise, kernels="hopper")
            assert torch.equal(again.padded_ends_G, first.padded_ends_G)
            if rowwise:
                assert torch.equal(bits(again.rowwise.data)[:used], bits(first.rowwise.data)[:used])
                assert torch.equal(bits(again.rowwise.scales)[:used], bits(first.rowwise.scales)[:used])
            if columnwise:
                blocks = end // first.columnwise.block[1]
                assert torch.equal(bits(again.columnwise.data)[:, :end], bits(first.columnwise.data)[:, :end])
                assert torch.equal(bits(again.columnwise.scales)[:, :blocks], bits(first.columnwise.scales)[:, :blocks])


@hopper
def test_what_hopper_refuses_goes_to_the_portable_kernels():
    x_SK, ends_G, _ = case([30], 128)
    x_SK, ends_G = x_SK.cuda(), ends_G.cuda()
    source_S = torch.zeros(30, dtype=torch.int32, device="cuda")
    for x, more in ((x_SK[:, :120], {}), (x_SK.float(), {}), (x_SK, {"source_S": source_S}), (x_SK, {"dtype": FNUZ})):
        quantize_rows(x, ends_G, "fp8_block", **more)
        with pytest.raises(UserError, match="hopper"):
            quantize_rows(x, ends_G, "fp8_block", kernels="hopper", **more)


def test_the_kernels_are_what_runs():
    best = "triton" if chips.no_hopper() else "hopper"
    assert registry.select("quantize", "mxfp8", "cuda").name == best
    x_SK, ends_G, _ = case([30], 128)
    quantize_rows(x_SK.cuda(), ends_G.cuda(), "mxfp8")
    assert ("quantize", "mxfp8", "cuda", best) in registry.used()
