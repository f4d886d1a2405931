"""Small `.bin/.idx` pairs written straight from arrays, and jobs that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from maniple.config.schema import TrainConfig
from maniple.data.datasets import build_datasets
from maniple.data.indexed import write_index
from maniple.data.sources import prepare_source

UINT16 = np.dtype(np.uint16)


def write_pair(folder: Path, lengths, dtype=UINT16, name: str = "data", tokens=None) -> tuple[str, np.ndarray]:
    """Prefix and tokens of a dataset of documents of these lengths; tokens count up from 0 unless given."""
    lengths = np.array(lengths, np.int32)
    waiting = folder / f"{name}.lengths"
    waiting.write_bytes(lengths.tobytes())
    tokens = np.arange(lengths.sum()) if tokens is None else np.asarray(tokens)
    tokens = tokens.astype(dtype)
    (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    write_index(folder / f"{name}.idx", waiting, dtype)
    waiting.unlink()
    return str(folder / name), tokens


def write_tokenizer(folder: Path, vocab_size: int) -> str:
    """A tokenizer of so many whole words; token 0 is its end token."""
    words = {"<|endoftext|>": 0} | {f"w{index}": index for index in range(1, vocab_size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<|endoftext|>"}
    path = folder / f"tokenizer{vocab_size}.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    return str(path)


def job(
    tokenizer: str, train, validation=(), *, seed: int = 1, length: int = 8, steps: int = 10, **data
) -> TrainConfig:
    data |= {"source": "megatron", "train": list(train), "validation": list(validation), "sequence_length": length}
    train_section = {"seed": seed, "steps": steps}
    return TrainConfig.model_validate({"data": {**data, "tokenizer": tokenizer}, "train": train_section})


def build(config: TrainConfig, folder: Path, train_samples: int = 50, valid_samples: int = 10, **options):
    source = prepare_source(config, folder, True, lambda: None)
    return build_datasets(config, source, train_samples=train_samples, valid_samples=valid_samples, **options)


def texts(dataset, stop: int, start: int = 0) -> list[list[int]]:
    return [dataset[index]["tokens"].tolist() for index in range(start, stop)]
