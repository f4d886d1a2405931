"""Grouped GEMM against a loop over rows in fp64, each gradient apart, with NaN in the tail of every operand."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.poison import relative_error, unit_error

from maniple.errors import UserError
from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu, reference
from maniple.kernels.permute import permute, sort_by_expert

SIZES = {
    "even": [2, 2, 2],
    "uneven": [5, 1, 3],
    "first empty": [0, 4, 2],
    "middle empty": [3, 0, 3],
    "last empty": [2, 4, 0],
    "all empty": [0, 0, 0],
    "one group": [4],
    "one row": [0, 1, 0],
}


def case(sizes, *, k=5, n=7, tail=3, layout="nk", dtype=torch.float32, seed=0):
    """x with a NaN tail, w, ends, bias, scale with a NaN tail, and a gradient of the result with a NaN tail."""
    g = torch.Generator().manual_seed(seed)
    used = sum(sizes)
    x_SK = torch.randn(used + tail, k, generator=g).to(dtype)
    w_G = torch.randn(len(sizes), *((n, k) if layout == "nk" else (k, n)), generator=g).to(dtype)
    bias_GN = torch.randn(len(sizes), n, generator=g).to(dtype)
    scale_S = torch.rand(used + tail, generator=g) + 0.5
    grad_SN = torch.randn(used + tail, n, generator=g).to(dtype)
    for tensor in (x_SK, scale_S, grad_SN):
        tensor[used:] = torch.nan
    ends_G = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN


def naive(x_SK, w_G, sizes, bias_GN=None, scale_S=None, layout="nk"):
    """Row by row in fp64, over the used rows only."""
    rows, s = [], 0
    for g, size in enumerate(sizes):
        for _ in range(size):
            w_NK = w_G[g] if layout == "nk" else w_G[g].t()
            row_N = w_NK.double() @ x_SK[s].double()
            if bias_GN is not None:
                row_N = row_N + (1 if scale_S is None else scale_S[s].double()) * bias_GN[g].double()
            rows.append(row_N)
            s += 1
    return torch.stack(rows) if rows else torch.zeros(0, w_G.shape[1] if layout == "nk" else w_G.shape[2]).double()


def check(sizes, *, bias, scale, bound=1e-6, layout="nk", **shape):
    x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN = case(sizes, layout=layout, **shape)
    used = sum(sizes)
    inputs = {"x": x_SK, "w": w_G} | ({"bias": bias_GN} if bias else {}) | ({"scale": scale_S} if scale else {})
    mine = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    theirs = {name: t.double().requires_grad_() for name, t in inputs.items()}
    expected = naive(theirs["x"], theirs["w"], sizes, theirs.get("bias"), theirs.get("scale"), layout)
    if used:
        expected.backward(grad_SN[:used].double())
    for _ in range(2):  # a second backward meets recycled memory
        out = grouped_gemm(
            mine["x"], mine["w"], ends_G, bias_GN=mine.get("bias"), bias_scale_S=mine.get("scale"), layout=layout
        )
        grads = dict(zip(mine, torch.autograd.grad(out, list(mine.values()), grad_SN), strict=True))
        assert out.dtype == x_SK.dtype
        assert unit_error(out[:used], expected) <= bound
        for name, grad in grads.items():
            wanted = theirs[name].grad if theirs[name].grad is not None else torch.zeros_like(theirs[name])
            rows = slice(used) if name in ("x", "scale") else slice(None)
            assert grad.dtype == mine[name].dtype
            assert unit_error(grad[rows], wanted[rows]) <= bound, name
        for g, size in enumerate(sizes):
            if size == 0:
                assert (grads["w"][g] == 0).all()
                assert not bias or (grads["bias"][g] == 0).all()


def gather(sizes, *, tokens=4, k=5, tail=3, seed=1, integers=torch.int32):
    """x `[T, K]`, the rows that are taken from it (some of no token, garbage in the tail), and each token's slots."""
    g = torch.Generator().manual_seed(seed)
    used = sum(sizes)
    x_TK = torch.randn(tokens, k, generator=g)
    source_S = torch.randint(-1, tokens, (used + tail,), generator=g)
    source_S[used:] = torch.iinfo(torch.int32).max
    slots = [[s for s in range(used) if source_S[s] == t] for t in range(tokens)]
    width = max(map(len, slots)) + 1
    slots_TK = torch.tensor(
        [[*row, *[-1, used + 1][: width - len(row)], *[-1] * (width - len(row) - 2)] for row in slots]
    )
    return x_TK, source_S.to(integers), slots_TK.to(integers)


