"""Cross-entropy of a chunk of logits in portable Triton, one pass a direction. As `reference.py`'s functions."""

from __future__ import annotations

import torch

from maniple.kernels import chips
from maniple.kernels.cross_entropy import launch
from maniple.kernels.cross_entropy.triton_kernels import gradient_kernel, statistics_kernel


def statistics(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's."""
    rows, vocabulary = logits_CV.shape
    lse_C, target_C = (logits_CV.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        block = launch.block(chips.target(logits_CV))
        statistics_kernel[(rows,)](
            *(logits_CV, labels_C.contiguous(), lse_C, target_C, vocabulary, logits_CV.stride(0)),
            COLUMNS=block.columns,
            num_warps=block.warps,
        )
    return lse_C, target_C


def gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, lse_C: torch.Tensor, grad_C: torch.Tensor
) -> torch.Tensor:
    """As the reference's, in the logits' memory."""
    rows, vocabulary = logits_CV.shape
    if rows:
        block = launch.block(chips.target(logits_CV))
        gradient_kernel[(rows,)](
            *(logits_CV, labels_C.contiguous(), lse_C, grad_C.float().contiguous(), vocabulary, logits_CV.stride(0)),
            COLUMNS=block.columns,
            num_warps=block.warps,
        )
    return logits_CV
