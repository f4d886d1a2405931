"""Which sources a measurement was made with. No torch here.

A figure is worth what its kernel is: a measured row keeps the digest of its op's sources, and once they change the row
no longer speaks for them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent


def digest(op: str, folder: Path = _FOLDER) -> str:
    """SHA-256, in hex, of an op's Python sources: names and bytes of `<folder>/<op>/*.py`, sorted by name.

    It depends on nothing else: not on where the package lies, not on file times. Raises ValueError for an op that has
    no folder or no sources.
    """
    files = sorted((folder / op).glob("*.py"), key=lambda file: file.name)
    if not files:
        raise ValueError(f"there are no sources of an op {op!r}")
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        total.update(f"{file.name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def digests(folder: Path = _FOLDER) -> dict[str, str]:
    """Of every op: what a measurement of a whole model depends on."""
    return {found.parent.name: digest(found.parent.name, folder) for found in sorted(folder.glob("*/__init__.py"))}
