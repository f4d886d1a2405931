"""Megatron's `.bin/.idx` pair: what is in it, writing its index in bounded memory, and checking one.

`PREFIX.bin` is every token of every document, back to back. `PREFIX.idx`, little-endian, is

    9 bytes    magic `MMIDIDX\\0\\0`
    uint64     version, 1
    uint8      code of the token type
    uint64     number of sequences N
    uint64     number of document bounds, N + 1 where each document is one sequence
    int32[N]   tokens of each sequence
    int64[N]   byte offset of each sequence in the `.bin`
    int64[N+1] sequence at which each document starts, and N

Megatron-Core's own `IndexedDatasetBuilder` keeps all three arrays as Python lists until the end: about 100 bytes a
document, several gigabytes for tens of millions. Here the lengths wait in a file and the rest is computed in blocks.

Nothing of a pair is believed: a copy that was cut short, a flipped bit or another dataset's half would otherwise be
read as text, or end a job hours later in the middle of nowhere.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maniple.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_BLOCK = 1 << 18
_MARKED = 1 << 18  # bytes at each end of a file
_SAMPLES, _SAMPLE = 64, 1 << 14  # blocks between the ends, bytes of each


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies under 65,500, else int32: Megatron-Core's `DType.optimal_dtype`."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def write_index(path: Path, lengths_file: Path, dtype: np.dtype) -> None:
    """Write the index of one-sequence documents whose int32 lengths lie in `lengths_file`, a block at a time."""
    code = next(code for code, kind in _CODES.items() if dtype == kind)
    documents = lengths_file.stat().st_size // 4
    with open(path, "wb") as out:
        out.write(_HEADER.pack(_MAGIC, _VERSION, code, documents, documents + 1))
        with open(lengths_file, "rb") as lengths:
            while block := lengths.read(4 * _BLOCK):
                out.write(block)
        with open(lengths_file, "rb") as lengths:
            offset = 0
            while block := lengths.read(4 * _BLOCK):
                ends = np.cumsum(np.frombuffer(block, np.int32), dtype=np.int64) * dtype.itemsize + offset
                out.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
                offset = int(ends[-1])
        for start in range(0, documents + 1, _BLOCK):
            out.write(np.arange(start, min(start + _BLOCK, documents + 1), dtype="<i8").tobytes())


@dataclass(frozen=True)
class IndexedFile:
    """A `.bin/.idx` pair. lengths: int32[sequences]; offsets: int64[sequences], in bytes; both mapped from disk."""

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return self.count(0, self.num_sequences)

    def count(self, first: int, stop: int) -> int:
        """Tokens of the sequences `first` to `stop`, without adding up their lengths."""
        if stop <= first:
            return 0
        size = int(self.offsets[stop - 1]) - int(self.offsets[first])
        return size // self.dtype.itemsize + int(self.lengths[stop - 1])

    def tokens(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens of the sequences `first` to `stop` (all of them by default), mapped from disk."""
        count = self.count(first, self.num_sequences if stop is None else stop)
        if count == 0:  # an empty map is an error to the system
            return np.empty(0, self.dtype)
        return np.memmap(self.prefix + ".bin", dtype=self.dtype, mode="r", offset=int(self.offsets[first]), shape=count)


def open_indexed(prefix: str, *, thorough: bool = False) -> IndexedFile:
    """Map the pair at `prefix`. Raises UserError, naming file and fault, if it is missing, foreign, damaged or empty.

    Header, sizes and last entries are always checked, which costs nothing. `thorough` reads the whole index, in blocks:
    every length, offset and document bound must be what the format makes of the lengths, so that an index either passes
    or is refused, whatever was done to it.
    """
    idx, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    try:
        missing = [file.name for file in (idx, data) if not file.is_file()]
        if missing:
            names = " and ".join(missing)
            raise UserError(
                f"dataset {prefix}: {names} not found; mend the prefix, or make it with `maniple data prepare`"
            )
        return _open(prefix, idx, data, thorough)
    except OSError as error:
        raise UserError(f"dataset {prefix}: {error.filename or idx}: {error.strerror or error}") from error


