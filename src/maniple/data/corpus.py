"""The demo corpus: source and documentation text of the Python installation that runs this.

Nothing is downloaded. Files come from the standard library's folder (`sysconfig.get_path("stdlib")`, so a virtual
environment reads its base installation). What is left out, and why:

- installed packages, compiled files, and `_sysconfigdata*`, which holds paths of one machine;
- the test suite's data (deliberately broken or foreign-encoded files), while its code stays in;
- files that are not UTF-8 or hold NUL bytes: skipped and counted;
- character tables (`encodings/cp037.py` and the like), whose thousands of alike lines would flatter any model;
- copies of a file already read, which could put one text into both splits.

The split is by document, from a hash of its relative name, so it does not move when `max_bytes` does, and no
validation document is ever trained on.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from maniple.errors import UserError

_SUFFIXES = {".py", ".rst", ".txt", ".md", ".html"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_BROKEN_FOLDERS = {"cjkencodings", "encoded_modules"}
_NUMERIC_ESCAPE = re.compile(r"\\[xuU]|0x")
_VALIDATION_ONE_IN = 20


@dataclass(frozen=True)
class Document:
    name: str
    """path relative to the standard library, with forward slashes"""
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in order of their names, and what was left out."""

    train: list[Document]
    validation: list[Document]
    num_bytes: int
    undecodable: int
    duplicates: int
    tables: int


def is_validation(name: str) -> bool:
    """Whether the document of this name belongs to the validation split (about one in twenty)."""
    return int.from_bytes(_digest(name)[:8], "big") % _VALIDATION_ONE_IN == 0


def read_corpus(max_bytes: int, root: Path | None = None) -> Corpus:
    """Read at most `max_bytes` bytes of text from `root` (default: this Python's standard library).

    Where not everything fits, files are drawn in the order of a hash of their names, so that a small budget is a fair
    sample of the whole library rather than its first letters; one that no longer fits is passed over. The result is
    sorted by name. Raises UserError if the installation keeps no source on disk.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = _candidates(root)
    if not names:
        raise UserError(
            f"no Python source found in {root} (is the standard library zipped or stripped?): "
            "set data.source to megatron and data.train to your own text"
        )
    splits: tuple[list[Document], list[Document]] = ([], [])
    seen: set[bytes] = set()
    num_bytes = undecodable = duplicates = tables = 0
    for name in sorted(names, key=lambda name: _digest(name)[8:]):
        path = root / name
        if path.stat().st_size > max_bytes - num_bytes:
            continue
        raw = path.read_bytes()
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            undecodable += 1
            continue
        if "\0" in text:
            undecodable += 1
            continue
        digest = hashlib.sha256(raw).digest()
        if digest in seen:
            duplicates += 1
            continue
        seen.add(digest)
        if _is_table(text):
            tables += 1
            continue
        num_bytes += len(raw)
        splits[is_validation(name)].append(Document(name, text))
    for split in splits:
        split.sort(key=lambda document: document.name)
    return Corpus(splits[0], splits[1], num_bytes, undecodable, duplicates, tables)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _candidates(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    names = (p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    return [name for name in names if _wanted(name)]


def _wanted(name: str) -> bool:
    *folders, file = name.split("/")
    if file.startswith("_sysconfigdata") or not _FOREIGN_FOLDERS.isdisjoint(folders):
        return False
    if "test" in folders or "tests" in folders:
        broken = any(folder in _BROKEN_FOLDERS or folder.endswith("data") for folder in folders)
        return file.endswith(".py") and not broken and not file.startswith("bad")
    return True


def _is_table(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(bool(_NUMERIC_ESCAPE.search(line)) for line in lines) > len(lines)
