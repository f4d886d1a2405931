"""Which tokens of a sample belong together, read from the end token that closes each document."""

from __future__ import annotations

import torch


def keep_apart(batch: dict[str, torch.Tensor], eod: int) -> dict[str, torch.Tensor]:
    """The batch with `documents` int32 `[B, S]` (1, 2, ... along each row) and no label across a border.

    A document ends with its end token `eod`; what follows begins the next one. So the label at an end token is another
    document's first token, and its loss does not count. A document without end token runs into the next.
    """
    ends_BS = batch["tokens"] == eod
    before_BS = ends_BS.cumsum(1, dtype=torch.int32) - ends_BS.to(torch.int32)  # end tokens before each token
    return {**batch, "documents": before_BS + 1, "loss_mask": batch["loss_mask"] * ~ends_BS}
