"""`maniple bench moe-layer` and its script on a CPU, and what the guide says of them."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench import small
from tests.bench.small import ROOT
from tests.bench.small_layers import plan

from maniple import cli
from maniple.bench import bars, moe_layer, rows
from maniple.bench.layer_shapes import NAMED
from maniple.errors import UserError

pytestmark = pytest.mark.usefixtures("ceilings")


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
    return small.script("moe_layer")


def test_the_script_measures_and_judges(script, tmp_path, capsys):
    out = small.judged(script, tmp_path / "rows.jsonl", capsys)
    assert "by stage" in out
    assert "not measured bf16 layer_step random-5-0 layer" in out


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
