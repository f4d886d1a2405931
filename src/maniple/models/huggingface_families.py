"""What each family's `config.json` says, read into a card's fields and written from a card.

What a field means, and which values exist, is what transformers' modelling code of the family (5.24) does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maniple.models.card import ModelCard
from maniple.models.config_json import Fields
from maniple.models.huggingface_rope import read_rope, write_rope


@dataclass(frozen=True)
class Family:
    architecture: str  # the class of its models in transformers
    read: Callable[[Fields], dict[str, Any]]  # facts of a card beyond those that all families name alike
    write: Callable[[ModelCard], dict[str, Any]]


# --- DeepSeek-V2, DeepSeek-V3 and Kimi-K2 ---------------------------------------------------------------------------


def _latent_attention(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    nope, turned = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim", low=2)
    fields.only(num_key_value_heads=heads, qk_head_dim=nope + turned, head_dim=(turned, nope + turned))
    fields.only(attention_bias=False, mlp_bias=False, moe_layer_freq=1)
    return {
        "num_kv_heads": heads,
        "head_dim": nope + turned,
        "mla": {
            "q_lora_rank": fields.integer_or_null("q_lora_rank"),
            "kv_lora_rank": fields.integer("kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": turned,
            "v_head_dim": fields.integer("v_head_dim"),
        },
    }


def _routed_and_shared(fields: Fields) -> dict[str, Any]:
    shared, width = fields.integer("n_shared_experts"), fields.integer("moe_intermediate_size")
    return {
        "num_experts": fields.integer("n_routed_experts", "num_experts", "num_local_experts"),
        "topk": fields.integer("num_experts_per_tok"),
        "expert_ffn_size": width,
        "num_shared_experts": shared,
        "shared_ffn_size": shared * width,
        "num_dense_layers": fields.integer("first_k_dense_replace", low=0),
    }


def _sigmoid_router(fields: Fields) -> dict[str, Any]:
    """DeepSeek-V3's: sigmoid scores, a balancing bias, groups by the sum of their two best."""
    fields.only(scoring_func="sigmoid", topk_method="noaux_tc")
    groups = fields.integer("n_group")
    return {
        "score": "sigmoid",
        "renormalize": fields.flag("norm_topk_prob"),
        "num_groups": groups,
        "group_topk": fields.integer("topk_group"),
        "group_score": "sum_top2" if groups > 1 else "max",
        "expert_bias": True,
        "route_scale": fields.number("routed_scaling_factor"),
    }


def _read_deepseek_v2(fields: Fields) -> dict[str, Any]:
    method = fields.choice("topk_method", "greedy", "group_limited_greedy")
    # DeepSeek's code would divide by the sum and then leave out the scale; transformers' knows no such division.
    fields.only(scoring_func="softmax", norm_topk_prob=False, rope_interleave=True)
    fields.only(num_nextn_predict_layers=0, num_mtp_layers=0)
    router = {
        "score": "softmax",
        "renormalize": False,
        "route_scale": fields.number("routed_scaling_factor"),
        "aux_loss": fields.number("aux_loss_alpha", or_zero=True, default=0.0),
    }
    if method == "greedy":
        fields.ignore(("n_group", "topk_group"))
    else:
        router |= {"num_groups": fields.integer("n_group"), "group_topk": fields.integer("topk_group")}
    return {
        **_latent_attention(fields),
        "rope": read_rope(fields, interleaved=True),
        "dense_ffn_size": fields.integer("intermediate_size"),
        "moe": _routed_and_shared(fields) | {"router": router},
    }


def _read_deepseek_v3(fields: Fields) -> dict[str, Any]:
    aux_loss = fields.number("aux_loss_alpha", or_zero=True, default=0.0)
    return {
        **_latent_attention(fields),
        "rope": read_rope(fields, interleaved=fields.flag("rope_interleave", default=True)),
        "dense_ffn_size": fields.integer("intermediate_size"),
        "num_mtp_layers": fields.integer("num_nextn_predict_layers", "num_mtp_layers", low=0),
        "moe": _routed_and_shared(fields) | {"router": _sigmoid_router(fields) | {"aux_loss": aux_loss}},
    }


