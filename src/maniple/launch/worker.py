"""What a process started by torchrun knows about itself, and how it tells the launcher why it failed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from maniple.errors import UserError

LAUNCHED = "MANIPLE_LAUNCHED"  # set for workers that `maniple train` started, not for those of a bare torchrun
LAUNCHER = "MANIPLE_LAUNCHER"  # the process id of that `maniple train`
RESTARTED = "MANIPLE_RESTARTED"  # set for workers that `maniple train` started anew, after a failure or for other nodes
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # in the order that `world_size` reads them
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


def is_worker() -> bool:
    """Whether torchrun (ours or any scheduler's) started this process as one rank of a job."""
    return all(name in os.environ for name in _TORCHRUN)


def is_launched() -> bool:
    """Whether `maniple train` itself started this worker, so that it prints what is recorded here."""
    return is_worker() and os.environ.get(LAUNCHED) == "1"


def is_restarted() -> bool:
    """Whether this worker takes the place of one that has failed, or of one of another number of nodes."""
    return os.environ.get(RESTARTED) == "1" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def world_size() -> int:
    """Ranks of the job this worker belongs to. UserError if what torchrun should have set makes no sense."""
    missing = [name for name in _MEETING if not os.environ.get(name)]
    if missing:
        raise UserError(f"RANK is set and {' and '.join(missing)} not: start with torchrun, or unset RANK")
    rank, local_rank, world, port = map(_number, (*_TORCHRUN, "MASTER_PORT"))
    if not max(rank, local_rank) < world:
        raise UserError(
            f"environment variables RANK {rank} and LOCAL_RANK {local_rank} must be below WORLD_SIZE {world}: unset "
            "them to start the processes here, or mend them"
        )
    if port > 65535:
        raise UserError(f"environment variable MASTER_PORT is {port}, more than 65535: mend it")
    return world


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"environment variable {name} is {text!r}, not a number: unset it, or mend it")
    return int(text)


def end_with_launcher() -> None:
    """Watches `maniple train`, in the background: killed with SIGKILL it cannot end this process, which ends itself.
    It may be gone already: what started this process is known by its id, not by who is the parent now."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)  # like a kill: what hangs in a collective would not come to an orderly end

    threading.Thread(target=watch, daemon=True).start()


def leave(code: int) -> NoReturn:
    """Ends this process at once with its streams written: an orderly end would wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(error: BaseException, exit_code: int) -> None:
    """Leaves the error for the launcher, or prints it in one line where no `maniple train` will. exit_code: what this
    process is about to end with."""
    record(error, exit_code)
    if not is_launched():
        print(f"maniple: error: {error}", file=sys.stderr, flush=True)


def record(error: BaseException, exit_code: int) -> None:
    """Leaves the error, its time and traceback, and the exit code that is to come, in the file that torchrun named for
    this rank, in torchrun's format.

    Written here rather than by torch's ErrorHandler, so that a mistake found before torch is needed costs no import.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(now)), "moment": now}
    details["exit_code"] = exit_code  # the launcher may read this before the process has ended
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    # under another name first: the launcher reads it at any moment
    fresh = Path(f"{path}.new")
    fresh.write_text(json.dumps({"message": message}), encoding="utf-8")
    fresh.rename(path)
