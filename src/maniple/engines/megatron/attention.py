"""Core attention on `scaled_dot_product_attention`: GQA and MLA head sizes, sliding windows, attention sinks, documents
kept apart, context parallelism.

Megatron-Core's own local attention assumes equal key and value head sizes, materialises the scores and refuses context
parallelism. Shapes here: S tokens of whole sequences, L query tokens of one chunk, N keys that a chunk may see, B
batch, H query heads on this rank, G key/value heads on this rank, D query/key and V value head size.

Context parallelism gathers keys and values, as Llama 3 (2024, section 3.3.2) did: each rank computes its queries
against the keys of all ranks. A layer's forward receives S (CP - 1) / CP x B G (D + V) elements on every rank and its
backward sends as many; with MLA, G = H, and what is gathered are the keys and values of the heads, not the latent.
Whole keys and values of each layer are kept for its backward.

Windows, sinks and later chunks are given to flash attention itself (`flash.py`) where that takes them. Elsewhere, and
for documents, they are a bias of zeros and -inf, and which kernel computes is torch's choice (`_fused_sdp_choice`;
rules in its aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). In half precision on sm_90 and sm_100 cuDNN's comes
first, from cuDNN 9.15.1 on, and takes everything here. Otherwise flash attention takes what has no bias and heads of
one size, and memory-efficient attention the rest, but not grouped keys: with a bias, and in fp32, they are repeated for
every head (`fused_attention`). What is left to torch's plain operators on a GPU, with all scores, are head sizes that
are no multiples of 8 (of 4 in fp32).
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
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.nn.attention import SDPBackend
from torch.utils.weak import WeakTensorKeyDictionary

from maniple.engines.megatron import context, flash
from maniple.engines.megatron.documents import documents_of
from maniple.kernels import custom_ops
from maniple.kernels.forgotten import active, forget, hold
from maniple.kernels.rope import rotate

_MOST_BIASES = 8  # for the same documents: of two chunks and two windows, and as many of another sequence length
_SINK_DIMS = 8  # added to a head for its sink: one is needed, and fused kernels want multiples of eight
_ALIGNED = 16  # keys of a bias: of other numbers torch pads it for memory-efficient attention, in a copy for every head


class SDPAttention(MegatronModule):
    """Causal attention, within documents where they are kept apart. Built and called as upstream's `core_attention`.

    Raises ValueError for what it does not compute: upstream's packed sequences, dropout, other masks.
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
        # without documents every micro-batch has the same ones: they belong to the model, whose layers share the config
        self.biases: dict = config.__dict__.setdefault("maniple_attention_biases", {})
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
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
        """query `[S / CP, B, H, D]`, key `[S / CP, B, G, D]`, value `[S / CP, B, G, V]` -> `[S / CP, B, H * V]`.

        Always causal. `attention_mask`: `documents_BS` of whole sequences (`maniple.engines.megatron.documents`), or
        None, or the causal mask that Megatron-LM makes, which is not read.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("attention takes neither packed sequences nor a bias")
        # where core attention is recomputed upstream hands the type on in a tensor, which has no value in a dry run
        if attn_mask_type not in (None, AttnMaskType.causal) and not query.is_meta:
            raise ValueError(f"attention is causal only, not {attn_mask_type}")
        documents_BS, group = documents_of(attention_mask), self.pg_collection.cp
        if group.size() > 1:
            both = context.gather(torch.cat([key, value], dim=-1), group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        q_BHLD, k_BGSD, v_BGSV = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        spans = context.spans(key.shape[0], group.size(), group.rank())
        chunks = [
            self._attend(q, k_BGSD, v_BGSV, first, documents_BS)
            for (first, _), q in zip(spans, q_BHLD.chunk(len(spans), dim=2), strict=True)
        ]
        out_BHLV = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)
        return out_BHLV.permute(2, 0, 1, 3).flatten(-2)

    def _attend(self, q_BHLD, k_BGSD, v_BGSV, first: int, documents_BS) -> torch.Tensor:
        """`[B, H, L, V]`: of the queries of one chunk, whose first is token `first` of the sequence."""
        end = first + q_BHLD.shape[2]
        # no query of this chunk looks further back than its first one does
        start = 0 if self.window is None else max(0, first + 1 - self.window) // _ALIGNED * _ALIGNED
        k_BGND, v_BGNV = k_BGSD[:, :, start:end], v_BGSV[:, :, start:end]
        sinks_H = self.softmax_offset
        plain = sinks_H is None and documents_BS is None and (self.window is None or self.window >= end)
        if plain and first == 0:  # elsewhere SDPA's own causal mask would begin at the wrong key
            return fused_attention(q_BHLD, k_BGND, v_BGNV, None, self.softmax_scale)
        if documents_BS is None and flash.takes(q_BHLD, v_BGNV):
            return flash.attention(q_BHLD, k_BGND, v_BGNV, self.window, sinks_H, self.softmax_scale)
        known = self.biases if documents_BS is None else _biases_of.setdefault(documents_BS, {})
        bias = shared_bias(known, first, end, start, self.window, sinks_H is not None, documents_BS, q_BHLD)
        if sinks_H is not None:
            more = bias.shape[-1] - (end - start)
            q_BHLD, k_BGND, v_BGNV = _with_sink(q_BHLD, k_BGND, v_BGNV, sinks_H / self.softmax_scale, more)
        return fused_attention(q_BHLD, k_BGND, v_BGNV, bias, self.softmax_scale)

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


class GroupedAttention(SelfAttention):
    """Upstream's, but that on a GPU one kernel turns queries and keys (`maniple.kernels.rope`), in fp32.

    Upstream does it with a dozen of torch's operators, in the model's dtype, where Transformer Engine is missing.
    """

    _turns: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # cosines and sines of queries, and of keys

    def forward(self, hidden_states: torch.Tensor, *args, rotary_pos_emb=None, **kwargs):
        both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
        if all(angles is not None for angles in both) and self._takes_kernel(hidden_states, kwargs):
            self._turns = [cos_and_sin(angles, self._yarn_concentration_factor) for angles in both]
            rotary_pos_emb = None
        try:
            return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        finally:
            self._turns = None

    def get_query_key_value_tensors(self, *args, **kwargs):
        result = super().get_query_key_value_tensors(*args, **kwargs)
        if self._turns is None:
            return result
        query, key, *rest = result
        return rotate(query, *self._turns[0]), rotate(key, *self._turns[1]), *rest

    def _takes_kernel(self, hidden_states: torch.Tensor, others: dict) -> bool:
        """Whether training calls it, on a GPU, with values that nobody looks at operator by operator."""
        given = [others.get(name) for name in ("inference_context", "inference_params", "packed_seq_params")]
        # with `no_rope_freq` upstream turns only some layers
        turned = not self.config.rotary_interleaved and not self.config.no_rope_freq
        plain = turned and all(value is None for value in given)
        return plain and hidden_states.is_cuda and not custom_ops.named(hidden_states)


class LatentAttention(MLASelfAttention):
    """Upstream's MLA, mended where it relies on Transformer Engine's linear layers.

    With `recomputed` nothing keeps queries, keys and values for backward, where they are projected again from the
    latents.
    """

    recomputed = False
    _latents: tuple[torch.Tensor, torch.Tensor] | None = None  # what the down projections gave, or are to give

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args, **kwargs):
        if not self.recomputed or not active():
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        result = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        assert self._latents is not None
        latents, self._latents = [hold(latent) for latent in self._latents], None
        like = hidden_states.new_empty(()).expand(hidden_states.shape)  # only shape and dtype are read: one element

        def again() -> tuple[torch.Tensor, ...]:
            self._latents = latents[0](), latents[1]()
            try:
                return super(LatentAttention, self).get_query_key_value_tensors(like, *args, **kwargs)[:3]
            finally:
                self._latents = None

        forget(result[:3], again)
        return result

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
        if self._latents is not None:
            return self._latents
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() > 1:
            kv_combined = gather_from_tensor_model_parallel_region(kv_combined, group=self.tp_group)
            if self.config.sequence_parallel:  # upstream gathers the key's sequence again, and sums in backward
                kv_combined = scatter_to_sequence_parallel_region(kv_combined, group=self.tp_group)
            else:
                latent, key = kv_combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
                key = copy_to_tensor_model_parallel_region(key, group=self.tp_group)
                kv_combined = torch.cat([latent, key], dim=-1)
        if self.recomputed and active():
            self._latents = q_compressed, kv_combined
        return q_compressed, kv_combined


def fused_attention(q_BHLD, k_BGND, v_BGNV, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """`[B, H, L, V]`: causal attention, or with `bias` `[1 or B, 1, L, N]` added to the scores.

    Where torch has no kernel on this GPU for such operands it would keep all scores. Then keys and values are repeated
    for every head, and values as wide as keys: B N (H - G) (D + V) and B N H (D - V) elements, kept for backward.
    """
    grouped, width = q_BHLD.shape[1] != k_BGND.shape[1], v_BGNV.shape[-1]

    def chosen() -> bool:
        """Whether torch takes a kernel for the operands as they are."""
        number = torch._fused_sdp_choice(
            q_BHLD, k_BGND, v_BGNV, bias, is_causal=bias is None, scale=scale, enable_gqa=grouped
        )
        return number != SDPBackend.MATH.value

    if q_BHLD.is_cuda and grouped and not chosen():
        k_BGND, v_BGNV = (t.repeat_interleave(q_BHLD.shape[1] // t.shape[1], dim=1) for t in (k_BGND, v_BGNV))
        grouped = False
    if q_BHLD.is_cuda and width < q_BHLD.shape[-1] and not chosen():
        v_BGNV = F.pad(v_BGNV, (0, q_BHLD.shape[-1] - width))
    out_BHLV = F.scaled_dot_product_attention(
        q_BHLD, k_BGND, v_BGNV, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=grouped
    )
    return out_BHLV if out_BHLV.shape[-1] == width else out_BHLV[..., :width]


def _with_sink(q_BHLD, k_BGND, v_BGNV, sinks_H, more: int):
    """`more` keys before the others. With the first every query of head h scores `sinks_H[h]`, and its value is zero.
    The rest are zeros, there for their number: the bias hides them.

    The sink is one more dimension of the queries, where only the new key is not zero: a bias would be a matrix a head.
    """
    sinks_H8 = F.pad(sinks_H.to(q_BHLD.dtype)[:, None], (0, _SINK_DIMS - 1))
    q_LBHD = q_BHLD.permute(2, 0, 1, 3)  # as they lie in memory, and as what comes of them is to lie
    q_LBHD = torch.cat([q_LBHD, sinks_H8.expand(*q_LBHD.shape[:2], -1, -1)], dim=-1)
    sink_dim = k_BGND.shape[-1]
    k_BGND = F.pad(k_BGND, (0, _SINK_DIMS, more, 0))
    with torch.no_grad():  # a constant in the padding, which has no gradient
        k_BGND[:, :, 0, sink_dim] = 1
    return q_LBHD.permute(1, 2, 0, 3), k_BGND, F.pad(v_BGNV, (0, 0, more, 0))


# by angles and factor: layers share them, and upstream keeps one tensor of angles for a sequence length
_turns_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def cos_and_sin(angles_S11R: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[S, R / 2]` each, times factor. angles: as upstream makes them, `[S, 1, 1, R]` of two equal halves."""
    known = _turns_of.setdefault(angles_S11R, {})
    if factor not in known:
        with torch.inference_mode(False):  # what is kept is for training too
            angles_SR = angles_S11R[:, 0, 0, : angles_S11R.shape[-1] // 2].clone().float()
            known[factor] = angles_SR.cos() * factor, angles_SR.sin() * factor
    return known[factor]


# by documents_BS, for as long as it lives
_biases_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def shared_bias(
    known: dict,
    first: int,
    end: int,
    start: int,
    window: int | None,
    sink: bool,
    documents_BS: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """`[1 or B, 1, L, N]`: 0 where query i may see key j, else -inf; in the dtype and on the device of `like`.

    Queries are the tokens `first` to `end` of a sequence, keys those from `start` to `end`: j <= i, i - j < window, and
    both of one document. With `sink` there are more keys before the others, up to a multiple of 16: all see the first,
    and none the rest. `known` holds what has been made for the same documents: each layer saves its bias for backward,
    and should save the same one.
    """
    wanted = (first, end, start, window, sink, like.dtype, like.device)
    if wanted not in known:
        if len(known) >= _MOST_BIASES:
            known.clear()
        i_L1 = torch.arange(first, end, device=like.device)[:, None]
        j_1N = torch.arange(start, end, device=like.device)[None]
        hidden = (j_1N > i_L1)[None]
        if window is not None:
            hidden = hidden | (i_L1 - j_1N >= window)
        if documents_BS is not None:
            hidden = hidden | (documents_BS[:, first:end, None] != documents_BS[:, None, start:end])
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -math.inf)
        if sink:
            bias = F.pad(bias, (_ALIGNED - bias.shape[-1] % _ALIGNED, 0), value=-math.inf)
            bias[..., 0] = 0
        known[wanted] = bias[:, None]
    return known[wanted]
