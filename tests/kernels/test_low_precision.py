"""The low-precision grouped GEMM: quality against fp64, products against the quantized values, NaN in every tail."""

from __future__ import annotations

import pytest
import torch
from tests.poison import relative_error

from maniple.errors import UserError
from maniple.kernels import quantize, registry
from maniple.kernels.grouped_gemm import low_precision_reference as reference
from maniple.kernels.grouped_gemm.low_precision import OP, quantized_grouped_gemm

RECIPES = ["fp8", "fp8_block", "mxfp8"]
SIZES = {
    "uneven": [5, 1, 3],
    "first empty": [0, 40, 2],
    "middle empty": [130, 0, 3],
    "last empty": [2, 4, 0],
    "all empty": [0, 0, 0],
    "one group": [64],
    "one row": [0, 1, 0],
}


def case(sizes, *, k=72, n=40, tail=3, layout="nk", dtype=torch.bfloat16, rms=1.0, seed=0):
    """x, w, ends, bias, scale and a gradient of the result, NaN in every tail."""
    g = torch.Generator().manual_seed(seed)
    used = sum(sizes)

    def random(*shape):
        return (torch.randn(*shape, generator=g) * rms).to(dtype)

    x_SK, grad_SN, scale_S = random(used + tail, k), random(used + tail, n), random(used + tail).float()
    w_G = random(len(sizes), *((n, k) if layout == "nk" else (k, n)))
    for tensor in (x_SK, grad_SN, scale_S):
        tensor[used:] = torch.nan
    return x_SK, w_G, torch.tensor(sizes).cumsum(0).to(torch.int32), random(len(sizes), n), scale_S, grad_SN


def exact(x_SK, w_G, grad_SN, sizes, layout):
    """(out, dx, dw) of the used rows in fp64, by autograd."""
    leaves = [t.detach().double().requires_grad_() for t in (x_SK, w_G)]
    w_GNK = leaves[1] if layout == "nk" else leaves[1].transpose(1, 2)
    parts = leaves[0][: sum(sizes)].split(sizes)
    out = torch.cat([part @ w_NK.t() for part, w_NK in zip(parts, w_GNK, strict=True)])
    return out, *torch.autograd.grad(out, leaves, grad_SN[: sum(sizes)].double())


def snr(actual, wanted):
    """Decibels; NaN anywhere gives NaN, which is over no bound."""
    actual, wanted = actual.double(), wanted.double()
    return (20 * torch.log10(wanted.norm() / (actual - wanted).norm())).item()


def run(x_SK, w_G, ends_G, grad_SN, **settings):
    """(out, dx, dw), the gradients computed twice: the second backward meets recycled memory."""
    leaves = [t.clone().requires_grad_() for t in (x_SK, w_G)]
    for _ in range(2):
        out = quantized_grouped_gemm(leaves[0], leaves[1], ends_G, **settings)
        grads = torch.autograd.grad(out, leaves, grad_SN)
    return out, *grads


def check_quality(sizes, *, bound=25.0, layout="nk", outliers=False, rms=1.0, k=200, n=136, **settings):
    x_SK, w_G, ends_G, _, _, grad_SN = case(sizes, k=k, n=n, layout=layout, rms=rms)
    if outliers:  # a few large numbers, in a few columns, as models have them
        for tensor in (x_SK, w_G, grad_SN):
            tensor[..., 3] *= 50
    used = sum(sizes)
    results = run(x_SK, w_G, ends_G, grad_SN, layout=layout, **settings)
    for name, got, wanted in zip(("out", "dx", "dw"), results, exact(x_SK, w_G, grad_SN, sizes, layout), strict=True):
        assert got.dtype == torch.bfloat16
        rows = slice(None) if name == "dw" else slice(used)
        assert snr(got[rows], wanted[rows]) >= bound, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rms", [1.0, 1e-3, 1e-6, 1e-10])
