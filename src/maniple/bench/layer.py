"""One implementation of an MoE layer as it is run: forward alone, or a step; its memory, and where its time goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maniple.bench.contender import Role
from maniple.bench.layer_operands import Leaves

STAGE_ROUNDS = 5


def _as_they_are(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return grads


@dataclass(frozen=True)
class Layer:
    """`forward()` gives the output `[T, D]` and the chosen ids `[T, K]`.

    leaves: whose gradients a step makes. unpack: those gradients in our layouts. logits: the dtype in which experts are
    chosen. unchecked: gradients by name that are not compared. stages: `forward` takes a function that it tells each
    stage as it ends.
    """

    name: str
    role: Role
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    leaves: Leaves
    unpack: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = _as_they_are
    logits: torch.dtype = torch.float32
    unchecked: tuple[str, ...] = ()
    note: str = ""
    stages: bool = False

    def forward_only(self) -> torch.Tensor:
        with torch.no_grad():
            return self.forward()[0]

    def step(self, grad_TD: torch.Tensor) -> torch.Tensor:
        """Forward and backward: gradients of x, of the router and of both matrices. Returns the output."""
        out_TD, _ = self.forward()
        torch.autograd.backward(out_TD, grad_TD)
        return out_TD

    def results(self, grad_TD: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What is to be checked, by name: the output, with `grad_TD` the gradients too; and the chosen ids."""
        if grad_TD is None:
            with torch.no_grad():
                out_TD, ids_TK = self.forward()
            return {"out": out_TD}, ids_TK
        for tensor in self.leaves.tensors.values():
            if (main_grad := getattr(tensor, "main_grad", None)) is not None:
                main_grad.zero_()
        self.leaves.keep = True
        try:
            out_TD, ids_TK = self.forward()
            torch.autograd.backward(out_TD, grad_TD)
            if missing := self.leaves.tensors.keys() - self.leaves.grads.keys():
                raise ValueError(f"there are no gradients of {', '.join(sorted(missing))}")
            grads = self.unpack(self.leaves.grads)
            kept = {name: grad for name, grad in grads.items() if name not in self.unchecked}
            return {"out": out_TD.detach(), **kept}, ids_TK
        finally:
            self.leaves.keep, self.leaves.grads = False, {}


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """What a call allocates at most at one time, over what is there before it; None on a CPU, which is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(layer: Layer, device: torch.device) -> int | None:
    """What a forward pass keeps for backward, its output apart; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    out_TD, _ = layer.forward()
    return torch.cuda.memory_allocated(device) - before - out_TD.nbytes


def stage_milliseconds(layer: Layer, grad_TD: torch.Tensor, hide: Callable[[], object]) -> dict[str, float]:
    """Medians of a step's stages, in the order in which they end. `hide()` lets the host get ahead of the device."""
    device = grad_TD.device
    rounds: list[dict[str, float]] = []
    for _ in range(STAGE_ROUNDS):
        marks: list[tuple[str, Any]] = []

        def mark(stage: str, marks: list[tuple[str, Any]] = marks) -> None:
            marks.append((stage, _now(device)))

        hide()
        mark("")
        out_TD, _ = layer.forward(mark)
        torch.autograd.backward(out_TD, grad_TD)
        mark("router backward")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took: dict[str, float] = {}
        for (_, start), (stage, end) in itertools.pairwise(marks):
            took[stage] = took.get(stage, 0.0) + _between(start, end)
        rounds.append(took)
    return {stage: statistics.median(each[stage] for each in rounds) for stage in rounds[0]}


def kernel_milliseconds(call: Callable[[], object], device: torch.device) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of what one call runs on the device, by falling time (on a CPU torch's operators).

    Empty where the profiler cannot see the device.
    """
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    try:
        kinds = [ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]
        with profile(activities=kinds, acc_events=True) as seen:
            call()
            if gpu:
                torch.cuda.synchronize(device)
    except RuntimeError:
        return []
    spent = [
        (event.key, event.count, (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3)
        for event in seen.key_averages()
    ]
    return sorted((each for each in spent if each[2] > 0), key=lambda each: -each[2])


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
