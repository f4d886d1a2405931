"""The grouped GEMM benchmark on a GPU: every recipe that runs there is right, timed and judged."""

from __future__ import annotations

import json

from maniple import cli
from maniple.bench import bars, rows
from maniple.bench.grouped_gemm import RECIPES


def test_every_recipe_has_rows_or_a_reason(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words = ["--model", "qwen3-30b-a3b", "--expert-parallel-size", "32", "--rows", "2048", "--quick", "--device", "gpu"]
    code = cli.main(["bench", "grouped-gemm", *words, "--json", "--out", str(file)])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == rows.read(file)
    failed = [f"{r['implementation']} {r['recipe']} {r['op']}: {r['not_run']}" for r in found if r["failed"]]
    assert not [line for line in failed if not line.startswith(("torch", "DeepGEMM", "dense"))]
    assert code == 0
    for recipe in RECIPES:
        selected = [row for row in found if row["recipe"] == recipe and row["role"] == "selected"]
        assert selected
        assert all(row["milliseconds"] or row["not_run"] for row in selected)
    bf16 = [row for row in found if row["recipe"] == "bf16" and row["role"] == "selected"]
    assert not [row for row in bf16 if row["implementation"] == "reference" or row["milliseconds"] is None]
    # little work on few rows: a share may be small, but nothing is faster than its floor by more than noise
    assert all(0 < row["floor_share"] < 1.2 for row in bf16)
    assert {v.word for v in bars.verdicts(found)} <= {"reached", "missed", "not measured"}
