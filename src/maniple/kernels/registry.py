"""Which implementation of an op runs where, and why. No silent fallback: what cannot run is refused with the reason.

An op registers implementations with the precision recipes and device types they serve. `select` finds the one for a
call; where several serve it, the one registered with the highest preference wins. `use` also notes the choice, so that
a run can print once which backend each op really used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from maniple.errors import UserError

ANY_DEVICE = frozenset({"any"})


@dataclass(frozen=True)
class Implementation:
    """One way to compute `op`. `fn` has the interface that the op's `__init__` states."""

    op: str
    name: str
    recipes: frozenset[str]
    devices: frozenset[str]  # torch device types, or ANY_DEVICE
    fn: Any
    preference: int
    reason_unavailable: Callable[[], str | None]  # None: can run in this process
    refuses: Callable[..., str | None] | None  # why it cannot serve these operands (what the op passes); None: it can
    defers: Callable[..., str | None] | None = None  # why others that can should go first for these operands

    def refusal(self, recipe: str, device_type: str) -> str | None:
        """Why this one cannot serve the recipe on the device; None if it can."""
        if recipe not in self.recipes:
            return f"has no recipe {recipe}"
        if self.devices != ANY_DEVICE and device_type not in self.devices:
            return f"does not run on {device_type}"
        return self.reason_unavailable()


_TABLE: dict[str, dict[str, Implementation]] = {}
_USED: set[tuple[str, str, str, str]] = set()


def register(
    op: str,
    name: str,
    recipes: Iterable[str],
    devices: Iterable[str],
    fn: Any,
    *,
    preference: int = 0,
    reason_unavailable: Callable[[], str | None] = lambda: None,
    refuses: Callable[..., str | None] | None = None,
    defers: Callable[..., str | None] | None = None,
) -> Implementation:
    """Adds an implementation. Raises ValueError if `op` has one of that name already."""
    implementation = Implementation(
        op,
        name,
        frozenset(recipes),
        frozenset(devices),
        fn,
        preference,
        functools.cache(reason_unavailable),
        refuses,
        defers,
    )
    if name in _TABLE.setdefault(op, {}):
        raise ValueError(f"{op} has an implementation {name} already")
    _TABLE[op][name] = implementation
    candidates.cache_clear()
    return implementation


@functools.cache
def candidates(op: str, recipe: str, device_type: str, pin: str | None = None) -> tuple[Implementation, ...]:
    """Implementations of `op` for a recipe on a device type, the best first. `pin` names one; None or "auto": all.

    Raises UserError, which names the reason and what there is instead, if nothing (or not the pinned one) can run.
    """
    if op not in _TABLE:
        raise UserError(f"there is no op {op}: the ops are {', '.join(sorted(_TABLE))}")
    known_ones = sorted(_TABLE[op].values(), key=lambda i: (-i.preference, i.name))
    able = tuple(i for i in known_ones if i.refusal(recipe, device_type) is None)
    instead = f"can run here: {', '.join(i.name for i in able)}" if able else f"none of {op} can run here"
    if pin in (None, "auto"):
        if able:
            return able
        reasons = "; ".join(f"{i.name} {i.refusal(recipe, device_type)}" for i in known_ones)
        known = sorted({known for i in known_ones for known in i.recipes})
        raise UserError(
            f"{op} cannot run recipe {recipe} on {device_type}: {reasons}; its recipes are {', '.join(known)}"
        )
    chosen = _TABLE[op].get(pin)
    if chosen is None:
        raise UserError(f"{op} has no implementation {pin} (recipe {recipe}, {device_type}); {instead}")
    if (reason := chosen.refusal(recipe, device_type)) is not None:
        raise UserError(f"{op} cannot use {pin} for recipe {recipe} on {device_type}: {pin} {reason}; {instead}")
    return (chosen,)


def select(
    op: str, recipe: str, device_type: str, pin: str | None = None, operands: tuple[Any, ...] = ()
) -> Implementation:
    """The best of `candidates(...)` that serves these operands; what they are, the op's `__init__` states.

    Raises UserError with each one's reason if none does.
    """
    refusals, later = [], None
    for implementation in candidates(op, recipe, device_type, pin):
        reason = implementation.refuses(*operands) if operands and implementation.refuses else None
        if reason is not None:
            refusals.append(f"{implementation.name} {reason}")
        elif operands and implementation.defers and implementation.defers(*operands) is not None:
            later = later or implementation
        else:
            return implementation
    if later is not None:
        return later
    raise UserError(f"{op} cannot run recipe {recipe} on {device_type} for these operands: {'; '.join(refusals)}")


def use(op: str, recipe: str, device_type: str, pin: str | None = None, operands: tuple[Any, ...] = ()) -> Any:
    """`select(...)`'s `fn`, noted for `used()`."""
    implementation = select(op, recipe, device_type, pin, operands)
    _USED.add((op, recipe, device_type, implementation.name))
    return implementation.fn


class LazyModule:
    """Stands for a module that is imported when the first of its names is asked for: kernels cost their compiler."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def used() -> list[tuple[str, str, str, str]]:
    """What ran in this process so far: sorted (op, recipe, device type, implementation)."""
    return sorted(_USED)


def describe() -> list[dict[str, Any]]:
    """Every implementation as a row: op, name, recipes, devices, preference, unavailable (the reason, or None)."""
    return [
        {
            "op": i.op,
            "name": i.name,
            "recipes": sorted(i.recipes),
            "devices": sorted(i.devices),
            "preference": i.preference,
            "unavailable": i.reason_unavailable(),
        }
        for op in sorted(_TABLE)
        for i in sorted(_TABLE[op].values(), key=lambda i: (-i.preference, i.name))
    ]
