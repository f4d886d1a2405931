"""Whole training jobs on synthetic data for tests. Import it inside a spawned process only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import parallel, trainer
from maniple.models import load_card
from maniple.models.card import ModelCard

VOCABULARY = 300  # of the synthetic tokenizer, which has no fewer


def tiny_card(name: str, **overrides: Any) -> ModelCard:
    """A card's tiny variant with the synthetic vocabulary."""
    return load_card(name).tiny().with_overrides({"vocab_size": VOCABULARY, **overrides})


def make_job(folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    """An fp32 CPU job of two micro-batches of two sequences a step and process; `sections` are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "model": {"vocab_size_multiple": 1},
        "parallel": {"collective_timeout_seconds": 60, "distributed_optimizer": False},
        "precision": {"dtype": "fp32"},
        "data": {"source": "synthetic", "sequence_length": 32, "tokenizer_vocab_size": VOCABULARY},
        "optimizer": {"warmup_steps": 0, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "decay_style": "linear"},
        "train": {
            "device": "cpu",
            "steps": 4,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "eval_interval": 0,
            "eval_batches": 1,
        },
        "checkpoint": {"save_at_end": False},
        "log": {"tensorboard": False, "figure": False, "progress": False},
    }
    for section, values in sections.items():
        base.setdefault(section, {}).update(values)
    return TrainConfig.model_validate({"name": name, "output_dir": folder, **base})


def run(job: TrainConfig, card: ModelCard) -> trainer.Trainer:
    """What `trainer.main` does, in the process group that there is; returns the trainer after its run."""
    device = parallel.pick_device(job)
    parallel.start(job, device)
    try:
        done = trainer.Trainer(job, card, device)
        done.run()
    finally:
        parallel.stop_groups()
    return done


@contextlib.contextmanager
def no_process_group() -> Iterator[None]:
    """In a process alone in its group: for what starts and ends a process group itself, as a first rank of one does."""
    dist.destroy_process_group()
    launcher = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        yield
    finally:
        os.environ.update(launcher)
        if dist.is_initialized():  # it failed
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
