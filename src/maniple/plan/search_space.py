"""Which layouts a search looks at: sizes of the groups, stages of the pipeline, micro-batches, recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from maniple.config.check import pipeline_stages
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard

CHUNKS = (1, 2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 4, 8)
MODULES = ("moe_act", "moe")
_MTP = 1.2  # a MTP layer, with its projection, in MoE layers; its head comes besides


@dataclass(frozen=True)
class Recompute:
    """`recompute.granularity`, `num_layers` (of each model chunk), `modules` and `layers`."""

    granularity: str = "none"
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One way to cut and run a job. stages: `parallel.pipeline_layout`, None for an even cut. chunks: a pipeline rank.
    recompute: None for the job's own. overlap: turns `moe.overlap_exchange` on, and what excludes it off."""

    tensor: int
    pipeline: int
    chunks: int
    stages: str | None
    expert: int
    expert_tensor: int
    micro_batch: int
    recompute: Recompute | None = Recompute()
    overlap: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What tells layouts apart that differ in more than details: TP, PP, EP, ETP."""
        return self.tensor, self.pipeline, self.expert, self.expert_tensor

    def applied(self, config: TrainConfig) -> TrainConfig:
        """The job with this layout. It goes through the schema's validation nowhere: values are the search's own."""
        parallel = config.parallel.model_copy(
            update={
                "tensor_parallel_size": self.tensor,
                "pipeline_parallel_size": self.pipeline,
                "virtual_pipeline_size": self.chunks if self.stages is None and self.chunks > 1 else None,
                "pipeline_layout": self.stages,
                "expert_parallel_size": self.expert,
                "expert_tensor_parallel_size": self.expert_tensor,
            }
        )
        update: dict[str, Any] = {
            "parallel": parallel,
            "train": config.train.model_copy(update={"micro_batch_size": self.micro_batch}),
        }
        if self.overlap:
            update["moe"] = config.moe.model_copy(update={"overlap_exchange": True})
            update["parallel"] = parallel.model_copy(update={"overlap_param_gather": False})
        if self.recompute is not None:
            kind = self.recompute
            update["recompute"] = config.recompute.model_copy(
                update={
                    "granularity": kind.granularity,
                    "num_layers": kind.num_layers,
                    "layers": list(kind.layers),
                    "modules": list(kind.modules),
                }
            )
        return config.model_copy(update=update)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# TP, PP, EP, ETP; and each way to cut the layers: chunks a rank, stages
Shape = tuple[int, int, int, int]
Cuts = list[tuple[int, str | None]]


def shapes_of(
    config: TrainConfig, card: ModelCard, gpu: GPU, world_size: int, held: Collection[str]
) -> Iterator[tuple[Shape, Cuts]]:
    """Sizes that divide the world and the experts, with cuts for which there are layers enough; what is `held` is as
    the job says. TP and ETP stay inside a node. Legal or not in all else: `maniple.config.check` decides."""
    parallel = config.parallel
    world = world_size // parallel.context_parallel_size if world_size % parallel.context_parallel_size == 0 else 0
    units = _number_of_units(card)

    def sizes(key: str, free: Sequence[int]) -> Sequence[int]:
        return [getattr(parallel, key)] if f"parallel.{key}" in held else free

    node = [size for size in divisors(world) if size <= gpu.gpus_per_node and gpu.gpus_per_node % size == 0]
    for tensor in sizes("tensor_parallel_size", node):
        for pipeline in sizes("pipeline_parallel_size", [size for size in divisors(world) if size <= units]):
            if not world or world % (tensor * pipeline):
                continue
            ranks, key = world_size // pipeline, "expert_tensor_parallel_size"
            experts = [size for size in divisors(card.moe.num_experts) if ranks % size == 0]
            stages = _stages_of(config, card, pipeline, held)
            for expert in sizes("expert_parallel_size", experts):
                # at least one, so that `check` says what is wrong with an EP that is held
                free = [size for size in node if ranks % (expert * size) == 0] or [1]
                for expert_tensor in sizes(key, free):
                    yield (tensor, pipeline, expert, expert_tensor), stages


def _stages_of(config: TrainConfig, card: ModelCard, pipeline: int, held: Collection[str]) -> Cuts:
    """(chunks a rank, layout): the even cut where layers divide, and the one that the stages' work evens out."""
    parallel = config.parallel
    if "parallel.pipeline_layout" in held and parallel.pipeline_layout is not None:
        own = parallel.model_copy(update={"pipeline_parallel_size": pipeline})
        try:
            chunks = pipeline_stages(config.model_copy(update={"parallel": own}), card)[1]
        except UserError:
            return []
        return [(chunks, parallel.pipeline_layout)]
    some: Sequence[int] = [1] if pipeline == 1 else CHUNKS
    if "parallel.virtual_pipeline_size" in held:
        some = [parallel.virtual_pipeline_size or 1]
    out: Cuts = []
    for chunks in some:
        number = pipeline * chunks
        if number > _number_of_units(card):
            continue
        if card.num_layers % number == 0:
            out.append((chunks, None))
        if pipeline > 1 and "parallel.pipeline_layout" not in held:
            text = layout_text(balanced_stages(card, number))
            if text != (layout_text(even_stages(card, number)) if out and out[-1] == (chunks, None) else None):
                out.append((chunks, text))
    return out


