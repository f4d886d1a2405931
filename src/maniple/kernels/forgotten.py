"""Tensors that autograd does not keep: where one would be saved for backward, how to compute it again is saved instead.

The graph is recorded once, in the forward pass, and each operation keeps what it always does; only of the tensors that
were `forget`-told a recipe stands in the place of the values. Nothing is differentiated twice, and an operation between
two such tensors is computed again only as far as values are needed. What is computed again must come out the same bits:
that is up to the caller.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Recipe:
    """Computes some tensors again, once for all that were saved of them in one graph."""

    def __init__(self, compute: Callable[[], Sequence[torch.Tensor]], late: bool) -> None:
        self.compute, self.late = compute, late
        self.saved = self.left = 0  # places where one of them was saved; those that have not asked yet
        self.made: Sequence[torch.Tensor] | None = None

    def take(self, number: int) -> torch.Tensor:
        if self.made is None:
            self.made, self.left = self._again(), self.saved
        out = self.made[number]
        self.left -= 1
        if self.left <= 0:
            self.made = None
        return out

    def look(self, number: int) -> torch.Tensor:
        return (self.made or self._again())[number]

    @torch.no_grad()
    def _again(self) -> Sequence[torch.Tensor]:
        return self.compute()


@dataclass(frozen=True)
class _Place:
    """A view of one of a recipe's tensors. there: itself, until it is taken, where the recipe is for later."""

    recipe: _Recipe
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    there: list[torch.Tensor]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, self.offset)


# by storage: (recipe, number of the tensor, its dtype, what keeps the entry for as long as the storage lives)
_known: dict[int, tuple[_Recipe, int, torch.dtype, weakref.ref]] = {}
_scopes = 0


@contextmanager
def forgetting() -> Iterator[None]:
    """Inside, what was `forget`-told is not saved for backward. Hooks of saved tensors that are set within it take
    precedence, and should begin with `pack` and end with `unpack`."""
    global _scopes
    _scopes += 1
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _scopes -= 1


def active() -> bool:
    """Whether this is inside `forgetting()` and anything is recorded for backward."""
    return _scopes > 0 and torch.is_grad_enabled()


def forget(
    tensors: Sequence[torch.Tensor], compute: Callable[[], Sequence[torch.Tensor]], *, late: bool = False
) -> None:
    """Wherever these tensors, or views of them, are saved for backward from now on, `compute` is instead.

    late: they are saved, and let go by the first operation that reads them in backward, where autograd would hold them
    until that operation is done; only another backward pass computes them again.

    compute: makes the very same tensors, in their order and strides; called without gradients, during backward. It
    should hold what is saved anyway, and of others `hold(tensor)`. To no end unless `active()`.
    """
    recipe = _Recipe(compute, late)
    for number, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        key = storage._cdata
        _known[key] = recipe, number, tensor.dtype, weakref.ref(storage, partial(_drop, key))


def is_forgotten(tensor: torch.Tensor) -> bool:
    return _find(tensor) is not None


def hold(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Gives the tensor's values when called, and keeps them only if they are not forgotten."""
    place = _find(tensor)
    if place is None:
        tensor = tensor.detach()
        return lambda: tensor
    return lambda: place.of(place.recipe.look(place.number))


def pack(tensor: torch.Tensor) -> torch.Tensor | _Place:
    """What is saved in the tensor's place."""
    place = _find(tensor)
    if place is None:
        return tensor
    place.recipe.saved += 1
    if place.recipe.late:
        place.there.append(tensor.detach())
    return place


def unpack(saved: torch.Tensor | _Place) -> torch.Tensor:
    if not isinstance(saved, _Place):
        return saved
    return saved.there.pop() if saved.there else saved.of(saved.recipe.take(saved.number))


def _find(tensor: torch.Tensor) -> _Place | None:
    if not _known:
        return None
    recipe, number, dtype, _ = _known.get(tensor.untyped_storage()._cdata, (None, 0, None, None))
    if recipe is None or dtype != tensor.dtype:
        return None
    return _Place(recipe, number, tensor.size(), tensor.stride(), tensor.storage_offset(), [])


def _drop(key: int, _: weakref.ref) -> None:
    _known.pop(key, None)


def recomputed(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function(*tensors)`, of which backward keeps `tensors` alone and computes the rest again.

    What else the function needs it holds itself; parameters get their gradients as ever. It must draw no random
    numbers.
    """
    return _Recomputed.apply(function, *tensors) if torch.is_grad_enabled() else function(*tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        torch.autograd.backward(out, grad)
        return None, *[tensor.grad for tensor in inputs]
