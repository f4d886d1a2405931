"""Metrics on disk: one JSON object a line, always valid JSON, and whole files written so that a crash leaves none half.

JSON has no NaN and no infinity, and a diverging run is exactly when the file must stay readable: such a value is
written as null, and the object's `nonfinite` field says which keys they were and what they held.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. Takes numpy and torch scalars and arrays, paths and tuples; raises TypeError for others.

    >>> to_json({"loss": float("nan")})
    '{"loss": null, "nonfinite": {"loss": "nan"}}'
    """
    return json.dumps(plain(record), allow_nan=False)


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as JSON's own types, with `nonfinite` added if a value was NaN or infinite."""
    nonfinite: dict[str, str] = {}
    out = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    return out | {"nonfinite": nonfinite} if nonfinite else out


def _plain(value: Any, where: str, nonfinite: dict[str, str]) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[where] = str(value)
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", nonfinite) for index, item in enumerate(value)]
    raise TypeError(f"metric {where} is a {type(value).__name__}, which JSON cannot hold")


def iter_metrics(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`, one at a time (a long run's file is large). A line that is none is left out:
    one that a crash cut short, or one without the number of a step."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield record


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """All records of a `metrics.jsonl`."""
    return list(iter_metrics(path))


def drop_after(path: Path, step: int) -> None:
    """Removes the records of steps past `step` (they are about to be made again), and any line that is no record."""
    if not path.exists():
        return
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in iter_metrics(path) if record["step"] <= step)
    os.replace(fresh, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file in one stroke: a reader sees the old file or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "w", encoding="utf-8") as out:
            json.dump(plain(content), out, indent=2, allow_nan=False)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
