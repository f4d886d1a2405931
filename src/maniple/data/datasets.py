"""What the trainer reads: endless streams of samples over a prepared source, and blends of them.

Not Megatron-Core's `GPTDataset`: its one shuffle over all samples that a job asks for depends on their number, so that
a longer run reads in another order, and its index files are written straight into the live cache and believed by name.
The files that hold the text are Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset

from maniple.config.schema import TrainConfig
from maniple.data.batches import Batches, iterate
from maniple.data.blend import Blend, period_slots
from maniple.data.packing import ENDLESS, PackedDataset
from maniple.data.sources import Part, Source, prepare_source
from maniple.data.synthetic import SyntheticDataset
from maniple.errors import UserError

__all__ = ["Batches", "Source", "build_datasets", "iterate", "prepare_source"]


def build_datasets(
    config: TrainConfig,
    source: Source,
    *,
    train_samples: int,
    valid_samples: int,
    is_writer: bool = True,
    barrier: Callable[[], object] = lambda: None,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> tuple[Dataset | None, Dataset | None]:
    """Training data without end, and `valid_samples` validation samples, repeating the text as often as that takes.

    A sample is a dict of tensors [sequence_length]: tokens, labels, position_ids (int64) and loss_mask (float32).
    Sample i depends on the datasets, their weights, seed and sequence length, and on nothing else. train_samples: what
    the job means to read, for which the index cache is made ready. Every process calls this; `is_writer` is true for
    one, and `barrier` returns once all have called it. Processes for which `is_built_on_rank` is false (those that need
    no tokens) get (None, None). Raises UserError if the cache cannot be written.
    """
    length, seed, vocab_size = config.data.sequence_length, config.train.seed, source.tokenizer.vocab_size
    if not source.train:
        if not is_built_on_rank():
            return None, None
        return (
            SyntheticDataset(ENDLESS, length, vocab_size, seed, split=0),
            SyntheticDataset(valid_samples, length, vocab_size, seed, split=1),
        )
    cache = source.cache_dir / "indices"
    streams = [
        BlendedDataset(parts, length, vocab_size, seed=seed, split=split, cache=cache)
        for parts, split in ((source.train, "train"), (source.validation, "validation"))
        if is_writer or is_built_on_rank()
    ]
    if is_writer:
        try:
            for stream, samples in zip(streams, (train_samples, valid_samples), strict=True):
                stream.build(samples)
        except OSError as error:
            raise UserError(f"cannot write the data cache {cache}: {error.strerror or error}") from error
    barrier()
    if not is_built_on_rank():
        return None, None
    train, valid = streams
    return train, Subset(valid, range(valid_samples))


class BlendedDataset(Dataset):
    """Parts of indexed datasets in proportion to their weights; one part alone is a blend of one.

    The samples of a part come in its own order, whatever else is in the blend.
    """

    def __init__(
        self, parts: Sequence[Part], sequence_length: int, vocab_size: int, *, seed: int, split: str, cache: Path
    ) -> None:
        self.members = [
            PackedDataset(part, sequence_length, vocab_size, seed=seed, split=split, cache=cache) for part in parts
        ]
        self.order = Blend(period_slots([part.weight for part in parts]))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        member, sample = self.order(index)
        return self.members[member][sample]

    def build(self, samples: int) -> None:
        """Write what the index cache lacks for the first `samples` samples. Raises OSError if it cannot be written."""
        for member, dataset in enumerate(self.members):
            dataset.build(self.order.count(member, samples))
