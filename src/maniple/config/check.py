"""Checks that need more than one section of a job: model against parallelism, batch against world, precision.

Everything here is arithmetic on plain data, so that a job that cannot work is refused before a process starts, on any
machine. Each refusal names the keys to change.
"""

from __future__ import annotations

from pydantic import ValidationError

from maniple.config.layout import checked_layout, parse_layout
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.explain import explained
from maniple.models import load_card
from maniple.models.card import ModelCard

__all__ = ["check", "check_sizes", "data_parallel_size", "parse_layout", "pipeline_stages", "resolve_card"]

_LARGEST_SEED = 2**31 - 1  # NumPy's is 2**32 - 1, and ranks add their own numbers
_MOST_SAMPLES = 2**40  # far past any job, and short of overflows in sample indices
UPSTREAM_RECOMPUTES = ("core_attn", "mlp", "moe", "shared_experts")
RECOMPUTE_MODULES = (*UPSTREAM_RECOMPUTES, "experts", "moe_act", "permute", "norm", "mla_up_proj")
# modules and the smaller ones in them
_CONTAIN = {"moe": ("experts", "moe_act", "permute", "shared_experts"), "experts": ("moe_act",)}


def resolve_card(config: TrainConfig) -> ModelCard:
    """The job's architecture: its card, shrunk if `model.variant` is tiny, then with `model.overrides` applied.

    Raises UserError for an unknown card (naming the nearest) and for overrides that do not make a consistent model.
    """
    card = load_card(config.model.card)
    if config.model.variant == "tiny":
        card = card.tiny()
    if not config.model.overrides:
        return card
    try:
        return card.with_overrides(config.model.overrides)
    except ValidationError as error:
        raise UserError(explained(error, "model.overrides")) from None


def pipeline_stages(config: TrainConfig, card: ModelCard) -> tuple[list[str] | None, int]:
    """The stages of `parallel.pipeline_layout` (None without one: an even cut) and the model chunks per pipeline rank.

    `"|".join(stages)` is the layout in its plain form, without repeats. Raises UserError if it does not fit.
    """
    parallel = config.parallel
    if parallel.pipeline_layout is None:
        return None, parallel.virtual_pipeline_size or 1
    stages = checked_layout(
        parallel.pipeline_layout,
        num_layers=card.num_layers,
        num_mtp_layers=card.num_mtp_layers,
        pipeline_size=parallel.pipeline_parallel_size,
    )
    chunks = len(stages) // parallel.pipeline_parallel_size
    if parallel.virtual_pipeline_size not in (None, chunks):
        raise UserError(
            f"parallel.virtual_pipeline_size is {parallel.virtual_pipeline_size} and parallel.pipeline_layout has "
            f"{len(stages)} stages, {chunks} a pipeline rank: leave virtual_pipeline_size out or change the layout"
        )
    return stages, chunks


def data_parallel_size(config: TrainConfig, world_size: int) -> int:
    """Ranks that read different data: the world over TP x PP x CP."""
    parallel = config.parallel
    return world_size // (
        parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.context_parallel_size
    )


def check(config: TrainConfig, card: ModelCard, world_size: int, *, gpus_per_node: int | None = None) -> None:
    """Raises UserError, in one line that names the keys to change, if the job cannot run on `world_size` ranks.

    `gpus_per_node` (ranks a node) adds the check that all nodes are full. Returns nothing if all is well.
    """
    _check_precision(config, card)
    _check_world(config, world_size, gpus_per_node)
    check_sizes(config, card)
    _check_pipeline(config, card, _check_batch(config, world_size))
    _check_recompute(config, card)
    _check_exchange(config, card)
    _check_optimizer(config)


def check_sizes(config: TrainConfig, card: ModelCard) -> None:
    """What of `check` depends on neither the world, the batch nor the pipeline: TP, CP, EP and ETP against model and
    sequences."""
    _check_model(config, card)
    _check_sequence(config)


def _multiple(value: int, of: int, what: str, by: str) -> None:
    if value % of:
        raise UserError(f"{what} {value} is not a multiple of {by} {of}")


