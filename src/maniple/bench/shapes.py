"""What the grouped GEMM benchmark measures: products of a model's experts, group sizes, and their counts. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from maniple.errors import UserError
from maniple.models.card import ModelCard

CONCENTRATION = 8.0  # of the Dirichlet distribution that group sizes are drawn from: as skewed as a balanced router's
OPS = ("forward", "dgrad", "wgrad", "wgrad_accumulate")
# Bytes of one operand's element, its share of a scale included; the scales of weights are too few to count.
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}


@dataclass(frozen=True)
class Shape:
    """One expert matrix `[G, n, k]` and the rows that each of its groups gets; `multiple`: of which all sizes are."""

    model: str
    matrix: str
    n: int
    k: int
    sizes: tuple[int, ...]
    multiple: int = 1

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        """Of one product: forward, dgrad and wgrad all take a multiplication and an addition a row, n and k."""
        return 2 * self.rows * self.n * self.k

    def facts(self, multiple: int = 1) -> dict[str, Any]:
        """The shape as a row says it; `multiple`: what groups are padded to; `rows` are those that count."""
        sizes = self.padded(multiple).sizes
        return {
            "model": self.model,
            "matrix": self.matrix,
            "groups": self.groups,
            "n": self.n,
            "k": self.k,
            "rows": self.rows,
            "smallest_group": min(sizes),
            "largest_group": max(sizes),
            "group_multiple": max(multiple, self.multiple),
            "padded_rows": sum(sizes),
        }

    def padded(self, multiple: int) -> Shape:
        """Each group with as many rows more as make a multiple of `multiple`."""
        sizes = tuple(-(-size // multiple) * multiple for size in self.sizes)
        return replace(self, sizes=sizes, multiple=max(multiple, self.multiple))

    def rounded(self, multiple: int) -> Shape:
        """The same rows in groups of multiples of `multiple`, as near as can be. Raises ValueError if rows are none."""
        if self.rows % multiple:
            raise ValueError(f"{self.rows} rows are no multiple of {multiple}")
        parts = _shares([size / multiple for size in self.sizes], self.rows // multiple)
        return replace(self, sizes=tuple(part * multiple for part in parts), multiple=multiple)

    def bytes_moved(self, op: str, recipe: str) -> float:
        """Least bytes that `op` reads and writes: each operand once, weights of groups that have rows, the result once.

        Results are bf16; `wgrad_accumulate` reads and writes fp32. Operands are as the product takes them: quantized.
        """
        width = OPERAND_BYTES[recipe]
        filled = sum(size > 0 for size in self.sizes) * self.n * self.k
        x, y = self.rows * self.k, self.rows * self.n
        if op == "forward":
            return width * (x + filled) + 2 * y
        if op == "dgrad":
            return width * (y + filled) + 2 * x
        if op == "wgrad":  # an empty group's gradient is written too, as zeros
            return width * (x + y) + 2 * self.groups * self.n * self.k
        return width * (x + y) + 8 * filled


def group_sizes(groups: int, rows: int, seed: int, concentration: float = CONCENTRATION) -> tuple[int, ...]:
    """`rows` dealt to `groups` as Dirichlet(concentration) does; the same seed, the same sizes."""
    draw = random.Random(seed)
    weights = [draw.gammavariate(concentration, 1.0) for _ in range(groups)]
    return tuple(_shares([weight * rows / sum(weights) for weight in weights], rows))


def of_model(card: ModelCard, *, rows: int, expert_parallel_size: int = 1, seed: int = 0) -> list[Shape]:
    """fc1 (gate and up) and fc2 of a rank's experts with `rows` rows. Raises UserError if the experts do not divide."""
    experts = card.moe.num_experts
    if expert_parallel_size < 1 or experts % expert_parallel_size:
        raise UserError(
            f"--expert-parallel-size {expert_parallel_size} does not divide the {experts} experts of {card.name}"
        )
    if rows < 1:
        raise UserError(f"--rows {rows}: there is nothing to measure; give 1 or more")
    groups, width = experts // expert_parallel_size, card.moe.expert_ffn_size
    sizes = group_sizes(groups, rows, seed)
    return [
        Shape(card.name, "fc1", 2 * width, card.hidden_size, sizes),
        Shape(card.name, "fc2", card.hidden_size, width, sizes),
    ]


def at_random(seed: int, *, rows: int) -> list[Shape]:
    """Two shapes that no model has, n and k multiples of 64, the second with far more uneven groups."""
    draw = random.Random(seed)
    shapes = []
    for number, concentration in enumerate((CONCENTRATION, 1.0)):
        groups = draw.randint(4, 160)
        n, k = (64 * draw.randint(8, 112) for _ in range(2))
        sizes = group_sizes(groups, rows, draw.randrange(2**31), concentration)
        shapes.append(Shape(f"random-{seed}-{number}", "matrix", n, k, sizes))
    return shapes


def _shares(wanted: Sequence[float], total: int) -> list[int]:
    """Integers that add up to `total`, each next to what is wanted: the largest remainders are rounded up."""
    parts = [int(share) for share in wanted]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - wanted[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
