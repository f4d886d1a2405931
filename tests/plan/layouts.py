"""All layouts of a job, for tests that cost every one."""

from __future__ import annotations

from collections.abc import Collection

from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan.search_groups import Legal, Space


def legal_layouts(
    config: TrainConfig, card: ModelCard, gpu: GPU, world_size: int, held: Collection[str]
) -> list[Legal]:
    """Each with where its layers are and what it can compute again."""
    space = Space(config, card, gpu, world_size, held)
    return [one for group in space.groups for one in space.legal(group)[0]]