def _check_precision(config: TrainConfig, card: ModelCard) -> None:
    precision = config.precision
    first, last = precision.bf16_first_layers, precision.bf16_last_layers
    if precision.recipe == "bf16":
        return
    if precision.dtype == "fp32":
        raise UserError(
            f"precision.recipe {precision.recipe} quantizes bf16 tensors and precision.dtype is fp32: "
            "set precision.dtype=bf16, or precision.recipe=bf16 (no quantization)"
        )
    if first + last >= card.num_layers:
        raise UserError(
            f"precision.bf16_first_layers {first} and precision.bf16_last_layers {last} leave none of the "
            f"{card.num_layers} layers to precision.recipe {precision.recipe}: lower them, or set precision.recipe=bf16"
        )


def _check_world(config: TrainConfig, world_size: int, gpus_per_node: int | None) -> None:
    parallel = config.parallel
    if world_size < 1:
        raise UserError(f"world size {world_size}: a job has at least one rank")
    sizes = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
    }
    _check_product(world_size, sizes)
    sizes = {
        "expert_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    _check_product(world_size, sizes)
    if gpus_per_node and world_size > gpus_per_node:
        _multiple(world_size, gpus_per_node, "world size", "the ranks a node,")


def _check_product(world_size: int, sizes: dict[str, int]) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if world_size % product:
        factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{world_size} processes, one a GPU, are not a multiple of {product} = {factors} (all under parallel.): "
            "change their number or these sizes"
        )


def _check_model(config: TrainConfig, card: ModelCard) -> None:
    parallel, moe = config.parallel, card.moe
    tensor, experts = parallel.tensor_parallel_size, parallel.expert_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size
    if moe.num_experts % experts:
        fitting = ", ".join(str(size) for size in range(1, moe.num_experts + 1) if moe.num_experts % size == 0)
        raise UserError(
            f"the model's moe.num_experts {moe.num_experts} is not a multiple of parallel.expert_parallel_size "
            f"{experts}: it can be {fitting}"
        )
    by = "parallel.tensor_parallel_size"
    _multiple(card.num_heads, tensor, "the model's num_heads", by)
    _multiple(card.num_kv_heads, tensor, "the model's num_kv_heads", by)
    if moe.num_dense_layers:
        _multiple(card.dense_ffn_size, tensor, "the model's dense_ffn_size", by)
    _multiple(moe.shared_ffn_size, tensor, "the model's moe.shared_ffn_size", by)
    _multiple(
        moe.expert_ffn_size, expert_tensor, "the model's moe.expert_ffn_size", "parallel.expert_tensor_parallel_size"
    )
    if moe.linear_bias and expert_tensor > 1:
        raise UserError(
            f"model {card.name} has biases in its experts, which are not cut over expert-tensor ranks: set "
            "parallel.expert_tensor_parallel_size=1"
        )
    biases = {"moe.linear_bias": moe.linear_bias, "moe.router.linear_bias": moe.router.linear_bias}
    biases["output_bias"] = card.output_bias
    if len(set(biases.values())) > 1 or (card.output_bias and not card.qkv_bias):
        said = ", ".join(f"{name} {value}".lower() for name, value in {**biases, "qkv_bias": card.qkv_bias}.items())
        raise UserError(
            f"model {card.name}: biases of experts, router and attention come together or not at all ({said})"
        )
    if card.rope.interleaved != (card.mla is not None):
        raise UserError(
            f"model {card.name}: rope.interleaved is {str(card.rope.interleaved).lower()}, and the engine rotates "
            "neighbouring dims with MLA and halves of the head without: change rope.interleaved"
        )
    if config.moe.dispatcher == "local" and experts * expert_tensor > 1:
        raise UserError(
            f"moe.dispatcher local exchanges nothing between ranks, and expert_parallel_size x "
            f"expert_tensor_parallel_size is {experts * expert_tensor}: use moe.dispatcher=all_to_all (or auto)"
        )
    if config.moe.buffer_factor is not None and config.moe.dispatcher != "all_to_all" and experts * expert_tensor == 1:
        raise UserError(
            "moe.buffer_factor bounds what ranks send each other, and expert_parallel_size x "
            "expert_tensor_parallel_size is 1, where every buffer is of exactly the rows that there are: leave it out"
        )
    if config.moe.pages_factor is not None and config.moe.buffer_factor is None:
        raise UserError(
            "moe.pages_factor keeps less than the buffers' size, and without moe.buffer_factor they are of exactly "
            "the rows that came: set moe.buffer_factor, or leave moe.pages_factor out"
        )
    if config.moe.pages_factor is not None and config.moe.overlap_exchange:
        raise UserError(
            "moe.pages_factor takes and frees pages in the order of one stream, and moe.overlap_exchange runs layers "
            "on two: leave one of them out"
        )


