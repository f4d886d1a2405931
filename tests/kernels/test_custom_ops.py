"""Grouped GEMM and SwiGLU as named operators: fake and meta tensors, compiled and exported graphs, dispatch modes."""

import pytest
import torch
from tests.kernels.test_grouped_gemm import case, gather
from tests.kernels.test_swiglu import GPT_OSS
from tests.poison import relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from maniple.kernels.swiglu import swiglu

SIZES, TAIL, K, F = [2, 0, 3], 3, 5, 4


class Names(TorchDispatchMode):
    """Notes the names of our operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "maniple":
            self.seen.append(func._schema.name.removeprefix("maniple::"))
        return func(*args, **(kwargs or {}))


def leaves(gathers=False):
    """x, w13, b13, probs, w2, b2 of an expert MLP that need gradients, ends, and the arguments that gather its rows."""
    x_SK, w_G, ends_G, bias_G2F, probs_S, _ = case(SIZES, k=K, n=2 * F, tail=TAIL)
    g = torch.Generator().manual_seed(5)
    w2_G, b2_G = torch.randn(len(SIZES), K, F, generator=g), torch.randn(len(SIZES), K, generator=g)
    slots = {}
    if gathers:
        x_SK, source_S, slots_TK = gather(SIZES, k=K, tail=TAIL)
        slots = dict(source_S=source_S, slots_TK=slots_TK)
    tensors = [t.clone().requires_grad_() for t in (x_SK, w_G, bias_G2F, probs_S, w2_G, b2_G)]
    return tensors, ends_G, slots


def mlp(tensors, ends_G, slots, *, fused, fuse=False):
    x_SK, w13_G, b13_G, probs_S, w2_G, b2_G = tensors
    shared = dict(zero_tail=True, fuse_wgrad_accumulation=fuse)
    if fused:
        hidden_SF = grouped_gemm_swiglu(
            x_SK, w13_G, ends_G, bias_G2F=b13_G, probs_S=probs_S, **GPT_OSS, **slots, **shared
        )
    else:
        gate_up_S2F = grouped_gemm(x_SK, w13_G, ends_G, bias_GN=b13_G, **slots, **shared)
        hidden_SF = swiglu(gate_up_S2F, probs_S, **GPT_OSS)
    return grouped_gemm(hidden_SF, w2_G, ends_G, bias_GN=b2_G, bias_scale_S=probs_S, **shared)


def gradients(function, tensors, used):
    grads = torch.autograd.grad(function()[:used].square().sum(), tensors)
    return [grad[:used] if grad.shape[0] == used + TAIL else grad for grad in grads]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered"])
def test_a_compiled_graph_is_whole_and_computes_the_same(fused, gathers):
    tensors, ends_G, slots = leaves(gathers)
    used = sum(SIZES)
    eager = gradients(lambda: mlp(tensors, ends_G, slots, fused=fused), tensors, used)
    compiled = torch.compile(lambda: mlp(tensors, ends_G, slots, fused=fused), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for wanted, got in zip(eager, gradients(compiled, tensors, used), strict=True):
            assert relative_error(got, wanted) < 1e-6
    assert relative_error(compiled()[:used], mlp(tensors, ends_G, slots, fused=fused)[:used]) < 1e-6


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_a_compiled_graph_adds_to_main_grad_once_a_micro_batch(fused):
    tensors, ends_G, slots = leaves()
    weights = [torch.nn.Parameter(tensors[i].detach()) for i in (1, 4)]
    tensors[1], tensors[4] = weights
    used = sum(SIZES)
    grads = gradients(lambda: mlp(tensors, ends_G, slots, fused=fused), tensors, used)
    once = grads[1], grads[4]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.full(weight.shape, 10.0), False
    compiled = torch.compile(
        lambda: mlp(tensors, ends_G, slots, fused=fused, fuse=True), backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        compiled()[:used].square().sum().backward()
    for weight, wanted in zip(weights, once, strict=True):
        assert weight.grad_added_to_main_grad
        assert relative_error(weight.main_grad - 10, 2 * wanted) < 1e-5


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_a_dispatch_mode_sees_the_names_and_changes_nothing(fused):
    tensors, ends_G, slots = leaves()
    used = sum(SIZES)
    eager = gradients(lambda: mlp(tensors, ends_G, slots, fused=fused), tensors, used)
    with Names() as names:
        watched = gradients(lambda: mlp(tensors, ends_G, slots, fused=fused), tensors, used)
    for wanted, got in zip(eager, watched, strict=True):
        assert torch.equal(got, wanted)
    expected = ["grouped_gemm_swiglu", "grouped_gemm"] if fused else ["grouped_gemm", "swiglu", "grouped_gemm"]
    gradient = ["grouped_gemm_wgrad", "grouped_gemm_dgrad", "grouped_gemm_bias_grad"]
    assert names.seen == [*expected, *gradient, "swiglu_backward", *gradient]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_without_values_there_are_shapes_forward_and_backward(device, fused, gathers):
    tensors, _, slots = leaves(gathers)
    mode = FakeTensorMode() if device == "fake" else torch.device("meta")
    with mode:
        away = [torch.empty(t.shape, requires_grad=True) for t in tensors]
        slots = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in slots.items()}
        out = mlp(away, torch.empty(len(SIZES), dtype=torch.int32), slots, fused=fused)
        assert out.shape == (sum(SIZES) + TAIL, K)
        grads = torch.autograd.grad(out.sum(), away)
        assert [grad.shape for grad in grads] == [t.shape for t in tensors]


def test_an_exported_program_has_the_operators():
    tensors, ends_G, slots = leaves(gathers=True)

    class Expert(torch.nn.Module):
        def forward(self, tensors, ends_G, slots):
            return mlp(tensors, ends_G, slots, fused=True)

    detached = [t.detach() for t in tensors]
    program = torch.export.export(Expert(), (detached, ends_G, slots))
    targets = {str(node.target) for node in program.graph.nodes if "maniple" in str(node.target)}
    assert targets == {"maniple.grouped_gemm_swiglu.default", "maniple.grouped_gemm.default"}
    wanted = mlp(detached, ends_G, slots, fused=True)
    assert relative_error(program.module()(detached, ends_G, slots), wanted) < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_schemas_fakes_and_gradients_agree():
    """PyTorch's own check of a custom operator; operands without a tail, whose values would be undefined."""
    x_SK, w_G, ends_G, bias_GN, scale_S, grad_SN = (
        t.requires_grad_() if t.is_floating_point() else t for t in case(SIZES, k=K, n=2 * F, tail=0)
    )
    x_TK, source_S, slots_TK = gather(SIZES, k=K, tail=0)
    x_TK.requires_grad_()
    how = "bf16", None, None
    ops = torch.ops.maniple
    plain, gathered = (bias_GN, scale_S, None, None, None), (bias_GN, scale_S, source_S, slots_TK, None)
    form = 1.702, 7.0, 1.0, "stacked"
    checks = [
        (ops.grouped_gemm, (x_SK, w_G, ends_G, *plain, "nk", True, *how)),
        (ops.grouped_gemm, (x_TK, w_G, ends_G, *gathered, "nk", True, *how)),
        (ops.grouped_gemm_swiglu, (x_SK, w_G, ends_G, *plain, *form, "nk", True, True, *how)),
        (ops.grouped_gemm_dgrad, (grad_SN.detach(), w_G.detach(), ends_G, "nk", True, *how)),
        (ops.grouped_gemm_wgrad, (x_SK.detach(), grad_SN.detach(), ends_G, None, "nk", *how)),
        (
            ops.grouped_gemm_wgrad_into,
            (x_SK.detach(), grad_SN.detach(), ends_G, None, torch.zeros(w_G.shape), True, "nk", *how),
        ),
        (ops.grouped_gemm_bias_grad, (grad_SN.detach(), ends_G, bias_GN.detach(), scale_S.detach(), *how)),
        (ops.grouped_gemm_gather_sum, (x_SK.detach(), slots_TK, ends_G, "bf16", None)),
        (ops.swiglu, (grad_SN, scale_S, ends_G, *form, None)),
        (ops.swiglu_backward, (grad_SN.detach()[:, :F], grad_SN.detach(), scale_S.detach(), ends_G, *form, None)),
    ]
    for operator, arguments in checks:
        torch.library.opcheck(operator.default, arguments)
