"""The MoE layer benchmark on a CPU: whether everyone is checked, counted and judged right."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.moe.oracle import Weights, dense_moe_oracle

from maniple import cli
from maniple.bench import bars, layer, layer_operands, layer_ours, layer_peers, moe_layer, rows, timing
from maniple.bench.contender import Absent
from maniple.bench.layer import Layer
from maniple.bench.layer_operands import LAYER_BOUNDS, LayerOperands
from maniple.bench.layer_shapes import NAMED, PARTS, LayerShape, at_random, of_card, of_part
from maniple.errors import UserError
from maniple.models import load_card

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
PLAIN = LayerShape("m", 64, 48, 6, 3, 40, skew=1.0)
CLAMPED = LayerShape("c", 64, 48, 6, 2, 40, clamped=True)
STAGES = {"router", "routing", "dispatch", "experts", "combine"}


@pytest.fixture(scope="module", params=[PLAIN, CLAMPED], ids=["plain", "clamped"])
def operands(request):
    return LayerOperands(request.param, CPU, 0)


@pytest.fixture(scope="module")
def plain():
    return LayerOperands(PLAIN, CPU, 0)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    """Not measured again for every run."""
    found = moe_layer.attained.Ceilings({"bf16": 1e12, "fp8": 2e12, "mxfp8": 2e12}, 1e11)
    monkeypatch.setattr(moe_layer.attained, "measure", lambda *args, **kwargs: found)
    return found


def worst(o, entrant, grad_TD):
    """The largest error of a layer's results, by the oracle of its own choice."""
    found, ids_TK = entrant.results(grad_TD)
    return max(layer_operands.errors(found, o.expected(ids_TK)).values())


def plan(**changes):
    settings = dict(shapes=[PLAIN], recipes=["bf16"], device=CPU, rounds=1, seed=0, command="command")
    return moe_layer.Plan(**settings | changes)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_that_peers_were_measured_at():
    sizes = [(s.hidden, s.ffn, s.experts, s.topk, s.tokens) for part in NAMED.values() for s in part]
    assert sizes == [
        (2048, 768, 128, 8, 16_384),
        (2048, 768, 128, 8, 32_768),
        (7168, 2048, 32, 8, 4_096),
        (4096, 1536, 16, 2, 16_384),
        (2880, 2880, 32, 4, 16_384),
    ]
    for name, part in NAMED.items():
        card = load_card(name)
        assert {(s.hidden, s.ffn) for s in part} == {(card.hidden_size, card.moe.expert_ffn_size)}
    assert [s.clamped for part in NAMED.values() for s in part] == [False] * 4 + [True]
    assert (*NAMED, "random") == PARTS


def test_random_shapes_are_seeded_and_odd():
    first, second = of_part("random", 7)
    assert (first, second) == at_random(7)
    assert at_random(7) != at_random(8)
    for shape in (first, second):
        assert shape.hidden % 16 == shape.ffn % 16 == 8
        assert shape.tokens % 2 == 1
        assert 60_000 < shape.rows <= 65_536
        assert 2 <= shape.topk < shape.experts
    assert (first.skew, second.skew) == (0.0, 1.0)


def test_a_cards_layer():
    assert of_card(load_card("deepseek-v3"), tokens=9, expert_parallel_size=8) == LayerShape(
        "deepseek-v3", 7168, 2048, 32, 8, 9
    )
    assert of_card(load_card("gpt-oss-20b"), tokens=9).clamped
    assert of_card(load_card("qwen3-30b-a3b"), tokens=9, expert_parallel_size=64).topk == 2
    with pytest.raises(UserError, match="3 does not divide the 128 experts"):
        of_card(load_card("qwen3-30b-a3b"), tokens=9, expert_parallel_size=3)
    with pytest.raises(UserError, match="nothing to measure"):
        of_card(load_card("qwen3-30b-a3b"), tokens=0)


def test_counts_by_hand(operands):
    shape = operands.shape
    assert shape.flops == 2 * shape.rows * (2 * 48 * 64 + 64 * 48)
    assert sum(shape.sizes) == shape.rows == shape.tokens * shape.topk
    facts = shape.facts()
    assert (facts["n"], facts["k"], facts["rows"], facts["largest_group"]) == (96, 64, shape.rows, max(shape.sizes))


