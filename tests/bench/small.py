"""What the tests of the benchmarks measure on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from maniple.bench import ceilings, rows
from maniple.bench.shapes import Shape

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = Shape("m", "fc1", 48, 64, (5, 0, 130, 1, 77, 43))
CEILINGS = ceilings.Ceilings({"bf16": 1e12, "fp8": 2e12}, 1e11)


def judged(script, file, capsys):
    """What a script of benchmarks/ says of a quick run of random shapes, whose rows are in `file`: the same later."""
    assert script.main(["--quick", "--recipe", "bf16", "--only", "random", "--seed", "5", "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert "seed 5" in out
    assert {row["model"] for row in rows.read(file)} == {"random-5-0", "random-5-1"}
    assert script.main(["--verdicts", str(file)]) == 0
    assert out.endswith(capsys.readouterr().out)
    return out


def script(name):
    """A module of benchmarks/."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
