"""`maniple data prepare`: raw text to a tokenized `.bin/.idx` pair.

One process reads chunks in order, workers tokenize them, and the results are appended in that same order, so the
output depends on the input and the tokenizer only, never on the number of workers. At most two chunks a worker are in
flight, and document lengths go straight to disk: memory does not grow with the corpus.

All work happens in `PREFIX.partial/`. Every few seconds its data is flushed and a small manifest records how far input
and output have come; a run that was killed goes on from there with `resume`, cutting off whatever was written after
the manifest, and ends byte for byte where an uninterrupted run would. The finished files are moved to `PREFIX.bin` and
then `PREFIX.idx`, whose presence means that both are whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from maniple.data.indexed import token_dtype, write_index
from maniple.data.inputs import Chunk, Position, find_inputs, read_chunks, texts_of
from maniple.data.tokenizer import TextTokenizer, load_tokenizer
from maniple.errors import UserError

_SAVE_SECONDS = 5.0


@dataclass(frozen=True)
class PrepareResult:
    """documents and tokens of the whole dataset (end tokens counted); seconds of this call."""

    documents: int
    tokens: int
    seconds: float


def prepare(
    inputs: Iterable[Path | str],
    output: Path | str,
    tokenizer: Path | str,
    *,
    key: str = "text",
    workers: int = 1,
    append_eod: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> PrepareResult:
    """Tokenize `inputs` into `output`.bin and `output`.idx.

    inputs: files or folders; `.jsonl` (also `.ndjson`, `.json`, one object a line) gives a document a line, from its
    `key`; any other file is one document. All may be gzipped. tokenizer: what `load_tokenizer` takes. workers:
    processes; 1 tokenizes in this one. append_eod: end each document with the tokenizer's end token. resume: go on
    with an interrupted run of the same job. overwrite: replace an existing dataset, and any interrupted run.
    Documents without a token are left out.

    Raises UserError, leaving nothing behind, for bad input (naming file and line); and, keeping the interrupted run
    for `resume`, when the disk is full.
    """
    started = time.monotonic()
    if workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    files = find_inputs(inputs)
    loaded = load_tokenizer(tokenizer)
    output = Path(output).expanduser()
    if output.suffix in (".bin", ".idx"):
        raise UserError(f"output {output} is a prefix, to which .bin and .idx are added: give {output.with_suffix('')}")
    job = _job(files, loaded, key, append_eod)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _Work(output, job, token_dtype(loaded.vocab_size), resume, overwrite) as work:
            if not work.complete:
                _tokenize(work, files, loaded, key, workers, append_eod, progress)
            work.publish()
    except OSError as error:
        where = error.filename or output
        raise UserError(f"{where}: {error.strerror or error}; mend that and run again with --resume") from error
    return PrepareResult(work.documents, work.tokens, time.monotonic() - started)


def _tokenize(
    work: _Work, files: list[Path], tokenizer: TextTokenizer, key: str, workers: int, append_eod: bool, progress: bool
) -> None:
    chunks = read_chunks(files, work.position)
    encoded_chunks = _encoded(chunks, tokenizer, key, append_eod, workers)
    with _progress_bar(progress) as bar, contextlib.closing(encoded_chunks):
        task = bar.add_task("tokenize", total=sum(file.stat().st_size for file in files))
        for chunk_end, read_bytes, encoded in encoded_chunks:
            work.append(encoded, chunk_end)
            bar.update(task, completed=read_bytes)
    if not work.documents:
        raise UserError(f"no text in {', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''}")


@dataclass(frozen=True)
class _Encoded:
    """lengths: int32, tokens of each document; tokens: the same back to back, as bytes of the dataset's type."""

    lengths: np.ndarray
    tokens: bytes