def test_skew_makes_experts_uneven():
    even, uneven = (LayerOperands(LayerShape("s", 64, 8, 16, 4, 1000, skew=s), CPU, 0).shape.sizes for s in (0.0, 1.0))
    assert max(even) < 1.6 * min(even)
    assert max(uneven) > 4 * min(uneven)


# --- what is right ----------------------------------------------------------------------------------------------------


def test_the_oracle_is_a_loop_over_tokens(operands):
    """Output and all gradients, by autograd through a loop over tokens in fp64."""
    o = operands
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
def test_ours_are_right(recipe, operands):
    found = list(layer_ours.ours(recipe, operands))
    assert [each.role for each in found] == ["selected"] + ["alternative"] * (len(found) - 1)
    assert len(found) == (5 if recipe == "bf16" else 1)
    for each in found:
        for grad_TD in (None, operands.grad_TD):
            error = worst(operands, each, grad_TD)
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


def test_transformers_is_right(operands):
    block = layer_peers.transformers_block(operands)
    assert block.logits == torch.bfloat16
    for grad_TD in (None, operands.grad_TD):
        assert 1e-4 < worst(operands, block, grad_TD) < LAYER_BOUNDS["bf16"]
    found, _ = block.results(operands.grad_TD)
    assert found.keys() == {"out", "x", "w13", "w2", "router"} | ({"router_bias"} if operands.shape.clamped else set())
    assert block.leaves.tensors["x"].data_ptr() == operands.x_TD.data_ptr()
    if not operands.shape.clamped:
        assert block.leaves.tensors["w13"].data_ptr() == operands["w13"].data_ptr()


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


# --- what is wrong ----------------------------------------------------------------------------------------------------


def held(o, entrant, op=moe_layer.STEP):
    """What a contest says of one layer: (error, reason)."""
    contest = moe_layer._contest(op, "bf16", o, [entrant], None)
    (row,) = moe_layer.hold(contest, moe_layer.attained.measure(CPU), CPU, 1)
    return row["error"], row["not_run"]


@pytest.mark.parametrize("name", ["x", "w13", "w2", "router", "router_bias", "b13", "b2"])
def test_every_gradient_is_checked(name):
    o = LayerOperands(CLAMPED, CPU, 0)
    right = next(layer_ours.ours("bf16", o))
    assert held(o, right)[1] is None
    wrong = replace(right, unpack=lambda grads: grads | {name: grads[name] * 1.1})
    assert "wrong: its error is" in held(o, wrong)[1]
    part = replace(right, unpack=lambda grads: grads | {name: grads[name].index_fill(0, torch.tensor([1]), 0)})
    if name != "x":  # a row of 40
        assert "wrong: its error is" in held(o, part)[1]
    absent = replace(right, unpack=lambda grads: grads | {name: torch.full_like(grads[name], torch.nan)})
    assert "wrong: its error is nan" in held(o, absent)[1]


@pytest.mark.parametrize("op", [moe_layer.FORWARD, moe_layer.STEP])
def test_outputs_and_choices_are_checked(op, plain):
    right = next(layer_ours.ours("bf16", plain))

    def off(mark=None):
        out_TD, ids_TK = right.forward()
        return out_TD * 1.02, ids_TK

    def other(mark=None):  # an expert that another token chose, consistently
        ids_TK = plain.ids_TK.roll(1, 0)
        return right.forward()[0], ids_TK

    assert held(plain, right, op)[1] is None
    assert "wrong: its error is" in held(plain, replace(right, forward=off), op)[1]
    reason = held(plain, replace(right, forward=other), op)[1]
    assert "ValueError: a logit left out is larger than a chosen one" in reason


def test_near_ties_are_bf16s_own():
    """Two experts whose logits differ by less than bf16 can tell may be chosen in turns by bf16, not by fp32."""
    plain = LayerOperands(PLAIN, CPU, 0)
    ids_TK = plain.ids_TK.clone()
    assert plain.misrouted(ids_TK) == 0
    logits_E = plain.logits_TE[0]
    best = logits_E.argsort(descending=True)
    plain.logits_TE[0, best[3]] = logits_E[best[2]] - 1e-3 * logits_E.abs().max()
    ids_TK[0, ids_TK[0] == best[2]] = best[3]
    missed = plain.misrouted(ids_TK)
    assert missed == pytest.approx(1e-3, rel=1e-3)
    bounds = layer_operands.CHOICE_BOUNDS
    assert bounds[torch.float32] < missed < bounds[torch.bfloat16]


