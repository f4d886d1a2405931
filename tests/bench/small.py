"""What the tests of the benchmarks measure on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from maniple.bench import ceilings
from maniple.bench.shapes import Shape

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = Shape("m", "fc1", 48, 64, (5, 0, 130, 1, 77, 43))
CEILINGS = ceilings.Ceilings({"bf16": 1e12, "fp8": 2e12}, 1e11)


def script(name):
    """A module of benchmarks/."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
