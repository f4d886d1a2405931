"""Documents kept apart: what follows from the number of each token's document.

`documents_BS`, int32 `[B, S]` over whole sequences (never cut over context- or tensor-parallel ranks): equal numbers in
a row are one document, in one piece; 0 is padding. It travels through Megatron-Core's models in the place of the
attention mask, a tensor that every layer of every pipeline stage is handed and that recomputation keeps. Without it
(None) a row is one text and a query sees everything before it.

Positions count from the row's start, not from the document's: rotary scores depend on distances alone, with YaRN too.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from maniple.engines.megatron import context


def documents_of(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """`documents_BS`, if that stands in the attention mask's place; Megatron-LM's own causal mask has 4 dims."""
    return attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None


def padding(documents_BS: torch.Tensor) -> torch.Tensor:
    """bool `[B, S]`: True at padding."""
    return documents_BS == 0


def complete(documents_BS: torch.Tensor, ahead: int) -> torch.Tensor:
    """bool `[B, S]`: True where the token `ahead` places on is of the same document (and is no padding)."""
    same_BS = torch.zeros_like(documents_BS, dtype=torch.bool)
    same_BS[:, : max(0, documents_BS.shape[1] - ahead)] = documents_BS[:, ahead:] == documents_BS[:, :-ahead]
    return same_BS & ~padding(documents_BS)


def on_this_rank(mask_BS: torch.Tensor, config, cp_group: ProcessGroup, tp_group: ProcessGroup) -> torch.Tensor:
    """The part `[B, S / CP / TP]` of a mask over whole sequences that belongs to this rank's rows of hidden states."""
    mask_BS = context.cut(mask_BS, cp_group)
    if config.sequence_parallel:  # tensor-parallel ranks hold consecutive parts
        mask_BS = mask_BS.chunk(tp_group.size(), dim=1)[tp_group.rank()].contiguous()
    return mask_BS