def test_a_missing_gradient_is_an_error(plain):
    right = next(layer_ours.ours("bf16", plain))
    unused = layer_operands.Leaves({"nothing": torch.zeros(1, requires_grad=True)})
    assert "there are no gradients of nothing" in held(plain, replace(right, leaves=unused))[1]


# --- memory, stages, time ---------------------------------------------------------------------------------------------


def test_gradients_are_let_go_and_peaks_are_over_what_is_there(plain, monkeypatch):
    state = types.SimpleNamespace(now=100, peak=100)
    cuda = types.SimpleNamespace(
        synchronize=lambda device: None,
        memory_allocated=lambda device: state.now,
        reset_peak_memory_stats=lambda device: setattr(state, "peak", state.now),
        max_memory_allocated=lambda device: state.peak,
    )
    monkeypatch.setattr(layer, "torch", types.SimpleNamespace(cuda=cuda))
    state.peak = 9000  # of what ran before
    assert layer.peak_bytes(lambda: setattr(state, "peak", 350), torch.device("cuda")) == 250
    assert layer.peak_bytes(lambda: None, CPU) is None
    out = torch.zeros(4)

    def forward():
        state.now += 16 + 90
        return out, out

    assert layer.saved_bytes(types.SimpleNamespace(forward=forward), torch.device("cuda")) == 90


def test_stages_end_in_their_order(operands):
    for each in layer_ours.ours("bf16", operands):
        stages = layer.stage_milliseconds(each, operands.grad_TD, lambda: None)
        names = list(stages)
        assert names[:5] == ["router", "routing", "dispatch", "experts", "combine"]
        assert set(names[5:]) == {f"{stage} backward" for stage in STAGES}
        assert names[5:7] == ["combine backward", "experts backward"]
        assert names[-2:] == ["routing backward", "router backward"]
        assert all(took >= 0 for took in stages.values())


def test_a_stage_has_its_own_time(plain, monkeypatch):
    true_route = layer_ours.route

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return true_route(*args, **kwargs)

    monkeypatch.setattr(layer_ours, "route", slow)
    stages = layer.stage_milliseconds(next(layer_ours.ours("bf16", plain)), plain.grad_TD, lambda: None)
    assert stages["routing"] > 50
    assert stages["router"] < 50


def test_kernels_are_named_counted_and_timed():
    a = torch.randn(64, 64)
    found = layer.kernel_milliseconds(lambda: [a @ a, a @ a], CPU)
    (product,) = [each for each in found if each[0] == "aten::mm"]
    assert product[1] == 2
    assert 0 < product[2] < 100
    assert [took for *_, took in found] == sorted((took for *_, took in found), reverse=True)


def test_the_host_gets_ahead_by_several_gigabytes(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            done.append("event")

        def elapsed_time(self, end):
            return 1.0

    flush = types.SimpleNamespace(zero_=lambda: done.append("flush"))
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda device: None)
    monkeypatch.setattr(timing, "torch", types.SimpleNamespace(cuda=cuda, empty=lambda *a, **k: flush, uint8=None))
    timing.interleaved({"a": lambda: done.append("a")}, torch.device("cuda"), 1, 3)
    turn = ["flush"] * 3 + ["event", "a", "event"]
    assert done == ["a"] * 3 + ["event", "a", "event"] + turn * 2  # the first of a turn does not count


def test_what_is_not_ready_in_time_is_a_row(plain, monkeypatch):
    monkeypatch.setattr(moe_layer, "PATIENCE", 0.05)
    right = next(layer_ours.ours("bf16", plain))

    def slow(mark=None):
        time.sleep(2)
        return right.forward()

    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    assert held(plain, replace(right, forward=slow))[1] == "TimeoutError: not ready after 0 s"
    assert time.monotonic() - start < 1
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# --- the run ----------------------------------------------------------------------------------------------------------


