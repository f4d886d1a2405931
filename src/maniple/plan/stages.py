"""Where each layer lives: which layers, embedding and head every chunk of every pipeline rank holds, and the sizes of
the groups that the job's ranks form."""

from __future__ import annotations

from dataclasses import dataclass, replace

from maniple.config.check import check, data_parallel_size, pipeline_stages
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models.card import ModelCard

MOST_GPUS = 131_072  # more than one job has had; a search of as many ends in half a minute, of more without limit


@dataclass(frozen=True)
class Stage:
    """One model chunk of one pipeline rank, on every rank that has that place in the pipeline.

    layers: decoder layers, from 0, in order; mtp: MTP depths, from 0, whose layer numbers are `num_layers + depth`. A
    stage with MTP layers holds the embedding as well as the first stage does, a copy of it where it is another rank.
    """

    rank: int
    chunk: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    mtp: tuple[int, ...] = ()

    @property
    def embeds(self) -> bool:
        """Whether an embedding table is here: the first stage's, or MTP's."""
        return self.embedding or bool(self.mtp)


@dataclass(frozen=True)
class Placement:
    """A job's ranks and what they hold. `stages` are in the order that a micro-batch passes them."""

    world_size: int
    tensor: int
    pipeline: int
    chunks: int  # model chunks a pipeline rank
    context: int
    data: int  # ranks that read different data
    expert: int
    expert_tensor: int
    expert_data: int  # ranks that hold the same experts
    micro_batches: int  # forward passes a step and data-parallel rank
    stages: tuple[Stage, ...]

    @property
    def dense_replicas(self) -> int:
        """Ranks that hold the same parameters, experts left out: data x context parallel."""
        return self.data * self.context

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The chunks of pipeline rank `rank`, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def holder(self, layer: int) -> Stage:
        """The stage of a layer by its number; MTP depth d is `num_layers + d`."""
        decoder = sum(len(stage.layers) for stage in self.stages)
        return next(stage for stage in self.stages if layer in stage.layers or layer - decoder in stage.mtp)


def check_number(gpus: int) -> None:
    """Raises UserError for more GPUs than a plan is made of."""
    if gpus > MOST_GPUS:
        raise UserError(f"{gpus:,} GPUs: the planner answers for at most {MOST_GPUS:,} of a job")


def place(config: TrainConfig, card: ModelCard, world_size: int) -> Placement:
    """Raises UserError, in one line, for a job that cannot run on `world_size` ranks (`maniple.config.check`), and for
    more than `MOST_GPUS`."""
    check_number(world_size)
    check(config, card, world_size)
    parallel = config.parallel
    texts, chunks = pipeline_stages(config, card)
    if texts is None:
        texts = _even(card, parallel.pipeline_parallel_size * chunks)
    stages, layer, depth = [], 0, 0
    for index, text in enumerate(texts):
        decoder, ahead = text.count("t"), text.count("m")
        stages.append(
            Stage(
                rank=index % parallel.pipeline_parallel_size,
                chunk=index // parallel.pipeline_parallel_size,
                layers=tuple(range(layer, layer + decoder)),
                embedding="E" in text,
                head="L" in text,
                mtp=tuple(range(depth, depth + ahead)),
            )
        )
        layer, depth = layer + decoder, depth + ahead
    data = data_parallel_size(config, world_size)
    expert_ranks = (
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size * parallel.pipeline_parallel_size
    )
    return Placement(
        world_size=world_size,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        chunks=chunks,
        context=parallel.context_parallel_size,
        data=data,
        expert=parallel.expert_parallel_size,
        expert_tensor=parallel.expert_tensor_parallel_size,
        expert_data=world_size // expert_ranks,
        micro_batches=config.train.global_batch_size // (config.train.micro_batch_size * data),
        stages=tuple(stages),
    )


def folded(place: Placement) -> Placement:
    """The stages of two chunks a rank as a V: the second half of them from the last rank back to the first, which so
    has both ends of the model. No engine's layout: for schedules that are simulated."""
    last = len(place.stages) - 1
    stages = tuple(
        replace(stage, rank=min(number, last - number), chunk=int(2 * number > last))
        for number, stage in enumerate(place.stages)
    )
    return replace(place, stages=stages)


def _even(card: ModelCard, stages: int) -> list[str]:
    """Without a layout: as many layers a stage, MTP layers before the head."""
    texts = ["t" * (card.num_layers // stages)] * stages
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * card.num_mtp_layers + "L"
    return texts
