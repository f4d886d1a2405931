"""Bytes that each pipeline rank of a job needs, by formula: what it holds all the time, and its fullest moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard
from maniple.plan import memory_layers, parameters, states
from maniple.plan.imbalance import Imbalance
from maniple.plan.memory_attention import spans
from maniple.plan.memory_chunks import Layers, chunk_of
from maniple.plan.memory_schedule import fullest_moment
from maniple.plan.parameters import RankParameters
from maniple.plan.profile import MANIPLE, Profile
from maniple.plan.shapes import Shapes, shapes
from maniple.plan.stages import Placement, folded, place


@dataclass(frozen=True)
class RankMemory:
    """Of every rank at one place in the pipeline, in bytes.

    states: parameters, gradients, main parameters and moments; held: other tensors that are there all the time;
    activations: what is kept for backward passes at the fullest moment, by part; moment: where that is; working: what
    the operation then needs beside it; reserved: the device's and the allocator's own. host: states that are in host
    memory, and in none of the others.
    """

    rank: int
    parameters: RankParameters
    states: Mapping[str, int]
    held: Mapping[str, int]
    activations: Mapping[str, int]
    in_flight: int
    moment: str
    working: int
    reserved: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def state_bytes(self) -> int:
        return sum(self.states.values())

    @property
    def peak(self) -> int:
        """Tensors at the fullest moment: what `torch.cuda.max_memory_allocated` would say."""
        return self.state_bytes + sum(self.held.values()) + sum(self.activations.values()) + self.working

    @property
    def total(self) -> int:
        """Of the device, with what is no tensor."""
        return self.peak + sum(self.reserved.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def of_job(
    config: TrainConfig,
    card: ModelCard,
    world_size: int,
    profile: Profile = MANIPLE,
    *,
    imbalance: Imbalance | None = None,
    context_rank: int = 1,
    schedule: str | None = None,
) -> list[RankMemory]:
    """One a pipeline rank, in order. Raises UserError for a job that cannot run on `world_size` ranks.

    imbalance: how unevenly tokens choose experts; the rank is then the fullest of its expert-parallel group.
    context_rank: among context-parallel ranks; the first needs least, all others as much as each other. schedule: of
    `schedules.SCHEDULES`; None is the engine's own.
    """
    where = place(config, card, world_size)
    if schedule == "zbv":
        where = folded(where)
    load = (imbalance or Imbalance()).factor(card.moe.num_experts, where.expert)
    z = shapes(config, card, where, context_rank=context_rank, load=load)
    layers = Layers(config, card, z, profile)
    return [_of_rank(layers, where, rank, schedule) for rank in range(where.pipeline)]


def tightest(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


def _of_rank(layers: Layers, where: Placement, rank: int, schedule: str | None) -> RankMemory:
    config, card, z, profile = layers.config, layers.card, layers.z, layers.profile
    count = parameters.of_rank(config, card, where, rank)
    chunks = [chunk_of(layers, stage) for stage in where.of_rank(rank)]
    most, moment, activations, in_flight = fullest_moment(config, where, rank, chunks, z.L * z.D * z.b, schedule)
    kept, held = states_of(config, where, count), _held(config, card, where, rank, z, profile, in_flight)
    if (passing := _passing(config, where, count, profile)) > most:
        most, moment, activations, in_flight = passing, "update of states in host memory", Counter(), 0
    working = most - sum(activations.values())
    tensors = sum(kept.values()) + sum(held.values()) + most
    groups = sum(size > 1 for size in (where.tensor, where.context, where.data, where.expert, where.expert_tensor)) + (
        2 if where.pipeline > 1 else 0
    )
    reserved = {
        "context": profile.context,
        "communication": groups * profile.communication,
        "allocator": round(tensors * profile.slack),
    }
    host = host_of(config, where, count)
    return RankMemory(rank, count, kept, held, activations, in_flight, moment, working, reserved, host)


def states_of(config: TrainConfig, where: Placement, count: RankParameters) -> dict[str, int]:
    """On the device: parameters, gradients, and the optimizer's tensors."""
    own, away = _owned(config, where, count), host_of(config, where, count)
    return {
        kind: each * (own if kind in (states.MAIN, states.MOMENTS) else count.total) - away.get(kind, 0)
        for kind, each in states.states(config).items()
    }


def host_of(config: TrainConfig, where: Placement, count: RankParameters) -> dict[str, int]:
    """Main parameters and moments in host memory, by kind; empty where there are none."""
    own = _owned(config, where, count)
    return {kind: int(each * own) for kind, each in states.hosted(config).items() if each}


def _owned(config: TrainConfig, where: Placement, count: RankParameters) -> int:
    """Parameters that the rank updates: the distributed optimizer cuts them over the ranks that hold the same."""
    dense, experts = sum(count.dense.values()), sum(count.experts.values())
    if not config.parallel.distributed_optimizer:
        return dense + experts
    return -(-dense // where.dense_replicas) + -(-experts // where.expert_data)


def _passing(config: TrainConfig, where: Placement, count: RankParameters, profile: Profile) -> int:
    """Bytes of the buffers in which states from host memory are updated."""
    kept = states.states(config)
    each = sum(kept[kind] for kind, share in states.hosted(config).items() if share)
    return each * min(profile.passing, _owned(config, where, count))


def _held(
    config: TrainConfig, card: ModelCard, where: Placement, rank: int, z: Shapes, profile: Profile, in_flight: int
) -> dict[str, int]:
    """Tensors that are there all the time beside the states. in_flight: passes that wait for their backward ones."""
    held = {"workspaces of products": profile.workspace} if profile.workspace else {}
    stages = where.of_rank(rank)
    mtp = any(stage.mtp for stage in stages)
    layers = [layer for stage in stages for layer in (*stage.layers, *(card.num_layers + depth for depth in stage.mtp))]
    if where.tensor > 1 and layers:  # one buffer, as large as the largest input that a product gathers
        held["gather buffer"] = z.T * z.D * z.b * (2 if mtp else 1)
    masks = {
        (queries, keys, card.window(layer))
        for layer in layers
        for queries, keys, biased in spans(card, layer, z, profile)
        if biased
    }
    if masks:
        each = z.B * max(1, in_flight) if z.documents else 1  # documents are a micro-batch's own
        held["attention masks"] = sum(queries * keys * z.b for queries, keys, _ in masks) * each
    copies = sum(quantized_copies(config, card, where, layer, profile) for layer in layers)
    if copies:
        held["quantized weights"] = copies
    return held


def quantized_copies(config: TrainConfig, card: ModelCard, where: Placement, layer: int, profile: Profile) -> int:
    """Bytes of a layer's quantized weights: each matrix for the forward product and, transposed, for the input's
    gradient."""
    if memory_layers.kept_element(config, card, layer, profile) != 1:
        return 0
    parts = parameters.layer_parameters(card, where, layer)
    return 2 * sum(parts.get(part, 0) for part in ("attention", "dense_mlp", "shared_experts", "routed_experts"))
