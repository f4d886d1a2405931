"""Ends a rank whose job hangs, naming the ranks that are missing.

Each rank tells the others, through the store at which torchrun's processes meet, where it is (`metrics.pulse`): from a
thread, about once a second, without the training loop's help. When this rank has been in one phase for longer than
`parallel.collective_timeout_seconds`, one rank reads where all are, says who is missing, and all end with `pulse.HUNG`.
A stopped process (SIGSTOP) tells nothing more; one that sleeps tells where.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from maniple.metrics import pulse

_EVERY = 1.0  # seconds between two words of a rank, in a small job
_RANKS_A_SECOND = 256  # that tell where they are, in a large one
_SILENT = 5.0  # seconds without a word, beyond what is usual, after which a rank counts as silent
_STORE_SECONDS = 20.0
_START_SECONDS = 120.0  # that a start may take at least: processes read their programs at their own pace


class Hang(RuntimeError):
    """The job does not move; the message says who is missing, and is all that is to be said."""


@dataclass(frozen=True)
class Seen:
    """Where a rank was when it last said so. Seconds since 1970, by its own clock."""

    step: int
    phase: str
    since: float
    told: float


def margin(timeout: float) -> float:
    """Seconds that a process group's own timeout is longer, so that this watch speaks first."""
    return max(10.0, 0.1 * timeout) + _STORE_SECONDS


class Watch:
    """The thread. `report` takes the Hang and the exit code, just before the process ends: for the launcher, or the
    screen."""

    def __init__(self, rank: int, world: int, timeout: float, report: Callable[[BaseException, int], None]) -> None:
        self.rank, self.world, self.timeout, self.report = rank, world, timeout, report
        self._every = max(_EVERY, world / _RANKS_A_SECOND)
        self._ended = threading.Event()
        self._store: dist.Store | None = None
        self._thread = threading.Thread(target=self._run, name="maniple-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        self._store = self._connect()
        while not self._ended.is_set():
            place = pulse.place()
            now = time.time()
            if self._store is not None:
                try:
                    told = json.dumps([place.step, place.phase, place.since, now])
                    self._store.set(f"maniple/pulse/{self.rank}", told)
                except Exception:  # its host is gone, and with it the job, which others will say
                    self._store = None
            limit = max(self.timeout, _START_SECONDS) if place.phase in pulse.STARTING else self.timeout
            if now - place.since > limit and not self._ended.is_set():
                self._end(place)
            self._ended.wait(self._every)  # after the first word: a rank that is stopped in its first second has joined

    def _connect(self) -> dist.Store | None:
        """A connection of its own to the store: the main thread's may be blocked by what it waits for."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal():
            return None
        try:
            timeout = timedelta(seconds=_STORE_SECONDS)
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        except Exception:
            return None
        # processes that are started anew may meet at the same store
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        return dist.PrefixStore(f"maniple/{run}/{self.world}", store)

    def _end(self, own: pulse.Place) -> None:
        hang = Hang(self._verdict(own))
        now = pulse.place()
        if now.since != own.since or self._ended.is_set():
            self._take_back()  # it has gone on meanwhile
            return
        self.report(hang, pulse.HUNG)
        sys.stderr.flush()
        os._exit(pulse.HUNG)

    def _verdict(self, own: pulse.Place) -> str:
        store = self._store
        alone = f"rank {self.rank} has been in {own} for {time.time() - own.since:.0f} s"
        if store is None:
            return f"{alone}; where the others are is not known"
        try:
            if store.add("asked", 1) > 1:
                return store.get("verdict").decode()
            time.sleep(2 * self._every)  # a rank that can speak has spoken by then
            found = {}
            for rank in range(self.world):
                key = f"maniple/pulse/{rank}"
                found[rank] = Seen(*json.loads(store.get(key))) if store.check([key]) else None
            text = verdict(found, time.time(), _SILENT + 2 * self._every)
            store.set("verdict", text)
            return text
        except Exception as error:
            return f"{alone}; the others cannot be asked ({type(error).__name__})"

    def _take_back(self) -> None:
        """Lets the next hang be looked at anew."""
        with contextlib.suppress(Exception):  # without its host there is nothing to take back
            if self._store is not None:
                self._store.delete_key("asked")
                self._store.delete_key("verdict")


def verdict(found: dict[int, Seen | None], now: float, silent: float) -> str:
    """One line that names the ranks which a hanging job waits for, and where the others wait.

    found: what each rank said last; None if it never said anything. silent: seconds without a word that are too many.
    """
    absent = [rank for rank, seen in found.items() if seen is None]
    there = {rank: seen for rank, seen in found.items() if seen is not None}
    quiet = [rank for rank, seen in there.items() if now - seen.told > silent]
    step = max((seen.step for seen in there.values()), default=0)
    where = f"step {step}" if step else "start-up"
    awake = {rank: seen for rank, seen in there.items() if rank not in quiet}
    missing = [] if absent or quiet else _behind(awake)
    parts = []
    if absent:
        parts.append(f"{_ranks(absent)} never joined ({len(there)} of {len(found)} did)")
    for rank in quiet:
        seen = there[rank]
        parts.append(f"rank {rank} has not answered for {now - seen.told:.0f} s (last in {_at(seen, step)})")
    for rank in missing:
        seen = there[rank]
        parts.append(f"rank {rank} stopped in {_at(seen, step)} {now - seen.since:.0f} s ago")
    waiting: dict[str, list[int]] = {}
    for rank, seen in awake.items():
        if rank not in missing:
            waiting.setdefault(_at(seen, step), []).append(rank)
    parts += [f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} in {at}" for at, ranks in waiting.items()]
    return f"{where}: {'; '.join(parts)}"


def _behind(awake: dict[int, Seen]) -> list[int]:
    """Ranks that the others wait for: those busy with something of their own, else the least advanced, if any is."""
    busy = [rank for rank, seen in awake.items() if seen.phase in pulse.LOCAL]
    if busy and len(busy) < len(awake):
        return busy
    order = {rank: (seen.step, pulse.PHASES.index(seen.phase)) for rank, seen in awake.items()}
    least = min(order.values(), default=None)
    behind = [rank for rank, at in order.items() if at == least]
    return behind if len(behind) < len(order) else []


def _at(seen: Seen, step: int) -> str:
    return seen.phase if seen.step in (0, step) else f"{seen.phase} of step {seen.step}"


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
