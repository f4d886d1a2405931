"""What `maniple.json` of a checkpoint may say, field by field. A stranger's is judged here before anything uses it.

No torch: `maniple checkpoint inspect` starts at once.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

LARGEST = 1 << 26  # bytes
_DEEPEST = 32  # levels of lists and dictionaries
_END_OF_TIME = 253_402_300_799.0  # the last second that a calendar of four digits has

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]
Text = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\p{Cc}]*$")]  # no control characters
Line = Annotated[str, StringConstraints(max_length=10_000, pattern=r"^[^\p{Cc}]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Open(BaseModel):
    """Has other fields too, of which nothing is asked."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _File(_Part):
    bytes: int = Field(ge=0, le=1 << 60)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Card(_Open):
    name: Text | None = None


class _Parallel(_Open):
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    virtual_pipeline_size: Size | None = None
    pipeline_layout: str | None = None
    context_parallel_size: Size = 1
    expert_parallel_size: Size = 1
    expert_tensor_parallel_size: Size = 1


class _Precision(_Open):
    dtype: Text | None = None


class _Job(_Open):
    name: Text | None = None
    parallel: _Parallel = _Parallel()
    precision: _Precision = _Precision()


class _Guard(_Open):
    losses: list[float] = []
    skips: Count = 0
    left_out: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = []


class _Data(_Open):
    train: list[dict[str, Any]] = []


class _Extra(_Open):
    guard: _Guard = _Guard()
    data: _Data | None = None
    weights_from: Line | None = None


class Manifest(_Part):
    """A checkpoint's description. saved: seconds since 1970; sequence: its place among the run's, in order of saving;
    job_id: of the start of the run that wrote it; lineage: of that start and those it went on from; holds: whether it
    has all that a run goes on from, or weights alone. The last four are not in all checkpoints."""

    format: int
    step: Count
    samples: Count
    updates: Count
    saved: float = Field(ge=0, le=_END_OF_TIME)
    world_size: Size
    versions: dict[Text, Text]
    card: _Card
    job: _Job
    extra: _Extra
    files: dict[str, _File]
    sha256: str
    sequence: Count | None = None
    job_id: Text | None = None
    lineage: Text | None = None
    holds: Literal["all", "weights"] = "all"


def parse(text: str) -> dict[str, Any]:
    """A JSON object of finite numbers, nested no deeper than any checkpoint's. Raises ValueError."""
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if type(found) is not dict:
        raise ValueError("it is no JSON object")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        inner = (value for each in level for value in (each.values() if type(each) is dict else each))
        level = [value for value in inner if type(value) in (dict, list)]
    if level:
        raise ValueError("it is nested too deep")
    return found


def faults(found: dict[str, Any]) -> list[str]:
    """The fields that are missing, of another kind or beyond reason, by dotted name, in the schema's order."""
    try:
        Manifest.model_validate(found)
    except ValidationError as error:
        names = (".".join(str(part) for part in fault["loc"] if part != "[key]") for fault in error.errors())
        return list(dict.fromkeys(name if name.isprintable() else ascii(name) for name in names))
    return []


def _refuse(word: str) -> float:
    raise ValueError(f"it has {word} for a number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("it has a number beyond all bounds")
    return number
