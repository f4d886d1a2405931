"""Where a run's numbers go: `metrics.jsonl` and TensorBoard from rank 0, a log file from every rank.

Keys of a training record (units in brackets): step, loss, mtp_loss, aux_loss, z_loss [nats], grad_norm, learning_rate,
tokens_per_second_per_gpu, tflops_per_gpu, mfu [share of 1], step_seconds, peak_memory_bytes, imbalance [busiest expert
over mean expert], expert_counts [MoE layers][experts], data (where the text comes from). A validation record
has step and validation_loss.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from rich.console import Console

from maniple.errors import UserError
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

    Raises UserError while another process writes the same run.
    """

    def __init__(
        self, run_dir: Path, rank: int = 0, *, tensorboard: bool = False, resumed_step: int | None = None
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        self._lines: IO[str] | None = None
        self._board: Any = None
        self._log = logging.getLogger(_METRICS_LOGGER)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = None
        if rank != 0:
            return
        self._lock = _locked(run_dir)
        if resumed_step is None:
            _set_aside(self.path)
        else:
            drop_after(self.path, resumed_step)
        self._lines = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the writer)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=(resumed_step or 0) + 1)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Writes one record of `step`. It is on disk (flushed) when this returns. TypeError for values JSON lacks."""
        full = {"step": step, **record}
        self._log.info(_one_line(full))
        if self._lines is not None:
            self._lines.write(to_json({**full, "time": time.time()}) + "\n")
            self._lines.flush()
        if self._board is not None:
            for key, value in full.items():
                scalar = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
                if key != "step" and isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
                    self._board.add_scalar(key, scalar, step)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
        to_file = logging.FileHandler(logs / f"rank_{rank}.log", encoding="utf-8")
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


def _locked(run_dir: Path) -> int:
    """Takes the run's folder for this process until the returned descriptor is closed, by whatever end.

    Raises UserError if another process has it: two jobs of one name would overwrite each other's records and
    checkpoints.
    """
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{run_dir}: another job is writing this run; wait for its end, or give a new --name") from None
    except OSError as error:  # a network file system without locks
        logging.getLogger("maniple").debug("%s cannot be locked: %s", run_dir, error)
    return descriptor


def _set_aside(path: Path) -> None:
    """Renames an earlier run's file to the first free `NAME.N.SUFFIX`, so that nothing measured is lost."""
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
