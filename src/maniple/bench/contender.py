"""Who takes part in a measurement: something to call, or the reason why it cannot be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

# selected: what the registry takes for these operands · alternative: another of our own · peer: of another project, for
# the same product · ceiling: one dense product of as many operations, which no grouped product is expected to reach
Role = Literal["selected", "alternative", "peer", "ceiling"]


@dataclass(frozen=True)
class Contender:
    """`call()` computes the op and returns its result.

    multiple: its groups are padded to it, since it takes no others. checked: its result is compared with fp32.
    note: what else its time holds, or lacks.
    """

    name: str
    role: Role
    call: Callable[[], Any]
    multiple: int = 1
    checked: bool = True
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """One that does not run here, and why."""

    name: str
    role: Role
    reason: str
