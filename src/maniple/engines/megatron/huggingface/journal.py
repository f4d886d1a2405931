"""A folder of files that is written over a long time: what is finished is kept, and the same work goes on after it.

The work is done in `OUT.partial`, which no reader takes for the result, and named `OUT` when all is there. One process
works on it at a time: the journal is locked, and a killed process loses its lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from maniple.engines.megatron.checkpoint.files import sync_folder
from maniple.errors import UserError

_JOURNAL = "progress.jsonl"
_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems


class Journal:
    """The finished files of `out.partial`: name and what was noted of each.

    source: what is read; neither folder may lie in the other. identity: what the result depends on, as JSON; finished
    files of another one are removed. Raises UserError if `out` exists, is being written, or cannot be.
    """

    def __init__(self, out: Path, source: Path, identity: Any) -> None:
        self.out, self.partial = out, out.parent / (out.name + _SUFFIX)
        self.finished: dict[str, dict[str, Any]] = {}
        self._refuse_existing()
        with told(self.partial):
            self._check_place(source)
            self.partial.mkdir(parents=True, exist_ok=True)
            self._file = open(self.partial / _JOURNAL, "a+b")  # noqa: SIM115  (open, and locked, until __exit__)
            try:
                self._lock()
                self._begin(json.loads(json.dumps(identity)))
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def note(self, name: str, entry: dict[str, Any]) -> None:
        """A file that is whole and synced. entry: has `bytes`, its size."""
        self._append({name: entry})
        self.finished[name] = entry

    def publish(self) -> None:
        """Gives the folder its name: every file is there. The journal goes last, so that a kill before leaves one."""
        sync_folder(self.partial)
        os.rename(self.partial, self.out)
        (self.out / _JOURNAL).unlink()
        sync_folder(self.out.parent)

    def check_room(self, wanted: int) -> None:
        """Raises UserError if the disk has no room for `wanted` bytes in all, of which finished files have some."""
        left = wanted - sum(entry["bytes"] for entry in self.finished.values())
        free = shutil.disk_usage(self.partial).free
        if free < left:
            raise UserError(f"{self.partial} needs {left / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free")

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.out):
            raise UserError(f"{self.out} exists: name another folder, or remove it")

    def _check_place(self, source: Path) -> None:
        if self.out.name in ("", ".."):
            raise UserError(f"{self.out} is no name for a folder: choose another")
        here, there = Path(os.path.realpath(self.partial)), Path(os.path.realpath(source))
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise UserError(f"{self.out} lies in {source}, or the other way round: name a folder beside it")
        if os.path.lexists(self.partial):
            names = os.listdir(self.partial) if self.partial.is_dir() and not self.partial.is_symlink() else None
            if names is None or (names and _JOURNAL not in names):
                raise UserError(f"{self.partial} is no unfinished conversion, and in the way: move it, or name another")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another conversion is writing {self.out}: wait for it, or name another folder") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self._refuse_existing()  # by who had the lock before

    def _begin(self, identity: Any) -> None:
        """Reads what is finished of the same work, and removes all else."""
        self._file.seek(0)
        lines, good = self._file.read().splitlines(), []
        with suppress(ValueError):  # the last line may not have been written whole
            for line in lines:
                good.append(json.loads(line))
        if not good or good[0] != identity:
            good = []
        if not good or len(good) < len(lines):
            self._file.truncate(0)
            for line in good or [identity]:
                self._append(line)
        kept = {name: entry for each in good[1:] for name, entry in each.items()}
        self.finished = {name: entry for name, entry in kept.items() if self._is_whole(name, entry)}
        for left in self.partial.iterdir():
            if left.name != _JOURNAL and left.name not in self.finished:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    def _append(self, line: Any) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _is_whole(self, name: str, entry: dict[str, Any]) -> bool:
        path = self.partial / name
        return path.is_file() and path.stat().st_size == entry["bytes"]


@contextmanager
def told(place: Path) -> Iterator[None]:
    """Makes one line of what a disk says while `place` is written; what is finished stays."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's: it was told of an OSError, and says something else
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        again = "; what is finished stays: the same command goes on" if cause.errno in _FULL else ""
        where = cause.filename or place
        raise UserError(f"{where} cannot be written ({cause.strerror or cause}){again}") from error


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
