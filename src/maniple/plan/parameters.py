"""Exact parameters of every rank, by component: those that the engine's model has there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from maniple.config.schema import TrainConfig
from maniple.models import counting
from maniple.models.card import ModelCard
from maniple.plan.shapes import padded_vocabulary
from maniple.plan.stages import Placement, Stage


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one rank at a place in the pipeline, by component. `experts` are those that are
    reduced, and their optimizer state cut, over the ranks that hold the same experts; `dense` are all others."""

    dense: Mapping[str, int]
    experts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.dense.values()) + sum(self.experts.values())

    @property
    def by_component(self) -> dict[str, int]:
        return dict(Counter(self.dense) + Counter(self.experts))


def of_rank(config: TrainConfig, card: ModelCard, place: Placement, rank: int) -> RankParameters:
    """Of pipeline rank `rank`, all its chunks together."""
    every = [of_stage(config, card, place, stage) for stage in place.of_rank(rank)]
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for stage in every:
        dense.update(stage.dense)
        experts.update(stage.experts)
    return RankParameters(dense, experts)


def of_stage(config: TrainConfig, card: ModelCard, place: Placement, stage: Stage) -> RankParameters:
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    table = padded_vocabulary(card, config) // place.tensor * card.hidden_size
    if stage.embeds:
        dense["embedding"] += table
    # a tied head is the embedding where both are here, and a copy of it elsewhere
    if stage.head and not (card.tied_embeddings and stage.embeds):
        dense["head"] += table
    if has_final_norm(card, stage):
        dense["norms"] += card.hidden_size
    for layer in (*stage.layers, *(card.num_layers + depth for depth in stage.mtp)):
        for part, number in layer_parameters(card, place, layer).items():
            (experts if part == "routed_experts" else dense)[part] += number
    dense["mtp"] += len(stage.mtp) * (3 * card.hidden_size + 2 * card.hidden_size**2 // place.tensor)
    return RankParameters(+dense, +experts)


def has_final_norm(card: ModelCard, stage: Stage) -> bool:
    """The norm behind the last decoder layer is with that layer where MTP follows it, and else with the head."""
    return card.num_layers - 1 in stage.layers if card.num_mtp_layers else stage.head


def layer_parameters(card: ModelCard, place: Placement, layer: int) -> dict[str, int]:
    """One layer's parameters on one rank, by component. Norms and the router are whole on every rank."""
    moe, width, tensor = card.moe, card.hidden_size, place.tensor
    parts = {"attention": counting.attention_parameters(card, tensor), "norms": 2 * width}
    if not card.is_moe_layer(layer):
        return parts | {"dense_mlp": 3 * width * card.dense_ffn_size // tensor}
    ffn = moe.expert_ffn_size // place.expert_tensor
    expert = 3 * width * ffn + (2 * ffn + width if moe.linear_bias else 0)
    return parts | {
        "router": moe.num_experts * (width + moe.router.linear_bias),
        "routed_experts": moe.num_experts // place.expert * expert,
        "shared_experts": 3 * width * moe.shared_ffn_size // tensor,
    }
