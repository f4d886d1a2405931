"""`maniple bench grouped-gemm` and its script on a CPU, and what the guide says of them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tests.bench import small
from tests.bench.small import CPU, ROOT, SHAPE

from maniple import cli
from maniple.bench import bars, command, grouped_gemm, rows
from maniple.bench.operands import BOUNDS
from maniple.bench.shapes import OPS
from maniple.errors import UserError
from maniple.kernels import sources


def bench(capsys, *words):
    code = cli.main(["bench", "grouped-gemm", *words])
    return code, *capsys.readouterr()


def test_the_command_measures_and_writes(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    code, out, err = bench(
        capsys, "--quick", "--recipe", "bf16", "--json", "--rows", "64", "--out", str(file), "--model", "deepseek-v3"
    )
    assert code == 0
    assert "this is a CPU: the reference implementation is measured" in err
    found = [json.loads(line) for line in out.splitlines()]
    assert found == rows.read(file)
    products = [(r["matrix"], r["op"]) for r in found if r["role"] == "selected"]
    assert products == [(m, op) for m in ("fc1", "fc2") for op in OPS] + [("fc1+fc2", "expert_mlp")]
    for row in found:
        assert (row["milliseconds"] is None) == (row["not_run"] is not None)
        assert row["sources"]["grouped_gemm"] == sources.digest("grouped_gemm")
        assert row["versions"]["torch"] == torch.__version__
        assert (row["model"], row["rows"], row["hardware"]["device"]) == ("deepseek-v3-tiny", 64, "cpu")
        assert "--out" not in row["command"]
        assert str(tmp_path) not in row["command"]
    forward = next(r for r in found if r["op"] == "forward" and r["role"] == "selected")
    assert forward["implementation"] == "reference"
    assert set(forward["ratios"]) == {"torch._grouped_mm", "dense"}
    assert forward["error"] < BOUNDS["bf16"]
    assert forward["floor_share"] > 0


def test_the_table_shows_what_did_not_run(capsys):
    code, out, _ = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "32", "--model", "qwen3-30b-a3b")
    assert code == 0
    assert "qwen3-30b-a3b-tiny fc1: N 96, K 64, 32 rows in 8 groups" in out
    assert "not run: needs an NVIDIA GPU" in out
    assert "reference (ours)" in out


MISTAKES = {
    ("--model", "gpt-5"): "gpt-5",
    ("--recipe", "fp4"): "there is no such recipe; choose from bf16, fp8, fp8_block, mxfp8",
    ("--device", "gpu"): "torch sees no GPU",
    ("--device", "tpu"): "give auto, cpu or gpu",
    ("--kernels", "hopper"): "cannot use hopper for recipe bf16 on cpu",
    ("--recipe", "fp8_block", "--kernels", "hopper"): "cannot use hopper for recipe fp8_block on cpu",
    ("--expert-parallel-size", "3"): "3 does not divide the 8 experts",
    ("--rows", "0"): "there is nothing to measure",
    ("--rows", "8", "--tokens", "8"): "give one",
    ("--variant", "huge"): "give full or tiny",
    ("--out", "gone/rows.jsonl"): "there is no folder gone; make it first",
    ("--out", "README.md"): "is there already",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_one_line(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert MISTAKES[words] in err


def test_failures_of_ours_end_with_1(capsys, monkeypatch):
    true_hold = grouped_gemm.hold

    def broken(*args):
        return [row | {"failed": row["role"] == "selected", "not_run": "broke"} for row in true_hold(*args)]

    monkeypatch.setattr(grouped_gemm, "hold", broken)
    code, _, err = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    assert code == 1
    assert "bench: reference bf16 forward of qwen3-30b-a3b-tiny fc1: broke" in err


def test_rows_are_read_as_written(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[]\n')
    with pytest.raises(UserError, match="line 2: not a JSON object"):
        rows.read(tmp_path / "bad.jsonl")


def test_markdown_has_selected_and_peers(capsys):
    bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    plan = grouped_gemm.Plan([SHAPE], ["bf16"], CPU, 1, None, 0, "command")
    found = [row for each in grouped_gemm.run(plan, lambda what: None) for row in each]
    table = rows.markdown(found)
    assert table.splitlines()[0] == "**m fc1: N 48, K 64, 256 rows in 6 groups of 0 to 130 rows**"
    assert sum(line.startswith("| forward |") for line in table.splitlines()) == 4
    assert "speed over a peer's" in table.splitlines()[2]
    assert rows.cells(found[0] | {"ratios": {"a": 1.139, "b": 0.5}, "milliseconds": 1.0})[7] == "1.14 x a, 0.50 x b"
    assert "| forward | bf16 | DeepGEMM |  |  |  | not run: needs an NVIDIA GPU |" in table


@pytest.fixture(scope="module")
def script():
    return small.script("grouped_gemm")


def test_the_script_adds_random_shapes_and_judges(script, tmp_path, capsys):
    out = small.judged(script, tmp_path / "rows.jsonl", capsys)
    assert "not measured bf16 forward random-5-0 matrix: wanted 1.00 x torch._grouped_mm or DeepGEMM" in out


def test_the_script_has_the_bars_shapes(script):
    gpu = torch.device("cuda")
    shapes = [s for part in ("deepseek-v3", "qwen3-30b-a3b", "random") for s in script.shapes_of(part, gpu, 1)]
    wanted = [(32, 4096, 7168), (32, 7168, 2048), (128, 1536, 2048), (128, 2048, 768)]
    assert [(s.groups, s.n, s.k) for s in shapes[:4]] == wanted
    assert {s.rows for s in shapes} == {65_536}
    assert len(shapes) == 6


def test_the_guide_has_every_field_and_bar(capsys):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    _, out, _ = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    fields = set(json.loads(out.splitlines()[0]))
    assert not [field for field in fields if f"`{field}`" not in page]
    table = [
        [
            b.recipe,
            ", ".join(b.ops),
            ", ".join(b.models or ["all"]),
            ", ".join(b.peers or ["the floor"]),
            f"{b.wanted:.2f}",
        ]
        for b in bars.BARS
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    assert re.findall(r"^\| (?:bf16|fp8_block|mxfp8) \|.*\|$", page, re.MULTILINE) == lines


def test_tokens_are_rows_over_topk():
    options = command.Options(model="deepseek-v3", tokens=100, variant="full", expert_parallel_size=8)
    assert {s.rows for s in command.shapes_of(options, CPU)} == {800}