def check_gathered(sizes, *, bound=1e-6, layout="nk", bias=True, k=5, n=7, tail=3, integers=torch.int32):
    _, w_G, ends_G, bias_GN, scale_S, grad_SN = case(sizes, layout=layout, k=k, n=n, tail=tail)
    x_TK, source_S, slots_TK = gather(sizes, k=k, tail=tail, integers=integers)
    used = sum(sizes)
    inputs = {"x": x_TK, "w": w_G} | ({"bias": bias_GN, "scale": scale_S} if bias else {})
    mine = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    theirs = {name: t.double().requires_grad_() for name, t in inputs.items()}
    rows_SK = torch.cat([theirs["x"], torch.zeros(1, k)])[source_S[:used].long()]  # -1 is the last, of zeros
    expected = naive(rows_SK, theirs["w"], sizes, theirs.get("bias"), theirs.get("scale"), layout)
    if used:
        expected.backward(grad_SN[:used].double())
    for _ in range(2):
        out = grouped_gemm(
            mine["x"],
            mine["w"],
            ends_G,
            bias_GN=mine.get("bias"),
            bias_scale_S=mine.get("scale"),
            source_S=source_S,
            slots_TK=slots_TK,
            layout=layout,
        )
        grads = torch.autograd.grad(out, list(mine.values()), grad_SN)
        assert unit_error(out[:used], expected) <= bound
        for (name, leaf), grad in zip(theirs.items(), grads, strict=True):
            wanted = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            rows = slice(used) if name == "scale" else slice(None)
            assert unit_error(grad[rows], wanted[rows]) <= bound, name


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_result_and_each_gradient(sizes, layout):
    check(sizes, bias=False, scale=False, layout=layout)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("scale", [False, True])
def test_bias_and_its_gradients(sizes, scale):
    check(sizes, bias=True, scale=scale)


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    k=st.integers(1, 9),
    n=st.integers(1, 9),
    tail=st.integers(0, 4),
    layout=st.sampled_from(["nk", "kn"]),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(sizes, k, n, tail, layout):
    check(sizes, bias=True, scale=True, k=k, n=n, tail=tail, layout=layout, bound=2e-6)


@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered"])
def test_sizes_and_shapes_of_models(gathers):
    """Every size of a group up to 130, and widths that no power of two divides."""
    run = check_gathered if gathers else functools.partial(check, bias=True, scale=True)
    run(list(range(0, 131, 13)), k=200, n=136, bound=2e-6)
    run([3, 0, 2], k=2880, n=200, bound=2e-6)
    run([0, 2, 1], k=768, n=2880, bound=2e-6)


def test_bf16_is_rounded_once():
    """fp32 inside: the result is the fp64 result, rounded to bf16."""
    x_SK, w_G, ends_G, *_ = case([3, 4], k=512, n=8, dtype=torch.bfloat16)
    out = grouped_gemm(x_SK, w_G, ends_G)
    assert out.dtype == torch.bfloat16
    assert relative_error(out[:7], naive(x_SK, w_G, [3, 4]).to(torch.bfloat16)) < 2e-4
    check([3, 4], bias=True, scale=True, k=33, n=8, dtype=torch.bfloat16, bound=4e-3)


def test_strided_operands():
    x_SK, w_G, ends_G, _, _, grad_SN = case([2, 3], k=6, n=4, tail=1)
    wide_S2K = torch.full((x_SK.shape[0], 13), torch.nan)
    wide_S2K[:, 1::2] = x_SK
    x_view = wide_S2K[:, 1::2].requires_grad_()
    w_view = w_G.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = grouped_gemm(x_view, w_view, ends_G)
    gx, gw = torch.autograd.grad(out, [x_view, w_view], grad_SN.t().contiguous().t())
    assert relative_error(out[:5], naive(x_SK, w_G, [2, 3])) < 1e-6
    assert relative_error(gx[:5], reference.dgrad(grad_SN, w_G, ends_G)[:5]) < 1e-6
    assert relative_error(gw, reference.wgrad(x_SK, grad_SN, ends_G)) < 1e-6