def test_quality_at_any_magnitude(recipe, rms):
    check_quality([5, 0, 130, 40], recipe=recipe, rms=rms)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quality_with_outliers(recipe):
    check_quality([70, 61], recipe=recipe, outliers=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quality_of_wide_gradients(recipe, grad_dtype):
    e5m2 = grad_dtype == torch.float8_e5m2
    check_quality([70, 61], recipe=recipe, grad_dtype=grad_dtype, layout="kn", bound=20 if e5m2 else 25)
    x_SK, w_G, ends_G, _, _, grad_SN = case([70, 61], k=200, n=136)
    wanted = exact(x_SK, w_G, grad_SN, [70, 61], "nk")
    dx = run(x_SK, w_G, ends_G, grad_SN, recipe=recipe, grad_dtype=grad_dtype)[1]
    assert (snr(dx[:131], wanted[1][:131]) < 27) == e5m2  # it was e5m2 that was used, and there only


@pytest.mark.parametrize(("k", "n"), [(2880, 200), (200, 2880), (136, 768), (768, 136)])
def test_quality_of_shapes(k, n):
    check_quality([7, 0, 12], recipe="fp8_block", k=k, n=n)


def values(q):
    """What a quantized tensor stands for, in fp64: every scale is repeated over its block."""
    scales = q.scales.double() if q.scales.dtype == torch.float32 else torch.exp2(q.scales.double() - 127)
    data = q.data.double()
    if q.block != (0, 0):
        for dim, size in zip((-2, -1), q.block, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, data.shape[dim])
    return data * scales


def products(rows, wgrad, sizes, recipe, *, layout="nk", k=72, n=40, bound=1e-6, seed=0, grad_dtype=None):
    """`rows` and `wgrad` of an implementation against fp64 products of the same quantized operands."""
    x_SK, w_GNK, ends_G, bias_GN, scale_S, grad_SN = case(sizes, k=k, n=n, seed=seed)
    used = sum(sizes)
    x = quantize.quantize_rows(x_SK, ends_G, recipe)
    grad = quantize.quantize_rows(grad_SN, ends_G, recipe, dtype=grad_dtype or torch.float8_e4m3fn)
    w = quantize.quantize_weight(w_GNK, recipe)

    def wanted(a, b, bias=None):
        parts = values(a)[:used].split(sizes)
        made = [part @ w_NK.t() for part, w_NK in zip(parts, values(b), strict=True)]
        if bias is not None:
            scales = scale_S[:used].double().split(sizes)
            made = [m + s[:, None] * b for m, s, b in zip(made, scales, bias.double(), strict=True)]
        return torch.cat(made)

    out = rows(x.rowwise, w.forward, ends_G, out_dtype=torch.float32, bias_GN=bias_GN, bias_scale_S=scale_S)
    assert relative_error(out[:used], wanted(x.rowwise, w.forward, bias_GN)) <= bound
    assert out[used:].isnan().all()
    dx = rows(grad.rowwise, w.dgrad, ends_G, out_dtype=torch.float32, zero_tail=True)
    assert relative_error(dx[:used], wanted(grad.rowwise, w.dgrad)) <= bound
    assert (dx[used:] == 0).all()
    ends = x.padded_ends_G.tolist()
    a, b = (grad, x) if layout == "nk" else (x, grad)
    a, b = values(a.columnwise), values(b.columnwise)
    dw_wanted = torch.stack([a[:, s:e] @ b[:, s:e].t() for s, e in zip([0, *ends], ends, strict=False)])
    operands = grad.columnwise, x.columnwise, x.padded_ends_G
    dw = wgrad(*operands, layout=layout, out_dtype=torch.float32)
    assert relative_error(dw, dw_wanted) <= bound
    main = torch.full_like(dw, 3.0)
    wgrad(*operands, layout=layout, out=main, accumulate=True)
    assert relative_error(main, dw_wanted + 3) <= bound  # added once
    for g, size in enumerate(sizes):
        if size == 0:
            assert (dw[g] == 0).all()
            assert (main[g] == 3).all()
    with pytest.raises(ValueError, match="pass it"):
        wgrad(*operands, layout=layout, accumulate=True)
    with pytest.raises(ValueError, match="shape"):
        wgrad(*operands, layout=layout, out=dw[:, :-1])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_the_reference(sizes, recipe):
    for layout in ("nk", "kn"):
        products(reference.rows, reference.wgrad, sizes, recipe, layout=layout, bound=2e-6)


def test_weight_gradients_are_written_where_asked():
    x_SK, _, ends_G, _, _, grad_SN = case([5, 0, 3])
    x, grad = (quantize.quantize_rows(t, ends_G, "fp8_block") for t in (x_SK, grad_SN))
    operands = grad.columnwise, x.columnwise, x.padded_ends_G
    fresh = reference.wgrad(*operands)
    out = torch.full((3, 40, 72), torch.nan)
    assert reference.wgrad(*operands, out=out) is out
    assert fresh.dtype == torch.bfloat16
    assert torch.equal(out.bfloat16(), fresh)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_of_a_group(recipe):
    products(reference.rows, reference.wgrad, list(range(131)), recipe, k=40, n=9, bound=2e-6)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_emulated_mxfp8_has_the_products_of_quantized_numbers(layout):
    """In fp32, where nothing else is rounded."""
    x_SK, w_G, ends_G, _, _, grad_SN = case([5, 0, 67, 1], layout=layout, dtype=torch.float32)
    results = [
        run(x_SK, w_G, ends_G, grad_SN, recipe="mxfp8", layout=layout, kernels=kernels)
        for kernels in ("emulated", "reference")
    ]
    for emulated, quantized, rows in zip(*results, (slice(73), slice(73), slice(None)), strict=True):
        assert relative_error(emulated[rows], quantized[rows]) < 1e-6
    assert registry.select(OP, "mxfp8", "cpu").name == "emulated"


@pytest.mark.parametrize("kernels", ["reference", "emulated"])
@pytest.mark.parametrize("scaled", [False, True])
def test_bias_and_its_gradients(kernels, scaled):
    sizes, used = [5, 0, 9], 14
    x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN = case(sizes)
    without = quantized_grouped_gemm(x_SK, w_G, ends_G, recipe="mxfp8", kernels=kernels)
    leaves = [bias_GN.requires_grad_()] + ([scale_S.requires_grad_()] if scaled else [])
    out = quantized_grouped_gemm(
        x_SK,
        w_G,
        ends_G,
        recipe="mxfp8",
        bias_GN=bias_GN,
        bias_scale_S=scale_S if scaled else None,
        kernels=kernels,
    )
    group_S = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    added = wide[0][group_S] * (wide[1][:used, None] if scaled else 1)
    assert relative_error(out[:used], without[:used].double() + added) < 5e-3
    wanted = torch.autograd.grad(added, wide, grad_SN[:used].double())
    for got, want in zip(torch.autograd.grad(out, leaves, grad_SN), wanted, strict=True):
        rows = slice(used) if got.dim() == 1 else slice(None)
        assert relative_error(got[rows], want[rows]) < 2e-3


def test_rows_past_the_only_group_change_nothing():
    x_SK, w_G, ends_G, _, _, grad_SN = case([40], tail=30)
    for recipe in RECIPES:
        poisoned = run(x_SK, w_G, ends_G, grad_SN, recipe=recipe)
        alone = run(x_SK[:40], w_G, ends_G, grad_SN[:40], recipe=recipe)
        for got, wanted, rows in zip(poisoned, alone, (slice(40), slice(40), slice(None)), strict=True):
            assert torch.equal(got[rows], wanted)
        assert poisoned[0][40:].isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_accumulate_in_main_grad_once_a_micro_batch(recipe):
    x_SK, w_G, ends_G, _, _, grad_SN = case([20, 0, 33])
    w_G = torch.nn.Parameter(w_G)
    w_G.main_grad, w_G.grad_added_to_main_grad = torch.full(w_G.shape, 100.0), False
    for _ in range(3):
        quantized_grouped_gemm(x_SK, w_G, ends_G, recipe=recipe, fuse_wgrad_accumulation=True).backward(grad_SN)
        assert w_G.grad_added_to_main_grad
        w_G.grad = None
    once = run(x_SK, w_G.detach(), ends_G, grad_SN, recipe=recipe)[2]
    assert relative_error(w_G.main_grad - 100, 3 * once.double()) < 3e-3  # `once` is rounded to bf16
    assert (w_G.main_grad[1] == 100).all()
    w_G.main_grad.fill_(torch.nan)
    w_G.overwrite_main_grad = True
    quantized_grouped_gemm(x_SK, w_G, ends_G, recipe=recipe, fuse_wgrad_accumulation=True).backward(grad_SN)
    assert not w_G.overwrite_main_grad
    assert relative_error(w_G.main_grad, once.double()) < 3e-3
    assert (w_G.main_grad[1] == 0).all()


def test_what_backward_keeps_is_float8():
    """x's transposed copy and the weight's, one byte a number, with their scales; no bf16 x."""
    x_SK, w_G, ends_G, *_ = case([200, 56], k=256, n=384, tail=0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        quantized_grouped_gemm(x_SK.requires_grad_(), w_G.requires_grad_(), ends_G, recipe="fp8_block")
    padded = quantize.padded_size(256, 2)
    assert sum(t.nbytes for t in kept if t.element_size() == 1) == 256 * padded + w_G.numel()
    assert sum(t.nbytes for t in kept if t.element_size() != 1) < 0.05 * (x_SK.nbytes + w_G.nbytes)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_a_kept_weight_changes_no_bit(layout):
    x_SK, w_G, ends_G, _, _, grad_SN = case([20, 13], layout=layout)
    cache = quantize.QuantizedWeight("fp8_block")
    w_G.requires_grad_()
    x_SK.requires_grad_()
    for _ in range(2):
        results = []
        for weight_cache in (None, cache, cache):
            out = quantized_grouped_gemm(
                x_SK, w_G, ends_G, recipe="fp8_block", layout=layout, weight_cache=weight_cache, zero_tail=True
            )
            results.append((out, *torch.autograd.grad(out, [x_SK, w_G], grad_SN)))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b), ((a != b).sum(), (a - b).abs().max(), a.isnan().sum())
        w_G.data.mul_(1.5)  # as an optimizer writes
        quantize.bump([w_G])


def test_a_cache_without_the_orientation_that_is_needed_is_refused():
    x_SK, w_G, ends_G, *_ = case([2, 1])
    cache = quantize.QuantizedWeight("fp8_block", dgrad=False)
    quantized_grouped_gemm(x_SK, w_G, ends_G, recipe="fp8_block", weight_cache=cache)
    with pytest.raises(ValueError, match="both orientations"):
        quantized_grouped_gemm(x_SK.requires_grad_(), w_G, ends_G, recipe="fp8_block", weight_cache=cache)


@pytest.mark.parametrize("frozen", ["x", "w", "both"])
def test_what_needs_no_gradient_gets_none(frozen):
    x_SK, w_G, ends_G, bias_GN, _, grad_SN = case([20, 13])
    leaves = {"x": x_SK, "w": w_G, "bias": bias_GN}
    wanted = run(x_SK, w_G, ends_G, grad_SN, recipe="fp8_block")
    asked = [name for name in leaves if name not in (("x", "w") if frozen == "both" else (frozen,))]
    for name in asked:
        leaves[name].requires_grad_()
    out = quantized_grouped_gemm(x_SK, w_G, ends_G, recipe="fp8_block", bias_GN=bias_GN)
    for name, grad in zip(asked, torch.autograd.grad(out, [leaves[n] for n in asked], grad_SN), strict=True):
        if name != "bias":
            assert torch.equal(grad[:33], wanted[1 if name == "x" else 2][:33])


@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_tensors_have_static_shapes_forward_and_backward(recipe):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x_SK = torch.empty(10, 64, dtype=torch.bfloat16, requires_grad=True)
        w_G = torch.empty(3, 48, 64, dtype=torch.bfloat16, requires_grad=True)
        bias_GN = torch.empty(3, 48, dtype=torch.bfloat16, requires_grad=True)
        out = quantized_grouped_gemm(x_SK, w_G, torch.empty(3, dtype=torch.int32), recipe=recipe, bias_GN=bias_GN)
        out.sum().backward()
        assert (out.shape, x_SK.grad.shape, w_G.grad.shape) == ((10, 48), (10, 64), (3, 48, 64))
        assert bias_GN.grad.shape == (3, 48)


@pytest.mark.parametrize(("recipe", "kernels"), [("fp8_block", "reference"), ("mxfp8", "emulated")])
def test_one_compiled_graph_gives_the_same_bits(recipe, kernels):
    x_SK, w_G, ends_G, _, _, grad_SN = case([5, 0, 9], tail=0)

    def call(x_SK, w_G, ends_G):
        return quantized_grouped_gemm(x_SK, w_G, ends_G, recipe=recipe, kernels=kernels)

    leaves = [x_SK.requires_grad_(), w_G.requires_grad_()]
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*leaves, ends_G)
        results.append((out, *torch.autograd.grad(out, leaves, grad_SN)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(
    "change",
    [
        dict(layout="kn"),
        dict(layout="mn"),
        dict(ends_G=torch.tensor([1, 2, 3])),
        dict(bias_GN=torch.zeros(3, 6)),
        dict(bias_scale_S=torch.zeros(9)),
        dict(w_G=torch.zeros(3, 40, 72)),
        dict(fuse_wgrad_accumulation=True),
        dict(dtype=torch.float16),
    ],
)
def test_what_does_not_fit_is_refused(change):
    x_SK, w_G, ends_G, *_ = case([2, 1, 3])
    arguments = dict(x_SK=x_SK, w_G=w_G, ends_G=ends_G, recipe="fp8_block") | change
    with pytest.raises(ValueError, match=r"\w"):
        quantized_grouped_gemm(arguments.pop("x_SK"), arguments.pop("w_G"), arguments.pop("ends_G"), **arguments)


def test_mixed_encodings_are_refused():
    x_SK, w_G, ends_G, *_ = case([2, 1])
    x = quantize.quantize_rows(x_SK, ends_G, "fp8_block", dtype=torch.float8_e4m3fnuz)
    with pytest.raises(ValueError, match="FNUZ"):
        reference.rows(x.rowwise, quantize.quantize_weight(w_G, "fp8_block").forward, ends_G)


def test_what_cannot_run_here_says_why():
    x_SK, w_G, ends_G, *_ = case([2])
    with pytest.raises(UserError, match="triton_scaled does not run on cpu"):
        quantized_grouped_gemm(x_SK, w_G, ends_G, recipe="mxfp8", kernels="triton_scaled")
    with pytest.raises(UserError, match="recipes are fp8, fp8_block, mxfp8"):
        quantized_grouped_gemm(x_SK, w_G, ends_G, recipe="fp4")


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8"])
def test_the_public_function_takes_every_recipe(recipe):
    from maniple.kernels.grouped_gemm import grouped_gemm
    from maniple.kernels.quantize import QuantizedWeight

    torch.manual_seed(0)
    x_SK, w_GNK = torch.randn(7, 64).bfloat16(), torch.randn(3, 48, 64).bfloat16()
    ends_G = torch.tensor([4, 4, 6], dtype=torch.int32)
    results = []
    for cache in (None, QuantizedWeight(recipe)):
        leaves = x_SK.clone().requires_grad_(), w_GNK.clone().requires_grad_()
        out_SN = grouped_gemm(*leaves, ends_G, recipe=recipe, weight_cache=cache, zero_tail=True)
        out_SN.float().square().sum().backward()
        results.append([out_SN.detach(), *(leaf.grad for leaf in leaves)])
    leaves = x_SK.clone().requires_grad_(), w_GNK.clone().requires_grad_()
    out_SN = quantized_grouped_gemm(*leaves, ends_G, recipe=recipe, zero_tail=True)
    out_SN.float().square().sum().backward()
    for got in results:
        for mine, direct in zip(got, [out_SN.detach(), *(leaf.grad for leaf in leaves)], strict=True):
            assert mine[:6].equal(direct[:6])
    assert not results[0][0].equal(grouped_gemm(x_SK, w_GNK, ends_G, zero_tail=True))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_rows_are_those_of_a_copy(recipe, integers):
    """Bit for bit: the output, the weight's gradient, and a token's gradient as the sum over its rows."""
    g = torch.Generator().manual_seed(0)
    x_TK, w_GNK = torch.randn(9, 64, generator=g).bfloat16(), torch.randn(3, 48, 64, generator=g).bfloat16()
    source_S = torch.tensor([4, 0, -1, 8, 8, 2, 77, 3, 1, 2**31 - 1], dtype=integers)  # -1 and 77 are none: zeros
    ends_G = torch.tensor([3, 3, 8], dtype=torch.int32)
    slots_TK = torch.tensor([[1, -1], [8, -1], [5, -1], [7, -1], [0, -1], [-1, -1], [-1, -1], [-1, -1], [3, 4]])
    grad_SN = torch.randn(10, 48, generator=g).bfloat16()
    rows_SK = torch.stack([x_TK[s] if 0 <= s < 9 else torch.zeros(64).bfloat16() for s in source_S.tolist()])
    rows_SK[8:] = torch.nan
    results = []
    for x, more in ((rows_SK, {}), (x_TK, dict(source_S=source_S, slots_TK=slots_TK.to(integers)))):
        leaves = x.clone().requires_grad_(), w_GNK.clone().requires_grad_()
        for _ in range(2):
            out_SN = quantized_grouped_gemm(*leaves, ends_G, recipe=recipe, **more)
            grads = torch.autograd.grad(out_SN, leaves, grad_SN)
        results.append((out_SN.detach()[:8], *grads))
    (plain, rows_grad_SK, plain_w), (out_SN, grad_TK, grad_w) = results
    assert out_SN.equal(plain)
    assert grad_w.equal(plain_w)
    wanted = torch.zeros(9, 64)
    for slot in range(8):
        if 0 <= source_S[slot] < 9:
            wanted[source_S[slot]] += rows_grad_SK[slot].float()
    assert grad_TK.equal(wanted.bfloat16())


def test_recipes_say_what_they_do_not_take():
    from maniple.kernels.grouped_gemm import grouped_gemm
    from maniple.kernels.quantize import QuantizedWeight

    x_SK, w_GNK, ends_G = torch.randn(4, 64), torch.randn(1, 48, 64), torch.tensor([4], dtype=torch.int32)
    source_S = torch.arange(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs slots"):
        grouped_gemm(x_SK.requires_grad_(), w_GNK, ends_G, recipe="fp8_block", source_S=source_S)
    with pytest.raises(ValueError, match="leave weight_cache out"):
        grouped_gemm(x_SK, w_GNK, ends_G, weight_cache=QuantizedWeight("fp8"))
