"""A card as the `transformers` config of its family: the independent implementation that cards are held against."""

from __future__ import annotations

from maniple.models import ModelCard


def hf_config(card: ModelCard):
    """The config that makes `AutoModelForCausalLM.from_config` build the card's base model (no MTP layers).

    Every field that the family's class would otherwise default is given, because several class defaults are not the
    released models.
    """
    import transformers

    name, family_fields = _FAMILIES[card.family]
    return getattr(transformers, name)(**_common(card), **family_fields(card))


def _common(card: ModelCard) -> dict:
    return {
        "num_hidden_layers": card.num_layers,
        "hidden_size": card.hidden_size,
        "num_attention_heads": card.num_heads,
        "num_key_value_heads": card.num_kv_heads,
        "vocab_size": card.vocab_size,
        "tie_word_embeddings": card.tied_embeddings,
        "rms_norm_eps": card.norm_eps,
        "initializer_range": card.init_std,
        "max_position_embeddings": card.max_position,
        "num_experts_per_tok": card.moe.topk,
        "rope_parameters": rope_parameters(card),
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_dropout": 0.0,
    }


def rope_parameters(card: ModelCard) -> dict:
    rope = card.rope
    fields: dict = {"rope_type": "default", "rope_theta": rope.base}
    if rope.partial != 1.0:
        fields["partial_rotary_factor"] = rope.partial
    if rope.yarn is not None:
        fields |= {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_max_position,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "mscale": rope.yarn.mscale,
            "mscale_all_dim": rope.yarn.mscale_all_dim,
            "truncate": rope.yarn.truncate,
        }
    return fields


def _deepseek(card: ModelCard) -> dict:
    assert card.mla is not None
    moe = card.moe
    return {
        "intermediate_size": card.dense_ffn_size,
        "moe_intermediate_size": moe.expert_ffn_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers,
        "routed_scaling_factor": moe.router.route_scale,
        "norm_topk_prob": moe.router.renormalize,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.group_topk,
        "q_lora_rank": card.mla.q_lora_rank,
        "kv_lora_rank": card.mla.kv_lora_rank,
        "qk_nope_head_dim": card.mla.qk_nope_head_dim,
        "qk_rope_head_dim": card.mla.qk_rope_head_dim,
        "v_head_dim": card.mla.v_head_dim,
        "attention_bias": card.qkv_bias,
    }


def _deepseek_v2(card: ModelCard) -> dict:
    grouped = card.moe.router.num_groups > 1
    return _deepseek(card) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _deepseek_v3(card: ModelCard) -> dict:
    return _deepseek(card) | {"rope_interleave": card.rope.interleaved, "num_mtp_layers": card.num_mtp_layers}


def _glm4_moe(card: ModelCard) -> dict:
    moe = card.moe
    return {
        "head_dim": card.head_dim,
        "intermediate_size": card.dense_ffn_size,
        "moe_intermediate_size": moe.expert_ffn_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers,
        "routed_scaling_factor": moe.router.route_scale,
        "norm_topk_prob": moe.router.renormalize,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.group_topk,
        "attention_bias": card.qkv_bias,
        "use_qk_norm": card.qk_norm == "per_head",
        "num_mtp_layers": card.num_mtp_layers,
    }


def _minimax_m2(card: ModelCard) -> dict:
    return {
        "head_dim": card.head_dim,
        "intermediate_size": card.moe.expert_ffn_size,
        "num_local_experts": card.moe.num_experts,
        "router_aux_loss_coef": card.moe.router.aux_loss,
    }


def _qwen3_moe(card: ModelCard) -> dict:
    return {
        "head_dim": card.head_dim,
        "intermediate_size": 3 * card.moe.expert_ffn_size,  # of dense layers, which these models do not have
        "moe_intermediate_size": card.moe.expert_ffn_size,
        "num_experts": card.moe.num_experts,
        "norm_topk_prob": card.moe.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": card.qkv_bias,
        "router_aux_loss_coef": card.moe.router.aux_loss,
    }


def _gpt_oss(card: ModelCard) -> dict:
    moe = card.moe
    return {
        "head_dim": card.head_dim,
        "intermediate_size": moe.expert_ffn_size,
        "num_local_experts": moe.num_experts,
        "sliding_window": card.sliding_window,
        "layer_types": [
            "full_attention" if card.window(layer) is None else "sliding_attention" for layer in range(card.num_layers)
        ],
        "swiglu_alpha": moe.activation_alpha,
        "swiglu_limit": moe.activation_limit,
        "attention_bias": card.qkv_bias,
        "router_aux_loss_coef": moe.router.aux_loss,
    }


def _mixtral(card: ModelCard) -> dict:
    return {
        "head_dim": card.head_dim,
        "intermediate_size": card.moe.expert_ffn_size,
        "num_local_experts": card.moe.num_experts,
        "sliding_window": card.sliding_window,
        "router_aux_loss_coef": card.moe.router.aux_loss,
    }


_FAMILIES = {
    "deepseek_v2": ("DeepseekV2Config", _deepseek_v2),
    "deepseek_v3": ("DeepseekV3Config", _deepseek_v3),
    "glm4_moe": ("Glm4MoeConfig", _glm4_moe),
    "minimax_m2": ("MiniMaxM2Config", _minimax_m2),
    "qwen3_moe": ("Qwen3MoeConfig", _qwen3_moe),
    "gpt_oss": ("GptOssConfig", _gpt_oss),
    "mixtral": ("MixtralConfig", _mixtral),
}
