"""A folder of files that is written over a long time: what is finished is kept, and the same work goes on after it.

The work is done in `OUT.partial`, which no reader takes for the result, and named `OUT` when all is there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from maniple.engines.megatron.checkpoint.files import sync_folder
from maniple.errors import UserError

_JOURNAL = "progress.jsonl"
_SUFFIX = ".partial"


class Journal:
    """The finished files of `out.partial`: name and what was noted of each.

    identity: what the result depends on; finished files of another one are removed. Raises UserError if `out` exists,
    or the folder cannot be written.
    """

    def __init__(self, out: Path, identity: Any) -> None:
        self.out, self.partial = out, out.with_name(out.name + _SUFFIX)
        if out.exists() or out.is_symlink():
            raise UserError(f"{out} exists: name another folder, or remove it")
        self.finished: dict[str, dict[str, Any]] = {}
        with told(self.partial):
            kept = self._read(identity)
            if kept is None:
                if self.partial.exists():
                    shutil.rmtree(self.partial)
                self.partial.mkdir(parents=True)
                self._append(identity)
            else:
                self.finished = kept

    def note(self, name: str, entry: dict[str, Any]) -> None:
        """A file that is whole and synced. entry: has `bytes`, its size."""
        self._append({name: entry})
        self.finished[name] = entry

    def close(self) -> None:
        """Takes the journal away: every file is there."""
        (self.partial / _JOURNAL).unlink()

    def publish(self) -> None:
        """Gives the folder its name."""
        sync_folder(self.partial)
        os.rename(self.partial, self.out)
        sync_folder(self.out.parent)

    def check_room(self, wanted: int) -> None:
        """Raises UserError if the disk has no room for `wanted` bytes in all, of which finished files have some."""
        left = wanted - sum(entry["bytes"] for entry in self.finished.values())
        free = shutil.disk_usage(self.partial).free
        if free < left:
            raise UserError(f"{self.partial} needs {left / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free")

    def _append(self, line: Any) -> None:
        with open(self.partial / _JOURNAL, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, identity: Any) -> dict[str, dict[str, Any]] | None:
        """Finished files of the same work; None if there was none."""
        path, good = self.partial / _JOURNAL, []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
        with suppress(ValueError):  # the last line may not have been written whole
            for line in lines:
                good.append(json.loads(line))
        if not good or good[0] != json.loads(json.dumps(identity)):
            return None
        if len(good) < len(lines):
            path.write_text("".join(json.dumps(line) + "\n" for line in good), encoding="utf-8")
        return {name: entry for each in good[1:] for name, entry in each.items() if self._is_whole(name, entry)}

    def _is_whole(self, name: str, entry: dict[str, Any]) -> bool:
        path = self.partial / name
        return path.parent == self.partial and path.is_file() and path.stat().st_size == entry["bytes"]


@contextmanager
def told(place: Path) -> Iterator[None]:
    """Makes one line of what a disk says while `place` is written; what is finished stays."""
    try:
        yield
    except OSError as error:
        again = "; what is finished stays: the same command goes on" if error.errno == errno.ENOSPC else ""
        where = error.filename or place
        raise UserError(f"{where} cannot be written ({error.strerror or error}){again}") from error