def test_the_tail_is_zeroed_on_demand_and_only_then():
    x_SK, w_G, ends_G, _, _, grad_SN = case([2, 1])
    x_SK.requires_grad_()
    assert grouped_gemm(x_SK, w_G, ends_G)[3:].isnan().all()  # unwritten: the poison of its memory
    out = grouped_gemm(x_SK, w_G, ends_G, zero_tail=True)
    assert (out[3:] == 0).all()
    assert (torch.autograd.grad(out, x_SK, grad_SN)[0][3:] == 0).all()


def test_splits_known_to_the_host_change_nothing():
    x_SK, w_G, ends_G, bias_GN, *_ = case([2, 0, 3])
    wrong_ends_G = torch.zeros_like(ends_G)
    out = grouped_gemm(x_SK, w_G, wrong_ends_G, bias_GN=bias_GN, splits=[2, 0, 3], zero_tail=True)
    assert torch.equal(out, grouped_gemm(x_SK, w_G, ends_G, bias_GN=bias_GN, zero_tail=True))


def test_weight_gradients_accumulate_in_main_grad_once_a_micro_batch():
    x_SK, w_G, ends_G, _, _, grad_SN = case([2, 0, 3], dtype=torch.bfloat16)
    w_G = torch.nn.Parameter(w_G)
    w_G.main_grad = torch.full(w_G.shape, 100.0)
    w_G.grad_added_to_main_grad = False
    for _ in range(3):
        grouped_gemm(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True).backward(grad_SN)
        assert w_G.grad_added_to_main_grad
        w_G.grad = None  # what DDP's hook does with the dummy
    x_32, grad_32 = x_SK.float(), grad_SN.float()
    once = reference.wgrad(x_32, grad_32, ends_G)
    assert relative_error(w_G.main_grad - 100, 3 * once) < 1e-5  # not rounded to bf16 in between
    assert (w_G.main_grad[1] == 100).all()


@pytest.mark.parametrize("swiglu", [False, True])
def test_the_first_gradient_takes_the_place_of_what_main_grad_holds_where_it_may(swiglu):
    x_SK, w_G, ends_G, _, _, grad_SN = case([2, 0, 3], n=8, dtype=torch.bfloat16)
    w_G = torch.nn.Parameter(w_G)
    product, grad = (grouped_gemm_swiglu, grad_SN[:, :4]) if swiglu else (grouped_gemm, grad_SN)
    w_G.main_grad, w_G.grad_added_to_main_grad = torch.zeros(w_G.shape), False
    sums = []
    for start in (0.0, torch.nan):
        w_G.main_grad.fill_(start)
        w_G.overwrite_main_grad = start != 0
        for _ in range(2):
            product(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True).backward(grad)
            assert not w_G.overwrite_main_grad
            assert w_G.grad_added_to_main_grad
            w_G.grad = None
            sums.append(w_G.main_grad.clone())
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])
    assert (sums[2][1] == 0).all()


def test_wgrad_writes_or_adds():
    x_SK, _, ends_G, _, _, grad_SN = case([2, 0, 3])
    fresh = reference.wgrad(x_SK, grad_SN, ends_G)
    out = torch.full_like(fresh, torch.nan)
    assert reference.wgrad(x_SK, grad_SN, ends_G, out=out) is out
    assert torch.equal(out, fresh)
    reference.wgrad(x_SK, grad_SN, ends_G, out=out, accumulate=True)
    assert torch.equal(out, 2 * fresh)
    with pytest.raises(ValueError, match="pass it"):
        reference.wgrad(x_SK, grad_SN, ends_G, accumulate=True)
    with pytest.raises(ValueError, match="shape"):
        reference.wgrad(x_SK, grad_SN, ends_G, out=out[:2])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_gathered_rows(sizes, layout):
    check_gathered(sizes, layout=layout)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_gathered_rows_of_any_integer_type_and_without_rows(integers):
    check_gathered([3, 0, 4], integers=integers)
    x_SK, w_G, ends_G, *_ = case([0, 0], tail=0)
    source_S, slots_TK = torch.zeros(0, dtype=integers), torch.full((4, 2), -1, dtype=integers)
    x_TK = torch.randn(4, 5, requires_grad=True)
    out = grouped_gemm(x_TK, w_G, ends_G, source_S=source_S, slots_TK=slots_TK)
    assert out.shape == (0, 7)
    assert (torch.autograd.grad(out.sum(), x_TK)[0] == 0).all()
    none = grouped_gemm(x_SK[:0], w_G, torch.tensor([1, 1], dtype=torch.int32), source_S=torch.tensor([0]))
    assert (none == 0).all()  # of no tokens, every source is none


