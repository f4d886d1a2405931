"""Speeds in the guide are those of raw rows, and the rows those of today's kernels: `figures.py` says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.figures import faults

from maniple.bench import rows as bench_rows
from maniple.kernels import sources

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_speed_in_the_guide_is_measured_with_these_sources(page):
    found = list(faults(page.name, page.read_text(encoding="utf-8"), RESULTS, sources.digest))
    assert not found, "\n".join(["", *found])


# --- the check itself -------------------------------------------------------------------------------------------------

ROW = {
    "op": "forward",
    "tflops": 697.4,
    "floor_share": 0.931,
    "date": "2026-11-30",
    "command": "maniple bench grouped-gemm --model m",
    "sources": {"grouped_gemm": "now"},
}
OLD = ROW | {"tflops": 512.0, "floor_share": 0.5, "sources": {"grouped_gemm": "then"}}
TRAINING = {"command": "maniple train x", "summary": {"tokens_per_second_per_gpu": 2198.3}}


@pytest.fixture
def check(tmp_path):
    """The faults of a page whose raw rows are ROW, OLD and TRAINING."""
    for name, row in (("new", ROW), ("old", OLD), ("2026-11-29-training", TRAINING)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return lambda text: list(faults("page.md", text, tmp_path, lambda op: "now"))


GOOD = [
    "No speeds here, 2026, 400 steps and GB/s.",
    "<!-- measured: new.jsonl -->\nForward runs at 697 TFLOP/s, 93 % of the floor.",
    "<!-- measured: new.jsonl -->\nForward runs at 697.4 TFLOP/s.",
    "<!-- measured: new.jsonl old.jsonl historical -->\n697 TFLOP/s; 512 TFLOP/s, measured on 2026-11-30.",
    "<!-- measured: 2026-11-29-training.jsonl historical -->\n2,200 tokens a second, measured on 2026-11-29.",
    "<!-- measured: new.jsonl -->\n| op | TFLOP/s | of the floor |\n|---|---|---|\n| fwd | 697 | 93 % |",
    "```\n999 TFLOP/s\n```",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_pages_have_no_faults(check, text):
    assert check(text) == []


BAD = {
    "Forward runs at 697 TFLOP/s.": "page.md:1: 697 (tflops) has no raw row",
    "Text.\n\nIt moves 1.3 GB/s.": "page.md:3: 1.3 (gb_per_s) has no raw row",
    "It moves\n1.3\nGB/s.": "page.md:2: 1.3 (gb_per_s) has no raw row",
    "| job | tokens/s a GPU |\n|---|---|\n| demo | 2,198 |": "page.md:3: 2,198 (tokens_per_second) has no raw row",
    "<!-- measured: new.jsonl -->\n698 TFLOP/s": "698 (tflops) is in no row of new.jsonl",
    "<!-- measured: new.jsonl -->\n697 TFLOP/s\n\n697 TFLOP/s": "page.md:4: 697 (tflops) has no raw row",
    "<!-- measured: gone.jsonl -->\nText": "benchmarks/results/gone.jsonl is not there",
    "<!-- measured: old.jsonl -->\n512 TFLOP/s": "512 (tflops) is stale: the sources of grouped_gemm have "
    "changed since; measure anew: maniple bench grouped-gemm --model m",
    "<!-- measured: old.jsonl historical -->\n512 TFLOP/s": "needs the words 'measured on 2026-11-30'",
    "<!-- measured: 2026-11-29-training.jsonl -->\n2,200 tok/s": "is stale: its row names no sources; measure anew",
    "<!-- measured: 2026-11-29-training.jsonl historical -->\n2,200 tok/s, measured on 2026-11-30.": (
        "needs the words 'measured on 2026-11-29'"
    ),
    # each number is in some row, but no row has both
    "<!-- measured: new.jsonl old.jsonl -->\n| op | TFLOP/s | of the floor |\n|---|---|---|\n| fwd | 697 | 50 |": (
        "697 (tflops), 50 (floor_share) is in no row"
    ),
    "<!-- measured: new.jsonl -->\n697 TFLOP/s\n\n| x | GB/s |\n|---|---|\n| y | 3 |\n<!-- measured: end -->": (
        "page.md:6: 3 (gb_per_s) is in no row"
    ),
    "<!-- rows: new.jsonl -->\nsomething else\n<!-- rows: end -->": "is not what maniple.bench.rows.markdown makes",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_pages_say_what_is_wrong(check, text, monkeypatch):
    monkeypatch.setattr(bench_rows, "markdown", lambda rows: "the table")
    found = check(text)
    assert len(found) == 1, found
    assert BAD[text] in found[0]


def test_a_digest_is_of_names_and_bytes_alone(tmp_path):
    first, second = tmp_path / "a" / "op", tmp_path / "b" / "op"
    for folder in (first, second):
        folder.mkdir(parents=True)
        for name in ("one.py", "two.py"):
            (folder / name).write_text(f"# {name}\n")
    (second / "note.txt").write_text("no source")
    same = sources.digest("op", first.parent)
    assert same == sources.digest("op", second.parent)
    (second / "two.py").write_text("# two.py changed\n")
    assert same != sources.digest("op", second.parent)
    (first / "two.py").rename(first / "three.py")
    assert same != sources.digest("op", first.parent)
    with pytest.raises(ValueError, match="no sources of an op 'gone'"):
        sources.digest("gone", tmp_path)
    assert len(sources.digest("grouped_gemm")) == 64