def _check_sequence(config: TrainConfig) -> None:
    parallel = config.parallel
    tensor = parallel.tensor_parallel_size
    if tensor > 1 and parallel.sequence_parallel is False:
        raise UserError(
            f"parallel.sequence_parallel is false and tensor_parallel_size is {tensor}: MoE layers with tensor "
            "parallelism need sequence parallelism: leave sequence_parallel out or set it to true"
        )
    if tensor == 1 and parallel.sequence_parallel:
        raise UserError(
            "parallel.sequence_parallel is true and parallel.tensor_parallel_size is 1: it cuts the sequence over the "
            "tensor-parallel ranks, so leave it out or raise tensor_parallel_size"
        )
    _multiple(config.data.sequence_length, tensor, "data.sequence_length", "parallel.tensor_parallel_size")
    if (context := parallel.context_parallel_size) > 1:
        by = "2 x parallel.context_parallel_size, as each rank holds an early and a late chunk:"
        _multiple(config.data.sequence_length, 2 * context, "data.sequence_length", by)
        by = "parallel.context_parallel_size x parallel.tensor_parallel_size"
        _multiple(config.data.sequence_length, context * tensor, "data.sequence_length", by)


def _check_batch(config: TrainConfig, world_size: int) -> int:
    """Returns the micro-batches a step."""
    train = config.train
    if train.seed > _LARGEST_SEED:
        raise UserError(f"train.seed {train.seed} is more than {_LARGEST_SEED}, which random generators take")
    if train.steps * train.global_batch_size > _MOST_SAMPLES:
        raise UserError(
            f"train.steps {train.steps} x train.global_batch_size {train.global_batch_size} is more than "
            f"{_MOST_SAMPLES:,} samples: lower one of them"
        )
    ranks = data_parallel_size(config, world_size)
    share = train.micro_batch_size * ranks
    if train.global_batch_size % share:
        raise UserError(
            f"train.global_batch_size {train.global_batch_size} is not a multiple of {share} = train.micro_batch_size "
            f"{train.micro_batch_size} x {ranks} data-parallel ranks"
        )
    return train.global_batch_size // share


def _check_pipeline(config: TrainConfig, card: ModelCard, num_micro_batches: int) -> None:
    parallel = config.parallel
    ranks = parallel.pipeline_parallel_size
    stages, chunks = pipeline_stages(config, card)
    if chunks > 1 and ranks == 1:
        key = "virtual_pipeline_size" if stages is None else "pipeline_layout"
        raise UserError(
            f"parallel.{key} asks for {chunks} model chunks a rank and parallel.pipeline_parallel_size is 1: "
            "interleaving needs a pipeline of at least 2"
        )
    if card.tied_embeddings and stages and any("m" in stage and "L" not in stage for stage in stages):
        raise UserError(
            f"parallel.pipeline_layout has the MTP layers (m) and the loss (L) in two stages, and {card.name} ties "
            "embedding and output head, which both need: put m and L in one stage"
        )
    if stages is None and card.num_layers % (ranks * chunks):
        raise UserError(
            f"the model's {card.num_layers} layers do not divide over {ranks * chunks} = pipeline_parallel_size "
            f"{ranks} x virtual_pipeline_size {chunks}: change them, or give parallel.pipeline_layout"
        )
    if chunks > 1 and num_micro_batches % ranks:
        raise UserError(
            f"{num_micro_batches} micro-batches a step (train.global_batch_size over micro_batch_size and data-parallel"
            f" ranks) is not a multiple of parallel.pipeline_parallel_size {ranks}, as the interleaved schedule needs"
        )


