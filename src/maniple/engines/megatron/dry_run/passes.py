"""Remembers what a forward and a backward pass communicates: a step of a large job has dozens that are alike.

Of each model chunk the first two passes of a step and the last are run. The first may gather parameters and the last
reduces gradients; what the second issued and waited for is written down again for each of those between. A pass does
not know its number, which `all_ranks.py` does not take for granted: it runs some ranks whole, and compares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from maniple.engines.megatron.dry_run.collectives import Recorder, replaced
from maniple.engines.megatron.dry_run.program import Event

_KEPT = 1  # the pass that is remembered
_MARK = "_maniple_pass"  # on a pass's output, which the schedule hands to the backward pass


class CannotRepeat(Exception):
    """A pass waits for what was issued outside it: what it does cannot be told apart from where it stands."""


@dataclass(frozen=True)
class _Pass:
    """What a pass added to the program (its waits count from `base` issues on), gave and logged."""

    events: tuple[Event, ...]
    base: int
    given: Any
    logged: tuple = ()


@dataclass(frozen=True)
class _Like:
    """A tensor, without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@contextlib.contextmanager
def remembered(recorder: Recorder) -> Iterator[None]:
    """Inside, passes like an earlier one are written down and not run. Raises CannotRepeat where that cannot be."""
    memory = _Memory(recorder)
    with replaced(schedules, "forward_step", memory.forward), replaced(schedules, "backward_step", memory.backward):
        yield


class _Memory:
    """In the places of upstream's `forward_step` and `backward_step` (schedules.py), which its schedules call for each
    pass. The combined schedule of `moe.overlap_exchange` has its own ones, and runs every pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forwards: dict[tuple[int, bool], _Pass] = {}  # by chunk, in training and in validation
        self._backwards: dict[int, _Pass] = {}

    def forward(self, run: Callable) -> Callable:
        def forward_step(function, data, model, count, inputs, log, *words, current_microbatch, **more):
            number, key = current_microbatch, (id(model), torch.is_grad_enabled())
            if _KEPT < number < count - 1:
                known = self._forwards[key]
                self._recorder.repeat(known.events, known.base)
                log.extend(known.logged)
                given = _made(known.given)
            else:
                mark, before = self._recorder.mark(), len(log)
                more["current_microbatch"] = number
                given = run(function, data, model, count, inputs, log, *words, **more)
                if number == _KEPT:
                    self._forwards[key] = self._since(mark, given, log[before:])
            setattr(_first(given), _MARK, (id(model), number, count))
            return given

        return forward_step

    def backward(self, run: Callable) -> Callable:
        def backward_step(inputs, outputs, gradients, config):
            model, number, count = getattr(_first(outputs), _MARK)
            if _KEPT < number < count - 1:
                known = self._backwards[model]
                self._recorder.repeat(known.events, known.base)
                return _made(known.given)
            mark = self._recorder.mark()
            given = run(inputs, outputs, gradients, config)
            if number == _KEPT:
                self._backwards[model] = self._since(mark, given)
            return given

        return backward_step

    def _since(self, mark: tuple[int, int], given: Any, logged: list | None = None) -> _Pass:
        at, base = mark
        events = tuple(self._recorder.events[at:])
        if any(isinstance(event, int) and event < base for event in events):
            raise CannotRepeat
        return _Pass(events, base, _described(given), tuple(logged or ()))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Like(tuple(value.shape), value.dtype, value.requires_grad)
    return type(value)(map(_described, value)) if isinstance(value, list | tuple) else value


def _made(value: Any) -> Any:
    if isinstance(value, _Like):
        return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
    return type(value)(map(_made, value)) if isinstance(value, list | tuple) else value


def _first(value: Any) -> torch.Tensor:
    return _first(value[0]) if isinstance(value, list | tuple) else value
