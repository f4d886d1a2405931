"""One job on any number of ranks against one process that sees the same weights and the same global batch.

A test module names its cases, gets `Outcome`s from `compare`, and asserts on them: relative errors of the loss figures,
of every gradient and of every weight after the steps, put together from each rank's own cuts; and the names of the
tensors of which two ranks hold unequal copies.

By default gradients are clipped to a third or less of their norm, and Adam's step is nearly linear in them (epsilon 1,
learning rate 100), so that a weight after the step is as sensitive as a gradient and an update is as large as a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

CLIP = 0.05  # far under any case's norm
STEEP = {"learning_rate": 100.0, "min_learning_rate": 0.0, "weight_decay": 1e-3, "epsilon": 1.0, "clip_grad": CLIP}
FIGURES = ("loss", "mtp_loss", "aux_loss", "z_loss", "grad_norm")


@dataclass(frozen=True)
class Case:
    """A job of `ranks` processes over `sequences` sequences a step, one a micro-batch."""

    card: str
    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)  # of the card
    aux: str = "sequence"
    bias: tuple[float, ...] | None = None  # of every router; None: small and random
    masked: str = ""  # "rank 1": no label of that data-parallel rank's counts; "all": none at all
    documents: bool = False  # rows hold some that are kept apart, and end in padding
    sequences: int = 8
    micro_batch_size: int = 1
    steps: int = 2
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the job, beside

    def reference(self) -> Case:
        """The same on one process. With the global balance loss it sees the ranks' micro-batches as one, as they do."""
        ranks = self.parallel.get("tensor_parallel_size", 1) * self.parallel.get("pipeline_parallel_size", 1)
        data_parallel = self.ranks // (ranks * self.parallel.get("context_parallel_size", 1))
        joined = data_parallel if self.aux == "global_batch" else 1
        masked = f"every {data_parallel}: {self.masked.removeprefix('rank ')}" if "rank" in self.masked else self.masked
        size = self.micro_batch_size * joined
        sections = {key: words for key, words in self.sections.items() if key != "recompute"}
        sections["train"] = {key: word for key, word in sections.get("train", {}).items() if key != "loss"}
        of_exchange = ("buffer_factor", "pages_factor")  # one process has none
        sections["moe"] = {key: word for key, word in sections.get("moe", {}).items() if key not in of_exchange}
        return replace(self, ranks=1, parallel={}, masked=masked, micro_batch_size=size, sections=sections)


@dataclass(frozen=True)
class Outcome:
    """How far the job's ranks are from the one process: relative errors."""

    figures: dict[str, float]  # by name and step, of the worst rank
    gradients: dict[str, float]  # of the last step
    weights: dict[str, float]  # after it, buffers too
    missing: list[str]  # held by no rank, or not by the one process
    unequal: list[str]  # of which two ranks hold different copies
    counts_agree: bool
    wanted: dict[str, Any]  # the one process's result

    def too_far(self, tolerance: float) -> dict[str, float]:
        """What is not within the tolerance; NaN is not."""
        everything = {**self.figures, **self.gradients, **{f"{name} (after)": e for name, e in self.weights.items()}}
        return {name: e for name, e in everything.items() if not e <= tolerance}


def compare(cases: dict[str, Case], timeout: float = 600.0) -> dict[str, Outcome]:
    """Runs all cases, those with as many ranks in the same processes, and each distinct reference once."""
    references = {name: case.reference() for name, case in cases.items()}
    distinct = list({repr(case): case for case in references.values()}.values())
    found = run_ranks(run, 1, {repr(case): case for case in distinct}, timeout=timeout)[0]
    outcomes: dict[str, Outcome] = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        own = {name: case for name, case in cases.items() if case.ranks == ranks}
        results = run_ranks(run, ranks, own, timeout=timeout)
        for name in own:
            outcomes[name] = judge([result[name] for result in results], found[repr(references[name])])
    return {name: outcomes[name] for name in cases}


