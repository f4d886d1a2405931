"""Maniple's training step as the trainer runs it, for `whole_step`: one GPU, local dispatcher, fp32 main gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from maniple.bench.whole_step import OURS, Plan, batches
from maniple.config.check import check
from maniple.config.load import PRESETS, load
from maniple.config.schema import TrainConfig
from maniple.kernels import registry
from maniple.metrics import expert_balance


def job_of(plan: Plan, recipe: str) -> TrainConfig:
    """The job of the preset `pretrain` at the plan's sizes."""
    sizes = [
        f"data.sequence_length={plan.sequence_length}",
        f"train.micro_batch_size={plan.micro_batch_size}",
        f"train.global_batch_size={plan.micro_batch_size * plan.micro_batches}",
        "train.steps=1000",
        f"train.seed={plan.seed}",
        f"train.device={'gpu' if plan.device.type == 'cuda' else 'cpu'}",
    ]
    words = [
        *sizes,
        "optimizer.warmup_steps=10",
        "data.source=synthetic",
        f"precision.recipe={recipe}",
        "train.loss=fused_kept",
    ]
    return load(PRESETS / "pretrain.yaml", words).config


class Ours:
    """The engine with a model of random weights. Raises UserError for a recipe that has no kernels here."""

    name = OURS

    def __init__(self, plan: Plan, recipe: str) -> None:
        from maniple.engines.megatron import model, parallel, precision, step
        from maniple.engines.megatron.optimizer import build_optimizer

        self.recipe, self.plan = recipe, plan
        self.note = "bf16 weights and products of their recipe, fp32 gradients, main parameters and moments"
        self.job = job_of(plan, recipe)
        check(self.job, plan.card, 1)
        self.device = parallel.pick_device(self.job)
        parallel.start(self.job, self.device)
        self.chunks = model.wrap(model.build_chunks(plan.card, self.job), self.job, self.device)
        precision.check_kernels(self.chunks)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, self.job)
        step.connect(self.chunks, self.optimizer, self.job)
        self.batches, self.train_step = self._batches(), step.train_step
        self.stats: Any = None

    def step(self) -> float:
        self.stats = self.train_step(self.chunks, self.optimizer, self.scheduler, [self.batches], self.job, self.device)
        return self.stats.loss

    def facts(self) -> dict[str, Any]:
        balance = expert_balance(list(self.stats.expert_counts.values())) if self.stats else None
        return {
            "imbalance": balance.overall if balance else None,
            "used_so_far": [f"{op} {recipe}: {name}" for op, recipe, _, name in registry.used()],
        }

    def close(self) -> None:
        from maniple.engines.megatron import parallel

        del self.chunks, self.optimizer, self.scheduler, self.batches
        parallel.stop()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for tokens, labels in batches(self.plan):
            positions = torch.arange(self.plan.sequence_length).expand_as(tokens)
            mask = torch.ones(tokens.shape)
            if self.plan.device.type == "cuda":
                positions, mask = positions.contiguous().pin_memory(), mask.pin_memory()
            yield {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
