"""Cross-entropy of a chunk of logits, in plain torch: the oracle.

A label outside [0, V) is not of this part of the vocabulary.
"""

from __future__ import annotations

import torch


def statistics(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[C]` each: the log-sum-exp of a row, and the label's logit, zero where the label is not here."""
    here_C, at_C = _here(labels_C, logits_CV.shape[1])
    target_C = logits_CV.gather(1, at_C[:, None]).squeeze(1).float()
    return logits_CV.float().logsumexp(1), torch.where(here_C, target_C, 0.0)


def gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, lse_C: torch.Tensor, grad_C: torch.Tensor
) -> torch.Tensor:
    """`grad * (exp(logits - lse) - [label])`, in the logits' dtype; may take their memory."""
    here_C, at_C = _here(labels_C, logits_CV.shape[1])
    p_CV = (logits_CV.float() - lse_C[:, None]).exp()
    p_CV.scatter_add_(1, at_C[:, None], -here_C.float()[:, None])
    return (p_CV * grad_C.float()[:, None]).to(logits_CV.dtype)


def _here(labels_C: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    here_C = (labels_C >= 0) & (labels_C < vocabulary)
    return here_C, torch.where(here_C, labels_C, 0)
