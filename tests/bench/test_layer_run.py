"""A run of the MoE layer benchmark: which variants, and its rows."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest
import torch
from tests.bench.small_layers import PLAIN, STAGES, plan

from maniple.bench import bars, layer_ours, moe_layer
from maniple.bench.contender import Absent
from maniple.bench.layer_operands import LAYER_BOUNDS
from maniple.errors import UserError

pytestmark = pytest.mark.usefixtures("ceilings")


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
    for changes in ({}, {"variants": "all"}, {"variants": "selected"}, {"liger": False}):
        list(moe_layer.run(plan(shapes=[PLAIN, qwen], **changes), lambda what: None))
    every = ["all", False, "all", True, "selected", False, "selected", True]
    assert asked == ["all", False, "few", True, *every, "all", False, "few", False]


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