def run(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """In each process: this rank's part of every case. The first that fails ends them all: peers may wait for it."""
    results = {}
    for name, case in cases.items():
        try:
            results[name] = _run(case)
        except Exception as failure:
            raise RuntimeError(f"case {name}") from failure
    return results


def _run(case: Case) -> dict[str, Any]:
    from tests.engines import helpers

    card = load_card(case.card).tiny().with_overrides(case.overrides)
    sections = {key: dict(words) for key, words in case.sections.items()}
    optimizer = STEEP | sections.pop("optimizer", {})
    sizes = {"micro_batch_size": case.micro_batch_size, "global_batch_size": case.sequences}
    job = helpers.make_job(
        parallel=case.parallel,
        moe={"aux_loss_type": case.aux} | sections.pop("moe", {}),
        optimizer=optimizer,
        train=sizes | sections.pop("train", {}),
        **sections,
    )
    engine = helpers.Engine(card, job, bias_E=None if case.bias is None else torch.tensor(case.bias))
    stats = []
    for step in range(case.steps):
        sequences = helpers.make_batches(card.vocab_size, case.sequences, 1, seed=step)
        for number, sequence in enumerate(sequences):
            if _is_masked(case, number, engine.data_parallel_size):
                sequence["loss_mask"].zero_()
        if case.documents:
            sequences = [helpers.with_documents(sequence, seed) for seed, sequence in enumerate(sequences)]
        size = case.micro_batch_size
        # micro-batch i of data-parallel rank r is the (i * ranks + r)th: one process reads them in the same order
        batches = [
            {key: torch.cat([one[key] for one in sequences[at : at + size]]) for key in sequences[0]}
            for at in range(0, case.sequences, size)
        ]
        stats.append(engine.step(batches[engine.data_parallel_rank :: engine.data_parallel_size]))
    if job.parallel.overlap_param_gather:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
    whole_gradients = not job.parallel.distributed_optimizer  # else each rank has a reduced shard and unreduced rest
    return {
        "cuts": engine.cuts(),
        "stats": stats,
        "gradients": engine.gradients() if whole_gradients else {},
        "weights": engine.weights(),
    }


def _is_masked(case: Case, number: int, data_parallel_size: int) -> bool:
    if case.masked == "all":
        return True
    micro_batch = number // case.micro_batch_size
    if case.masked.startswith("rank "):
        return micro_batch % data_parallel_size == int(case.masked[5:])
    if case.masked.startswith("every "):
        ranks, rank = case.masked[6:].split(": ")
        return micro_batch % int(ranks) == int(rank)
    return False


def judge(parts: list[dict[str, Any]], wanted: dict[str, Any]) -> Outcome:
    """Ranks' results against the one process's."""
    figures: dict[str, float] = {}
    counts_agree = True
    for part in parts:
        for step, (got, right) in enumerate(zip(part["stats"], wanted["stats"], strict=True)):
            counts_agree &= got.expert_counts == right.expert_counts and got.tokens == right.tokens
            for figure in FIGURES:
                value, due = getattr(got, figure), getattr(right, figure)
                if (value is None) != (due is None):
                    figures[f"{figure} {step}"] = float("nan")
                elif due is not None:
                    e = error(torch.tensor(value), torch.tensor(due))
                    figures[f"{figure} {step}"] = max(figures.get(f"{figure} {step}", 0.0), e)
    missing: list[str] = []
    unequal: list[str] = []
    errors: dict[str, dict[str, float]] = {}
    for key in ("gradients", "weights"):
        tensors, different = whole(parts, key)
        unequal += [f"{name} ({key})" for name in different]
        if tensors:
            missing += sorted(set(tensors) ^ set(wanted[key]))
        errors[key] = {name: error(x, wanted[key][name]) for name, x in tensors.items() if name in wanted[key]}
    return Outcome(figures, errors["gradients"], errors["weights"], missing, unequal, counts_agree, wanted)


def whole(parts: list[dict[str, Any]], key: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(each tensor put together from the ranks' pieces, the names of those with unequal copies of a piece)."""
    tensors: dict[str, torch.Tensor] = {}
    unequal: list[str] = []
    for name in dict.fromkeys(name for part in parts for name in part[key]):
        pieces: dict[tuple, list[torch.Tensor]] = {}
        for part in parts:
            if name in part[key]:
                pieces.setdefault(tuple(part["cuts"].get(name, ())), []).append(part[key][name])
        if any(not torch.equal(copies[0], copy) for copies in pieces.values() for copy in copies[1:]):
            unequal.append(name)
        tensors[name] = assemble({cuts: copies[0] for cuts, copies in pieces.items()})
    return tensors, unequal


def assemble(pieces: dict[tuple, torch.Tensor]) -> torch.Tensor:
    """One tensor of pieces by their cuts: `(dimension, rank, ranks, sections that are each cut by themselves)` each.

    Places that no piece fills are NaN.
    """
    cuts, piece = next(iter(pieces.items()))
    if not cuts:
        return piece
    shape = list(piece.shape)
    for dim, _, ranks, _ in cuts:
        shape[dim] *= ranks
    filled = torch.full(shape, torch.nan, dtype=piece.dtype)
    for cuts, piece in pieces.items():
        places = [torch.arange(size) for size in piece.shape]
        for dim, rank, ranks, sections in cuts:
            length = piece.shape[dim] // sections
            starts = (torch.arange(sections) * ranks + rank) * length
            places[dim] = (starts[:, None] + torch.arange(length)).flatten()
        filled[torch.meshgrid(*places, indexing="ij")] = piece
    return filled


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest magnitude wanted (over 1 where all of it is zero); NaN if there is one."""
    if got.shape != wanted.shape:
        return float("nan")
    scale = wanted.double().abs().max()
    return float((got.double() - wanted.double()).abs().max() / (scale if scale > 0 else 1))
