"""The float8 grouped GEMM kernels on a GPU: products of the same quantized numbers against fp64, and quality."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from tests.kernels import test_low_precision as suite
from tests.poison import poisoned_memory, relative_error  # noqa: F401 (a fixture for every test here)

from maniple.errors import UserError
from maniple.kernels import quantize, registry
from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm.low_precision import OP, quantized_grouped_gemm

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the oracle's products need to be deterministic

# One rounding to bf16 is off by 1.1e-3 in the mean. Float8 products are exact in fp32, and their sums are taken over in
# fp32 every 128; Hopper's sums of 128 keep about 14 bits, as the bound for results in fp32 says.
BOUND, BOUND_FP32 = 1.8e-3, 5e-4
SIZES = {
    "even": [64, 64, 64, 64],
    "unaligned": [5, 0, 130, 1, 77, 64],
    "first empty": [0, 100, 28],
    "last empty": [100, 28, 0],
    "all empty": [0, 0, 0],
    "one group": [200],
    "one row": [0, 1, 0],
    "skewed": [1, 1, 1500, 3, 0, 2],
}
SHAPES = [(2880, 208), (208, 2880), (144, 768), (768, 144), (512, 512), (64, 16), (2880, 2880)]
ODD_SHAPES = [(200, 136), (33, 70), (8, 65)]
ALL = [
    (recipe, kernels)
    for recipe, names in {
        "fp8": ["triton", "hopper"],
        "fp8_block": ["triton", "hopper"],
        "mxfp8": ["triton_scaled", "emulated"],
    }.items()
    for kernels in names
]


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


@pytest.fixture(params=ALL, ids="-".join)
def implementation(request) -> tuple[str, str]:
    """(recipe, implementation) of each that can run on this machine."""
    recipe, kernels = request.param
    try:
        registry.candidates(OP, recipe, "cuda", kernels)
    except UserError as error:
        pytest.skip(str(error))
    return recipe, kernels


def dtype() -> torch.dtype:
    fnuz = bool(torch.version.hip) and "gfx942" in torch.cuda.get_device_properties(0).gcnArchName
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def case(sizes, n, k, *, tail=50, layout="nk", rms=1.0):
    """x, w, ends, bias, scale and a gradient of the result on the GPU; NaN in every tail."""
    g = torch.Generator("cuda").manual_seed(0)
    used = sum(sizes)

    def random(*shape):
        return torch.randn(*shape, generator=g).mul_(rms).bfloat16()

    x_SK, grad_SN, scale_S = random(used + tail, k), random(used + tail, n), random(used + tail).float()
    for tensor in (x_SK, grad_SN, scale_S):
        tensor[used:] = torch.nan
    w_G = random(len(sizes), *((n, k) if layout == "nk" else (k, n)))
    ends_G = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x_SK, w_G, ends_G, random(len(sizes), n), scale_S, grad_SN


def products(implementation, sizes, n, k, *, layout="nk", bias=False, grad_dtype=None):
    """Each product of an implementation against fp64 products of the same quantized operands."""
    recipe, kernels = implementation
    fn = registry.use(OP, recipe, "cuda", kernels)
    x_SK, w_GNK, ends_G, bias_GN, scale_S, grad_SN = case(sizes, n, k)
    used = sum(sizes)
    x = quantize.quantize_rows(x_SK, ends_G, recipe, dtype=dtype())
    grad = quantize.quantize_rows(grad_SN, ends_G, recipe, dtype=grad_dtype or dtype())
    w = quantize.quantize_weight(w_GNK, recipe, dtype=dtype())

    def wanted(a, b):
        parts = suite.values(a)[:used].split(sizes)
        return torch.cat([part @ w_NK.t() for part, w_NK in zip(parts, suite.values(b), strict=True)])

    out_wanted = wanted(x.rowwise, w.forward)
    if bias:
        group_S = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        out_wanted += scale_S[:used, None].double() * bias_GN[group_S].double()
    extra = dict(bias_GN=bias_GN, bias_scale_S=scale_S) if bias else {}
    for _ in range(2):  # the second meets recycled memory
        out = fn.rows(x.rowwise, w.forward, ends_G, **extra)
        dx = fn.rows(grad.rowwise, w.dgrad, ends_G, zero_tail=True)
        assert out[used:].isnan().all()
        assert (dx[used:] == 0).all()
        if used:
            assert relative_error(out[:used], out_wanted) <= BOUND
            assert relative_error(dx[:used], wanted(grad.rowwise, w.dgrad)) <= BOUND

    ends = x.padded_ends_G.tolist()
    a, b = (grad, x) if layout == "nk" else (x, grad)
    a, b = suite.values(a.columnwise), suite.values(b.columnwise)
    dw_wanted = torch.stack([a[:, s:e] @ b[:, s:e].t() for s, e in zip([0, *ends], ends, strict=False)])
    operands = grad.columnwise, x.columnwise, x.padded_ends_G
    dw = fn.wgrad(*operands, layout=layout)
    main, fresh = torch.full(dw.shape, 3.0), torch.full(dw.shape, torch.nan)
    fn.wgrad(*operands, layout=layout, out=main, accumulate=True)
    fn.wgrad(*operands, layout=layout, out=fresh)
    if used:
        assert relative_error(dw, dw_wanted) <= BOUND
        assert relative_error(main, dw_wanted + 3) <= BOUND_FP32
        assert relative_error(fresh, dw_wanted) <= BOUND_FP32
    for g, size in enumerate(sizes):
        if size == 0:
            assert (dw[g] == 0).all()
            assert (fresh[g] == 0).all()
            assert (main[g] == 3).all()


def quantized(implementation) -> tuple[str, str]:
    if implementation[1] == "emulated":
        pytest.skip("emulation takes bf16 operands: its products are the bf16 grouped GEMM's")
    return implementation


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_every_kind_of_group(implementation, sizes, layout):
    products(quantized(implementation), sizes, 384, 320, layout=layout)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_shapes(implementation, n, k):
    products(quantized(implementation), [70, 0, 61, 260], n, k, bias=True)


@pytest.mark.parametrize(("n", "k"), ODD_SHAPES)
def test_odd_shapes_run_or_are_refused_with_the_multiple(implementation, n, k):
    recipe, kernels = quantized(implementation)
    if kernels != "hopper":
        return products(implementation, [70, 0, 61], n, k)
    x_SK, w_G, ends_G, *_ = case([20], n, k)
    with pytest.raises(UserError, match="multiples of 16"):
        quantized_grouped_gemm(x_SK, w_G, ends_G, recipe=recipe, kernels=kernels)


def test_every_size_of_a_group(implementation):
    products(quantized(implementation), list(range(131)), 128, 64)


def test_wide_gradients(implementation):
    if dtype() == torch.float8_e4m3fnuz:
        pytest.skip("gfx942 multiplies e4m3 by e4m3 here")
    products(quantized(implementation), [70, 0, 61], 256, 384, grad_dtype=torch.float8_e5m2)


@pytest.mark.parametrize("tile", launch.HOPPER_FP8_TILES, ids=lambda t: f"{t.rows}x{t.columns}-{t.stages}")
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block"])
@pytest.mark.parametrize(("n", "k"), [(384, 320), (640, 2048), (144, 768), (2880, 2880)])
def test_every_tile_of_hopper(monkeypatch, tile, recipe, n, k):
    try:
        registry.candidates(OP, recipe, "cuda", "hopper")
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(launch, "hopper_fp8_tile", lambda columns, *, block, bias: tile)
    wide = [t for t in launch.HOPPER_FP8_WGRAD_TILES if t.columns == tile.columns]
    monkeypatch.setattr(launch, "hopper_fp8_wgrad_tile", lambda columns: wide[0])
    products((recipe, "hopper"), [5, 0, 130, 1, 1700, 64], n, k)


@pytest.mark.parametrize("rms", [1.0, 1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("outliers", [False, True])
def test_quality_at_any_magnitude(implementation, rms, outliers):
    recipe, kernels = implementation
    x_SK, w_G, ends_G, _, _, grad_SN = case([300, 0, 261], 512, 768, rms=rms)
    if outliers:  # in several columns: of two alone one number would decide, whose rounding may be the worst there is
        for tensor in (x_SK, w_G, grad_SN):
            tensor[..., 3::64] *= 50
    settings = dict(recipe=recipe, kernels=kernels, dtype=dtype())
    wanted = suite.exact(x_SK, w_G, grad_SN, [300, 0, 261], "nk")
    for got, want in zip(suite.run(x_SK, w_G, ends_G, grad_SN, **settings), wanted, strict=True):
        rows = slice(None) if got.dim() == 3 else slice(561)
        assert suite.snr(got[rows], want[rows]) >= 25


def test_bias_and_its_gradients(implementation):
    recipe, kernels = implementation
    sizes = [70, 0, 61]
    x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN = case(sizes, 256, 384)
    call = functools.partial(quantized_grouped_gemm, x_SK, w_G, ends_G, recipe=recipe, kernels=kernels, dtype=dtype())
    leaves = [bias_GN.requires_grad_(), scale_S.requires_grad_()]
    out = call(bias_GN=bias_GN, bias_scale_S=scale_S)
    group_S = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    added = wide[0][group_S] * wide[1][:131, None]
    assert relative_error(out[:131], call()[:131].double() + added) < 5e-3
    wanted = torch.autograd.grad(added, wide, grad_SN[:131].double())
    for got, want in zip(torch.autograd.grad(out, leaves, grad_SN), wanted, strict=True):
        rows = slice(131) if got.dim() == 1 else slice(None)
        assert relative_error(got[rows], want[rows]) < 2e-3


def test_gathered_rows_are_those_of_a_copy(implementation):
    recipe, kernels = implementation
    x_TK, w_G, _, _, _, _ = case([300, 0, 41, 259], 512, 256, tail=0)
    source_S = torch.randint(-1, 600, (600,), generator=torch.Generator("cuda").manual_seed(1)).to(torch.int32)
    ends_G = torch.tensor([131, 131, 400, 580]).to(torch.int32)
    source_S[580:] = 2**31 - 1
    rows_SK = torch.where((source_S[:, None] >= 0) & (source_S[:, None] < 600), x_TK[source_S.clamp(0, 599).long()], 0)
    settings = dict(recipe=recipe, kernels=kernels, dtype=dtype())
    with torch.no_grad():
        wanted = quantized_grouped_gemm(rows_SK, w_G, ends_G, **settings)
        got = quantized_grouped_gemm(x_TK, w_G, ends_G, source_S=source_S, **settings)
    assert torch.equal(got[:580], wanted[:580])


def test_the_same_inputs_give_the_same_bits(implementation):
    recipe, kernels = implementation
    x_SK, w_G, ends_G, _, _, grad_SN = case([300, 0, 41, 700], 512, 256)
    settings = dict(recipe=recipe, kernels=kernels, dtype=dtype())
    first = suite.run(x_SK, w_G, ends_G, grad_SN, **settings)
    for _ in range(2):
        for a, b in zip(first, suite.run(x_SK, w_G, ends_G, grad_SN, **settings), strict=True):
            rows = slice(None) if a.dim() == 3 else slice(1041)
            assert torch.equal(a[rows], b[rows])


def test_weight_gradients_accumulate_in_main_grad_once_a_micro_batch(implementation):
    recipe, kernels = implementation
    x_SK, w_G, ends_G, _, _, grad_SN = case([200, 0, 333], 384, 256)
    settings = dict(recipe=recipe, kernels=kernels, dtype=dtype())
    once = suite.run(x_SK, w_G, ends_G, grad_SN, **settings)[2]
    w_G = torch.nn.Parameter(w_G)
    w_G.main_grad, w_G.grad_added_to_main_grad = torch.full(w_G.shape, 1000.0), False
    for _ in range(3):
        quantized_grouped_gemm(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True, **settings).backward(grad_SN)
        w_G.grad = None
    assert relative_error(w_G.main_grad - 1000, 3 * once.double()) < 3e-3
    assert (w_G.main_grad[1] == 1000).all()
    w_G.main_grad.fill_(torch.nan)
    w_G.overwrite_main_grad = True
    quantized_grouped_gemm(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True, **settings).backward(grad_SN)
    assert relative_error(w_G.main_grad, once.double()) < 3e-3
    assert (w_G.main_grad[1] == 0).all()


def test_the_last_expert_beyond_2_to_31_elements(implementation):
    recipe, kernels = quantized(implementation)
    sizes, n, k = [0] * 62 + [128, 130], 14336, 4096  # 3.76e9 weights, 3.8 GB each way
    fn = registry.use(OP, recipe, "cuda", kernels)
    x_SK, grad_SN = (torch.randn(258, size).bfloat16() for size in (k, n))
    ends_G = torch.tensor(sizes).cumsum(0).to(torch.int32)
    w_G = torch.zeros(len(sizes), n, k, dtype=torch.bfloat16)
    w_G[-1] = torch.randn(n, k) / k**0.5
    w = quantize.quantize_weight(w_G, recipe, dtype=dtype())
    del w_G
    x, grad = (quantize.quantize_rows(t, ends_G, recipe, dtype=dtype()) for t in (x_SK, grad_SN))
    last_NK = quantize.dequantize(quantize.Quantized(w.forward.data[-1:], w.forward.scales[-1:], w.forward.block))[0]
    out = fn.rows(x.rowwise, w.forward, ends_G)
    values = quantize.dequantize(x.rowwise, torch.float32)
    assert relative_error(out[128:], values[128:] @ last_NK.float().t()) < 2 * BOUND
    assert (out[:128] == 0).all()
    dx = fn.rows(grad.rowwise, w.dgrad, ends_G)
    values = quantize.dequantize(grad.rowwise, torch.float32)
    assert relative_error(dx[128:], values[128:] @ last_NK.float()) < 2 * BOUND
    del w, last_NK
    dw = fn.wgrad(grad.columnwise, x.columnwise, x.padded_ends_G)
    assert not dw[:62].any()
    a, b = (quantize.dequantize(q.columnwise, torch.float32)[:, 128:] for q in (grad, x))
    assert relative_error(dw[-1], a[:, :256] @ b[:, :256].t()) < 2 * BOUND


def test_the_best_that_serves_the_operands_is_taken():
    chip = torch.cuda.get_device_capability() if not torch.version.hip else (0, 0)
    if chip != (9, 0):
        pytest.skip("the names here are Hopper's")
    for recipe, name in {"fp8": "hopper", "fp8_block": "hopper", "mxfp8": "emulated"}.items():
        operands = torch.bfloat16, 64, 64, dtype(), dtype()
        assert registry.select(OP, recipe, "cuda", None, operands).name == name
    operands = torch.bfloat16, 65, 64, dtype(), dtype()
    assert registry.select(OP, "fp8_block", "cuda", None, operands).name == "triton"
    with pytest.raises(UserError, match="block-scaled matrix instructions"):
        registry.select(OP, "mxfp8", "cuda", "triton_scaled", operands)