def _write_deepseek(card: ModelCard) -> dict[str, Any]:
    mla, router = card.mla, card.moe.router
    latent = {} if mla is None else {"qk_head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim} | mla.model_dump()
    return {
        **write_rope(card),
        **latent,
        **_written_shared(card),
        "attention_bias": card.qkv_bias,
        "moe_layer_freq": 1,
        "aux_loss_alpha": router.aux_loss,
        "norm_topk_prob": router.renormalize,
        "scoring_func": router.score,
    }


def _write_deepseek_v2(card: ModelCard) -> dict[str, Any]:
    method = "group_limited_greedy" if card.moe.router.num_groups > 1 else "greedy"
    return _write_deepseek(card) | {"topk_method": method}


def _write_deepseek_v3(card: ModelCard) -> dict[str, Any]:
    return _write_deepseek(card) | {
        "topk_method": "noaux_tc",
        "rope_interleave": card.rope.interleaved,
        "num_nextn_predict_layers": card.num_mtp_layers,
    }


def _written_shared(card: ModelCard) -> dict[str, Any]:
    moe, router = card.moe, card.moe.router
    return {
        "intermediate_size": card.dense_ffn_size or moe.expert_ffn_size,  # read by no layer if none is dense
        "moe_intermediate_size": moe.expert_ffn_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn_size // moe.expert_ffn_size,
        "first_k_dense_replace": moe.num_dense_layers,
        "n_group": router.num_groups,
        "topk_group": router.group_topk,
        "routed_scaling_factor": router.route_scale,
    }


# --- GLM-4.5 to 4.7 -------------------------------------------------------------------------------------------------


def _grouped_attention(fields: Fields, *, head_dim: int | None = None) -> dict[str, Any]:
    """Heads; `head_dim` is asked for unless it is given."""
    return {
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.integer("head_dim") if head_dim is None else head_dim,
    }


def _read_glm4_moe(fields: Fields) -> dict[str, Any]:
    head_dim = fields.integer("head_dim")
    fields.only(moe_layer_freq=1)
    return {
        **_grouped_attention(fields, head_dim=head_dim),
        "rope": read_rope(fields, partial=None, head_dim=head_dim),
        "qk_norm": "per_head" if fields.flag("use_qk_norm") else "none",
        "qkv_bias": fields.flag("attention_bias"),  # the output projection has none
        "dense_ffn_size": fields.integer("intermediate_size"),
        "num_mtp_layers": fields.integer("num_nextn_predict_layers", "num_mtp_layers", low=0),
        "moe": _routed_and_shared(fields) | {"router": _sigmoid_router(fields)},
    }


def _write_glm4_moe(card: ModelCard) -> dict[str, Any]:
    return {
        **write_rope(card),
        **_written_shared(card),
        "head_dim": card.head_dim,
        "use_qk_norm": card.qk_norm == "per_head",
        "attention_bias": card.qkv_bias,
        "norm_topk_prob": card.moe.router.renormalize,
        "scoring_func": card.moe.router.score,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": card.num_mtp_layers,
    }


# --- MiniMax-M2, Qwen3-MoE, GPT-OSS, Mixtral: every layer has experts, and none are shared --------------------------


def _experts(fields: Fields, width: str, **router: Any) -> dict[str, Any]:
    """`width` names the field of an expert's width."""
    aux_loss = fields.number("router_aux_loss_coef", or_zero=True, default=0.001)
    return {
        "num_experts": fields.integer("num_experts", "num_local_experts"),
        "topk": fields.integer("num_experts_per_tok", "experts_per_token"),
        "expert_ffn_size": fields.integer(width),
        "router": {"aux_loss": aux_loss, **router},
    }


def _read_minimax_m2(fields: Fields) -> dict[str, Any]:
    layers, head_dim = fields.integer("num_hidden_layers"), fields.integer("head_dim")
    fields.only(scoring_func="sigmoid", norm_topk_prob=True, use_routing_bias=True, router_jitter_noise=0)
    fields.only(use_qk_norm=True, qk_norm_type="per_layer", attention_bias=False, sliding_window=None)
    kinds = fields.take("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers and all(k == 1 for k in kinds)):
        raise fields.refuse("attn_type_list", f"a list of {layers} ones: full attention in every layer")
    fields.only(shared_intermediate_size=0, postnorm=False)
    for part in ("full_attention", "linear_attention", "mlp"):
        fields.only(**{f"layernorm_{part}_{greek}": 1 for greek in ("alpha", "beta")})
    # Names of what the release does not hold: prediction layers, a shared MLP.
    fields.ignore(["use_mtp", "num_mtp_modules", "mtp_transformer_layers", "shared_moe_mode", "mlp_intermediate_size"])
    # The release's way to say which share is rotated; transformers 5 says partial_rotary_factor.
    turned = fields.integer("rotary_dim", low=2, default=0)
    return {
        **_grouped_attention(fields, head_dim=head_dim),
        "rope": read_rope(fields, partial=None, head_dim=head_dim, rotary_dim=turned),
        "qk_norm": "full_width",
        "moe": _experts(fields, "intermediate_size", score="sigmoid", renormalize=True, expert_bias=True),
    }


def _write_minimax_m2(card: ModelCard) -> dict[str, Any]:
    router = card.moe.router
    return write_rope(card) | {
        "head_dim": card.head_dim,
        "rotary_dim": int(card.head_dim * card.rope.partial),
        "intermediate_size": card.moe.expert_ffn_size,
        "num_local_experts": card.moe.num_experts,
        "router_aux_loss_coef": router.aux_loss,
        "scoring_func": router.score,
        "use_routing_bias": router.expert_bias,
        "use_qk_norm": card.qk_norm == "full_width",
        "qk_norm_type": "per_layer",
    }


def _read_qwen3_moe(fields: Fields) -> dict[str, Any]:
    fields.only(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False)
    # Without dense layers and windows these say nothing.
    fields.ignore(("intermediate_size", "sliding_window", "max_window_layers"))
    bias = fields.flag("attention_bias", default=False)
    return {
        **_grouped_attention(fields),
        "rope": read_rope(fields),
        "qk_norm": "per_head",
        "qkv_bias": bias,
        "output_bias": bias,
        "moe": _experts(fields, "moe_intermediate_size", renormalize=fields.flag("norm_topk_prob")),
    }


def _write_qwen3_moe(card: ModelCard) -> dict[str, Any]:
    moe = card.moe
    return write_rope(card) | {
        "head_dim": card.head_dim,
        "intermediate_size": moe.topk * moe.expert_ffn_size,  # of dense layers, which there are not
        "moe_intermediate_size": moe.expert_ffn_size,
        "num_experts": moe.num_experts,
        "norm_topk_prob": moe.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "attention_bias": card.qkv_bias,
        "router_aux_loss_coef": moe.router.aux_loss,
    }


_LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}


def _read_gpt_oss(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    types = fields.take("layer_types")
    slides = ("even", "all", "none")
    if isinstance(types, list) and len(types) == layers:
        expected = {kind: [_LAYER_TYPES[_slides(kind, layer)] for layer in range(layers)] for kind in slides}
        kinds = [kind for kind in slides if types == expected[kind]]
    else:
        kinds = []
    if not kinds:
        raise fields.refuse("layer_types", f"{layers} types, sliding and full in turn, or all of one kind")
    window = None if kinds[0] == "none" else fields.integer("sliding_window")
    fields.ignore(("sliding_window",))
    rope = read_rope(fields, typed=True)  # transformers' class would scale by a YaRN of its own if none is said
    fields.only(initial_context_length=rope["yarn"] and rope["yarn"]["original_max_position"])
    bias = fields.flag("attention_bias", default=True)
    return {
        **_grouped_attention(fields),
        "rope": rope,
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_sinks": True,
        "sliding_window": window,
        "sliding_layers": kinds[0],
        "moe": _experts(fields, "intermediate_size", score_before_topk=False, renormalize=False, linear_bias=True)
        | {
            "linear_bias": True,
            "activation": "clamped_swiglu",
            "activation_alpha": fields.number("swiglu_alpha", default=1.702),
            "activation_limit": fields.number("swiglu_limit"),
            "activation_up_offset": 1.0,
        },
    }


def _slides(kind: str, layer: int) -> bool:
    return kind == "all" or (kind == "even" and layer % 2 == 0)


def _write_gpt_oss(card: ModelCard) -> dict[str, Any]:
    moe = card.moe
    return write_rope(card) | {
        "head_dim": card.head_dim,
        "intermediate_size": moe.expert_ffn_size,
        "num_local_experts": moe.num_experts,
        "sliding_window": card.sliding_window,
        "layer_types": [_LAYER_TYPES[card.window(layer) is not None] for layer in range(card.num_layers)],
        "swiglu_alpha": moe.activation_alpha,
        "swiglu_limit": moe.activation_limit,
        "attention_bias": card.qkv_bias,
        "router_aux_loss_coef": moe.router.aux_loss,
    }


def _read_mixtral(fields: Fields) -> dict[str, Any]:
    fields.only(router_jitter_noise=0)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    fields.take("head_dim")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads}), or with head_dim")
    window = fields.integer("sliding_window") if fields.has("sliding_window") else fields.take("sliding_window")
    return {
        **_grouped_attention(fields, head_dim=fields.integer("head_dim", default=hidden // heads)),
        "rope": read_rope(fields),
        "sliding_window": window,
        "sliding_layers": "none" if window is None else "all",
        "moe": _experts(fields, "intermediate_size", renormalize=True),
    }


def _write_mixtral(card: ModelCard) -> dict[str, Any]:
    return write_rope(card) | {
        "head_dim": card.head_dim,
        "intermediate_size": card.moe.expert_ffn_size,
        "num_local_experts": card.moe.num_experts,
        "sliding_window": card.sliding_window,
        "router_aux_loss_coef": card.moe.router.aux_loss,
    }


FAMILIES = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _read_deepseek_v2, _write_deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),
    "glm4_moe": Family("Glm4MoeForCausalLM", _read_glm4_moe, _write_glm4_moe),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", _read_minimax_m2, _write_minimax_m2),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
    "gpt_oss": Family("GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss),
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral),
}