def test_a_permutation_has_what_a_gather_needs():
    """Rows in expert order, gathered and copied: the same, forward and backward."""
    g = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(-1, 4, (9, 3), generator=g)
    permutation = sort_by_expert(ids_TK, 4)
    x_TD, w_G = torch.randn(9, 5, generator=g), torch.randn(4, 7, 5, generator=g)
    grad_SN = torch.randn(27, 7, generator=g)
    used = int(permutation.ends_E[-1])
    results = []
    for gathers in (False, True):
        x, w = x_TD.clone().requires_grad_(), w_G.clone().requires_grad_()
        if gathers:
            slots = dict(source_S=permutation.order_S // 3, slots_TK=permutation.position_TK)
            out = grouped_gemm(x, w, permutation.ends_E, **slots)
        else:
            out = grouped_gemm(permute(x, permutation), w, permutation.ends_E)
        results.append([out[:used].detach(), *torch.autograd.grad(out, [x, w], grad_SN)])
    for copied, gathered in zip(*results, strict=True):
        assert relative_error(gathered, copied) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        dict(layout="kn"),
        dict(layout="mn"),
        dict(ends_G=torch.tensor([1, 2, 3])),
        dict(ends_G=torch.tensor([1, 2], dtype=torch.int32)),
        dict(bias_GN=torch.zeros(3, 6)),
        dict(bias_scale_S=torch.zeros(9)),
        dict(w_G=torch.zeros(3, 7, 5, dtype=torch.bfloat16)),
        dict(splits=[9, 9, 9]),
        dict(splits=[1, 2]),
        dict(fuse_wgrad_accumulation=True),
        dict(slots_TK=torch.zeros(9, 1, dtype=torch.int32)),
        dict(source_S=torch.zeros(6)),
        dict(source_S=torch.zeros(6, 1, dtype=torch.int32)),
        dict(source_S=torch.zeros(6, dtype=torch.int32), slots_TK=torch.zeros(8, 1, dtype=torch.int32)),
        dict(source_S=torch.zeros(6, dtype=torch.int32), slots_TK=torch.zeros(9, 1)),
        dict(source_S=torch.zeros(6, dtype=torch.int32), x_SK=torch.zeros(9, 5, requires_grad=True)),
    ],
)
def test_what_does_not_fit_is_refused(change):
    x_SK, w_G, ends_G, *_ = case([2, 1, 3])
    arguments = dict(x_SK=x_SK, w_G=w_G, ends_G=ends_G) | change
    with pytest.raises(ValueError, match=r"\w"):
        grouped_gemm(arguments.pop("x_SK"), arguments.pop("w_G"), arguments.pop("ends_G"), **arguments)


def test_a_recipe_without_a_kernel_is_refused():
    x_SK, w_G, ends_G, *_ = case([1])
    with pytest.raises(UserError, match="recipe fp4"):
        grouped_gemm(x_SK, w_G, ends_G, recipe="fp4")


def test_passes_may_overlap_where_gradients_are_added():
    """As a pipeline's do: two forward passes, then their backward passes, each of which adds to the same tensor."""
    x_SK, w_GNK = torch.randn(6, 8), torch.nn.Parameter(torch.randn(2, 5, 8))
    ends_G = torch.tensor([2, 6], dtype=torch.int32)
    w_GNK.main_grad = torch.zeros(2, 5, 8)
    for product in (grouped_gemm, grouped_gemm_swiglu):
        w = w_GNK if product is grouped_gemm else torch.nn.Parameter(torch.randn(2, 4, 8))
        w.main_grad = torch.zeros_like(w)
        (wanted,) = torch.autograd.grad(product(x_SK, w, ends_G).sum(), w)
        losses = [product(x_SK, w, ends_G, fuse_wgrad_accumulation=True).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(w.main_grad, 2 * wanted)
