"""What every row of a run says of the run: where, with what, how and when."""

from __future__ import annotations

import datetime
import importlib.metadata
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
