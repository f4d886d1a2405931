"""What Megatron-Core builds a layer from: Maniple's attention, norms, MoE layer and experts in its own slots.

Use it from Megatron-LM as `--spec maniple.engines.megatron.spec layer_spec` (with `--transformer-impl local`), or
through `decoder_specs`, as Maniple's own trainer does.
"""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from maniple.engines.megatron.attention import GroupedAttention, LatentAttention, SDPAttention
from maniple.engines.megatron.experts import GroupedExperts
from maniple.engines.megatron.language_model import PredictionLayer
from maniple.engines.megatron.moe import ManipleMoELayer, ManipleRouter
from maniple.engines.megatron.norm import FullWidthRMSNorm, LatentRMSNorm, RMSNorm
from maniple.engines.megatron.precision import Layer

# gpt_layer_specs.py, `get_gpt_layer_local_submodules`: norms under the names that they have where linears contain them
_FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class ManipleSpecProvider(BackendSpecProvider):
    """Which module stands in each of Megatron-Core's slots, with no need of Transformer Engine or Apex."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False) -> type:
        if not rms_norm:
            raise ValueError("Maniple's layers use RMSNorm: pass --normalization RMSNorm")
        return RMSNorm

    def core_attention(self) -> type:
        return SDPAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type:
        return GroupedExperts

    def activation_func(self) -> None:
        return None


def _attention(config) -> ModuleSpec:
    backend = ManipleSpecProvider()
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    card = getattr(config, "maniple_card", None)
    full_width = card is not None and card.qk_norm == "full_width"
    params = {"attn_mask_type": AttnMaskType.causal}
    if config.multi_latent_attention:
        norm = LatentRMSNorm if config.qk_layernorm else IdentityOp
        submodules = MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=backend.core_attention(),
            linear_proj=row,
            q_layernorm=IdentityOp if config.q_lora_rank is None else norm,
            kv_layernorm=norm,
        )
        return ModuleSpec(module=LatentAttention, params=params, submodules=submodules)
    if not config.qk_layernorm:
        q_norm = k_norm = IdentityOp
    elif full_width:
        q_norm = partial(FullWidthRMSNorm, num_heads=config.num_attention_heads)
        k_norm = partial(FullWidthRMSNorm, num_heads=config.num_query_groups)
    else:
        q_norm = k_norm = RMSNorm
    submodules = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=backend.core_attention(),
        linear_proj=row,
        q_layernorm=q_norm,
        k_layernorm=k_norm,
    )
    return ModuleSpec(module=GroupedAttention, params=params, submodules=submodules)


def transformer_layer(config, *, moe: bool) -> ModuleSpec:
    """One decoder layer, with a dense MLP or an MoE layer."""
    backend = ManipleSpecProvider()
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if moe:
        mlp = partial(
            ManipleMoELayer,
            submodules=MoESubmodules(
                experts=backend.grouped_mlp_modules(True),
                shared_experts=partial(SharedExpertMLP, submodules=linears),
                router=ManipleRouter,
            ),
        )
    else:
        mlp = partial(MLP.as_mlp_submodule, submodules=linears)
    return ModuleSpec(
        module=Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # checkpoints have the keys of upstream's local spec, so that each loads the other's
            sharded_state_dict_keys_map={} if config.multi_latent_attention else dict(_FUSED_NORM_KEYS),
        ),
    )


def decoder_specs(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, in order, and the final norm."""
    kinds = {bool(kind): transformer_layer(config, moe=bool(kind)) for kind in set(_layer_kinds(config))}
    layers = [kinds[bool(kind)] for kind in _layer_kinds(config)]
    if config.pipeline_model_parallel_layout is not None:
        ids = config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
        local = [layers[i] for i in ids]
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        local = layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(layer_specs=local, layer_norm=RMSNorm)


def mtp_specs(config, vp_stage: int | None = None):
    """The multi-token-prediction block of this pipeline stage, or None. Its layer is the last decoder layer's kind."""
    if not config.mtp_num_layers:
        return None
    layer = transformer_layer(config, moe=bool(_layer_kinds(config)[-1]))
    last = TransformerBlockSubmodules(layer_specs=[layer])  # a bare layer would have to be upstream's own class
    block = get_gpt_mtp_block_spec_for_backend(config, last, backend=ManipleSpecProvider(), vp_stage=vp_stage)
    for layer in block.layer_specs if block is not None else ():
        layer.module = PredictionLayer
    return block


def layer_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron-LM's `--spec` entry: its model builder passes a model config that holds the `TransformerConfig`."""
    return decoder_specs(getattr(config, "transformer", config), vp_stage=vp_stage)


def _layer_kinds(config) -> list[int]:
    """1 for an MoE layer, 0 for a dense one, for every decoder layer of the whole model."""
    if config.num_moe_experts is None:
        return [0] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(i % frequency == 0) for i in range(config.num_layers)]
    if len(frequency) != config.num_layers:
        raise ValueError(f"moe_layer_freq names {len(frequency)} layers, the model has {config.num_layers}")
    return list(frequency)
