"""Model cards: the facts of an architecture, and nothing about how it is trained.

A card is read from `cards/NAME.yaml` and validated here. Field names are the field's own (`hidden_size`, `topk`);
no engine's words occur. `ModelCard.tiny()` shrinks a card to something a laptop's CPU trains in seconds while it
keeps every architectural feature (router kind, groups, shared experts, biases, sinks, MTP, ...).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Far past any model, and short of what would hang or exhaust memory before a word is said.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_HEADS, _WIDEST, _MOST_TOKENS = 2048, 1 << 16, 1 << 14, 1 << 20, 1 << 27


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MLA(_Facts):
    """Multi-head latent attention (DeepSeek-V2): low-rank query and key/value, a rotary part beside a plain part."""

    q_lora_rank: int | None = Field(None, ge=1, le=_WIDEST, description="None: the query has no low-rank bottleneck")
    kv_lora_rank: int = Field(ge=1, le=_WIDEST)
    qk_nope_head_dim: int = Field(ge=1, le=_WIDEST)
    qk_rope_head_dim: int = Field(ge=2, le=_WIDEST)
    v_head_dim: int = Field(ge=1, le=_WIDEST)


class Yarn(_Facts):
    """YaRN rotary scaling (Peng et al., 2023), as the model's own code parameterises it."""

    factor: float = Field(gt=0)
    original_max_position: int = Field(ge=1)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class Rope(_Facts):
    base: float = Field(10_000.0, gt=0)
    partial: float = Field(1.0, gt=0, le=1, description="share of the head dim that is rotated (of MLA's rope part: 1)")
    interleaved: bool = Field(
        False, description="rotated pairs are neighbours (2i, 2i+1) in the reference weights, not (i, i + half)"
    )
    yarn: Yarn | None = None


class Router(_Facts):
    """How a token chooses its experts. Bias enters selection only; ties go to the lowest expert id."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    score_before_topk: bool = Field(True, description="False: scores are taken over the selected logits only (GPT-OSS)")
    renormalize: bool = Field(True, description="divide the selected scores by their sum")
    num_groups: int = Field(1, ge=1)
    group_topk: int = Field(1, ge=1, description="groups kept per token")
    group_score: Literal["max", "sum_top2"] = "max"
    expert_bias: bool = Field(False, description="aux-free balancing bias, added for selection only (DeepSeek-V3)")
    route_scale: float = Field(1.0, gt=0)
    linear_bias: bool = Field(False, description="the router's linear layer has a bias (GPT-OSS)")
    aux_loss: float = Field(0.0, ge=0, description="the model's own load-balance coefficient")


class MoE(_Facts):
    num_experts: int = Field(ge=1, le=_MOST_EXPERTS)
    topk: int = Field(ge=1)
    expert_ffn_size: int = Field(ge=1, le=_WIDEST)
    num_shared_experts: int = Field(0, ge=0, le=_MOST_EXPERTS)
    shared_ffn_size: int = Field(0, ge=0, le=_WIDEST, description="intermediate size of all shared experts together")
    num_dense_layers: int = Field(0, ge=0, description="leading layers with a dense MLP")
    linear_bias: bool = Field(False, description="expert matrices have biases (GPT-OSS)")
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    activation_alpha: float = Field(1.0, description="gate * sigmoid(alpha * gate)")
    activation_limit: float | None = Field(None, description="clamp of gate (above) and up (both sides)")
    activation_up_offset: float = Field(0.0, description="added to up after the clamp")
    router: Router = Router()


class Published(_Facts):
    """What the model's authors say, in billions, and how they counted."""

    total: float
    active: float
    total_counting: Literal[
        "all", "no_embedding", "no_embedding_and_head", "base_plus_mtp_minus_embedding_and_head"
    ] = "all"
    active_counting: Literal["all", "no_embedding", "no_embedding_and_head"] = "all"


