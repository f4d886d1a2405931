"""Files that the planner writes: whole or not at all, and over nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from maniple.errors import UserError


def write_new(option: str, file: Path, text: str) -> None:
    """Raises UserError, with the option that asked for the file, if it cannot be written or is there already."""
    fresh = file.with_name(f".maniple-{os.getpid()}")  # shorter than the longest that `file` may have
    try:
        with open(fresh, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.link(fresh, file)  # unlike a rename it fails where something is
    except OSError as error:
        raise UserError(f"{option} {file}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
