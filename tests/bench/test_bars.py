"""Whether rows reach their bars."""

from __future__ import annotations

import pytest

from maniple.bench import bars


def measured(op, recipe, ratios, *, model="deepseek-v3", share=0.9, implementation="hopper", device="cuda"):
    row = {"op": op, "recipe": recipe, "model": model, "matrix": "fc1", "groups": 2, "n": 8, "k": 8, "rows": 9}
    row |= {"implementation": implementation, "role": "selected", "milliseconds": 1.0, "not_run": None}
    return row | {"ratios": ratios, "floor_share": share, "hardware": {"device": device}}


@pytest.mark.parametrize(
    ("row", "word", "number"),
    [
        (measured("forward", "bf16", {bars.TORCH: 1.2, bars.DEEP_GEMM: 1.0}), "reached", 1.0),
        (measured("forward", "bf16", {bars.TORCH: 1.2, bars.DEEP_GEMM: 0.99}), "missed", 0.99),
        (measured("wgrad", "bf16", {bars.TORCH: 1.05}), "reached", 1.05),
        (measured("wgrad", "bf16", {bars.TORCH: 1.05}, model="qwen3-30b-a3b"), "missed", 1.05),
        (measured("dgrad", "fp8_block", {bars.DEEP_GEMM: 0.95}), "reached", 0.95),
        (measured("wgrad", "fp8_block", {bars.OUR_BF16: 1.2}), "missed", 1.2),
        (measured("forward", "mxfp8", {bars.OUR_BF16: 0.86}), "reached", 0.86),
        (measured("quantize_rows", "fp8_block", {}, share=0.79), "missed", 0.79),
        (measured("expert_mlp", "fp8_block", {bars.OUR_BF16: 1.4, bars.OUR_FUSED: 1.29}), "missed", 1.29),
        (
            measured("expert_mlp", "fp8_block", {bars.OUR_BF16: 1.2, bars.OUR_FUSED: 1.2}, model="qwen3-30b-a3b"),
            "reached",
            1.2,
        ),
        (measured("forward", "bf16", {bars.TORCH: 2.0}, implementation="reference"), "not measured", None),
        (measured("forward", "bf16", {bars.TORCH: 2.0}, device="cpu"), "not measured", None),
        (measured("dgrad", "fp8_block", {}), "not measured", None),
    ],
)
def test_verdicts(row, word, number):
    (verdict,) = bars.verdicts([row])
    assert (verdict.word, verdict.measured) == (word, number)
    assert str(verdict).startswith(word)


def test_a_bar_held_against_fewer_peers_says_so():
    peer = measured("forward", "bf16", {}) | {"role": "peer", "implementation": bars.DEEP_GEMM, "milliseconds": None}
    rows_ = [measured("forward", "bf16", {bars.TORCH: 1.2}), peer | {"not_run": "cannot be imported"}]
    (verdict,) = bars.verdicts(rows_)
    assert verdict.word == "reached"
    assert verdict.remark == "DeepGEMM: cannot be imported"


def test_ours_that_failed_is_not_measured():
    row = measured("forward", "bf16", {}) | {"milliseconds": None, "not_run": "wrong: its error is 1.0e+00"}
    (verdict,) = bars.verdicts([row])
    assert (verdict.word, verdict.remark) == ("not measured", "wrong: its error is 1.0e+00")


def test_alternatives_do_not_count():
    (verdict,) = bars.verdicts([measured("forward", "bf16", {bars.TORCH: 9.0}) | {"role": "alternative"}])
    assert verdict.measured is None


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
