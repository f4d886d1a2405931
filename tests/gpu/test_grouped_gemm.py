"""The grouped GEMM kernels on a GPU against the oracle: each gradient, every kind of group, memory full of NaN."""

from __future__ import annotations

import os

import pytest
import torch
from tests.poison import poisoned_memory, relative_error  # noqa: F401 (a fixture for every test here)

from maniple.errors import UserError
from maniple.kernels import registry
from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu, launch, reference
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.permute import sort_by_expert
from maniple.kernels.swiglu import reference as swiglu_reference
from maniple.kernels.swiglu import swiglu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the oracle's products need to be deterministic

# bf16 keeps 8 bits: a result rounded once is off by about 2^-9 / sqrt(3) of each value, 1.1e-3 in the mean
BOUND = 1.8e-3
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
SHAPES = [(2880, 200), (200, 2880), (136, 768), (768, 136), (512, 512), (64, 8), (2880, 2880)]


def implementations() -> list[str]:
    """What a GPU machine can run; named one by one, so that a machine without Hopper says what it left out."""
    return ["triton", "hopper"]


@pytest.fixture(params=implementations())
def kernels(request) -> str:
    try:
        registry.select("grouped_gemm", "bf16", "cuda", request.param)
    except UserError as error:
        pytest.skip(str(error))
    return request.param


def case(sizes, n, k, *, tail=50, layout="nk", rms=1.0, seed=0):
    """x, w, ends, bias, scale and a gradient of the result on the GPU; NaN in every tail."""
    g = torch.Generator("cuda").manual_seed(seed)
    used = sum(sizes)

    def random(*shape):
        return torch.randn(*shape, generator=g, device="cuda").mul_(rms).bfloat16()

    x_SK, grad_SN, scale_S = random(used + tail, k), random(used + tail, n), random(used + tail).float()
    for tensor in (x_SK, grad_SN, scale_S):
        tensor[used:] = torch.nan
    w_G = random(len(sizes), *((n, k) if layout == "nk" else (k, n)))
    ends_G = torch.tensor(sizes).cumsum(0).to("cuda", torch.int32)
    return x_SK, w_G, ends_G, random(len(sizes), n), scale_S, grad_SN


def check(kernels, sizes, n, k, *, bias=False, layout="nk", rms=1.0):
    x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN = case(sizes, n, k, layout=layout, rms=rms)
    used = sum(sizes)
    inputs = {"x": x_SK, "w": w_G} | ({"bias": bias_GN, "scale": scale_S} if bias else {})
    results = {}
    for name in (kernels, "reference"):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in inputs.items()}
        for _ in range(2):  # a second backward meets recycled memory
            out = grouped_gemm(
                leaves["x"],
                leaves["w"],
                ends_G,
                bias_GN=leaves.get("bias"),
                bias_scale_S=leaves.get("scale"),
                layout=layout,
                kernels=name,
            )
            grads = torch.autograd.grad(out, list(leaves.values()), grad_SN)
        results[name] = {"out": out[:used]} | {
            key: grad[:used] if key in ("x", "scale") else grad for key, grad in zip(leaves, grads, strict=True)
        }
    for key, wanted in results["reference"].items():
        got = results[kernels][key]
        assert got.dtype == wanted.dtype
        assert got.isfinite().all(), key
        if wanted.numel():
            assert relative_error(got, wanted) <= BOUND, key
    for g, size in enumerate(sizes):
        if size == 0:
            assert (results[kernels]["w"][g] == 0).all()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_every_kind_of_group(kernels, sizes, layout):
    check(kernels, sizes, 384, 320, layout=layout)
    check(kernels, sizes, 384, 320, layout=layout, bias=True)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_shapes(kernels, n, k):
    for layout in ("nk", "kn"):
        check(kernels, [70, 0, 61, 260], n, k, layout=layout, bias=True)


@pytest.mark.parametrize("rms", [1e-3, 1e-6, 1e-10])
def test_small_numbers(kernels, rms):
    check(kernels, [70, 0, 61], 384, 320, rms=rms)


def test_every_size_of_a_group(kernels):
    check(kernels, list(range(131)), 128, 64)


