"""What every row of a run says of the run: where, with what, how and when."""

from __future__ import annotations

import datetime
import importlib.metadata
import re
from collections.abc import Iterable

import torch

from maniple.bench.rows import Row
from maniple.metrics.summary import environment


def of_run(device: torch.device, seed: int, command: str, packages: Iterable[str]) -> Row:
    """packages: distributions whose versions are noted beside ours, where they are installed."""
    facts = environment(device)
    facts["versions"] |= {name: version for name in packages if (version := _version(name))}
    return facts | {
        "seed": seed,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def file_name(device: torch.device, benchmark: str) -> str:
    """Of a run's rows: DATE-GPU-BENCHMARK.jsonl."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    gpu = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{gpu}-{benchmark}.jsonl"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
