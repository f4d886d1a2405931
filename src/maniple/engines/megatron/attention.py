"""Core attention on `scaled_dot_product_attention`: GQA and MLA head sizes, sliding windows, attention sinks.

Megatron-Core's own local attention assumes equal key and value head sizes and materialises the scores. Shapes here:
S query tokens, B batch, H query heads on this rank, G key/value heads on this rank, D query/key and V value head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint


class SDPAttention(MegatronModule):
    """Causal attention over whole sequences. Built and called as Megatron-Core's `core_attention`.

    Raises ValueError for what it does not compute: context parallelism, packed sequences, dropout, other masks.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("attention has no context parallelism yet: set parallel.context_parallel_size=1")
        if config.attention_dropout if attention_dropout is None else attention_dropout:
            raise ValueError("attention has no dropout: set attention_dropout=0")
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"attention is causal self-attention only, not {attention_type} with {attn_mask_type}")
        self.layer_number = max(1, layer_number)
        head_dim = k_channels or config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        # Megatron-Core's window (left, 0) lets a query see `left` tokens before itself
        self.window = config.window_size[0] + 1 if windowed else None
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.pg_collection.tp.size()
            sinks_H = torch.empty(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(sinks_H)  # upstream's name, so that checkpoints agree
            self.softmax_offset.tensor_model_parallel = True
            self.softmax_offset.partition_dim = 0
            self.softmax_offset.partition_stride = 1
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        elif config.softmax_type == "vanilla":
            self.softmax_offset = None
        else:
            raise ValueError(f"attention has no softmax_type {config.softmax_type!r}: use vanilla or learnable")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query `[S, B, H, D]`, key `[S, B, G, D]`, value `[S, B, G, V]` -> `[S, B, H * V]`; always causal."""
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("attention takes neither packed sequences nor a bias")
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise ValueError(f"attention is causal only, not {attn_mask_type}")
        q_BHSD, k_BGSD, v_BGSV = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        length, gqa = query.shape[0], query.shape[2] != key.shape[2]
        if self.softmax_offset is None and (self.window is None or self.window >= length):
            out_BHSV = F.scaled_dot_product_attention(
                q_BHSD, k_BGSD, v_BGSV, is_causal=True, scale=self.softmax_scale, enable_gqa=gqa
            )
        else:
            bias_HSS = causal_bias(length, self.window, q_BHSD)
            if self.softmax_offset is not None:
                # a sink is one more key whose score is the learned logit and whose value is zero
                heads = self.softmax_offset.shape[0]
                sink_HS1 = self.softmax_offset.to(bias_HSS.dtype)[:, None, None].expand(-1, length, 1)
                bias_HSS = torch.cat([bias_HSS.expand(heads, -1, -1), sink_HS1], dim=-1)
                k_BGSD, v_BGSV = (F.pad(t, (0, 0, 0, 1)) for t in (k_BGSD, v_BGSV))
            out_BHSV = F.scaled_dot_product_attention(
                q_BHSD, k_BGSD, v_BGSV, attn_mask=bias_HSS, scale=self.softmax_scale, enable_gqa=gqa
            )
        return out_BHSV.permute(2, 0, 1, 3).flatten(-2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        state = self.state_dict(prefix="", keep_vars=True) if self.softmax_offset is not None else {}
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class LatentAttention(MLASelfAttention):
    """Upstream's MLA, mended where it relies on Transformer Engine's linear layers."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict:
        """A query of one projection has no norm (DeepSeek-V2-Lite), and the key/value latent still has one: upstream
        (mla_qk_norm_config.py, `_resolve_mla_qk_layernorm`) wants a norm fused into `linear_q_proj` for that."""
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor):
        """The rotary key is one for all heads, so its gradient is a sum over tensor-parallel ranks. Upstream
        (multi_latent_attention.py, `get_query_key_value_tensors`) forgets it after a ColumnParallelLinear: it gathers
        the columns with an operation whose backward takes a slice."""
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() > 1:
            kv_combined = gather_from_tensor_model_parallel_region(kv_combined, group=self.tp_group)
            if self.config.sequence_parallel:  # upstream gathers the key's sequence again, and sums in backward
                kv_combined = scatter_to_sequence_parallel_region(kv_combined, group=self.tp_group)
            else:
                latent, key = kv_combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
                key = copy_to_tensor_model_parallel_region(key, group=self.tp_group)
                kv_combined = torch.cat([latent, key], dim=-1)
        return q_compressed, kv_combined


def causal_bias(length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """`[1, S, S]`: 0 where query i may see key j (j <= i and i - j < window), else -inf; dtype, device of `like`."""
    i_S1 = torch.arange(length, device=like.device)[:, None]
    j_1S = torch.arange(length, device=like.device)[None]
    hidden_SS = j_1S > i_S1
    if window is not None:
        hidden_SS = hidden_SS | (i_S1 - j_1S >= window)
    return torch.zeros(1, length, length, dtype=like.dtype, device=like.device).masked_fill(hidden_SS, -math.inf)
