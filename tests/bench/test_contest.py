"""A contest of products, of quantization and of whole expert MLPs: its rows, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.bench.small import CEILINGS, CPU, SHAPE

from maniple.bench import bars, contest, grouped_gemm, mlp, quantizing, timing
from maniple.bench.contender import Absent, Contender
from maniple.bench.operands import BOUNDS, make
from maniple.bench.ours import ours
from maniple.bench.shapes import OPS, Shape
from maniple.kernels import quantize, sources


def held(entrants, baselines=(), error=lambda contender: 1e-3, monkeypatch=None):
    """Rows of a contest whose times are its contenders' notes."""
    notes = {e.name: float(e.note) for e in [*entrants, *baselines] if isinstance(e, Contender)}
    monkeypatch.setattr(
        contest, "interleaved", lambda calls, *rest: {name: timing.Times.of([notes[name]]) for name in calls}
    )
    used = ("grouped_gemm",)
    found = contest.Contest("forward", "bf16", SHAPE, entrants, 1e9, 1e7, "bf16", used, error, 3e-3, [*baselines])
    return contest.hold(found, CEILINGS, CPU, 1)


def test_rows_say_time_rate_floor_and_ratios(monkeypatch):
    entrants = [
        Contender("a", "selected", lambda: None, note="2"),
        Contender("b", "alternative", lambda: None, note="4"),
        Contender("p", "peer", lambda: None, note="3", multiple=64),
        Contender("d", "ceiling", lambda: None, note="1"),
        Absent("q", "peer", "is not installed"),
    ]
    a, b, p, d, q = held(entrants, [Contender("base", "alternative", lambda: None, note="5")], monkeypatch=monkeypatch)
    assert (a["milliseconds"], a["tflops"], a["gb_per_s"]) == (2.0, 0.5, 5.0)
    assert (a["floor_milliseconds"], a["floor_of"], a["floor_share"]) == (1.0, "operations", 0.5)
    assert a["ratios"] == {"p": 1.5, "d": 0.5, "base": 2.5}
    assert b["ratios"]["p"] == 0.75
    assert p["ratios"] == d["ratios"] == {}
    assert (p["group_multiple"], a["group_multiple"]) == (64, 1)
    assert p["largest_group"] % 64 == 0
    assert (q["milliseconds"], q["not_run"], q["failed"]) == (None, "is not installed", False)
    assert a["sources"] == {"grouped_gemm": sources.digest("grouped_gemm")}


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_result_has_no_time(error, monkeypatch):
    entrants = [
        Contender("a", "selected", lambda: None, note="2"),
        Contender("p", "peer", lambda: None, note="3"),
    ]
    a, p = held(entrants, error=lambda c: error if c.name == "p" else 1e-3, monkeypatch=monkeypatch)
    assert "wrong: its error is" in p["not_run"]
    assert p["failed"]
    assert p["milliseconds"] is None
    assert a["ratios"] == {}
    json.dumps(p, allow_nan=False)


def test_errors_are_found_in_every_part(operands):
    for op in OPS:
        operands.main_grad_GNK.zero_()
        good = next(ours(op, "bf16", operands, None)).call()
        for where in ((-1, -1), (0, -1)) if op in ("forward", "dgrad") else ((-1, -1, -1), (0, -1, -1)):
            bad = good.clone()
            bad[where] += 10
            assert operands.error(op, bad) > BOUNDS["bf16"] > operands.error(op, good), (op, where)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8"])
def test_quantization_is_checked_both_ways(recipe, operands, monkeypatch):
    found = list(quantizing.contests(recipe, operands))
    assert [each.op for each in found] == ["quantize_rows", "quantize_weight"] + ["emulate_rows"] * (recipe == "mxfp8")
    for each in found:
        (selected,) = each.entrants
        assert 1e-2 < each.error(selected) < each.bound
    true_rows = quantize.quantize_rows

    def turned_wrong(*args, **kwargs):
        made = true_rows(*args, **kwargs)
        wrong = replace(made.columnwise, scales=made.columnwise.scales.flip(0))
        return replace(made, columnwise=wrong)

    monkeypatch.setattr(quantize, "quantize_rows", turned_wrong)
    if recipe != "fp8":  # which has one scale
        assert found[0].error(found[0].entrants[0]) > found[0].bound


def test_bytes_of_quantization_by_hand(operands):
    rows_, weight = list(quantizing.contests("fp8_block", operands))
    padded = 128 + 256 + 128 + 128 + 128  # 5, 130, 1, 77 and 43 rows, the empty group none
    assert rows_.moved == 2 * 256 * 64 + (1 + 1 / 32) * (256 + padded) * 64
    assert weight.moved == 4 * 6 * 48 * 64


@pytest.mark.parametrize("recipe", grouped_gemm.RECIPES)
def test_the_mlp_is_right_and_counted(recipe, monkeypatch):
    fc1 = make(Shape("m", "fc1", 96, 64, SHAPE.sizes), CPU, 0)
    fc2 = make(Shape("m", "fc2", 64, 48, SHAPE.sizes), CPU, 1)
    experts = mlp.Experts(fc1, fc2)
    assert experts.flops == 18 * 256 * 48 * 64
    found = mlp.contest(recipe, experts, None)
    for entrant in [*found.entrants, *found.baselines]:
        fc1.main_grad_GNK.zero_()
        fc2.main_grad_GNK.zero_()
        assert found.error(entrant) < found.bound
        assert fc1.main_grad_GNK.abs().sum() > 0 < fc2.main_grad_GNK.abs().sum()
    if recipe == "bf16":
        assert not found.baselines
    else:
        assert [b.name for b in found.baselines] == [bars.OUR_BF16, bars.OUR_FUSED]
    whole = mlp.expert_mlp
    monkeypatch.setattr(mlp, "swiglu", lambda x, probs: x[:, ::2] * probs[:, None].to(x))
    monkeypatch.setattr(mlp, "expert_mlp", lambda x, probs, *others, **how: whole(x, 2 * probs, *others, **how))
    wrong = mlp.contest(recipe, experts, None)
    assert wrong.error(wrong.entrants[0]) > wrong.bound
