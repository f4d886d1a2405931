"""What the trainer reads: Megatron-Core's `GPTDataset`s over a prepared source.

The datasets are Megatron-Core's own classes, built here rather than by its `BlendedMegatronDatasetBuilder`, which
writes index files straight into the live cache and trusts whatever it finds there by name: a job killed in between
leaves half an index for the next one, and two jobs that start at once write into each other's files. Here the index
cache of a job is one folder, named after everything that its content depends on, written by one process and renamed
when it is whole. Rounding of blends follows the builder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from maniple.config.schema import TrainConfig
from maniple.data.batches import iterate
from maniple.data.sources import Part, Source, prepare_source, publish, wait_until_visible
from maniple.data.synthetic import SyntheticDataset
from maniple.errors import UserError

__all__ = ["Source", "build_datasets", "iterate", "prepare_source"]

# Blending picks a dataset's samples one by one and may take slightly more than its share.
_BLEND_SURPLUS = 0.005


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
    """Training and validation dataset of at least so many samples, repeating the text as often as that takes.

    A sample is a dict of tensors [sequence_length]: tokens, labels, position_ids (int64) and loss_mask (float32).
    Order and content depend on seed, source and sample counts only. Every process calls this; `is_writer` is true for
    global rank 0 alone, and `barrier` returns once all have called it. Processes for which `is_built_on_rank` is false
    (those that need no tokens) get (None, None). Raises UserError if the cache cannot be written or seen.
    """
    if not source.train:
        length, seed, vocab_size = config.data.sequence_length, config.train.seed, source.tokenizer.vocab_size
        if not is_built_on_rank():
            return None, None
        return (
            SyntheticDataset(train_samples, length, vocab_size, seed, split=0),
            SyntheticDataset(valid_samples, length, vocab_size, seed, split=1),
        )
    _require_helpers()
    if is_writer and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        raise ValueError("the writer must be global rank 0: Megatron-Core's datasets write their indices there only")
    wanted = ((source.train, train_samples), (source.validation, valid_samples))
    folder = source.cache_dir / "indices" / _identity(config, source, train_samples, valid_samples)
    if is_writer and not folder.is_dir():
        publish(folder, lambda partial: _open(config, source, wanted, partial))
    barrier()
    wait_until_visible(folder)
    if not is_built_on_rank():
        return None, None
    train, valid = _open(config, source, wanted, folder)
    return train, valid


def _open(config: TrainConfig, source: Source, wanted: tuple, cache: Path) -> list[Any]:
    """The datasets of both splits; indices come from `cache`, and are written there by rank 0 if it is empty."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    blends = [([part.prefix for part in parts], None) for parts, _ in wanted]
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.data.sequence_length,
        blend_per_split=[*blends, None],
        path_to_cache=str(cache),
        tokenizer=source.tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    datasets: list[Any] = []
    for split, (parts, samples) in zip((Split.train, Split.valid), wanted, strict=True):
        share_sizes = [samples if len(parts) == 1 else math.ceil(samples * part.weight) for part in parts]
        members = []
        for part, size in zip(parts, share_sizes, strict=True):
            size = size if len(parts) == 1 else math.ceil(size * (1 + _BLEND_SURPLUS))
            documents = np.arange(part.first, part.stop, dtype=np.int32)
            tokens = GPTDataset.build_low_level_dataset(part.prefix, settings)
            members.append(GPTDataset(tokens, part.prefix, documents, size, split, settings))
        if len(members) == 1:
            datasets.append(members[0])
        else:
            datasets.append(BlendedDataset(members, [part.weight for part in parts], sum(share_sizes), settings))
    return datasets


def _identity(config: TrainConfig, source: Source, train_samples: int, valid_samples: int) -> str:
    def described(part: Part) -> list[Any]:
        # Megatron-Core knows a dataset by its path; a dataset prepared anew at the same path is another one.
        return [part.prefix, part.first, part.stop, part.weight, _content_mark(Path(part.prefix + ".idx"))]

    everything = [
        [described(part) for part in source.train],
        [described(part) for part in source.validation],
        [train_samples, valid_samples, config.train.seed, config.data.sequence_length],
        source.tokenizer.unique_identifiers,
    ]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]


def _content_mark(path: Path) -> str:
    """Size and both ends of a file, hashed: tells a changed index without reading all of it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return f"{size}-{digest.hexdigest()}"


def _require_helpers() -> None:
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"megatron-core is installed without its compiled dataset helpers ({error}): reinstall it from a wheel, or "
            "with a C++ compiler: pip install --force-reinstall --no-deps --no-binary megatron-core megatron-core"
        ) from error
