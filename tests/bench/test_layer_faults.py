"""What is wrong with a layer is found, and what it takes is counted."""

from __future__ import annotations

import signal
import time
import types
from dataclasses import replace

import pytest
import torch
from tests.bench.small import CPU
from tests.bench.small_layers import CLAMPED, PLAIN, STAGES, held

from maniple.bench import layer, layer_operands, layer_ours, moe_layer, timing
from maniple.bench.layer_operands import LayerOperands

pytestmark = pytest.mark.usefixtures("ceilings")


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


def test_stages_end_in_their_order(either):
    for each in layer_ours.ours("bf16", either):
        stages = layer.stage_milliseconds(each, either.grad_TD, lambda: None)
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