def _check_recompute(config: TrainConfig, card: ModelCard) -> None:
    recompute = config.recompute
    for module in recompute.modules:
        if module not in RECOMPUTE_MODULES:
            raise UserError(f"recompute.modules: unknown {module!r}; it knows {', '.join(RECOMPUTE_MODULES)}")
    if len(set(recompute.modules)) < len(recompute.modules):
        raise UserError("recompute.modules names a module twice")
    for module in recompute.modules:
        for inner in _CONTAIN.get(module, ()):
            if inner in recompute.modules:
                raise UserError(f"recompute.modules: {module} computes {inner} again already: leave {inner} out")
    if "mla_up_proj" in recompute.modules and card.mla is None:
        raise UserError(f"recompute.modules: mla_up_proj is a part of MLA, which {card.name} has not: leave it out")
    parallel = config.parallel
    exchanged = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size > 1
    if "permute" in recompute.modules and (
        exchanged or config.moe.dispatcher == "all_to_all" or config.moe.buffer_factor
    ):
        raise UserError(
            "recompute.modules: permute gathers rows again on their own rank, and here they come from an exchange: "
            "leave it out, or use moe.dispatcher=local without buffer_factor"
        )
    if "norm" in recompute.modules and config.moe.overlap_exchange:
        raise UserError(
            "recompute.modules: norm needs layers that run whole, and moe.overlap_exchange cuts them: leave one out"
        )
    if recompute.modules and recompute.granularity != "selective":
        raise UserError(f"recompute.modules needs recompute.granularity=selective, and it is {recompute.granularity}")
    if recompute.granularity == "selective" and not recompute.modules:
        raise UserError("recompute.granularity selective needs recompute.modules, e.g. [core_attn]")
    if recompute.num_layers is not None and recompute.granularity != "full":
        raise UserError(f"recompute.num_layers needs recompute.granularity=full, and it is {recompute.granularity}")
    if recompute.layers:
        if recompute.granularity != "full":
            raise UserError(f"recompute.layers needs recompute.granularity=full, and it is {recompute.granularity}")
        if recompute.num_layers is not None:
            raise UserError("recompute.layers and recompute.num_layers both say which layers: leave one out")
        last = card.num_layers + card.num_mtp_layers - 1
        if wrong := [number for number in recompute.layers if not 0 <= number <= last]:
            raise UserError(f"recompute.layers names layer {wrong[0]} and {card.name}'s are 0 to {last}, MTP last")
        if len(set(recompute.layers)) < len(recompute.layers):
            raise UserError("recompute.layers names a layer twice")


def _check_exchange(config: TrainConfig, card: ModelCard) -> None:
    """What a schedule that cuts layers in pieces cannot do: Megatron-Core's own limits (transformer_config.py), and two
    of ours: its pieces bypass the hooks that gather parameters, and documents kept apart have not been tried there."""
    if not config.moe.overlap_exchange:
        return
    parallel = config.parallel
    stages = parallel.pipeline_parallel_size
    for fits, what in (
        (parallel.expert_parallel_size > 1, "parallel.expert_parallel_size above 1: there is nothing to exchange"),
        (config.precision.dtype == "bf16", "precision.dtype=bf16"),
        (stages == 1 or pipeline_stages(config, card)[1] > 1, "two model chunks or more a pipeline rank"),
        (config.recompute.granularity != "full", "recompute.granularity none or selective"),
        (not parallel.overlap_param_gather, "parallel.overlap_param_gather=false"),
        (config.data.attend_across_documents, "data.attend_across_documents=true"),
        (card.num_mtp_layers <= 1, f"a model with one MTP layer at most, and {card.name} has {card.num_mtp_layers}"),
    ):
        if not fits:
            raise UserError(f"moe.overlap_exchange needs {what}; or leave it out")


def _check_optimizer(config: TrainConfig) -> None:
    optimizer, parallel = config.optimizer, config.parallel
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UserError(
            f"optimizer.min_learning_rate {optimizer.min_learning_rate:g} is more than optimizer.learning_rate "
            f"{optimizer.learning_rate:g}"
        )
    if optimizer.warmup_steps >= config.train.steps:
        raise UserError(
            f"optimizer.warmup_steps {optimizer.warmup_steps} is not less than train.steps {config.train.steps}, and "
            "the learning rate would never reach its peak: set more train.steps, or "
            f"optimizer.warmup_steps={config.train.steps // 10}"
        )
    if optimizer.main_params_dtype == "bf16":
        for fits, what in (
            (config.precision.dtype == "bf16", "precision.dtype=bf16: an fp32 model's weights are updated as they are"),
            (parallel.distributed_optimizer, "parallel.distributed_optimizer=true"),
        ):
            if not fits:
                raise UserError(f"optimizer.main_params_dtype bf16 needs {what}; or set it to fp32")
    if parallel.overlap_param_gather and not (parallel.distributed_optimizer and parallel.overlap_grad_reduce):
        raise UserError(
            "parallel.overlap_param_gather needs parallel.distributed_optimizer and parallel.overlap_grad_reduce on"
        )
