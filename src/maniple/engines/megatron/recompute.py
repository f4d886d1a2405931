"""Recomputing chosen layers: one keeps its input alone for the backward pass, and is computed again there.

Megatron-Core knows the first layers of each pipeline stage only (`recompute_num_layers`). Here layers have their
numbers in the whole model, so that what is recomputed does not change with the layout.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer


class Layer(TransformerLayer):
    """Upstream's layer; `config.maniple_recompute` holds the numbers, from 0, of the layers that are recomputed.

    The layer of MTP depth d (from 0) has the number `num_layers + d`.
    """

    @property
    def number(self) -> int:
        return self.layer_number - 1 + (self.config.num_layers if self.is_mtp_layer else 0)

    def forward(self, *args: Any, **kwargs: Any):
        if not self.training or self.number not in getattr(self.config, "maniple_recompute", ()):
            return super().forward(*args, **kwargs)
        # upstream's block and MTP layer pass everything by name; nothing but the hidden states needs a gradient
        context = None

        def run(hidden_SBD: torch.Tensor) -> torch.Tensor:
            nonlocal context
            out_SBD, context = super(Layer, self).forward(*args, **{**kwargs, "hidden_states": hidden_SBD})
            return out_SBD

        return tensor_parallel.checkpoint(run, False, kwargs["hidden_states"]), context
