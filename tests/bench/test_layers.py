"""Who takes part in the MoE layer benchmark: each by a loop over tokens in fp64."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from tests.bench.small import CPU
from tests.bench.small_layers import CLAMPED, worst
from tests.moe.oracle import Weights, dense_moe_oracle

from maniple.bench import layer_operands, layer_ours, layer_peers, moe_layer
from maniple.bench.contender import Absent
from maniple.bench.layer import Layer
from maniple.bench.layer_operands import LAYER_BOUNDS, LayerOperands

pytestmark = pytest.mark.usefixtures("ceilings")


def test_the_oracle_is_a_loop_over_tokens(either):
    """Output and all gradients, by autograd through a loop over tokens in fp64."""
    o = either
    named = {"router": "router_ED", "w13": "w13_GFD", "w2": "w2_GDF", "b13": "b13_GF", "b2": "b2_GD"}
    values = {name: o[name].detach().double().requires_grad_() for name in o.parameters}
    weights = Weights(**{field: values[name] for name, field in named.items() if name in values})
    x_TD = o.x_TD.detach().double().requires_grad_()
    logits_TE = x_TD @ weights.router_ED.t() + values.get("router_bias", 0.0)
    chosen_TK = logits_TE.softmax(-1).gather(1, o.ids_TK)
    probs_TK = chosen_TK / chosen_TK.sum(1, keepdim=True)
    probs_TK.retain_grad()
    out_TD = dense_moe_oracle(x_TD, weights, o.ids_TK, probs_TK, o.activation)
    out_TD.backward(o.grad_TD.double())
    expected = o.expected(o.ids_TK)
    wanted = {"out": out_TD.detach(), "x": x_TD.grad, "probs": probs_TK.grad}
    wanted |= {name: value.grad for name, value in values.items()}
    assert expected.keys() == wanted.keys() | {"x_experts"}
    for name, tensor in wanted.items():
        assert expected[name].dtype == torch.float32
        assert (expected[name] - tensor).norm() < 2e-6 * tensor.norm(), name
    alone_TD = x_TD.detach().requires_grad_()
    dense_moe_oracle(alone_TD, weights, o.ids_TK, probs_TK.detach(), o.activation).backward(o.grad_TD.double())
    assert (expected["x_experts"] - alone_TD.grad).norm() < 2e-6 * alone_TD.grad.norm()
    assert (expected["x"] - expected["x_experts"]).norm() > 1e-2 * expected["x"].norm()


@pytest.mark.parametrize("recipe", moe_layer.RECIPES)
def test_ours_are_right(recipe, either):
    found = list(layer_ours.ours(recipe, either))
    assert [each.role for each in found] == ["selected"] + ["alternative"] * (len(found) - 1)
    assert len(found) == (5 if recipe == "bf16" else 1)
    for each in found:
        for grad_TD in (None, either.grad_TD):
            error = worst(either, each, grad_TD)
            assert error < LAYER_BOUNDS[recipe], (each.name, error)
            if recipe != "bf16":
                assert error > 1e-2, f"{each.name} has no quantization error"


def test_gradients_go_where_it_says(plain):
    writes, adds, leaves_bf16, *_ = layer_ours.ours("bf16", plain)
    for each, dtype in ((writes, torch.float32), (adds, torch.float32), (leaves_bf16, torch.bfloat16)):
        found, _ = each.results(plain.grad_TD)
        assert found["w13"].dtype == found["w2"].dtype == dtype
        assert found["router"].dtype == torch.bfloat16
    for each, times in ((writes, 1), (adds, 3)):
        found, ids_TK = each.results(plain.grad_TD)  # from zero, whatever ran before
        assert max(layer_operands.errors(found, plain.expected(ids_TK)).values()) < LAYER_BOUNDS["bf16"]
        once = plain["w2"].main_grad.clone()
        each.step(plain.grad_TD)
        each.step(plain.grad_TD)
        assert torch.allclose(plain["w2"].main_grad, times * once, rtol=1e-5)
    assert all(tensor.grad is None for tensor in plain.leaves.tensors.values())


def test_transformers_is_right(either):
    block = layer_peers.transformers_block(either)
    assert block.logits == torch.bfloat16
    for grad_TD in (None, either.grad_TD):
        assert 1e-4 < worst(either, block, grad_TD) < LAYER_BOUNDS["bf16"]
    found, _ = block.results(either.grad_TD)
    assert found.keys() == {"out", "x", "w13", "w2", "router"} | ({"router_bias"} if either.shape.clamped else set())
    assert block.leaves.tensors["x"].data_ptr() == either.x_TD.data_ptr()
    if not either.shape.clamped:
        assert block.leaves.tensors["w13"].data_ptr() == either["w13"].data_ptr()


def test_transformers_runs_its_grouped_products(plain, monkeypatch):
    from transformers.integrations import moe

    block, seen = layer_peers.transformers_block(plain), []
    true_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(moe.torch.nn.functional, "grouped_mm", lambda *a, **k: seen.append(1) or true_mm(*a, **k))
    block.forward_only()
    assert len(seen) == 2


class LigerLike(torch.autograd.Function):
    """Takes what `LigerFusedMoEFunction` takes, by its docstring, and computes it in plain torch."""

    @staticmethod
    def forward(ctx, x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32
        ctx.save_for_backward(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
        return LigerLike.compute(x, gate_up_proj, down_proj, top_k_index, top_k_weights)

    @staticmethod
    def compute(x, w13, w2, ids, weights):
        return dense_moe_oracle(x, Weights(torch.empty(0), w13, w2), ids, weights.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        x, w13, w2, ids, weights = ctx.saved_tensors
        leaves = [t.float().requires_grad_() for t in (x, w13, w2, weights)]
        with torch.enable_grad():
            out = LigerLike.compute(*leaves[:3], ids, leaves[3])
        gx, gw13, gw2, gp = torch.autograd.grad(out, leaves, grad.float())
        return gx.to(x), gw13.to(w13), gw2.to(w2), None, gp.to(weights)


def test_liger_gets_what_it_takes(plain, monkeypatch):
    assert "No module named 'liger_kernel'" in layer_peers.liger_layer(plain).reason
    module = types.ModuleType("liger_kernel.ops.fused_moe")
    module.LigerFusedMoEFunction = LigerLike
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", types.ModuleType("liger_kernel.ops"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", module)
    liger = layer_peers.liger_layer(plain)
    found, ids_TK = liger.results(plain.grad_TD)
    assert found.keys() == {"out", "x_experts", "w13", "w2", "probs"}
    assert max(layer_operands.errors(found, plain.expected(ids_TK)).values()) < LAYER_BOUNDS["bf16"]
    assert "routing given" in liger.note
    clamped = layer_peers.liger_layer(LayerOperands(CLAMPED, CPU, 0))
    assert clamped.reason == "has neither biases nor the clamped activation"


def test_peers_that_cannot_run_say_why(plain, monkeypatch):
    *_, liger = layer_peers.peers(plain, liger=True)
    assert liger == Absent("Liger", "peer", "needs a GPU")
    assert [p.name for p in layer_peers.peers(plain, liger=False)] == ["transformers"]
    monkeypatch.setattr(layer_peers, "transformers_block", lambda o: 1 / 0)
    (absent,) = layer_peers.peers(plain, liger=False)
    assert absent.reason == "ZeroDivisionError: division by zero"


def test_a_layer_has_one_name_in_a_contest(either, monkeypatch):
    """On a GPU where the portable kernels are selected, to ask for them is no other variant."""
    twice = [layer_ours.Variant(), layer_ours.Variant(products="reference"), layer_ours.Variant(gradients="bf16")]
    monkeypatch.setattr(layer_ours, "_variants", lambda recipe, device: iter(twice))
    found = list(layer_ours.ours("bf16", either))
    assert [each.name for each in found] == ["reference", "reference, bf16 gradients"]
    assert all(isinstance(each, Layer) for each in found)
