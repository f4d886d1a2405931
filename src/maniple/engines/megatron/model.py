"""The model of this rank: Megatron-Core's GPTModel from Maniple's specs, one chunk a virtual pipeline stage."""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.language_model import LanguageModel
from maniple.engines.megatron.moe import share_pages
from maniple.engines.megatron.spec import decoder_specs, mtp_specs
from maniple.engines.megatron.transformer import transformer_config
from maniple.kernels.quantize import bump
from maniple.models.card import ModelCard


def padded_vocab_size(vocab_size: int, job: TrainConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up so that every tensor-parallel rank holds as many.

    Padded rows take part in the loss, so they are as many for each TP that divides the multiple (upstream's product of
    the two makes the loss depend on TP).
    """
    multiple = math.lcm(job.model.vocab_size_multiple, job.parallel.tensor_parallel_size)
    return -(-vocab_size // multiple) * multiple


def build_chunks(card: ModelCard, job: TrainConfig, **config_changes) -> list[GPTModel]:
    """The bare model chunks of this rank, on the engine's device. The vocabulary is the card's, padded."""
    config = transformer_config(card, job)
    for name, value in config_changes.items():
        setattr(config, name, value)
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = [_build_chunk(card, job, config, None if virtual is None else stage) for stage in range(virtual or 1)]
    share_pages(chunks, job.moe.pages_factor)
    return chunks


def _build_chunk(card: ModelCard, job: TrainConfig, config, vp_stage: int | None) -> GPTModel:
    yarn_outside_mla = card.rope.yarn is not None and card.mla is None
    model = LanguageModel(
        config=config,
        transformer_layer_spec=decoder_specs(config, vp_stage),
        vocab_size=padded_vocab_size(card.vocab_size, job),
        max_sequence_length=job.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=card.tied_embeddings,
        position_embedding_type="yarn" if yarn_outside_mla else "rope",
        rotary_percent=card.rope.partial,
        rotary_base=card.rope.base,
        mtp_block_spec=mtp_specs(config, vp_stage),
        vp_stage=vp_stage,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def wrap(chunks: list[GPTModel], job: TrainConfig, device: torch.device) -> list[DistributedDataParallel]:
    """Casts to bf16 where the job says so and lays parameters and fp32 gradients out in data-parallel buffers."""
    config = chunks[0].config
    chunks = [chunk.to(device) for chunk in chunks]
    if job.precision.dtype == "bf16":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=job.parallel.overlap_grad_reduce,
        overlap_param_gather=job.parallel.overlap_param_gather,
        use_distributed_optimizer=job.parallel.distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def settle(chunks: list) -> None:
    """Makes the weights whole where an update left their gathering to the next step (`overlap_param_gather`): before
    anything but a training step reads them. Collective; does nothing without that overlap.

    Upstream's hooks gather in the first forward pass after gradients are zeroed, and in no other: its own loop gathers
    before it validates and saves (training.py, `force_param_sync`).
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
            bump()


def routers(chunks: list[torch.nn.Module]) -> dict[int, torch.nn.Module]:
    """Routers of this rank by the layer's number in the whole model, from 0; MTP depth d is `num_layers + d`."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from maniple.engines.megatron.moe import ManipleRouter

    found: dict[int, torch.nn.Module] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for layer in model.decoder.layers:
            for module in layer.modules():
                if isinstance(module, ManipleRouter):
                    found[layer.layer_number - 1] = module
        for block in model.modules():
            if isinstance(block, MultiTokenPredictionBlock):
                for depth, layer in enumerate(block.layers):
                    for module in layer.modules():
                        if isinstance(module, ManipleRouter):
                            found[model.config.num_layers + depth] = module
    return found