def test_the_same_inputs_give_the_same_bits(kernels):
    x_SK, w_G, ends_G, _, _, grad_SN = case([300, 0, 41, 700], 512, 256)
    x_SK.requires_grad_(), w_G.requires_grad_()
    runs = []
    for _ in range(3):
        out = grouped_gemm(x_SK, w_G, ends_G, kernels=kernels)
        runs.append([out[:1041].detach(), *torch.autograd.grad(out, [x_SK, w_G], grad_SN)])
    for run in runs[1:]:
        assert torch.equal(run[0], runs[0][0])
        assert torch.equal(run[1][:1041], runs[0][1][:1041])
        assert torch.equal(run[2], runs[0][2])


def test_rows_past_the_groups_are_left_or_zeroed(kernels):
    x_SK, w_G, ends_G, *_ = case([70, 0, 61], 256, 128, tail=90)
    assert grouped_gemm(x_SK, w_G, ends_G, kernels=kernels)[131:].isnan().all()
    out = grouped_gemm(x_SK, w_G, ends_G, kernels=kernels, zero_tail=True)
    assert (out[131:] == 0).all()
    assert out.isfinite().all()


def test_weight_gradients_accumulate_in_main_grad_once_a_micro_batch(kernels):
    x_SK, w_G, ends_G, _, _, grad_SN = case([200, 0, 333], 384, 256)
    w_G = torch.nn.Parameter(w_G)
    w_G.main_grad = torch.full(w_G.shape, 1000.0, device="cuda")
    w_G.grad_added_to_main_grad = False
    for _ in range(3):
        grouped_gemm(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True, kernels=kernels).backward(grad_SN)
        w_G.grad = None
    once = reference.wgrad(x_SK.float(), grad_SN.float(), ends_G)
    assert relative_error(w_G.main_grad - 1000, 3 * once) < 1e-4
    assert (w_G.main_grad[1] == 1000).all()


@pytest.mark.parametrize(("n", "k"), [(384, 256), (96, 64), (200, 136)])
def test_the_first_gradient_is_written_in_fp32_where_it_may_be(kernels, n, k):
    x_SK, w_G, ends_G, _, _, grad_SN = case([200, 0, 333], n, k)
    w_G = torch.nn.Parameter(w_G)
    w_G.grad_added_to_main_grad, sums = False, []
    for start in (0.0, torch.nan):
        w_G.main_grad, w_G.overwrite_main_grad = torch.full(w_G.shape, start, device="cuda"), start != 0
        for _ in range(2):
            grouped_gemm(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True, kernels=kernels).backward(grad_SN)
            w_G.grad = None
            sums.append(w_G.main_grad.clone())
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])
    assert (sums[2][1] == 0).all()


def test_the_last_expert_beyond_2_to_31_elements(kernels):
    sizes, n, k = [0] * 62 + [128, 130], 14336, 4096  # 3.76e9 weights, 7.5 GB
    assert len(sizes) * n * k > 2**31
    used = sum(sizes)
    w_G = torch.zeros(len(sizes), n, k, device="cuda", dtype=torch.bfloat16)
    w_G[-1] = torch.randn(n, k, device="cuda") / k**0.5
    x_SK, grad_SN = (torch.randn(used, size, device="cuda").bfloat16() for size in (k, n))
    ends_G = torch.tensor(sizes).cumsum(0).to("cuda", torch.int32)
    fn = registry.use("grouped_gemm", "bf16", "cuda", kernels)
    out = fn.forward(x_SK, w_G, ends_G)
    assert relative_error(out[128:], x_SK[128:].float() @ w_G[-1].float().t()) < BOUND * 1.5
    assert (out[:128] == 0).all()
    dx = fn.dgrad(grad_SN, w_G, ends_G)
    assert relative_error(dx[128:], grad_SN[128:].float() @ w_G[-1].float()) < BOUND * 1.5
    dw = fn.wgrad(x_SK, grad_SN, ends_G)
    assert relative_error(dw[-1], grad_SN[128:].float().t() @ x_SK[128:].float()) < BOUND * 1.5
    assert not dw[:62].any()


