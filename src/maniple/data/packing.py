"""Documents as an endless stream of samples: an order that neither the run's length nor its layout has a say in.

An epoch lays the documents end to end in an order of its own and cuts a sample every `sequence_length` tokens (labels
are the same text one token on, so neighbours share a token); the cuts are read in another order of the epoch's own.
Every sample of an epoch is read once, and what is left at its end, less than a sample, is other text each time. Sample
`i` of the stream is found from `i` alone: a longer run only reads on, and a resumed one goes on where it was.

Both orders are `Permutation`s, which take no memory. What is kept of an epoch is at which token each block of 64
documents ends, an eighth of a byte a document, in a small file that one process writes; a sample is then found by a
search and a look at the block's own documents. A block whose lengths do not add up to what the file says is an error,
so that a file of another dataset is never believed.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from maniple.data.indexed import TokenReader, content_mark, open_indexed, stranger_among
from maniple.data.permutation import Permutation
from maniple.data.sources import Part, private_name
from maniple.errors import UserError

ORDER_VERSION = 1  # raised whenever the same seed would give another order
ENDLESS = 1 << 40  # samples: a stream has no end, and a dataset needs a length
_BLOCK = 64
_AT_ONCE = 1 << 18  # documents, a multiple of _BLOCK


class _Epoch(NamedTuple):
    documents: Permutation
    samples: Permutation
    ends: np.ndarray  # int64[blocks]: tokens up to and with each block of documents


class PackedDataset(Dataset):
    """The samples of one part of an indexed dataset, without end.

    A sample is a dict of tensors [sequence_length]: tokens, labels, position_ids (int64) and loss_mask (float32, ones).
    split: a name that sets this use of the documents apart from others of the same seed. cache: folder of the files
    that `build` writes; an epoch without one is worked out in memory. Raises UserError, naming file and document, for
    what cannot be read or holds a token that is not below `vocab_size`.
    """

    def __init__(
        self, part: Part, sequence_length: int, vocab_size: int, *, seed: int, split: str, cache: Path
    ) -> None:
        self.part, self.sequence_length, self.vocab_size = part, sequence_length, vocab_size
        self.samples_per_epoch = (part.num_tokens - 1) // sequence_length
        self._key = f"{ORDER_VERSION}/{seed}/{split}"
        content = [self._key, content_mark(part.prefix), part.first, part.stop]
        self._folder = cache / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        self._open()

    def _open(self) -> None:
        file = open_indexed(self.part.prefix)
        self._lengths, self._offsets, self._itemsize = file.lengths, file.offsets, file.dtype.itemsize
        self._reader = TokenReader(file)
        self._epoch = lru_cache(maxsize=2)(self._load_epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.from_numpy(self.text(index))
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": torch.ones(self.sequence_length, dtype=torch.float32),
            "position_ids": torch.arange(self.sequence_length),
        }

    def text(self, index: int) -> np.ndarray:
        """int64[sequence_length + 1]: sample `index` and the token after it."""
        number, position = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = int(epoch.samples(position)) * self.sequence_length
        wanted = self.sequence_length + 1
        block = int(np.searchsorted(epoch.ends, start, side="right"))
        at = int(epoch.ends[block - 1]) if block else 0
        if block == self._num_blocks or at > start:
            raise self._stale(self._folder)
        pieces: list[np.ndarray] = []
        while wanted:
            documents, lengths = self._block(epoch, block)
            for document, length in zip(documents.tolist(), lengths.tolist(), strict=True):
                skip = max(0, start - at)
                count = min(length - skip, wanted)
                if count > 0:
                    pieces.append(self._read(document, skip, count))
                    wanted -= count
                    if not wanted:
                        break
                at += length
            block += 1
        return np.concatenate(pieces)

    def build(self, samples: int) -> None:
        """Write what is missing in the cache for the first `samples` samples. One process at a time need do it; several
        at once do no harm, since each file appears whole and all would write the same."""
        if self._num_blocks == 1:
            return  # nothing worth a file
        for number in range(-(-samples // self.samples_per_epoch)):
            path = self._path(number)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(private_name(path.name))
                try:
                    with open(partial, "wb") as out:
                        self._block_ends(number).astype("<i8").tofile(out)
                        out.flush()
                        os.fsync(out.fileno())
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)

    @property
    def _num_documents(self) -> int:
        return self.part.stop - self.part.first

    @property
    def _num_blocks(self) -> int:
        return -(-self._num_documents // _BLOCK)

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:06d}.i64"

    def _documents(self, epoch: int) -> Permutation:
        return Permutation(self._num_documents, f"{self._key}/{epoch}/documents")

    def _load_epoch(self, number: int) -> _Epoch:
        path = self._path(number)
        if self._num_blocks == 1 or not path.exists():
            ends = self._block_ends(number)
        elif path.stat().st_size == 8 * self._num_blocks:
            ends = np.memmap(path, "<i8", "r")
        else:
            raise self._stale(path)
        if int(ends[-1]) != self.part.num_tokens:
            raise self._stale(path)
        samples = Permutation(self.samples_per_epoch, f"{self._key}/{number}/samples")
        return _Epoch(self._documents(number), samples, ends)

    def _block_ends(self, epoch: int) -> np.ndarray:
        permutation, count = self._documents(epoch), self._num_documents
        sums = np.empty(self._num_blocks, np.int64)
        for first in range(0, count, _AT_ONCE):
            positions = np.arange(first, min(first + _AT_ONCE, count))
            lengths = self._lengths[permutation(positions) + self.part.first].astype(np.int64)
            inside = np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK))
            sums[first // _BLOCK : first // _BLOCK + len(inside)] = inside
        return np.cumsum(sums)

    def _block(self, epoch: _Epoch, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents of a block in the epoch's order, and their lengths; checked against the cache."""
        stop = min((block + 1) * _BLOCK, self._num_documents)
        documents = epoch.documents(np.arange(block * _BLOCK, stop)) + self.part.first
        lengths = self._lengths[documents]
        before = int(epoch.ends[block - 1]) if block else 0
        if int(lengths.sum(dtype=np.int64)) != int(epoch.ends[block]) - before:
            raise self._stale(self._folder)
        return documents, lengths

    def _read(self, document: int, skip: int, count: int) -> np.ndarray:
        offset = int(self._offsets[document]) + skip * self._itemsize
        tokens = self._reader.read(offset, count).astype(np.int64)
        if (stranger := stranger_among(tokens, self.vocab_size)) is not None:
            raise UserError(
                f"dataset {self.part.prefix}: document {document} holds token {stranger}, and the tokenizer has "
                f"{self.vocab_size:,} tokens: prepare the dataset again, or set data.tokenizer to that of the dataset"
            )
        return tokens

    def _stale(self, path: Path) -> UserError:
        return UserError(
            f"{path} is not an index of dataset {self.part.prefix} as it is now: delete it and start again"
        )


_OPENED = ("_lengths", "_offsets", "_itemsize", "_reader", "_epoch")