def _open(prefix: str, idx: Path, data: Path, thorough: bool) -> IndexedFile:
    with open(idx, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or header[:9] != _MAGIC:
        raise UserError(f"dataset {prefix}: {idx.name} is not a Megatron index; make it with `maniple data prepare`")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != _VERSION or code not in _CODES:
        raise UserError(f"dataset {prefix}: {idx.name} has unknown version {version} or token type {code}")
    dtype = np.dtype(_CODES[code])
    size, expected = idx.stat().st_size, _HEADER.size + 12 * sequences + 8 * bounds
    if size < expected:
        raise UserError(f"dataset {prefix}: {idx.name} is cut short; copy or prepare it again")
    if size > expected:
        raise UserError(
            f"dataset {prefix}: {idx.name} has {size:,} bytes where its header says {expected:,}: it is damaged, or of "
            "a dataset with images; copy or prepare it again"
        )
    if sequences == 0:
        raise UserError(f"dataset {prefix} holds no documents")
    start = _HEADER.size
    lengths = np.memmap(idx, dtype="<i4", mode="r", offset=start, shape=sequences)
    offsets = np.memmap(idx, dtype="<i8", mode="r", offset=start + 4 * sequences, shape=sequences)
    starts = np.memmap(idx, dtype="<i8", mode="r", offset=start + 12 * sequences, shape=bounds) if bounds else None
    if thorough:
        _check_contents(prefix, idx.name, dtype, lengths, offsets, starts)
    elif int(offsets[0]) or int(lengths[-1]) < 0 or int(offsets[-1]) < 0:
        raise _contradiction(prefix, idx.name, 0, "its first or last entry is impossible")
    file = IndexedFile(prefix, dtype, lengths, offsets)
    if data.stat().st_size != file.num_tokens * dtype.itemsize:
        raise UserError(
            f"dataset {prefix}: {data.name} has {data.stat().st_size:,} bytes where its index says "
            f"{file.num_tokens * dtype.itemsize:,}; copy or prepare it again"
        )
    return file


def _check_contents(prefix, name, dtype, lengths, offsets, starts) -> None:
    """Raises UserError at the first entry of the index that does not follow from those before it."""
    offset, count = 0, len(lengths)
    for first in range(0, count, _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64)
        if (wrong := np.flatnonzero(block < 0)).size:
            raise _contradiction(prefix, name, first + int(wrong[0]), f"has {int(block[wrong[0]])} tokens")
        ends = np.cumsum(block) * dtype.itemsize + offset
        due = np.concatenate(([offset], ends[:-1]))
        if (wrong := np.flatnonzero(offsets[first : first + _BLOCK] != due)).size:
            at = first + int(wrong[0])
            raise _contradiction(prefix, name, at, f"starts at byte {int(offsets[at])}, not at {int(due[wrong[0]])}")
        offset = int(ends[-1])
    last = 0
    for first in range(0, 0 if starts is None else len(starts), _BLOCK):
        block = starts[first : first + _BLOCK].astype(np.int64)
        steps = np.diff(block, prepend=last)
        if (wrong := np.flatnonzero((steps < 0) | (block > count))).size or (first == 0 and block[0]):
            at = int(wrong[0]) if wrong.size else 0
            raise UserError(
                f"dataset {prefix}: {name} is damaged: document {first + at} begins at sequence {int(block[at])} of "
                f"{count:,}; copy or prepare it again"
            )
        last = int(block[-1])
    if starts is None or last != count:
        raise UserError(
            f"dataset {prefix}: {name} is damaged: its documents end at sequence {last:,} of {count:,}; copy or "
            "prepare it again"
        )


def _contradiction(prefix: str, name: str, sequence: int, what: str) -> UserError:
    return UserError(f"dataset {prefix}: {name} is damaged: sequence {sequence} {what}; copy or prepare it again")


def content_mark(prefix: str) -> str:
    """Tells one dataset from another without reading all of it: both files' sizes, and a hash of both ends of each."""
    digest, sizes = hashlib.sha256(), []
    for path in (Path(prefix + ".idx"), Path(prefix + ".bin")):
        with open(path, "rb") as file:
            sizes.append(os.fstat(file.fileno()).st_size)
            digest.update(file.read(_MARKED))
            file.seek(max(0, sizes[-1] - _MARKED))
            digest.update(file.read())
    return f"{sizes[0]}-{sizes[1]}-{digest.hexdigest()[:32]}"


def sampled_mark(prefix: str) -> str:
    """A hash of 64 blocks of 16 KiB of each of both files, evenly spaced between the ends that `content_mark` reads; of
    all between them where that is no more. It takes as long for a terabyte as for two megabytes.

    What differs in one of the blocks is seen; what differs between them alone is not.
    """
    digest = hashlib.sha256()
    for path in (Path(prefix + ".idx"), Path(prefix + ".bin")):
        with open(path, "rb", buffering=0) as file:
            first, stop = _MARKED, os.fstat(file.fileno()).st_size - _MARKED
            room = max(0, stop - first - _SAMPLE)
            step = max(_SAMPLE, -(-room // (_SAMPLES - 1)))
            for start in range(first, max(first, stop), step):
                digest.update(os.pread(file.fileno(), min(_SAMPLE, stop - start), start))
    return digest.hexdigest()[:32]


class TokenReader:
    """Reads tokens of a pair by position. Not through a map: a file that shrinks or fails under a running job is then
    an error with a name instead of a bus error, and what was read is not counted as this process's memory."""

    def __init__(self, file: IndexedFile) -> None:
        self._path, self._dtype = file.prefix + ".bin", file.dtype
        self._stream = open(self._path, "rb", buffering=0)  # noqa: SIM115 - as long as the dataset lives

    def read(self, offset: int, count: int) -> np.ndarray:
        """`count` tokens from byte `offset`. Raises UserError if they cannot be read."""
        size = count * self._dtype.itemsize
        try:
            raw = os.pread(self._stream.fileno(), size, offset)
            while len(raw) < size and (more := os.pread(self._stream.fileno(), size - len(raw), offset + len(raw))):
                raw += more
        except OSError as error:
            raise UserError(f"{self._path} cannot be read at byte {offset:,}: {error.strerror or error}") from error
        if len(raw) < size:
            raise UserError(f"{self._path} ends at byte {offset + len(raw):,}: it was cut short while in use")
        return np.frombuffer(raw, self._dtype)


def stranger_among(tokens: np.ndarray, vocab_size: int) -> int | None:
    """A token id (the least or the greatest) that a vocabulary of that size does not have; None if it has all."""
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest >= 0 and highest < vocab_size:
        return None
    return lowest if lowest < 0 else highest