def test_rows_say_what_was_measured():
    forward, step = moe_layer.run(plan(), lambda what: None)
    assert [row["implementation"] for row in step] == [
        "reference",
        "reference, gradients added",
        "reference, bf16 gradients",
        "reference, rows let go, bf16 gradients",
        "reference, rows gathered by fc1",
        "transformers",
    ]
    for row in (*forward, *step):
        flops = 6 * 120 * 64 * 48 * (3 if row["op"] == "layer_step" else 1)
        assert row["tflops"] == pytest.approx(flops / row["milliseconds"] / 1e9)
        assert (row["benchmark"], row["matrix"], row["tokens"], row["topk"]) == ("moe-layer", "layer", 40, 3)
        assert row["not_run"] is None
        assert row["error"] < LAYER_BOUNDS["bf16"]
        assert "transformers" in row["versions"]
        json.dumps(row, allow_nan=False)
    assert set(step[0]["ratios"]) == {"transformers"}
    assert step[0]["note"] == "swiglu reference, routing reference, permute reference, gradients written in fp32"
    assert set(step[0]["stages"]) == STAGES | {f"{stage} backward" for stage in STAGES}
    assert not forward[0]["stages"]
    assert not step[-1]["stages"]


def test_low_precision_is_beside_our_bf16_and_keeps_its_weights(monkeypatch):
    made = []
    true_quantize = layer_ours.quantize.cache.quantize_weight
    monkeypatch.setattr(
        layer_ours.quantize.cache, "quantize_weight", lambda *a, **k: made.append(1) or true_quantize(*a, **k)
    )
    (forward, step) = moe_layer.run(plan(recipes=["fp8_block"]), lambda what: None)
    assert [row["implementation"] for row in step] == ["reference"]
    assert set(step[0]["ratios"]) == set(forward[0]["ratios"]) == {bars.OUR_BF16}
    assert len(made) == 2  # w13 and w2, once each
    assert "quantize" in step[0]["sources"]


def test_peaks_of_peers_are_over_ours():
    found = [
        {"implementation": "a", "role": "selected", "peak_bytes": 100},
        {"implementation": "p", "role": "peer", "peak_bytes": 150},
        {"implementation": "q", "role": "peer", "peak_bytes": None},
    ]
    assert moe_layer._peak_ratios(found[0], found) == {"p": 1.5}
    assert moe_layer._peak_ratios(found[1], found) == {}


def test_what_is_left_out_is_said_at_the_end(monkeypatch):
    run = moe_layer.run(plan(limit=-1.0), lambda what: None)
    with pytest.raises(UserError, match="left out: m 40 tokens bf16: the time was up"):
        list(run)
    true_operands = moe_layer.LayerOperands

    def big(shape, *rest):
        if shape.tokens > 40:
            raise UserError("needs 9 GB")
        return true_operands(shape, *rest)

    monkeypatch.setattr(moe_layer, "LayerOperands", big)
    run = moe_layer.run(plan(shapes=[replace(PLAIN, tokens=41), PLAIN]), lambda what: None)
    assert {row["tokens"] for row in (*next(run), *next(run))} == {40}
    with pytest.raises(UserError, match="left out: m 41 tokens bf16: needs 9 GB"):
        next(run)


def test_the_first_shape_has_all_variants(monkeypatch):
    asked = []
    monkeypatch.setattr(moe_layer, "ours", lambda recipe, o, variants: asked.append(variants) or [])
    monkeypatch.setattr(moe_layer, "peers", lambda o, liger: asked.append(liger) or [])
    qwen = replace(PLAIN, model="qwen3-30b-a3b-tiny", tokens=8)
    for changes in ({}, {"variants": True}, {"liger": False}):
        list(moe_layer.run(plan(shapes=[PLAIN, qwen], **changes), lambda what: None))
    assert asked == ["all", False, "few", True, "all", False, "all", True, "all", False, "few", False]


def test_few_and_selected_are_the_first_ones(plain):
    assert [each.name for each in layer_ours.ours("bf16", plain, "selected")] == ["reference"]
    assert layer_ours._COUNT == {"selected": 1, "few": 5, "all": None}


