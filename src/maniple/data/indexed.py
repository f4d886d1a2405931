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
"""

from __future__ import annotations

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
    """A checked `.bin/.idx` pair. lengths: int32[sequences], mapped from disk."""

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    num_tokens: int

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def tokens(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens of the sequences `first` to `stop` (all of them by default), mapped from disk."""
        start = int(self.lengths[:first].sum(dtype=np.int64))
        count = int(self.lengths[first:stop].sum(dtype=np.int64))
        if count == 0:  # an empty map is an error to the system
            return np.empty(0, self.dtype)
        return np.memmap(
            self.prefix + ".bin", dtype=self.dtype, mode="r", offset=start * self.dtype.itemsize, shape=count
        )


def open_indexed(prefix: str) -> IndexedFile:
    """Check the pair at `prefix` and map its lengths. Raises UserError if a file is missing, foreign or cut short."""
    idx, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    missing = [file.name for file in (idx, data) if not file.is_file()]
    if missing:
        names = " and ".join(missing)
        raise UserError(f"dataset {prefix}: {names} not found; mend the prefix, or make it with `maniple data prepare`")
    with open(idx, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or header[:9] != _MAGIC:
        raise UserError(f"dataset {prefix}: {idx.name} is not a Megatron index; make it with `maniple data prepare`")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != _VERSION or code not in _CODES:
        raise UserError(f"dataset {prefix}: {idx.name} has unknown version {version} or token type {code}")
    dtype = np.dtype(_CODES[code])
    if idx.stat().st_size < _HEADER.size + 12 * sequences + 8 * bounds:
        raise UserError(f"dataset {prefix}: {idx.name} is cut short; copy or prepare it again")
    if sequences == 0:
        raise UserError(f"dataset {prefix} holds no documents")
    lengths = np.memmap(idx, dtype=np.int32, mode="r", offset=_HEADER.size, shape=sequences)
    tokens = int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != tokens * dtype.itemsize:
        raise UserError(
            f"dataset {prefix}: {data.name} has {data.stat().st_size:,} bytes where its index says "
            f"{tokens * dtype.itemsize:,}; copy or prepare it again"
        )
    return IndexedFile(prefix, dtype, lengths, tokens)
