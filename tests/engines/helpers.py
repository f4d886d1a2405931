"""Starts the engine on CPU processes with known weights and batches, for tests. Import it in spawned processes only.

Weights have one canonical form whatever the layout: whole experts `[E, ...]`, decoder layers by their number in the
whole model. They are drawn at unit scale, so that biases, norms and sinks matter as much as matrices do.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import model, parallel, step
from maniple.engines.megatron.documents import padding
from maniple.engines.megatron.optimizer import build_optimizer
from maniple.models.card import ModelCard

SEQUENCE = 24  # longer than the tiny cards' window of 16, no power of two


def make_job(**sections: dict[str, Any]) -> TrainConfig:
    """An fp32 CPU job of two micro-batches of two sequences a process; `sections` are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "parallel": {"collective_timeout_seconds": 60, "distributed_optimizer": False},
        "precision": {"dtype": "fp32"},
        "data": {"source": "synthetic", "sequence_length": SEQUENCE},
        "moe": {"aux_loss_type": "sequence", "aux_loss_coefficient": 0.3, "z_loss_coefficient": 0.1},
        # a bound that is never reached: the norm is computed, no gradient is scaled
        "optimizer": {"clip_grad": 1e9, "warmup_steps": 0, "learning_rate": 1e-2, "decay_style": "constant"},
        "train": {"micro_batch_size": 2, "global_batch_size": 4, "mtp_loss_coefficient": 0.5, "device": "cpu"},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return TrainConfig.model_validate(base)


def make_batches(vocab_size: int, count: int, sequences: int, seed: int = 0) -> list[step.Batch]:
    """`count` micro-batches; each sequence has another number of labels that count, at random places."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, vocab_size, (sequences, SEQUENCE + 1), generator=generator)
        share = torch.rand(sequences, 1, generator=generator) * 0.5 + 0.4
        mask = (torch.rand(sequences, SEQUENCE, generator=generator) < share).float()
        positions = torch.arange(SEQUENCE).expand(sequences, -1)
        batches.append({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions})
    return batches


def with_documents(batch: step.Batch, seed: int) -> step.Batch:
    """The batch with its rows cut into some documents, the last of which ends in padding; no label crosses a border."""
    tokens_BS = batch["tokens"]
    generator = torch.Generator().manual_seed(seed)
    documents_BS = torch.zeros(tokens_BS.shape, dtype=torch.int32)
    for row_S in documents_BS:
        ends = sorted(torch.randperm(SEQUENCE - 1, generator=generator)[:3].add(1).tolist())
        for number, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), 1):
            row_S[first:end] = number
    next_BS = torch.nn.functional.pad(documents_BS[:, 1:], (0, 1))
    inside_BS = (documents_BS == next_BS) & (documents_BS > 0)
    return {**batch, "documents": documents_BS, "loss_mask": batch["loss_mask"] * inside_BS}


class Engine:
    """This rank's part of a job: model in DDP buffers, optimizer, schedule. Weights are `draw`'s, by `seed`."""

    def __init__(self, card: ModelCard, job: TrainConfig, seed: int = 0, bias_E: torch.Tensor | None = None) -> None:
        self.card, self.job, self.device = card, job, parallel.pick_device(job)
        parallel.stop_groups()
        parallel.start(job, self.device)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        chunks = model.build_chunks(card, job)
        for chunk in chunks:
            _fill(chunk, seed, bias_E)
        self.chunks = model.wrap(chunks, job, self.device)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, job)
        step.connect(self.chunks, self.optimizer, job)

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers of this rank, by canonical name."""
        return {
            canonical(chunk, name): tensor.detach().clone()
            for chunk in map(model.unwrap, self.chunks)
            for name, tensor in chunk.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the step's mean loss, by canonical name; wholly present without the distributed optimizer only."""
        factor = getattr(self.optimizer, "scale_to_come", None)
        return {
            canonical(chunk, name): parameter.main_grad.detach() * (1.0 if factor is None else factor)
            for chunk in map(model.unwrap, self.chunks)
            for name, parameter in chunk.named_parameters()
        }

    def cuts(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """By canonical name: how this rank's part was cut from the whole, where it was (see `cuts_of`)."""
        return {
            canonical(chunk, name): cuts
            for chunk in map(model.unwrap, self.chunks)
            for name, parameter in chunk.named_parameters()
            if (cuts := cuts_of(name, parameter))
        }

    def step(self, batches: list[step.Batch]) -> step.StepStats:
        iterators: list[Iterator[step.Batch]] = [iter(batches) for _ in self.chunks]
        return step.train_step(self.chunks, self.optimizer, self.scheduler, iterators, self.job, self.device)

    @torch.no_grad()
    def look(self, batch: step.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, S, V] and losses [B, S] of one micro-batch in evaluation mode (no pipeline)."""
        net = self.chunks[0].eval()
        documents_BS = batch.get("documents")
        inputs = {
            "input_ids": batch["tokens"],
            "position_ids": batch["position_ids"],
            "attention_mask": documents_BS,
            "padding_mask": None if documents_BS is None else padding(documents_BS),
        }
        logits = net(**inputs)
        losses = net(**inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
        net.train()
        return logits.clone(), losses.clone()


def canonical(chunk: torch.nn.Module, name: str) -> str:
    """A parameter's name with its decoder layer counted in the whole model rather than in this pipeline stage."""
    if found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        return f"decoder.layers.{number}.{found[2]}"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The canonical weight of that name: same values for whoever asks."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode())))
    if name.endswith("expert_bias"):
        return 0.1 * noise
    if "norm" in name.rsplit(".", 2)[-2]:
        return 1 + 0.2 * noise
    if len(shape) == 1 or name.endswith((".b13", ".b2")):
        return 0.3 * noise
    if name.endswith("word_embeddings.weight"):
        return noise
    return noise / shape[-1] ** 0.5  # keeps the variance of what it multiplies


@torch.no_grad()
def _fill(chunk: torch.nn.Module, seed: int, bias_E: torch.Tensor | None) -> None:
    parameters = dict(chunk.named_parameters())
    for name, tensor in chunk.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        cuts = cuts_of(name, parameters.get(name))
        shape = list(tensor.shape)
        for dim, _, ranks, _ in cuts:
            shape[dim] *= ranks
        whole = bias_E if name.endswith("expert_bias") and bias_E is not None else None
        whole = draw(canonical(chunk, name), tuple(shape), seed) if whole is None else whole
        for dim, rank, ranks, halves in cuts:
            whole = torch.cat([half.chunk(ranks, dim)[rank] for half in whole.chunk(halves, dim)], dim)
        tensor.copy_(whole)


def cuts_of(name: str, parameter: torch.nn.Parameter | None) -> list[tuple[int, int, int, int]]:
    """(dimension, rank, ranks, parts that are each cut by themselves) of each cut that makes this rank's part."""
    cuts, tensor_group = [], parallel_state.get_tensor_model_parallel_group()
    if ".experts." in name:
        group, tensor_group = (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        cuts.append((0, group.rank(), group.size(), 1))
    if parameter is not None and getattr(parameter, "tensor_model_parallel", False):
        halves = 2 if name.endswith(("linear_fc1.weight", ".w13", ".b13")) else 1  # gate and up
        cuts.append((parameter.partition_dim, tensor_group.rank(), tensor_group.size(), halves))
    return [cut for cut in cuts if cut[2] > 1]