class ModelCard(_Facts):
    name: str = Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    family: str = Field(description="transformers' model_type of the family")
    huggingface: str | None = Field(None, description="hub repository of the reference weights")
    num_layers: int = Field(ge=1, le=_MOST_LAYERS)
    hidden_size: int = Field(ge=1, le=_WIDEST)
    dense_ffn_size: int = Field(0, ge=0, le=_WIDEST, description="0: no dense layers")
    num_heads: int = Field(ge=1, le=_MOST_HEADS)
    num_kv_heads: int = Field(ge=1, le=_MOST_HEADS, description="equals num_heads for MLA")
    head_dim: int = Field(ge=1, le=_WIDEST, description="for MLA: nope + rope")
    mla: MLA | None = None
    rope: Rope = Rope()
    qk_norm: Literal["none", "per_head", "full_width"] = "none"
    qkv_bias: bool = False
    output_bias: bool = Field(False, description="bias of the attention's output projection")
    attention_sinks: bool = Field(False, description="one learned sink logit per head (GPT-OSS)")
    sliding_window: int | None = Field(None, ge=1, description="tokens a query sees, itself included")
    sliding_layers: Literal["none", "even", "all"] = "none"
    moe: MoE
    num_mtp_layers: int = Field(0, ge=0, le=_MOST_LAYERS)
    vocab_size: int = Field(ge=1, le=_MOST_TOKENS)
    tied_embeddings: bool = False
    norm_eps: float = Field(1e-6, gt=0)
    init_std: float = Field(0.02, gt=0)
    max_position: int = Field(4096, ge=1)
    published: Published | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ModelCard:
        moe, router = self.moe, self.moe.router
        if moe.topk > moe.num_experts:
            raise ValueError(f"moe.topk {moe.topk} is more than moe.num_experts {moe.num_experts}")
        if moe.num_experts % router.num_groups:
            raise ValueError(f"moe.num_experts {moe.num_experts} does not divide into {router.num_groups} groups")
        if router.group_topk > router.num_groups:
            raise ValueError(f"moe.router.group_topk {router.group_topk} is more than num_groups {router.num_groups}")
        if moe.topk > router.group_topk * (moe.num_experts // router.num_groups):
            raise ValueError(
                f"moe.topk {moe.topk} is more than the experts in {router.group_topk} of {router.num_groups} groups"
            )
        if router.group_score == "sum_top2" and router.num_groups > 1 and moe.num_experts // router.num_groups < 2:
            raise ValueError("group_score sum_top2 needs at least two experts a group")
        if moe.num_dense_layers > self.num_layers:
            raise ValueError(f"moe.num_dense_layers {moe.num_dense_layers} is more than num_layers {self.num_layers}")
        if moe.num_dense_layers and not self.dense_ffn_size:
            raise ValueError("moe.num_dense_layers > 0 needs dense_ffn_size")
        if bool(moe.num_shared_experts) != bool(moe.shared_ffn_size):
            raise ValueError("moe.num_shared_experts and moe.shared_ffn_size go together")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.mla is not None:
            if self.num_kv_heads != self.num_heads:
                raise ValueError("MLA has num_kv_heads equal to num_heads")
            if self.head_dim != self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim:
                raise ValueError("MLA has head_dim equal to qk_nope_head_dim + qk_rope_head_dim")
        if (self.sliding_layers == "none") != (self.sliding_window is None):
            raise ValueError("sliding_layers and sliding_window go together")
        if (moe.activation == "clamped_swiglu") != (moe.activation_limit is not None):
            raise ValueError("moe.activation clamped_swiglu and moe.activation_limit go together")
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts; layers from `num_layers` on are MTP layers, which are as
        the last decoder layer is."""
        return min(layer, self.num_layers - 1) >= self.moe.num_dense_layers

    def window(self, layer: int) -> int | None:
        """Keys a query of decoder layer `layer` (from 0) sees, itself included; None: all before it."""
        slides = self.sliding_layers == "all" or (self.sliding_layers == "even" and layer % 2 == 0)
        return self.sliding_window if slides else None

    def tiny(self) -> ModelCard:
        """This architecture at toy sizes: every feature kept, about a million parameters, trains on a CPU."""
        moe, router = self.moe, self.moe.router
        groups = min(router.num_groups, 4)
        experts = 8
        changes: dict = {
            "name": f"{self.name}-tiny",
            "num_layers": 3 if moe.num_dense_layers else 2,
            "hidden_size": 64,
            "dense_ffn_size": 96 if self.dense_ffn_size else 0,
            "num_heads": 4,
            "num_kv_heads": 4 if self.mla else 2,
            "head_dim": 24 if self.mla else 16,
            "vocab_size": 256,
            "max_position": 256,
            "init_std": 0.02,  # a std chosen for a width of thousands starves a width of 64
            "published": None,
            "rope": self.rope.model_copy(
                update={"yarn": self.rope.yarn and self.rope.yarn.model_copy(update={"original_max_position": 64})}
            ),
            "moe": moe.model_copy(
                update={
                    "num_experts": experts,
                    "topk": min(moe.topk, 2),
                    "expert_ffn_size": 48,
                    "shared_ffn_size": 48 * moe.num_shared_experts,
                    "num_dense_layers": 1 if moe.num_dense_layers else 0,
                    "router": router.model_copy(
                        update={"num_groups": groups, "group_topk": min(router.group_topk, max(1, groups // 2))}
                    ),
                }
            ),
        }
        if self.mla:
            changes["mla"] = MLA(
                q_lora_rank=self.mla.q_lora_rank and 32,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
            )
        if self.sliding_window:
            changes["sliding_window"] = 16
        return type(self).model_validate(self.model_copy(update=changes).model_dump())

    def with_overrides(self, overrides: dict) -> ModelCard:
        """A copy with nested fields replaced, validated anew. `overrides` has the shape of the card's YAML."""
        return type(self).model_validate(_merged(self.model_dump(), overrides))


def _merged(base: dict, top: dict) -> dict:
    out = dict(base)
    for key, value in top.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
