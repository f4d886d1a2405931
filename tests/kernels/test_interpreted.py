"""The Triton kernels under Triton's interpreter, on the CPU: each suite in a process where Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "suite",
    [
        "interpreted_adamw.py",
        "interpreted_cross_entropy.py",
        "interpreted_grouped_gemm.py",
        "interpreted_grouped_gemm_swiglu.py",
        "interpreted_low_precision.py",
        "interpreted_pages.py",
        "interpreted_permute.py",
        "interpreted_quantize.py",
        "interpreted_rope.py",
        "interpreted_routing.py",
    ],
)
def test_suite(suite):
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, Path(__file__).parent / suite],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
