"""Rules for the whole suite: few threads, and GPU tests only where there is a GPU, with a word about it at the end."""

import os
import platform
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run: a change that breaks something is what turns the suite red, and not chance.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")

# Before torch is imported anywhere: two test processes share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And one set of vector loops on every machine: AVX-512's take another exponential for the elements that do not fill a
# loop, so that a row's last bit depends on the rows beside it, and tests compare bits.
if platform.machine() == "x86_64":
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")

TESTS = Path(__file__).parent
NO_GPU = "no GPU on this machine"


FIRST = "test_guide_commands.py"  # a file is one process's: begun last, this one would be waited for alone


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != FIRST)
    gpu_items = []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in ("gpu", "distributed"):
            item.add_marker(folder)
        if item.get_closest_marker("gpu"):
            gpu_items.append(item)
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter):
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests did not run: {NO_GPU}")