def test_variants_on_a_gpu(monkeypatch):
    def select(op, recipe, device, *rest):
        return types.SimpleNamespace(name="reference" if op in ("routing", "permute") else "hopper")

    monkeypatch.setattr(layer_ours.registry, "select", select)
    gpu = torch.device("cuda")
    first, turned, *others = layer_ours._variants("bf16", gpu)
    assert first == layer_ours.Variant()
    assert turned == layer_ours.Variant(routing="triton", permute="triton")
    assert all((v.routing, v.permute) == ("triton", "triton") for v in others)
    assert [layer_ours._name(v, {"products": v.products or "hopper"}) for v in others] == [
        "hopper, triton routing and permutation, gradients added",
        "hopper, triton routing and permutation, bf16 gradients",
        "hopper, triton routing and permutation, rows let go, bf16 gradients",
        "hopper, triton routing and permutation, rows gathered by fc1",
        "hopper, triton routing and permutation, fc1 hopper_fused",
        "triton, triton routing and permutation",
        "triton, triton routing and permutation, rows gathered by fc1",
    ]
    assert len(list(layer_ours._variants("fp8_block", gpu))) == 2
    monkeypatch.setattr(layer_ours.registry, "select", lambda *a: types.SimpleNamespace(name="triton"))
    _, turned, other, *_ = layer_ours._variants("bf16", gpu)
    assert (turned.routing, turned.permute) == ("reference", "reference")
    assert other == layer_ours.Variant(gradients="added")


def test_what_cannot_run_is_absent(plain, monkeypatch):
    fused = layer_ours._made(layer_ours.Variant(fc1="hopper_fused"), "alternative", plain)
    assert isinstance(fused, Absent)
    assert "cannot use hopper_fused" in fused.reason


# --- bars -------------------------------------------------------------------------------------------------------------


def judged(model, recipe, ratios, peaks, device="cuda"):
    row = {"op": "layer_step", "recipe": recipe, "model": model, "matrix": "layer", "groups": 2, "n": 8, "k": 8}
    row |= {"rows": 9, "tokens": 9, "implementation": "hopper", "role": "selected", "milliseconds": 1.0}
    row |= {"not_run": None, "ratios": ratios, "peak_ratios": peaks, "hardware": {"device": device}}
    return [(v.bar.of, v.bar.peers, v.word, v.measured) for v in bars.verdicts([row])]


def test_verdicts_of_layers():
    hf, liger, both = ("transformers",), ("Liger",), ("transformers", "Liger")
    assert judged(
        "qwen3-30b-a3b", "bf16", {"transformers": 2.1, "Liger": 1.59}, {"transformers": 1.8, "Liger": 0.9}
    ) == [
        ("time", hf, "reached", 2.1),
        ("time", liger, "missed", 1.59),
        ("memory", both, "missed", 0.9),
    ]
    assert judged("random-1-0", "bf16", {"transformers": 1.5}, {"transformers": 1.2}) == [
        ("time", hf, "reached", 1.5),
        ("memory", hf, "reached", 1.2),
    ]
    assert judged("deepseek-v3", "fp8_block", {"our bf16": 1.19}, {}) == [("time", ("our bf16",), "missed", 1.19)]
    assert judged("qwen3-30b-a3b", "fp8_block", {"our bf16": 1.19}, {}) == []
    assert {word for _, _, word, _ in judged("gpt-oss-20b", "bf16", {}, {})} == {"not measured"}
    assert {word for _, _, word, _ in judged("gpt-oss-20b", "bf16", {}, {}, "cpu")} == {"not measured"}


def test_a_verdict_says_what_of():
    rows_ = [{"op": "layer_step", "recipe": "bf16", "model": "m", "matrix": "layer", "groups": 2, "n": 8, "k": 8}]
    rows_[0] |= {"rows": 9, "tokens": 9000, "implementation": "hopper", "role": "selected", "milliseconds": 1.0}
    rows_[0] |= {"not_run": None, "ratios": {}, "peak_ratios": {"transformers": 1.25}, "hardware": {"device": "cuda"}}
    _, memory = bars.verdicts(rows_)
    wanted = "wanted 1.00 x transformers's peak memory over ours"
    assert str(memory) == f"reached      bf16 layer_step m layer 9,000 tokens: 1.250, {wanted}"


