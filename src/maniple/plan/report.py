"""A memory plan in words: as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.hardware.units import binary_size
from maniple.models.card import ModelCard
from maniple.plan import memory
from maniple.plan.imbalance import Imbalance
from maniple.plan.memory import RankMemory
from maniple.plan.profile import profile_of
from maniple.plan.stages import Placement, Stage, folded, place

# how far a plan may be above and below what is measured, by tests/plan/test_memory.py
ABOVE, BELOW = 0.05, 0.03


def band(total: int) -> tuple[int, int]:
    """Bytes that a rank planned at `total` really needs, from and to."""
    return round(total / (1 + ABOVE)), round(total / (1 - BELOW))


def certain(total: int, gpu: GPU) -> bool:
    """Whether the error band of a rank planned at `total` is on one side of what the GPU has."""
    least, most = band(total)
    return not least <= gpu.memory_bytes < most


@dataclass(frozen=True)
class MemoryPlan:
    """What each place in the pipeline needs of a GPU; `ranks` are in the pipeline's order."""

    config: TrainConfig
    card: ModelCard
    gpu: GPU
    placement: Placement
    ranks: tuple[RankMemory, ...]

    @property
    def tightest(self) -> RankMemory:
        return memory.tightest(list(self.ranks))

    @property
    def fits(self) -> bool:
        return self.tightest.total <= self.gpu.memory_bytes

    @property
    def verdict(self) -> str:
        tight = self.tightest
        said = (
            f"pipeline rank {tight.rank} of {self.placement.pipeline} needs {binary_size(tight.total)} "
            f"of {binary_size(self.gpu.memory_bytes)} ({tight.total / self.gpu.memory_bytes:.0%})"
        )
        return f"fits: the tightest, {said}" if self.fits else f"does not fit: {said}"

    @property
    def band(self) -> str:
        """A line: from what to what the tightest rank may really need, and whether that decides."""
        least, most = band(self.tightest.total)
        assumed = sum(self.tightest.reserved.values())
        line = (
            f"error band: {binary_size(least)} to {binary_size(most)} at the planned load; "
            f"{binary_size(assumed)} of this are no tensors, and assumed"
        )
        return line if self.certain else f"{line}: whether it fits is not certain"

    @property
    def certain(self) -> bool:
        """Whether the error band is on one side of what the GPU has."""
        return certain(self.tightest.total, self.gpu)

    @property
    def host_per_node(self) -> int:
        """Bytes of states in the host memory of the node that has most of them."""
        stage = self.placement.world_size // self.placement.pipeline
        ranks, node = range(self.placement.world_size), self.gpu.gpus_per_node
        nodes = (ranks[first : first + node] for first in ranks[::node])
        return max(sum(self.ranks[rank // stage].host_bytes for rank in of_node) for of_node in nodes)


def memory_plan(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    imbalance: Imbalance | None = None,
    schedule: str | None = None,
) -> MemoryPlan:
    """schedule: of `schedules.SCHEDULES`; None is the engine's own. Raises UserError, in one line, for a job that
    cannot run on `world_size` ranks."""
    profile = profile_of(gpu)
    ranks = memory.of_job(config, card, world_size, profile, imbalance=imbalance, schedule=schedule)
    where = place(config, card, world_size)
    return MemoryPlan(config, card, gpu, folded(where) if schedule == "zbv" else where, tuple(ranks))


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Plain data; sizes in bytes."""
    where = plan.placement
    return {
        "model": plan.card.name,
        "gpus": where.world_size,
        "gpu": plan.gpu.name,
        "gpu_memory": plan.gpu.memory_bytes,
        "fits": plan.fits,
        "certain": plan.certain,
        "verdict": plan.verdict,
        "error_band": band(plan.tightest.total),
        "tightest_rank": plan.tightest.rank,
        "host_per_node": plan.host_per_node,
        "layout": {
            "tensor": where.tensor,
            "pipeline": where.pipeline,
            "chunks": where.chunks,
            "context": where.context,
            "expert": where.expert,
            "expert_tensor": where.expert_tensor,
            "data": where.data,
            "expert_data": where.expert_data,
            "micro_batches": where.micro_batches,
        },
        "ranks": [
            {
                "rank": rank.rank,
                "chunks": held_chunks(plan, rank),
                "parameters": rank.parameters.by_component,
                "states": dict(rank.states),
                "host": dict(rank.host),
                "held": dict(rank.held),
                "activations": dict(rank.activations),
                "working": rank.working,
                "moment": rank.moment,
                "passes_in_flight": rank.in_flight,
                "peak": rank.peak,
                "reserved": dict(rank.reserved),
                "total": rank.total,
            }
            for rank in plan.ranks
        ],
    }


def said(stage: Stage, card: ModelCard) -> str:
    """`E 0-3`, `60 m L`: what a chunk holds, as in `parallel.pipeline_layout`, with the numbers of its layers."""
    words = ["E"] if stage.embedding else []
    if stage.layers:
        first, last = stage.layers[0], stage.layers[-1]
        words.append(str(first) if first == last else f"{first}-{last}")
    words += ["m"] * len(stage.mtp) + (["L"] if stage.head else [])
    return " ".join(words)


def rank_rows(plan: MemoryPlan) -> list[list[str]]:
    """One row a pipeline rank; `rank_headings` names the columns."""
    unit, rows = unit_of(plan), []
    for rank in plan.ranks:
        chunks = " · ".join(held_chunks(plan, rank))
        rows.append(
            [
                f"{rank.rank}" + (" *" if rank.rank == plan.tightest.rank else ""),
                chunks if len(chunks) <= _WIDEST else chunks[: _WIDEST - 3] + "...",
                f"{rank.parameters.total / 1e9:.2f}B" if unit == "GiB" else f"{rank.parameters.total / 1e6:.2f}M",
                *(_in(unit, size) for size in kinds_of(rank).values()),
                _in(unit, rank.total),
                f"{rank.total / plan.gpu.memory_bytes:.0%}",
            ]
        )
    return rows


def layout_of(where: Placement, config: TrainConfig) -> str:
    """`TP 1, PP 4 x 6, CP 1, DP 2, EP 1, ETP 1; 8 micro-batches of 4 x 4,096 tokens`."""
    chunks = f" x {where.chunks}" if where.chunks > 1 else ""
    return (
        f"TP {where.tensor}, PP {where.pipeline}{chunks}, CP {where.context}, DP {where.data}, EP {where.expert}, "
        f"ETP {where.expert_tensor}; {where.micro_batches:,} micro-batches of "
        f"{config.train.micro_batch_size} x {config.data.sequence_length:,} tokens"
    )


def host_line(plan: MemoryPlan) -> str | None:
    """What is in host memory, where anything is."""
    most = max(plan.ranks, key=lambda rank: rank.host_bytes)
    if not most.host_bytes:
        return None
    parts = " and ".join(f"{kind} {binary_size(size)}" for kind, size in most.host.items() if size)
    return (
        f"in host memory: {binary_size(most.host_bytes)} of rank {most.rank} ({parts}), "
        f"{binary_size(plan.host_per_node)} a node of {min(plan.gpu.gpus_per_node, plan.placement.world_size)} GPUs"
    )


def held_chunks(plan: MemoryPlan, rank: RankMemory) -> list[str]:
    """What each chunk of a pipeline rank holds, in words."""
    return [said(stage, plan.card) for stage in plan.placement.of_rank(rank.rank)]


def kinds_of(rank: RankMemory) -> dict[str, int]:
    """A rank's bytes by kind; they add up to its total."""
    states = rank.states
    return {
        "weights": states["parameters"],
        "gradients": states["gradients"],
        "optimizer": states["main parameters"] + states["moments"],
        "activations": sum(rank.activations.values()),
        "working": rank.working + sum(rank.held.values()),
        "device": sum(rank.reserved.values()),
    }


_WIDEST = 60
# columns that a narrow terminal does without
SPARE = (
    *("parameters", "device", "working", "activations", "holds"),
    *("optimizer", "gradients", "weights", "of GPU"),
)
_UNITS = {"GiB": 2**30, "MiB": 2**20}


def rank_headings(plan: MemoryPlan) -> list[str]:
    sizes = ["weights", "gradients", "optimizer", "activations", "working", "device"]
    return ["rank", "holds", "parameters", *sizes, f"total {unit_of(plan)}", "of GPU"]


def unit_of(plan: MemoryPlan) -> str:
    """GiB; MiB where a rank's tensors are less than one."""
    return "GiB" if plan.tightest.peak >= 2**30 else "MiB"


def component_rows(plan: MemoryPlan) -> list[list[str]]:
    """What the tightest rank's bytes are, in `unit_of(plan)`, largest first within each kind."""
    rows, last = [], None
    for kind, name, size in components_of(plan.tightest):
        rows.append(["" if kind == last else kind, name, _in(unit_of(plan), size)])
        last = kind
    return rows


def components_of(rank: RankMemory) -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of all that a rank needs, largest first within each kind; they add up to its total."""
    kinds: list[tuple[str, Mapping[str, int]]] = [
        ("states", rank.states),
        ("held", rank.held),
        (f"activations, {rank.in_flight} in flight", rank.activations),
        (f"working ({rank.moment})", {"": rank.working}),
        ("device", rank.reserved),
    ]
    return [
        (kind, name.replace("_", " "), size)
        for kind, parts in kinds
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
        if size or not name
    ]


def _in(unit: str, size: float) -> str:
    return f"{size / _UNITS[unit]:,.2f}"
