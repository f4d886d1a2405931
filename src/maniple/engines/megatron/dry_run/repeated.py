"""Remembers what shapes an operation on meta tensors gave: a step repeats each of a few hundred thousands of times.

Meta kernels of pointwise operations are Python and take most of a dry run. What they return depends on nothing but the
shapes, strides and types of what goes in, so that the second call of the same kind needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_SIMPLE = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_SEQUENCES = frozenset({list, tuple})
_Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Repeated:
    """Calls operations on meta tensors; of one that makes new tensors only, a call like an earlier one is not made."""

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}  # operator -> whether its schema promises nothing but new tensors
        self._known: dict[Any, tuple[type | None, list[_Result]] | None] = {}  # None: was not what the schema promises

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = _promises_new(func)
        if not makes_new:
            return func(*args, **kwargs)
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            if known is None:
                return func(*args, **kwargs)
            kind, results = known
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in results
            ]
            return made[0] if kind is None else kind(made)
        out = func(*args, **kwargs)
        self._known[key] = _described(out, args, kwargs)
        return out


def _promises_new(func: Any) -> bool:
    schema = func._schema
    return bool(schema.returns) and not any(a.alias_info for a in [*schema.arguments, *schema.returns])


def _key(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """What decides the result's shapes, hashable; None if something else may (a subclass, an object)."""
    parts: list[Any] = [func]
    values = [*args, *(part for name in sorted(kwargs) for part in (name, kwargs[name]))] if kwargs else args
    return tuple(parts) if _add(parts, values) else None


def _add(parts: list[Any], values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if not value.is_meta:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif kind in _SIMPLE:
            parts += (kind, value)  # 1, 1.0 and True are equal
        elif kind in _SEQUENCES:
            parts += (kind, len(value))
            if not _add(parts, value):
                return False
        else:
            return False
    return True


def _described(out: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[type | None, list[_Result]] | None:
    """How to make `out` again; None unless it is plain new meta tensors, each with memory of its own."""
    tensors = list(out) if isinstance(out, tuple | list) else [out]
    if not all(type(t) in _PLAIN and t.is_meta for t in tensors):
        return None
    storages = {t.untyped_storage()._cdata for t in tensors}
    given = {t.untyped_storage()._cdata for t in _tensors([args, kwargs])}
    if len(storages) < len(tensors) or storages & given:  # e.g. _unsafe_view shares, whatever its schema says
        return None
    results = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
    for tensor, (shape, strides, dtype) in zip(tensors, results, strict=True):
        again = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if again.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
    return (type(out) if isinstance(out, tuple | list) else None), results


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