# --- the command, the script, the guide -------------------------------------------------------------------------------


def test_the_command_measures_and_writes(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words = ["--quick", "--recipe", "bf16", "--json", "--tokens", "24", "--model", "gpt-oss-20b", "--out", str(file)]
    assert cli.main(["bench", "moe-layer", *words]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert found == rows.read(file)
    assert {(row["model"], row["tokens"], row["op"]) for row in found} == {
        ("gpt-oss-20b-tiny", 24, "layer_forward"),
        ("gpt-oss-20b-tiny", 24, "layer_step"),
    }
    assert "this is a CPU" in err
    assert str(tmp_path) not in found[0]["command"]


def test_the_guide_has_every_field_and_bar():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    forward, _ = moe_layer.run(plan(), lambda what: None)
    assert not [field for field in forward[0] if f"`{field}`" not in page]
    lines = []
    for bar in bars.LAYER_BARS:
        models = ", ".join(bar.models) if bar.models else f"all but {', '.join(bar.besides)}"
        over = ", ".join(bar.peers)
        lines.append(f"| {', '.join(bar.ops)} | {bar.recipe} | {models} | {over} | {bar.of} | {bar.wanted:.2f} |")
    assert re.findall(r"^\| layer_step \|.*\| (?:time|memory) \| .*\|$", page, re.MULTILINE) == lines
    for part, shapes in NAMED.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| `{part}` |"))
        for shape in shapes:
            for number in (shape.hidden, shape.ffn, shape.experts, shape.topk, shape.tokens):
                assert f"{number:,}" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "gpt-5"), "gpt-5"),
        (("--recipe", "fp4"), "there is no such recipe; choose from bf16, fp8_block, fp8, mxfp8"),
        (("--tokens", "0"), "there is nothing to measure"),
        (("--variant", "huge"), "give full or tiny"),
        (("--device", "tpu"), "give auto, cpu or gpu"),
        (("--out", "gone/rows.jsonl"), "there is no folder gone; make it first"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", "moe-layer", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("moe_layer_script", ROOT / "benchmarks" / "moe_layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_measures_and_judges(script, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words = ["--quick", "--recipe", "bf16", "--only", "random", "--seed", "5", "--out", str(file)]
    assert script.main(words) == 0
    out = capsys.readouterr().out
    assert "seed 5" in out
    assert "by stage" in out
    assert {row["model"] for row in rows.read(file)} == {"random-5-0", "random-5-1"}
    assert "not measured bf16 layer_step random-5-0 layer" in out
    assert script.main(["--verdicts", str(file)]) == 0
    assert out.endswith(capsys.readouterr().out)


@pytest.mark.parametrize("end", [KeyboardInterrupt, UserError])
def test_every_end_leaves_rows_and_verdicts(end, script, tmp_path, capsys, monkeypatch):
    true_hold = moe_layer.hold

    def hold(contest, *rest):
        if contest.op == moe_layer.STEP:
            raise end("enough")
        return true_hold(contest, *rest)

    monkeypatch.setattr(moe_layer, "hold", hold)
    file = tmp_path / "rows.jsonl"
    words = ["--quick", "--recipe", "bf16", "--only", "deepseek-v3", "--seed", "5", "--out", str(file)]
    with pytest.raises(end):
        script.main(words)
    assert {row["op"] for row in rows.read(file)} == {"layer_forward"}
    out = capsys.readouterr().out
    assert "deepseek-v3 layer: N 96" in out
    assert "Bars, a peer's time" in out


def test_a_layer_has_one_name_in_a_contest(operands, monkeypatch):
    """On a GPU where the portable kernels are selected, to ask for them is no other variant."""
    twice = [layer_ours.Variant(), layer_ours.Variant(products="reference"), layer_ours.Variant(gradients="bf16")]
    monkeypatch.setattr(layer_ours, "_variants", lambda recipe, device: iter(twice))
    found = list(layer_ours.ours("bf16", operands))
    assert [each.name for each in found] == ["reference", "reference, bf16 gradients"]
    assert all(isinstance(each, Layer) for each in found)
