"""The line a person watches: step, loss, tokens a second, expert balance, time left. Rank 0 only.

On a terminal it is a bar that stays in place; elsewhere (a file, a scheduler's log) a plain line every few seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from maniple.metrics.writer import console as shared_console


class TrainProgress:
    """Progress of a training run from `start_step` (done already) to `total_steps`.

    rank: only rank 0 shows anything. enabled: False shows nothing.
    plain_interval: seconds between lines where there is no terminal; the first and the last step always have one.
    clock: seconds, monotonic (a test gives its own).
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        rank: int = 0,
        enabled: bool = True,
        plain_interval: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.start_step = start_step
        self._shown = enabled and rank == 0
        self._console = console or shared_console
        self._plain_interval = plain_interval
        self._clock = clock
        self._start: tuple[int, float] | None = None  # first step seen and when: the first, slow step is not in the ETA
        self._last_line: float | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(bar_width=None, complete_style="green"),
                TextColumn("{task.fields[line]}"),
                console=self._console,
                expand=True,
                auto_refresh=True,
                refresh_per_second=4,
            )
            self._bar.add_task("train", total=self.total_steps, completed=self.start_step, line="starting")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self, step: int, *, loss: float, tokens_per_second: float | None = None, imbalance: float | None = None
    ) -> None:
        """Step `step` is done. tokens_per_second: of all ranks. imbalance: busiest expert over mean expert."""
        if not self._shown:
            return
        now = self._clock()
        if self._start is None:
            self._start = (step, now)
        line = self.line(step, loss=loss, tokens_per_second=tokens_per_second, imbalance=imbalance, now=now)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, line=line)
        elif self._last_line is None or now - self._last_line >= self._plain_interval or step >= self.total_steps:
            self._last_line = now
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def line(
        self, step: int, *, loss: float, tokens_per_second: float | None, imbalance: float | None, now: float
    ) -> str:
        """`step 120/800 · loss 4.213 · 2,810 tok/s · balance 1.32x · 3:12 left`; what is not known is left out."""
        parts = [f"step {step}/{self.total_steps}", f"loss {loss:.3f}"]
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tok/s")
        if imbalance is not None:
            parts.append(f"balance {imbalance:.2f}x")
        if self._start is not None and step > self._start[0]:
            seconds_a_step = (now - self._start[1]) / (step - self._start[0])
            parts.append(f"{_clock_text(seconds_a_step * max(0, self.total_steps - step))} left")
        return " · ".join(parts)

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._shown:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock_text(seconds: float) -> str:
    """`0:42`, `12:05`, `3:07:09`, `2d 3:07:09`."""
    whole = math.ceil(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02d}"
    return f"{days}d {hour}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"
