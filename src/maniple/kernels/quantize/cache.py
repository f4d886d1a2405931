"""A weight's quantized form, kept for as long as the weight keeps its values: one quantization an optimizer step.

Torch does not say when values change: writes through `.data`, into a buffer that the weight is a view of, or by a
collective leave `_version` as it was. So whoever changes weights says so with `bump`: the optimizer after its step, DDP
where it has gathered parameters, a loader after it has loaded. What torch does say is heeded too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from maniple.kernels.quantize.functions import quantize_weight
from maniple.kernels.quantize.quantized import Weight

_OWN: dict[tuple[torch.device, int], int] = {}  # where a weight begins -> how often it was bumped by itself
_ALL = [0]  # how often all were


def bump(weights: Iterable[torch.Tensor] | None = None) -> None:
    """Says that the values of these weights, or of all (None), may have changed. Costs no device time.

    A weight is known by where its memory begins, so that a view from there, such as `weight[None]`, is the same weight.
    """
    if weights is None:
        _ALL[0] += 1
        return
    for weight in weights:
        _OWN[_place(weight)] = _OWN.get(_place(weight), 0) + 1


def generation(weight: torch.Tensor) -> tuple[int, int]:
    """Differs from an earlier one if the weight was bumped in between."""
    return _ALL[0], _OWN.get(_place(weight), 0)


class QuantizedWeight:
    """The quantized form of one weight: `quantized(weight)` quantizes when its values may have changed, else not.

    settings: those of `quantize_weight`, recipe first. check: with each reuse, a digest of the weight is compared with
    that of the weight that was quantized (waits for the device, for finding faults only).
    """

    def __init__(self, recipe: str, *, check: bool = False, **settings: Any) -> None:
        self._recipe, self._settings, self._check = recipe, settings, check
        self._stamp: tuple[Any, ...] | None = None
        self._digest: int | None = None
        self._kept: Weight | None = None

    def __call__(self, w_GNK: torch.Tensor) -> Weight:
        """The weight's `Weight`. Raises ValueError for a part of a weight, whose changes would be said of the whole;
        RuntimeError, with `check`, if values changed and nobody said so.
        """
        whole = w_GNK._base
        if whole is not None and _place(whole) != _place(w_GNK):
            raise ValueError(
                f"a part {list(w_GNK.shape)} of a weight {list(whole.shape)} cannot be cached: pass it whole"
            )
        stamp = _stamp(w_GNK)
        if self._kept is None or stamp != self._stamp:
            self._kept = None  # two of them would not fit where one just does
            self._kept = quantize_weight(w_GNK, self._recipe, **self._settings)
            self._stamp = stamp
            self._digest = digest(w_GNK) if self._check else None
        elif self._check and digest(w_GNK) != self._digest:
            raise RuntimeError(
                f"a weight {list(w_GNK.shape)} changed and its quantized form did not: call "
                "maniple.kernels.quantize.bump() where it was written"
            )
        return self._kept

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        if self._kept is None:
            return 0
        kept = [each for each in (self._kept.forward, self._kept.dgrad) if each is not None]
        return sum(each.data.nbytes for each in kept) + self._kept.forward.scales.nbytes

    def clear(self) -> None:
        """Frees what is kept."""
        self._kept = self._stamp = self._digest = None


def _stamp(weight: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if weight.is_inference() else weight._version
    return *generation(weight), version, _place(weight), weight.shape, weight.stride(), weight.dtype


def _place(weight: torch.Tensor) -> tuple[torch.device, int]:
    return weight.device, 0 if is_fake(weight) or weight.is_meta else weight.data_ptr()


def digest(weight: torch.Tensor) -> int:
    """A number that almost surely differs when one bit of the values does, or two values change places."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)  # wraps around, which is well defined
    for part in weight.detach().contiguous().view(torch.uint8).flatten().split(2**24):
        place = torch.arange(part.numel(), device=weight.device)
        mixed = (part.long() + 1) * (place * 0x9E3779B1 + 0x7F4A7C15 | 1)
        total = total * 0x85EBCA6B + (mixed ^ (mixed >> 29)).sum()
    return int(total)
