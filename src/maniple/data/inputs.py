"""Raw text on disk as a stream of chunks: JSON lines and plain text files, each plain or .gz, in a fixed order.

A chunk's bounds depend on the input alone, and each chunk says where the next begins, so a reader can stop after any
chunk and another can go on from there.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from maniple.errors import UserError

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html")
_OTHER_PACKING = (".zst", ".bz2", ".xz", ".zip")
CHUNK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 1 << 28


@dataclass(frozen=True)
class Position:
    """Where a chunk starts: index of the file, byte offset in its unpacked content, lines before it."""

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Chunk:
    """Some documents of one file, still undecoded.

    first_line: 1-based line of documents[0], for JSON lines. next: where the following chunk starts.
    read_bytes: bytes read from disk (packed) up to the end of this chunk, over all files, for the progress bar.
    """

    path: str
    is_json: bool
    first_line: int
    documents: list[bytes]
    next: Position
    read_bytes: int


def find_inputs(inputs: Iterable[Path | str]) -> list[Path]:
    """Files to read, in order: a named file as it is, a folder's JSON-lines and text files sorted by name.

    Raises UserError for a missing path, a folder without such files, or a packing other than gzip.
    """
    files: list[Path] = []
    for given in map(Path, inputs):
        given = given.expanduser()
        if given.is_dir():
            found = sorted(p for p in given.rglob("*") if _inner_suffix(p) in _JSON_SUFFIXES + _TEXT_SUFFIXES)
            found = [p for p in found if p.is_file()]
            if not found:
                kinds = ", ".join(_JSON_SUFFIXES + _TEXT_SUFFIXES)
                raise UserError(f"input folder {given} holds no {kinds} files")
            files += found
        elif given.is_file():
            files.append(given)
        else:
            raise UserError(f"input {given} does not exist")
    if not files:
        raise UserError("no input files given")
    for file in files:
        if file.suffix in _OTHER_PACKING:
            raise UserError(f"input {file}: of packed files only .gz is read; unpack it, or pack it as .gz")
    return files


def read_chunks(files: list[Path], start: Position, chunk_bytes: int | None = None) -> Iterator[Chunk]:
    """Chunks from `start` on, each of about `chunk_bytes` (default `CHUNK_BYTES`) or of one larger document.

    Raises UserError for a damaged archive or a document over `MAX_DOCUMENT_BYTES`.
    """
    chunk_bytes = chunk_bytes or CHUNK_BYTES
    sizes = [file.stat().st_size for file in files]
    for number in range(start.file, len(files)):
        path = files[number]
        here = start if number == start.file else Position(number)
        done = sum(sizes[:number])
        try:
            with open(path, "rb") as raw, _unpacked(path, raw) as stream:
                stream.seek(here.offset)
                if _inner_suffix(path) in _JSON_SUFFIXES:
                    yield from _json_chunks(path, raw, stream, here, chunk_bytes, done)
                elif here.offset == 0:
                    text = stream.read(MAX_DOCUMENT_BYTES + 1)
                    if len(text) > MAX_DOCUMENT_BYTES:
                        raise UserError(f"{path} is over 256 MiB, but a text file is one document: use .jsonl")
                    after = Position(number + 1)
                    yield Chunk(str(path), False, 1, [text], after, done + sizes[number])
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is damaged and cannot be unpacked: {error}") from error


def parse_json_line(line: bytes, key: str, where: str) -> str | None:
    """The text under `key` of one JSON line, None for a blank line. UserError naming `where` for anything else."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{where}: not a line of JSON in UTF-8 ({error}); mend or remove the line") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply; mend or remove the line") from error
    if not isinstance(record, dict) or key not in record:
        keys = ", ".join(map(str, list(record)[:8])) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: no key {key!r} (found: {keys}); name the right one with --key")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} is {type(text).__name__}, not text; mend the line or use another --key")
    return text


def texts_of(chunk: Chunk, key: str) -> list[str]:
    """Its documents, decoded; of JSON lines what is under `key`. UserError, by file and line, for what is no text."""
    if not chunk.is_json:
        try:
            return [document.decode("utf-8") for document in chunk.documents]
        except UnicodeDecodeError as error:
            raise UserError(f"{chunk.path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    numbered = enumerate(chunk.documents, chunk.first_line)
    texts = (parse_json_line(line, key, f"{chunk.path}:{number}") for number, line in numbered)
    return [text for text in texts if text is not None]


def _json_chunks(
    path: Path, raw: BinaryIO, stream: BinaryIO, here: Position, chunk_bytes: int, done: int
) -> Iterator[Chunk]:
    offset, line = here.offset, here.line
    lines: list[bytes] = []
    first, size = line + 1, 0
    while text := stream.readline(MAX_DOCUMENT_BYTES + 1):
        if len(text) > MAX_DOCUMENT_BYTES:
            raise UserError(f"{path}:{line + 1}: a line of over 256 MiB; is this JSON lines?")
        lines.append(text)
        size += len(text)
        offset += len(text)
        line += 1
        if size >= chunk_bytes:
            yield Chunk(str(path), True, first, lines, Position(here.file, offset, line), done + raw.tell())
            lines, first, size = [], line + 1, 0
    if lines:
        yield Chunk(str(path), True, first, lines, Position(here.file, offset, line), done + raw.tell())


def _inner_suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in (".gz", *_OTHER_PACKING) else path.suffix


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    return raw