class _Work:
    """The folder of an unfinished dataset: `tokens`, `lengths`, `manifest.json`, and at the end `index`."""

    def __init__(self, output: Path, job: dict[str, Any], dtype: np.dtype, resume: bool, overwrite: bool) -> None:
        self.bin, self.idx = Path(f"{output}.bin"), Path(f"{output}.idx")
        self.folder = Path(f"{output}.partial")
        self.job, self.dtype = job, dtype
        self.position, self.documents, self.tokens, self.complete = Position(), 0, 0, False
        self._saved_at = time.monotonic()
        self._files: list[BinaryIO] = []
        going_on = resume and (self.folder / "manifest.json").is_file()
        if self.folder.is_dir() and not resume and not overwrite:
            raise UserError(f"{self.folder} holds an interrupted run: add --resume, or --overwrite to start anew")
        if going_on:
            self._load()
        # A complete run that was killed between its last moves has files in place already; resuming it ends the moves.
        if not self.complete and not overwrite and (self.bin.exists() or self.idx.exists()):
            raise UserError(f"{self.bin} or {self.idx.name} exists: choose another output or add --overwrite")
        if not going_on:
            if self.folder.is_dir():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
            self._save()

    def __enter__(self) -> _Work:
        if not self.complete:
            self._files.append(self._open("tokens", self.tokens * self.dtype.itemsize))
            self._files.append(self._open("lengths", 4 * self.documents))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for file in self._files:
            try:
                file.close()
            except OSError:  # what was buffered does not fit on the disk either; the manifest does not count it
                continue
        if isinstance(error, UserError):
            shutil.rmtree(self.folder, ignore_errors=True)

    def append(self, encoded: _Encoded, position: Position) -> None:
        self._files[0].write(encoded.tokens)
        self._files[1].write(encoded.lengths.tobytes())
        self.documents += len(encoded.lengths)
        self.tokens += len(encoded.tokens) // self.dtype.itemsize
        self.position = position
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._flush()
            self._save()

    def publish(self) -> None:
        """Write the index, then move the pair into place; each step can be repeated after a kill."""
        if not self.complete:
            self._flush()
            write_index(self.folder / "index", self.folder / "lengths", self.dtype)
            _sync(self.folder / "index")
            self.complete = True
            self._save()
        tokens, index = self.folder / "tokens", self.folder / "index"
        if tokens.exists():
            self.idx.unlink(missing_ok=True)  # an overwritten index must not be seen beside the new tokens
            os.replace(tokens, self.bin)
        if index.exists():
            os.replace(index, self.idx)
        shutil.rmtree(self.folder)

    def _open(self, name: str, size: int) -> BinaryIO:
        path = self.folder / name
        present = path.stat().st_size if path.exists() else 0
        if present < size:
            raise UserError(f"{path} is shorter than its manifest says: start anew with --overwrite")
        file = open(path, "ab")  # noqa: SIM115 - closed in __exit__
        file.truncate(size)
        return file

    def _flush(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _save(self) -> None:
        manifest = {
            "job": self.job,
            "position": asdict(self.position),
            "documents": self.documents,
            "tokens": self.tokens,
            "complete": self.complete,
        }
        new = self.folder / "manifest.new"
        new.write_text(json.dumps(manifest, indent=1))
        _sync(new)
        os.replace(new, self.folder / "manifest.json")
        self._saved_at = time.monotonic()

    def _load(self) -> None:
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
            job, position = manifest["job"], Position(**manifest["position"])
            documents, tokens, complete = manifest["documents"], manifest["tokens"], manifest["complete"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: start anew with --overwrite") from error
        changed = [name for name in self.job if self.job[name] != job.get(name)]
        if changed:
            raise UserError(f"{self.folder} was begun with other {', '.join(changed)}: start anew with --overwrite")
        self.position, self.documents, self.tokens, self.complete = position, documents, tokens, complete


def _job(files: list[Path], tokenizer: TextTokenizer, key: str, append_eod: bool) -> dict[str, Any]:
    listing = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {
        "inputs": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "key": key,
        "append_eod": append_eod,
    }


def _encoded(
    chunks: Iterator[Chunk], tokenizer: TextTokenizer, key: str, append_eod: bool, workers: int
) -> Generator[tuple[Position, int, _Encoded]]:
    """Each chunk tokenized, in order: where the next one starts, bytes read so far, tokens."""
    if workers == 1:
        encoder = _Encoder(tokenizer, key, append_eod)
        for chunk in chunks:
            yield chunk.next, chunk.read_bytes, encoder(chunk)
        return
    # Not `fork`: this process may hold threads (the tokenizer's own, a trainer's) that do not survive one.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.path, key, append_eod),
    )
    waiting: deque[tuple[Position, int, Future[_Encoded]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk.next, chunk.read_bytes, pool.submit(_work, chunk)))
            if len(waiting) >= 2 * workers:
                position, read_bytes, future = waiting.popleft()
                yield position, read_bytes, future.result()
        while waiting:
            position, read_bytes, future = waiting.popleft()
            yield position, read_bytes, future.result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died (out of memory?)") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    def __init__(self, tokenizer: TextTokenizer, key: str, append_eod: bool) -> None:
        self.tokenizer, self.key = tokenizer, key
        self.tail = [tokenizer.eod] if append_eod else []
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> _Encoded:
        documents = [ids + self.tail for ids in self.tokenizer.encode_batch(texts_of(chunk, self.key)) if ids]
        lengths = [len(ids) for ids in documents]
        flat = np.fromiter(itertools.chain.from_iterable(documents), self.dtype, count=sum(lengths))
        return _Encoded(np.array(lengths, np.int32), flat.tobytes())


_encoder: _Encoder | None = None  # of a worker process


def _start_worker(tokenizer: Path, key: str, append_eod: bool) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = _Encoder(load_tokenizer(tokenizer), key, append_eod)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot tell its workers, which would wait for work for ever


def _work(chunk: Chunk) -> _Encoded:
    assert _encoder is not None
    return _encoder(chunk)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _progress_bar(enabled: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,  # what is left to read is the result, or the one line of an error
        disable=not (enabled and console.is_interactive),
    )
