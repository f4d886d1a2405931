"""Reasons to end a run early at the next step border: SIGTERM, SIGUSR1, Ctrl-C, and limits of time.

A rank knows its own reason only; `step.py` carries it to the others with the step's figures, so that all stop at one
step. The first signal asks; a second, some seconds later, ends the process where it is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from maniple.config.schema import TrainConfig
from maniple.metrics import pulse

log = logging.getLogger("maniple")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: what Slurm's --signal is asked for by custom


class StopRequest:
    """Of this process. Use as a context: signals are handled inside, in the main thread."""

    def __init__(self, job: TrainConfig, started: float) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._former: dict[int, object] = {}
        minutes = job.train.max_minutes
        self._deadline = None if minutes is None else started + 60 * minutes  # monotonic
        # Slurm tells a job's processes when it will end them: seconds since 1970
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        self._slurm_deadline = float(end) - job.train.stop_grace_seconds if end.isdecimal() else None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    @property
    def is_late(self) -> bool:
        """Whether a limit of time has come."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            return True
        return self._slurm_deadline is not None and time.time() > self._slurm_deadline

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._at = number, now
            log.info("%s: saving at the end of this step, then stopping", signal.Signals(number).name)
        elif now - self._at > pulse.SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
