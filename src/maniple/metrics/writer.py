"""Where a run's numbers go: `metrics.jsonl` and TensorBoard from rank 0, a log file from every rank.

Keys of a training record (units in brackets): step, loss, mtp_loss, aux_loss, z_loss [nats], grad_norm, learning_rate,
tokens_per_second_per_gpu, tflops_per_gpu, mfu [share of 1], step_seconds, peak_memory_bytes, imbalance [busiest expert
over mean expert], expert_counts [MoE layers][experts], data (where the text comes from). A validation record
has step and validation_loss.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from maniple.errors import UserError
from maniple.metrics.folder import RunLock
from maniple.metrics.records import drop_after, plain, to_json

# Results go to stdout; everything a person watches goes to stderr, through one console so that log lines and the
# progress bar do not write over each other.
console = Console(stderr=True)

_METRICS_LOGGER = "maniple.metrics"


class MetricsWriter:
    """Records of one run. Rank 0 writes `RUN/metrics.jsonl` and `RUN/tensorboard/`; every rank writes its log.

    run_dir: the run's folder, made if it is missing.
    tensorboard: also write scalars for TensorBoard (rank 0).
    resumed_step: the run goes on after this step: records of later steps are removed, the others kept. None: a new
        run; the metrics of a former run in the same folder are set aside as `metrics.1.jsonl` and so on.
    lock: rank 0's right to write the folder, where it has been taken before; closed with the writer.

    Raises UserError while another process writes the same run. A record that cannot be written later (a full disk) is
    lost, which is said once.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int = 0,
        *,
        tensorboard: bool = False,
        resumed_step: int | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        self._lines: io.FileIO | None = None
        self._board: Any = None
        self._with_board = tensorboard
        self._log = logging.getLogger(_METRICS_LOGGER)
        self._is_cut = self._said_lost = False
        self._lock: RunLock | None = None
        run_dir.mkdir(parents=True, exist_ok=True)
        if rank != 0:
            return
        self._lock = lock or RunLock(run_dir)
        self._lock.take()
        if resumed_step is None:
            _set_aside(self.path)
        self._open(resumed_step)

    def go_back(self, step: int) -> None:
        """Removes the records of later steps: the run goes on after `step` once more."""
        if self._lock is not None:
            self._close_files()
            self._open(step)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Writes one record of `step`. It is in its file when this returns. TypeError for values JSON lacks."""
        full = {"step": step, **record}
        self._log.info(_one_line(full))
        if self._lines is not None:
            line = to_json({**full, "time": time.time()}) + "\n"
            self._or_say(lambda: self._write(line.encode()))
        if self._board is not None:
            self._or_say(lambda: self._draw(step, full))

    def close(self) -> None:
        self._close_files()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self, resumed_step: int | None) -> None:
        if resumed_step is not None:
            drop_after(self.path, resumed_step)
        self._lines = open(self.path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the writer)
        if self._with_board:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=(resumed_step or 0) + 1)

    def _write(self, line: bytes) -> None:
        assert self._lines is not None
        if not os.fstat(self._lines.fileno()).st_nlink:
            self._begin_anew()
        if self._is_cut:  # what there is of the record before stays a line of its own, which no reader takes
            line = b"\n" + line
        while line:
            line = line[self._lines.write(line) :]
            self._is_cut = bool(line)

    def _begin_anew(self) -> None:
        """The file was removed while the run went on: what follows goes into a new one of that name."""
        assert self._lock is not None
        log = logging.getLogger("maniple")
        log.warning("%s was removed in mid-run: its records until now are lost; going on in a new file", self.path)
        if not self.path.parent.exists():
            self.path.parent.mkdir(parents=True)
            self._lock.close()
            self._lock.take()
        fresh = open(self.path, "ab", buffering=0)  # noqa: SIM115
        assert self._lines is not None
        self._lines.close()
        self._lines, self._is_cut = fresh, False

    def _draw(self, step: int, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            scalar = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
            if key != "step" and isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
                self._board.add_scalar(key, scalar, step)

    def _or_say(self, write: Callable[[], None]) -> None:
        """A record that cannot be written does not end the run."""
        try:
            write()
        except OSError as error:
            if not self._said_lost:
                where, why = error.filename or self.path.parent, error.strerror or error
                logging.getLogger("maniple").warning(
                    "%s: %s: records of this run are lost until that is mended; training goes on", where, why
                )
            self._said_lost = True

    def _close_files(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._board is not None:
            self._or_say(self._board.close)
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def setup_logging(run_dir: Path, rank: int, *, level: int = logging.INFO) -> logging.Logger:
    """Sends the `maniple` loggers to `RUN/logs/rank_N.log` (appended), and to the terminal: rank 0 from `level` up,
    the other ranks their warnings only, with the rank named. Calling it again replaces the former destinations.

    Raises UserError if the folder cannot be written.
    """
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        to_file = _LogFile(logs / f"rank_{rank}.log", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.filename or logs}: {error.strerror or error}; set output_dir (and name) to a folder that can be "
            "written"
        ) from error
    to_file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    to_terminal = _TerminalHandler()
    to_terminal.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    to_terminal.setLevel(level if rank == 0 else logging.WARNING)
    # A record a step is for files; the terminal has the progress bar.
    to_terminal.addFilter(lambda record: record.name != _METRICS_LOGGER)

    logger = logging.getLogger("maniple")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(to_file)
    logger.addHandler(to_terminal)
    logger.setLevel(level)
    logger.propagate = False
    return logger


class _LogFile(logging.FileHandler):
    """Lines that cannot be written (a full disk) are lost; the terminal is told once, and without a traceback."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            console.print(
                f"warning: {self.baseFilename}: {error.strerror}: lines of this log are lost; the run goes on",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def close(self) -> None:
        with suppress(OSError):  # of lines that could not be written before
            super().close()


class _TerminalHandler(logging.Handler):
    """Log lines in whole, above the progress bar where there is one; warnings and errors say that they are."""

    def emit(self, record: logging.LogRecord) -> None:
        style, kind = None, ""
        if record.levelno >= logging.WARNING:
            style, kind = ("red", "error: ") if record.levelno >= logging.ERROR else ("yellow", "warning: ")
        try:
            console.print(kind + self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # logging's own convention: a line that cannot be shown must not end the run
            self.handleError(record)


def _one_line(record: Mapping[str, Any]) -> str:
    """`step=3 loss=6.1204 ...`: numbers and words; lists are left to the JSONL."""
    shown = ((key, value) for key, value in plain(record).items() if not isinstance(value, (list, dict)))
    return " ".join(f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown)


def _set_aside(path: Path) -> None:
    """Renames an earlier run's file to the first free `NAME.N.SUFFIX`, so that nothing measured is lost."""
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
