"""What a process started by torchrun knows about itself, and how it tells the launcher why it failed."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

LAUNCHED = "MANIPLE_LAUNCHED"  # set for workers that `maniple train` started, not for those of a bare torchrun
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def is_worker() -> bool:
    """Whether torchrun (ours or any scheduler's) started this process as one rank of a job."""
    return all(name in os.environ for name in _TORCHRUN)


def is_launched() -> bool:
    """Whether `maniple train` itself started this worker, so that it prints what is recorded here."""
    return is_worker() and os.environ.get(LAUNCHED) == "1"


def world_size() -> int:
    """Ranks of the job this worker belongs to."""
    return int(os.environ["WORLD_SIZE"])


def record(error: BaseException) -> None:
    """Leaves the error, its time and traceback in the file that torchrun named for this rank, in torchrun's format.

    Written here rather than by torch's ErrorHandler, so that a mistake found before torch is needed costs no import.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
