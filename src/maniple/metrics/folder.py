"""A run's folder: one job writes it at a time, and which errors of writing it are the user's to mend."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from maniple.errors import UserError

# A full disk, a limit of file sizes, no permission, a file in a folder's place or the reverse, a broken device.
_CANNOT_WRITE = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
        *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    )
)


def cannot_write(error: OSError, run_dir: Path) -> bool:
    """Whether the user can mend it; a missing file (removed, or a dangling link) is theirs in the run's folder only."""
    if error.errno == errno.ENOENT:
        return Path(os.fsdecode(error.filename or "")).is_relative_to(run_dir)
    return error.errno in _CANNOT_WRITE


class RunLock:
    """This process's sole right to write a run's folder, until it is closed or the process ends, by whatever end.

    The lock lies on the folder itself. A folder that is not there yet has nothing to protect: it is taken by the next
    `take`, when the folder has been made.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError if another process has it: see `take`."""
        self._run_dir = run_dir
        self._descriptor: int | None = None
        self.take()

    def take(self) -> None:
        """Takes the folder that now has the run's name. Raises UserError if another process has it: two jobs of one
        name would overwrite each other's records and checkpoints."""
        if self._descriptor is not None or not self._run_dir.is_dir():
            return
        descriptor = os.open(self._run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"{self._run_dir}: another job is writing this run; wait for its end, or give a new --name"
            ) from None
        except OSError as error:  # a network file system without locks
            logging.getLogger("maniple").debug("%s cannot be locked: %s", self._run_dir, error)
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
