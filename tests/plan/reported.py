"""A report of a small job, for the tests of it: with a name that tries to be a script."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys

import pytest

from maniple import cli

# a file's name that would end one script and start another
HOSTILE = "job</script><script>window.hacked=1<!--{{data}}&amp;.yaml"
JOB = """
model: {overrides: {num_layers: 8}}
parallel: {pipeline_parallel_size: 2, virtual_pipeline_size: 2, expert_parallel_size: 8}
recompute: {granularity: full, num_layers: 1}
data: {sequence_length: 4096}
"""
WORDS = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h200"]


def said(words: list[str]) -> dict:
    """What the command prints with `--json`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out := io.StringIO())
        assert cli.main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


class Report:
    """A page, and the data in it."""

    def __init__(self, folder):
        self.folder, self.file = folder, folder / "plan.html"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "stderr", err := io.StringIO())
            (folder / HOSTILE).parent.mkdir()
            (folder / HOSTILE).write_text(JOB, encoding="utf-8")
            self.json = said([*WORDS, "--config", HOSTILE, "--report", str(self.file)])
        self.err = err.getvalue()
        self.text = self.file.read_text(encoding="utf-8")
        self.data = json.loads(
            re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.S)[1]
        )

    @property
    def own(self) -> dict:
        return self.data["cells"][self.data["own"]]

    def cell(self, at: list[int]) -> dict:
        places = itertools.product(*(range(len(axis["values"])) for axis in self.data["axes"]))
        return dict(zip(places, self.data["cells"], strict=True))[tuple(at)]


def hostile(value, evil: str):
    """Data with `evil` behind each of its texts, but for those that the page looks up."""
    if isinstance(value, dict):
        return {key: hostile(item, evil) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hostile(item, evil) for item in value]
    looked_up = ("weak", "strong", "F", "B", "FB", "compute", "exchange", "recompute", "idle", "update", "collectives")
    return value + evil if isinstance(value, str) and value not in looked_up else value
