"""The MoE layer benchmark on a GPU: what runs there is right, and has a time, memory and stages."""

from __future__ import annotations

import json

import pytest

from maniple import cli
from maniple.bench import bars, rows


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_every_recipe_has_rows_or_a_reason(model, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words = ["--model", model, "--expert-parallel-size", "8", "--tokens", "513", "--quick", "--device", "gpu"]
    code = cli.main(["bench", "moe-layer", *words, "--no-liger", "--json", "--out", str(file)])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == rows.read(file)
    failed = [f"{r['implementation']} {r['recipe']} {r['op']}: {r['not_run']}" for r in found if r["failed"]]
    assert not failed
    assert code == 0
    steps = [row for row in found if row["op"] == "layer_step" and row["milliseconds"]]
    assert {row["role"] for row in steps} == {"selected", "alternative", "peer"}
    for row in steps:
        assert row["peak_bytes"] > row["saved_bytes"] > 0
        if row["role"] != "peer":
            assert sum(row["stages"].values()) > 0
    bf16 = next(row for row in steps if row["role"] == "selected" and row["recipe"] == "bf16")
    assert bf16["kernels"]
    assert bf16["peak_ratios"]["transformers"] > 0
    assert {v.word for v in bars.verdicts(found)} <= {"reached", "missed", "not measured"}
