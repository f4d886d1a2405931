"""MoE layers that the tests of their benchmark measure on a CPU, and short words for it."""

from __future__ import annotations

from tests.bench.small import CPU

from maniple.bench import layer_operands, moe_layer
from maniple.bench.layer_shapes import LayerShape

PLAIN = LayerShape("m", 64, 48, 6, 3, 40, skew=1.0)
CLAMPED = LayerShape("c", 64, 48, 6, 2, 40, clamped=True)
STAGES = {"router", "routing", "dispatch", "experts", "combine"}


def worst(o, entrant, grad_TD):
    """The largest error of a layer's results, by the oracle of its own choice."""
    found, ids_TK = entrant.results(grad_TD)
    return max(layer_operands.errors(found, o.expected(ids_TK)).values())


def plan(**changes):
    settings = dict(shapes=[PLAIN], recipes=["bf16"], device=CPU, rounds=1, seed=0, command="command")
    return moe_layer.Plan(**settings | changes)


def held(o, entrant, op=moe_layer.STEP):
    """What a contest says of one layer: (error, reason)."""
    contest = moe_layer._contest(op, "bf16", o, [entrant], None)
    (row,) = moe_layer.hold(contest, moe_layer.attained.measure(CPU), CPU, 1)
    return row["error"], row["not_run"]