@pytest.mark.parametrize("kernels", ["hopper"], indirect=True)  # the others have no pace to keep
@pytest.mark.parametrize("programs", [None, 300], ids=["all at once", "more than fit at once"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_programs_that_keep_pace(kernels, monkeypatch, layout, programs):
    """Bit for bit as without a pace; programs that wait for others which cannot run yet give up and finish."""
    fn = registry.use("grouped_gemm", "bf16", "cuda", kernels)
    x_SK, w_G, ends_G, *_ = case([900, 0, 1, 2500, 130, 4000], 1536, 2880, layout=layout)
    monkeypatch.setattr(launch, "PACED_WEIGHT", 2**40)
    alone = fn.forward(x_SK, w_G, ends_G, layout=layout)
    monkeypatch.setattr(launch, "PACED_WEIGHT", 0)
    if programs:
        monkeypatch.setattr(portable, "programs", lambda like: programs)
    for _ in range(3):
        paced = fn.forward(x_SK, w_G, ends_G, layout=layout)
        assert torch.equal(paced[: ends_G[-1]], alone[: ends_G[-1]])


def test_rows_beyond_2_to_31_elements(kernels):
    rows, n, k = 524_416, 4096, 128
    x_SK = torch.randn(rows, k, device="cuda").bfloat16()
    w_G = torch.randn(2, n, k, device="cuda").bfloat16() / k**0.5
    ends_G = torch.tensor([17, rows], device="cuda", dtype=torch.int32)
    fn = registry.use("grouped_gemm", "bf16", "cuda", kernels)
    out = fn.forward(x_SK, w_G, ends_G)
    assert out.numel() > 2**31
    for part in (slice(0, 17), slice(rows - 300, rows)):
        wanted = x_SK[part].float() @ w_G[0 if part.start == 0 else 1].float().t()
        assert relative_error(out[part], wanted) < BOUND * 1.5
    dx = fn.dgrad(out, w_G, ends_G)
    assert relative_error(dx[-300:], out[-300:].float() @ w_G[1].float()) < BOUND * 1.5


def test_strided_operands(kernels):
    if kernels == "hopper":
        with pytest.raises(UserError, match="multiples of 16 bytes"):
            grouped_gemm(*case([20], 64, 65)[:3], kernels=kernels)
        return
    x_SK, w_G, ends_G, *_ = case([20, 33], 66, 71)
    wide = torch.full((x_SK.shape[0], 143), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, 1::2] = x_SK
    out = grouped_gemm(wide[:, 1::2], w_G.transpose(1, 2).contiguous().transpose(1, 2), ends_G, kernels=kernels)
    assert relative_error(out[:53], reference.forward(x_SK, w_G, ends_G)[:53]) < BOUND


GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)


def gathered(tokens, topk, experts, d, seed=0):
    """x `[T, D]`, its permutation into expert order with some choices dropped, and the arguments that gather by it."""
    g = torch.Generator("cuda").manual_seed(seed)
    x_TD = torch.randn(tokens, d, generator=g, device="cuda").bfloat16()
    ids_TK = torch.randint(-1, experts, (tokens, topk), generator=g, device="cuda")
    permutation = sort_by_expert(ids_TK, experts)
    source_S = (permutation.order_S // topk).int()
    source_S[int(permutation.ends_E[-1]) :] = torch.iinfo(torch.int32).max  # never read
    return x_TD, permutation.ends_E, dict(source_S=source_S, slots_TK=permutation.position_TK)


def compare(function, leaves, grad, used, bound=BOUND):
    """`function(name of an implementation, leaves)` for Triton against the reference, each gradient apart, twice."""
    results = {}
    for name in ("triton", "reference"):
        inputs = {key: tensor.clone().requires_grad_() for key, tensor in leaves.items()}
        for _ in range(2):
            out = function(name, inputs)
            grads = torch.autograd.grad(out, list(inputs.values()), grad)
        results[name] = {"out": out[:used].detach()} | {
            key: value[:used] if value.shape[0] == grad.shape[0] else value
            for key, value in zip(inputs, grads, strict=True)
        }
    for key, wanted in results["reference"].items():
        got = results["triton"][key]
        assert got.isfinite().all(), key
        assert relative_error(got, wanted) <= bound, key


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("n", "k"), [(384, 320), (200, 2880), (136, 768), (66, 71)])
def test_gathered_rows(layout, n, k):
    x_TD, ends_G, slots = gathered(150, 4, 6, k)
    g = torch.Generator("cuda").manual_seed(1)
    w_G = torch.randn(6, *((n, k) if layout == "nk" else (k, n)), generator=g, device="cuda").bfloat16()
    grad_SN = torch.randn(600, n, generator=g, device="cuda").bfloat16()
    used = int(ends_G[-1])
    grad_SN[used:] = torch.nan

    def function(kernels, leaves):
        return grouped_gemm(leaves["x"], leaves["w"], ends_G, layout=layout, kernels=kernels, **slots)

    # a token's gradient sums up to four products that were rounded apart
    compare(function, {"x": x_TD, "w": w_G}, grad_SN, used, bound=1.5 * BOUND)


@pytest.mark.parametrize("gate_up", ["stacked", "interleaved"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize(("f", "k"), [(192, 320), (720, 200), (384, 136), (33, 71)])
def test_the_epilogue_is_swiglu(gate_up, layout, gathers, f, k):
    """A product that rounds to the neighbouring bf16 moves the activation as far: a wider bound than a product's."""
    x_TD, ends_G, slots = gathered(150, 4, 6, k)
    used = int(ends_G[-1])
    g = torch.Generator("cuda").manual_seed(1)
    if not gathers:
        x_TD, slots = torch.randn(600, k, generator=g, device="cuda").bfloat16(), {}
        x_TD[used:] = torch.nan
    w_G = torch.randn(6, *((2 * f, k) if layout == "nk" else (k, 2 * f)), generator=g, device="cuda")
    leaves = {
        "x": x_TD,
        "w": (w_G * 3 / k**0.5).bfloat16(),
        "bias": torch.randn(6, 2 * f, generator=g, device="cuda").bfloat16(),
        "probs": torch.rand(600, generator=g, device="cuda"),
    }
    grad_SF = torch.randn(600, f, generator=g, device="cuda").bfloat16()
    leaves["probs"][used:] = grad_SF[used:] = torch.nan

    def function(kernels, leaves):
        return grouped_gemm_swiglu(
            leaves["x"],
            leaves["w"],
            ends_G,
            bias_G2F=leaves["bias"],
            probs_S=leaves["probs"],
            **GPT_OSS,
            gate_up=gate_up,
            layout=layout,
            kernels=kernels,
            **slots,
        )

    compare(function, leaves, grad_SF, used, bound=4e-3)


@pytest.mark.parametrize("kernels", ["triton", "hopper", "hopper_fused"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("f", [384, 720, 64, 8])
def test_every_way_to_an_activation(kernels, layout, f):
    """One kernel ("triton", "hopper_fused"), or a product and then the SwiGLU kernel ("hopper")."""
    try:
        registry.select("grouped_gemm_swiglu", "bf16", "cuda", kernels)
    except UserError as error:
        pytest.skip(str(error))
    x_SK, w_G, ends_G, bias_GN, scale_S, _ = case([70, 0, 61, 260], 2 * f, 512, layout=layout)
    w_G /= 8
    grad_SF = torch.randn(441, f, device="cuda").bfloat16()
    grad_SF[391:] = torch.nan
    results = []
    for name in (kernels, kernels, "reference"):
        leaves = [t.clone().requires_grad_() for t in (x_SK, w_G, bias_GN, scale_S)]
        x, w, bias, probs = leaves
        arguments = dict(bias_G2F=bias, probs_S=probs, **GPT_OSS, layout=layout, kernels=name)
        out = grouped_gemm_swiglu(x, w, ends_G, **arguments)
        grads = torch.autograd.grad(out, leaves, grad_SF)
        results.append([out[:391].detach(), grads[0][:391], *grads[1:3], grads[3][:391]])
        with torch.no_grad():  # without keeping the product
            assert torch.equal(grouped_gemm_swiglu(x, w, ends_G, **arguments)[:391], out[:391])
    for first, second, wanted in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert relative_error(first, wanted) < 4e-3
    arguments = dict(bias_G2F=bias_GN, probs_S=scale_S, **GPT_OSS, layout=layout, kernels=kernels)
    assert grouped_gemm_swiglu(x_SK, w_G, ends_G, **arguments)[391:].isnan().all()
    assert (grouped_gemm_swiglu(x_SK, w_G, ends_G, zero_tail=True, **arguments)[391:] == 0).all()


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("f", [2048, 720, 37])
def test_swiglu_alone(layout, f):
    g = torch.Generator("cuda").manual_seed(0)
    x, grad = (3 * torch.randn(533, columns, generator=g, device="cuda").bfloat16() for columns in (2 * f, f))
    probs = torch.rand(533, generator=g, device="cuda")
    ends_G = torch.tensor([100, 400], device="cuda", dtype=torch.int32)
    for tensor in (x, grad, probs):
        tensor[400:] = torch.nan
    x.requires_grad_(), probs.requires_grad_()
    wanted = swiglu_reference.forward(x[:400].detach(), probs[:400].detach(), **GPT_OSS, layout=layout)
    wanted_grads = swiglu_reference.backward(
        grad[:400], x[:400].detach(), probs[:400].detach(), **GPT_OSS, layout=layout
    )
    runs = []
    for _ in range(2):
        out = swiglu(x, probs, ends_G=ends_G, **GPT_OSS, layout=layout, kernels="triton")
        runs.append([out[:400].detach(), *(t[:400] for t in torch.autograd.grad(out, [x, probs], grad))])
        assert relative_error(runs[-1][0], wanted) < 1e-3  # now and then a last bit of exp rounds the other way
        assert relative_error(runs[-1][1], wanted_grads[0]) < 1e-3
        assert relative_error(runs[-1][2], wanted_grads[1]) < 1e-5
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_gathered_sums_are_the_oracle_s_bit_for_bit():
    g = torch.Generator("cuda").manual_seed(0)
    rows_SD = torch.randn(5000, 2880, generator=g, device="cuda").bfloat16()
    rows_SD[4000:] = torch.nan
    slots_TK = torch.randint(-9, 4500, (777, 8), generator=g, device="cuda")
    ends_G = torch.tensor([9, 4000], device="cuda", dtype=torch.int32)
    got = portable.gather_sum(rows_SD, slots_TK, ends_G)
    assert torch.equal(got, reference.gather_sum(rows_SD, slots_TK, ends_G))


def test_one_group_with_rows_past_its_end(kernels):
    x_SK, _, ends_G, _, _, grad_SN = case([77], 256, 128, tail=4000)
    for _ in range(2):
        dw = registry.use("grouped_gemm", "bf16", "cuda", kernels).wgrad(x_SK, grad_SN, ends_G)
        assert relative_error(dw, reference.wgrad(x_SK, grad_SN, ends_G)) < BOUND


def test_a_compiled_expert_is_one_graph(kernels):
    """Forward and backward through Inductor, with gradients added to main_grad: as without a compiler."""
    x_SK, w_G, ends_G, bias_GN, scale_S, _ = case([70, 0, 61, 260], 768, 512, tail=9)
    results = []
    for compiles in (False, True):
        w13 = torch.nn.Parameter(w_G.clone())
        w13.main_grad, w13.grad_added_to_main_grad = torch.zeros(w13.shape, device="cuda"), False
        x = x_SK.clone().requires_grad_()

        def expert(x, w13=w13):
            arguments = dict(bias_GN=bias_GN, fuse_wgrad_accumulation=True, kernels=kernels)
            return swiglu(grouped_gemm(x, w13, ends_G, **arguments), scale_S)

        out = (torch.compile(expert, fullgraph=True) if compiles else expert)(x)
        out[:391].float().square().sum().backward()
        assert w13.grad_added_to_main_grad
        results.append((out[:391].detach(), x.grad[:391], w13.main_grad))
    for eager, compiled in zip(*results, strict=True):
        assert relative_error(compiled, eager) < 1e-3


def test_the_best_that_serves_the_operands_is_taken():
    x_SK, w_G, *_ = case([20, 33], 64, 64)
    best = registry.select("grouped_gemm", "bf16", "cuda", None, (x_SK, w_G, "nk")).name
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert best == ("hopper" if hopper else "triton")
    assert registry.select("grouped_gemm", "bf16", "cuda", None, (x_SK.float(), w_G.float(), "nk")).name == "triton"
