"""From a model card and a job to Megatron-Core's `TransformerConfig`. The one place where the two vocabularies meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from maniple.config.check import UPSTREAM_RECOMPUTES, pipeline_stages
from maniple.config.schema import TrainConfig
from maniple.kernels.routing import RouterSpec
from maniple.models.card import ModelCard

_AUX_LOSS = {
    "none": "none",
    "sequence": "seq_aux_loss",
    "micro_batch": "aux_loss",
    "global_batch": "global_aux_loss",
}


def transformer_config(card: ModelCard, job: TrainConfig) -> TransformerConfig:
    """Megatron-Core's config of this card under this job; an `MLATransformerConfig` where the card has MLA.

    Attributes are added to it: `maniple_router` (RouterSpec: Megatron-Core's own fields cannot say every router),
    `maniple_moe` and `maniple_precision` (the job's sections), `maniple_loss` (`train.loss`), `maniple_card`, and
    `maniple_recompute` and `maniple_recompute_modules` (layers by number, modules by name: see recompute.py). What
    cannot be built together is refused before, in `maniple.config.check`.
    """
    moe, router, parallel, precision = card.moe, card.moe.router, job.parallel, job.precision
    aux_coefficient = router.aux_loss if job.moe.aux_loss_coefficient is None else job.moe.aux_loss_coefficient
    dtype = torch.bfloat16 if precision.dtype == "bf16" else torch.float32
    virtual = parallel.virtual_pipeline_size
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = parallel.tensor_parallel_size > 1
    interleaved = pipeline_stages(job, card)[1] > 1
    fields: dict[str, Any] = dict(
        num_layers=card.num_layers,
        mtp_num_layers=card.num_mtp_layers or None,
        mtp_loss_scaling_factor=job.train.mtp_loss_coefficient,
        hidden_size=card.hidden_size,
        # Megatron-Core wants a dense size even where every layer is MoE
        ffn_hidden_size=card.dense_ffn_size or moe.expert_ffn_size,
        num_attention_heads=card.num_heads,
        num_query_groups=card.num_kv_heads,
        kv_channels=card.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=card.norm_eps,
        qk_layernorm=card.mla is not None or card.qk_norm != "none",
        add_bias_linear=moe.linear_bias,
        add_qkv_bias=card.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_type="learnable" if card.attention_sinks else "vanilla",
        init_method_std=card.init_std,
        num_moe_experts=moe.num_experts,
        moe_layer_freq=[0] * moe.num_dense_layers + [1] * (card.num_layers - moe.num_dense_layers),
        moe_ffn_hidden_size=moe.expert_ffn_size,
        moe_shared_expert_intermediate_size=moe.shared_ffn_size or None,
        moe_router_topk=moe.topk,
        moe_router_score_function=router.score,
        moe_router_pre_softmax=not router.renormalize,
        moe_router_num_groups=router.num_groups if router.num_groups > 1 else None,
        moe_router_group_topk=router.group_topk if router.num_groups > 1 else None,
        moe_router_topk_scaling_factor=router.route_scale,
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=router.expert_bias,
        moe_router_bias_update_rate=job.moe.expert_bias_update_rate,
        moe_router_load_balancing_type=_AUX_LOSS[job.moe.aux_loss_type],
        moe_aux_loss_coeff=aux_coefficient,
        moe_z_loss_coeff=job.moe.z_loss_coefficient or None,
        moe_token_dispatcher_type="alltoall",  # its constructor knows no other name; ours takes its place
        moe_grouped_gemm=True,
        transformer_impl="local",
        calculate_per_token_loss=True,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        sequence_parallel=sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=None if parallel.pipeline_layout or virtual == 1 else virtual,
        pipeline_model_parallel_layout=parallel.pipeline_layout,
        # of two ranks each is the other's next and previous stage at once: one batch of sends would mix up the two
        # (upstream's arguments.py refuses it), so the interleaved schedule sends one by one
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        overlap_moe_expert_parallel_comm=job.moe.overlap_exchange,
        bf16=precision.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=job.train.deterministic,
        recompute_granularity=_recompute_granularity(job),
    )
    if fields["recompute_granularity"] == "full":
        fields |= dict(recompute_method="uniform", recompute_num_layers=1)
        if job.recompute.num_layers is not None:
            fields |= dict(recompute_method="block", recompute_num_layers=job.recompute.num_layers)
    elif fields["recompute_granularity"] == "selective":
        fields |= dict(recompute_modules=_upstreams_modules(job))
    if card.sliding_layers != "none" and card.sliding_window is not None:
        # (left, right): a query sees `left` tokens before itself
        fields |= dict(
            window_size=(card.sliding_window - 1, 0),
            # upstream slides where the layer's number, from 1, is not a multiple of this
            window_attn_skip_freq=2 if card.sliding_layers == "even" else None,
        )
    config = _mla_config(card, fields) if card.mla else _gqa_config(card, fields)
    config.maniple_router = RouterSpec.from_card(moe)
    config.maniple_moe = job.moe
    config.maniple_precision = job.precision
    config.maniple_loss = job.train.loss
    config.maniple_recompute = frozenset(job.recompute.layers)
    config.maniple_recompute_modules = frozenset(job.recompute.modules)
    config.maniple_card = card
    return config


def _recompute_granularity(job: TrainConfig) -> str | None:
    """Upstream's word. Layers by number and some modules are our own business, which upstream must not checkpoint."""
    recompute = job.recompute
    if recompute.granularity == "none" or recompute.layers:
        return None
    return None if recompute.granularity == "selective" and not _upstreams_modules(job) else recompute.granularity


def _upstreams_modules(job: TrainConfig) -> list[str]:
    return [module for module in job.recompute.modules if module in UPSTREAM_RECOMPUTES]


def _mla_config(card: ModelCard, fields: dict[str, Any]) -> MLATransformerConfig:
    mla, yarn = card.mla, card.rope.yarn
    assert mla is not None
    fields |= dict(
        multi_latent_attention=True,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        rotary_base=card.rope.base,
        rotary_percent=card.rope.partial,
        rope_type="yarn" if yarn else "rope",
        rotary_scaling_factor=yarn.factor if yarn else 1.0,
    )
    if yarn:
        fields |= dict(
            original_max_position_embeddings=yarn.original_max_position,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            mscale=yarn.mscale,
            mscale_all_dim=yarn.mscale_all_dim,
        )
    return MLATransformerConfig(**fields)


def _gqa_config(card: ModelCard, fields: dict[str, Any]) -> TransformerConfig:
    config = TransformerConfig(**fields)
    if yarn := card.rope.yarn:
        # GPTModel reads these from the config although the dataclass does not declare them
        config.yarn_rotary_scaling_factor = yarn.factor
        config.yarn_original_max_position_embeddings = yarn.original_max_position
        config.yarn_beta_fast = yarn.beta_fast
        config.yarn_beta_slow = yarn.beta_slow
        config.yarn_mscale = yarn.mscale
        config.yarn_mscale_all_dim = yarn.mscale_all_dim
        config.yarn_correction_range_round_to_int = yarn.truncate
    return config
