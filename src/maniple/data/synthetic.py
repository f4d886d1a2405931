"""A token stream that needs no text, for tests of speed and of plumbing: it calls itself synthetic wherever it is used.

Tokens follow a chain that a model can learn: with probability 0.75 the next token is the fixed successor of the last
one, else it is drawn anew from a Zipf distribution. The stream's unigram entropy is therefore well above what a model
that has learnt the successors reaches. Each sample depends on (seed, split, index) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

FOLLOW_PROBABILITY = 0.75
_ZIPF_EXPONENT = 1.1


class SyntheticTokenizer:
    """Names ids where there is no text: `<12> <7>`. Encoding maps each character to some id."""

    def __init__(self, vocab_size: int) -> None:
        self.name = "synthetic"
        self.vocab_size = vocab_size
        self.eod = 0
        self.unique_identifiers: dict[str, Any] = {"class": type(self).__name__, "vocab_size": vocab_size}

    def encode(self, text: str) -> list[int]:
        return [1 + ord(character) % (self.vocab_size - 1) for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(f"<{int(i)}>" for i in ids)


class SyntheticDataset(Dataset):
    """`num_samples` samples of `sequence_length` tokens, ids 1 to `vocab_size` - 1, in Megatron-Core's sample format.

    A sample is a dict of tensors [sequence_length]: tokens, labels, position_ids (int64) and loss_mask (float32, ones).
    """

    def __init__(self, num_samples: int, sequence_length: int, vocab_size: int, seed: int, split: int) -> None:
        self._num_samples = num_samples
        self._length = sequence_length
        self._seed, self._split = seed, split
        ranks = np.arange(1, vocab_size, dtype=np.float64)
        self._cumulative = np.cumsum(ranks**-_ZIPF_EXPONENT)
        self._cumulative /= self._cumulative[-1]
        # The same table for both splits: what training learns holds in validation.
        self._ids = 1 + np.random.default_rng(seed).permutation(vocab_size - 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.from_numpy(self.tokens(index))
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": torch.ones(self._length, dtype=torch.float32),
            "position_ids": torch.arange(self._length),
        }

    def successor(self, token: int) -> int:
        """The token that follows `token` with `FOLLOW_PROBABILITY` (or by chance)."""
        rank = int(np.flatnonzero(self._ids == token)[0])
        return int(self._ids[(rank + 1) % len(self._ids)])

    def tokens(self, index: int) -> np.ndarray:
        """int64[sequence_length + 1]: the sample's text."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        rng = np.random.default_rng((self._seed, self._split, index))
        count = self._length + 1
        fresh = rng.random(count) >= FOLLOW_PROBABILITY
        fresh[0] = True
        draws = np.minimum(np.searchsorted(self._cumulative, rng.random(count)), len(self._ids) - 1)
        # Rank = that of the last fresh draw plus the steps taken along the successor ring since.
        positions = np.arange(count)
        last_fresh = np.maximum.accumulate(np.where(fresh, positions, 0))
        ranks = (draws[last_fresh] + positions - last_fresh) % len(self._ids)
        return self._ids[ranks].astype(np.int64)
