"""`maniple data tokenizer`: a byte-level BPE of the user's own text, as the tokenizer.json that `prepare` takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from maniple.data.inputs import Position, find_inputs, read_chunks, texts_of
from maniple.data.tokenizer import train_bpe
from maniple.errors import UserError


@dataclass(frozen=True)
class NewTokenizer:
    """vocab_size: as it came out, less than asked if the text has no more pairs. documents and characters: read."""

    path: Path
    vocab_size: int
    documents: int
    characters: int
    seconds: float


def make_tokenizer(
    inputs: Iterable[Path | str],
    output: Path | str,
    vocab_size: int,
    *,
    key: str = "text",
    max_bytes: int | None = None,
    progress: bool = True,
) -> NewTokenizer:
    """Trains on `inputs` (as `prepare` takes them) and writes `output`, a tokenizer.json (see `train_bpe`).

    max_bytes: of more input than that, as it lies on disk, evenly chosen pieces of a MiB (or of one document) are read.
    Memory grows with the number of different words. The result depends on the arguments only.
    Raises UserError for an output that exists, bad input (naming file and line), or input without text.
    """
    started = time.monotonic()
    path = Path(output).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it, e.g. {path / 'tokenizer.json'}")
    if path.exists():
        raise UserError(f"{path} exists, and datasets may have been made with it: choose another --output")
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max_bytes must be at least 1, not {max_bytes}")
    files = find_inputs(inputs)
    counted = _Counted(files, key, max_bytes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _progress_bar(progress) as bar:
            made = train_bpe(counted.texts(bar), vocab_size, path)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from error
    if not counted.characters:
        path.unlink()
        raise UserError(f"no text in {', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''}")
    return NewTokenizer(path, made.vocab_size, counted.documents, counted.characters, time.monotonic() - started)


class _Counted:
    """The texts of files, or of every so-many-th chunk of them, counted as they are read."""

    def __init__(self, files: list[Path], key: str, max_bytes: int | None) -> None:
        self._files, self._key = files, key
        self._size = sum(file.stat().st_size for file in files)
        self._every = 1 if max_bytes is None else max(1, -(-self._size // max_bytes))
        self.documents = self.characters = 0

    def texts(self, bar: Progress) -> Iterator[str]:
        task = bar.add_task("reading", total=self._size)
        for number, chunk in enumerate(read_chunks(self._files, Position())):
            if number % self._every == 0:
                for text in texts_of(chunk, self._key):
                    self.documents += 1
                    self.characters += len(text)
                    # what no UTF-8 spells is read as `TextTokenizer.encode_batch` reads it
                    yield text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            bar.update(task, completed=chunk.read_bytes)
        bar.update(task, description="merging", completed=self._size)


def _progress_bar(enabled: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (enabled and console.is_interactive),
    )
