"""Recomputing chosen layers, and chosen modules of every layer.

A recomputed layer keeps its input alone for the backward pass. Megatron-Core knows the first layers of each pipeline
stage only (`recompute_num_layers`). Here layers have their numbers in the whole model, so that what is recomputed does
not change with the layout.

Of a module's output that is recomputed, a recipe is saved in its place (`maniple.kernels.forgotten`). Upstream's own
way (tensor_parallel/random.py, `CheckpointWithoutOutput`) compiles an extension of torch when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from maniple.engines.megatron.attention import LatentAttention
from maniple.engines.megatron.norm import RMSNorm
from maniple.kernels.forgotten import forgetting
from maniple.moe.dispatch import LocalDispatcher


def spans(numbers: list[int]) -> str:
    """Layers in short: `0, 3-57`."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


class Layer(TransformerLayer):
    """Upstream's layer; `config.maniple_recompute` holds the numbers, from 0, of the layers that are recomputed, and
    `config.maniple_recompute_modules` the names of what is in each.

    The layer of MTP depth d (from 0) has the number `num_layers + d`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        modules: frozenset[str] = getattr(self.config, "maniple_recompute_modules", frozenset())
        self.forgets = False
        for name, part, kind in (
            ("norm", self.input_layernorm, RMSNorm),
            ("norm", self.pre_mlp_layernorm, RMSNorm),
            ("mla_up_proj", self.self_attention, LatentAttention),
        ):
            if name in modules and isinstance(part, kind):
                part.recomputed = self.forgets = True
        dispatcher = getattr(self.mlp, "exact", None)
        if "permute" in modules and isinstance(dispatcher, LocalDispatcher):
            dispatcher.gathers_again = self.forgets = True

    @property
    def number(self) -> int:
        return self.layer_number - 1 + (self.config.num_layers if self.is_mtp_layer else 0)

    def forward(self, *args: Any, **kwargs: Any):
        if not self.training or self.number not in getattr(self.config, "maniple_recompute", ()):
            if not self.forgets:
                return super().forward(*args, **kwargs)
            with forgetting():
                return super().forward(*args, **kwargs)
        # upstream's block and MTP layer pass everything by name; nothing but the hidden states needs a gradient
        context = None

        def run(hidden_SBD: torch.Tensor) -> torch.Tensor:
            nonlocal context
            out_SBD, context = super(Layer, self).forward(*args, **{**kwargs, "hidden_states": hidden_SBD})
            return out_SBD

        return tensor_parallel.checkpoint(run, False, kwargs["hidden_states"]), context

    def _forward_attention(self, *args: Any, **kwargs: Any):
        """By itself where a schedule cuts layers in pieces (`moe.overlap_exchange`)."""
        if not self.forgets:
            return super()._forward_attention(*args, **kwargs)
        with forgetting():
            return super()._forward_attention(*args, **kwargs)