def recomputes(config: TrainConfig, layers: int, held: Collection[str]) -> list[Recompute | None]:
    """Nothing, an expert's activation, the MoE layer, and whole layers: of the `layers` of a chunk up to four, and
    then quarters of them. Only the job's own if it says anything of it."""
    if any(key.startswith("recompute.") for key in held):
        return [None]
    some = range(1, layers) if layers <= 4 else sorted({-(-layers * quarter // 4) for quarter in (1, 2, 3)} - {layers})
    whole = [Recompute("full", number) for number in some] + [Recompute("full")]
    if config.moe.overlap_exchange:
        whole = []  # its schedule cuts layers in pieces
    return [Recompute(), *(Recompute("selective", None, (module,)) for module in MODULES), *whole]


def micro_batches(config: TrainConfig, held: Collection[str]) -> Sequence[int]:
    return [config.train.micro_batch_size] if "train.micro_batch_size" in held else MICRO_BATCHES


# --- stages -----------------------------------------------------------------------------------------------------------


def even_stages(card: ModelCard, number: int) -> list[str]:
    texts = ["t" * (card.num_layers // number)] * number
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * card.num_mtp_layers + "L"
    return texts


@cache
def _balanced(weights: tuple[float, ...], number: int) -> tuple[int, ...]:
    """How many units each of `number` stages takes, in order, so that the heaviest is least, and then the sum of
    squares is."""
    total = list(itertools.accumulate(weights, initial=0.0))
    count = len(weights)
    least = [0.0, *[float("inf")] * count]
    for stage in range(1, number + 1):
        least = [
            min(
                (max(least[cut], total[end] - total[cut]) for cut in range(stage - 1, end)),
                default=float("inf"),
            )
            for end in range(count + 1)
        ]
    most = least[count] * (1 + 1e-9)
    best = [0.0, *[float("inf")] * count]
    cuts: list[list[int]] = []
    for stage in range(1, number + 1):
        now, here = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage, count + 1):
            for cut in range(end - 1, stage - 2, -1):
                size = total[end] - total[cut]
                if size > most:
                    break
                if best[cut] + size * size < now[end]:
                    now[end], here[end] = best[cut] + size * size, cut
        best = now
        cuts.append(here)
    sizes, end = [], count
    for here in reversed(cuts):
        sizes.append(end - here[end])
        end = here[end]
    return tuple(reversed(sizes))


def balanced_stages(card: ModelCard, number: int) -> list[str]:
    """Consecutive stages whose heaviest has least to do, by active parameters: layers with experts weigh one."""
    units, weights = _units(card)
    texts, at = [], 0
    for size in _balanced(tuple(weights), number):
        texts.append("".join(units[at : at + size]))
        at += size
    return texts


def _number_of_units(card: ModelCard) -> int:
    return len(_units(card)[0])


def _units(card: ModelCard) -> tuple[list[str], list[float]]:
    """What cannot be cut, in order, and its weight: first the embedding with a layer, last the head."""
    moe, width = card.moe, card.hidden_size
    attention = 4 * width * card.num_heads * card.head_dim
    active = attention + 3 * width * (moe.topk * moe.expert_ffn_size + moe.shared_ffn_size)
    dense = (attention + 3 * width * card.dense_ffn_size) / active
    head = card.vocab_size * width / active
    units = ["t"] * card.num_layers
    weights = [1.0 if card.is_moe_layer(layer) else dense for layer in range(card.num_layers)]
    units[0] = "E" + units[0]
    ahead, depths = "m" * card.num_mtp_layers, card.num_mtp_layers * (_MTP + head)
    if ahead and card.tied_embeddings:  # both need the one table
        return [*units, ahead + "L"], [*weights, depths + head]
    return [*units, *([ahead] if ahead else []), "L"], [*weights, *([depths] if ahead else []), head]


def layout_text(stages: Sequence[str]) -> str:
    """Stages as `parallel.pipeline_layout`, stages alike under one bracket."""
    words = []
    for symbols, alike in itertools.groupby(stages[:-1]):
        stage, times = _short(symbols), len(list(alike))
        words.append(f"{stage}|" if times == 1 else f"({stage}|)*{times}")
    text = ""
    for word in [*words, _short(stages[-1])]:
        text += ("," if text and not text.endswith("|") else "") + word
    return text


def _short(symbols: str) -> str:
    out = ""
    for symbol, alike in itertools.groupby(symbols):
        times = len(list(alike))
        out += symbol * times if times <= 2 else f"{symbol}*{times}"
    return out
