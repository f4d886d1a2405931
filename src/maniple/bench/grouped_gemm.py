"""The grouped GEMM benchmark: every op of every recipe on every shape, ours beside its peers, a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from maniple.bench import ceilings as attained
from maniple.bench import facts, mlp, quantizing
from maniple.bench import operands as tensors
from maniple.bench.contender import Absent, Contender
from maniple.bench.contest import Contest, hold
from maniple.bench.operands import BOUNDS, Operands
from maniple.bench.ours import bf16_baseline, candidates, format_of, ours
from maniple.bench.peers import peers
from maniple.bench.rows import Row
from maniple.bench.shapes import OPS, Shape
from maniple.errors import UserError

RECIPES = tuple(BOUNDS)
ALL_OPS = (*OPS, *quantizing.OPS, mlp.OP)


@dataclass(frozen=True)
class Plan:
    """What is measured. kernels: one of our implementations, None for all that can run. command: for the rows. ops: by
    name, None for all."""

    shapes: Sequence[Shape]
    recipes: Sequence[str]
    device: torch.device
    rounds: int
    kernels: str | None
    seed: int
    command: str
    ops: Sequence[str] | None = None

    def has(self, op: str) -> bool:
        return self.ops is None or op in self.ops


def check_recipes(recipes: Sequence[str], device: torch.device, kernels: str | None) -> None:
    """Raises UserError for a recipe that is none, or that nothing can run here."""
    for recipe in recipes:
        if recipe not in RECIPES:
            raise UserError(f"--recipe {recipe}: there is no such recipe; choose from {', '.join(RECIPES)}")
        candidates(recipe, device, kernels)


def run(plan: Plan, progress: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yields the rows of one contest after the other; `progress` is told what comes next."""
    about = facts.of_run(plan.device, plan.seed, plan.command, ("sgl-deep-gemm", "deep-gemm"))
    progress("measuring dense products and copies")
    ceilings = attained.measure(plan.device, rounds=plan.rounds)
    fc1: Operands | None = None
    for shape in plan.shapes:
        progress(f"{shape.model} {shape.matrix}: filling the operands")
        operands = tensors.make(shape, plan.device, plan.seed)
        for contest in _contests(plan, operands, fc1):
            progress(f"{contest.shape.model} {contest.shape.matrix} {contest.recipe} {contest.op}")
            yield [row | about for row in hold(contest, ceilings, plan.device, plan.rounds)]
        fc1 = operands if shape.matrix == "fc1" else None


def _contests(plan: Plan, operands: Operands, fc1: Operands | None) -> Iterator[Contest]:
    """Of a shape; after a model's fc2, for which `fc1` is kept, those of its whole MLP."""
    for recipe in plan.recipes:
        for op in filter(plan.has, OPS):
            yield _product(op, recipe, operands, plan.kernels)
        if recipe != "bf16" and any(map(plan.has, quantizing.OPS)):
            yield from (contest for contest in quantizing.contests(recipe, operands) if plan.has(contest.op))
    if not plan.has(mlp.OP):
        return
    if fc1 is not None and operands.shape.matrix == "fc2" and operands.shape.model == fc1.shape.model:
        experts = mlp.Experts(fc1, operands)
        for recipe in plan.recipes:
            yield mlp.contest(recipe, experts, plan.kernels)


def _product(op: str, recipe: str, operands: Operands, kernels: str | None) -> Contest:
    shape = operands.shape
    try:
        entrants: list[Contender | Absent] = list(ours(op, recipe, operands, kernels))
        format = format_of(recipe, operands.device, kernels)
    except UserError as refusal:
        format, entrants = "bf16", [Absent("ours", "selected", str(refusal))]

    def error(contender: Contender) -> float | None:
        if op == "wgrad_accumulate":
            operands.main_grad_GNK.zero_()
        result = contender.call()
        if not contender.checked:
            return None
        return operands.padded(contender.multiple).error(op, result)

    return Contest(
        op,
        recipe,
        shape,
        [*entrants, *peers(op, recipe, operands)],
        shape.flops,
        shape.bytes_moved(op, "bf16" if format == "bf16" else recipe),
        format,
        ("grouped_gemm",) if recipe == "bf16" else ("grouped_gemm", "quantize"),
        error,
        BOUNDS[recipe],
        [] if recipe == "bf16" else bf16_baseline(op, operands),
    )
