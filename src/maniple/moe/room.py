"""How large a static buffer is, and on the device how large it would have had to be.

What depends on routing has no size that the host knows without waiting. A buffer is given room for a stated factor of
the balanced load; what does not fit is left out of this pass, and `asked` says so. Whoever owns the pass reads `asked`
once, with what it reads anyway, throws the pass away, calls `grow` and runs it again: no row is ever missing from a
result that is used. One-sided exchanges use the same interface: a rank notes what it would have had to receive.
"""

from __future__ import annotations

import math

import torch

_HEADROOM = 10  # a tenth beyond what was asked for: the next batch may ask for a little more
_TRIES = 3  # that grow by what was asked; from then on the worst case


class Room:
    """Room of one buffer, as a factor (at least 1) of the balanced load, and never more than the worst case."""

    def __init__(self, factor: float) -> None:
        if not factor >= 1:
            raise ValueError(f"a buffer has room for at least the balanced load: {factor} is less than 1")
        self.factor = factor
        self.rows = self.balanced = self.worst = 0  # as last asked for
        self.asked: torch.Tensor | None = None  # int64 [1], the most since `reset`
        self._grown = 0

    def size(self, balanced: int, worst: int) -> int:
        """Rows of the buffer where the balanced load is `balanced` rows and no load is more than `worst`."""
        self.balanced, self.worst = balanced, worst
        self.rows = min(worst, math.ceil(self.factor * balanced))
        return self.rows

    def note(self, asked: torch.Tensor) -> None:
        """Remembers an integer tensor of one element, on the device, if it is the most so far."""
        asked = asked.detach().reshape(1).to(torch.int64)
        if self.asked is None:
            self.asked = torch.zeros_like(asked)
        torch.maximum(self.asked, asked, out=self.asked)

    def reset(self) -> None:
        if self.asked is not None:
            self.asked.zero_()

    def grow(self, asked: int) -> None:
        """Makes room for `asked` rows, and some more. After a few times it is the worst case's."""
        self._grown += 1
        rows = self.worst if self._grown > _TRIES else min(self.worst, asked + -(-asked // _HEADROOM))
        self.factor = max(self.factor, rows / max(self.balanced, 1))
        self.size(self.balanced, self.worst)
