"""Where each rank is: its step, what it is doing there, and since when, in a record that survives the process.

A rank notes where it is at every change of phase, which costs a microsecond: the record is a mapped file, so that the
launcher can say in which step and phase a killed process was. `watch.py` in the engine tells the other ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = "MANIPLE_PULSE_DIR"  # environment: where ranks of this node keep their records; unset: in memory only
HUNG = 124  # exit code of a rank that ends since the job hangs, as of the `timeout` program
# A scheduler's signal reaches a process directly and through its launcher: what comes so soon after is the same one.
SAME_SIGNAL_SECONDS = 3.0

# In the order of a job and a step. What a rank does in one of `LOCAL` it does alone: it waits for no other rank there.
PHASES = (
    *("start-up", "meeting", "building"),
    *("data loading", "forward", "backward", "gradient reduction", "update", "statistics"),
    *("validation", "saving", "writing results", "the end"),
)
STARTING = START, MEETING, BUILDING = PHASES[:3]  # before the first step
DATA, FORWARD, BACKWARD, REDUCTION, UPDATE, STATISTICS, VALIDATION, SAVING, RESULTS, END = PHASES[3:]
LOCAL = (DATA,)
_RECORD = struct.Struct("<qqqd")  # process id, step, number of the phase, seconds since 1970


@dataclass(frozen=True)
class Place:
    """Where a rank is: step from 1 (0: before the first), phase, and since when (seconds since 1970)."""

    pid: int
    step: int
    phase: str
    since: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class Pulse:
    """This process's own record; `enter` notes a change. Read `place` from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        self._bytes: mmap.mmap | bytearray = bytearray(_RECORD.size)
        if path is not None:
            with open(path, "w+b") as file:
                file.truncate(_RECORD.size)
                self._bytes = mmap.mmap(file.fileno(), _RECORD.size)
        self._step = 0
        self.enter(START)

    def enter(self, phase: str, step: int | None = None) -> None:
        if step is not None:
            self._step = step
        _RECORD.pack_into(self._bytes, 0, os.getpid(), self._step, PHASES.index(phase), time.time())

    @property
    def place(self) -> Place:
        return _place(bytes(self._bytes))


_current = Pulse()


def start(rank: int) -> Pulse:
    """Begins this process's record, in the launcher's folder where there is one."""
    global _current
    folder = os.environ.get(DIRECTORY)
    _current = Pulse(record_of(Path(folder), rank) if folder and Path(folder).is_dir() else None)
    return _current


def enter(phase: str, step: int | None = None) -> None:
    """Notes that this process is now in `phase` (one of `PHASES`), of `step` if it is another one."""
    _current.enter(phase, step)


def place() -> Place:
    return _current.place


def record_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}"


def read(folder: Path, rank: int, pid: int) -> Place | None:
    """Where process `pid` was as `rank`; None if it left no record (it had not come so far)."""
    with contextlib.suppress(OSError, struct.error, IndexError):
        found = _place(record_of(folder, rank).read_bytes())
        return found if found.pid == pid else None
    return None


def _place(record: bytes) -> Place:
    pid, step, phase, since = _RECORD.unpack(record)
    return Place(pid, step, PHASES[phase], since)
