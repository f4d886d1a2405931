"""The tensors of one shape, and whether what was computed from them is right.

Arrays are random normal values in bf16: rows `[S, k]` and `[S, n]`, weights `[G, n, k]`, scaled so that results are of
the size of their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from maniple.bench.shapes import Shape
from maniple.errors import UserError

# Relative error against fp32. bf16: a result that is rounded once is off by 1.7e-3. fp8: noise 25 dB below the signal.
BOUNDS = {"bf16": 3e-3, "fp8": 10 ** (-25 / 20), "fp8_block": 10 ** (-25 / 20), "mxfp8": 10 ** (-25 / 20)}
PART = 64  # rows and columns of a group's part that is checked


@dataclass(frozen=True)
class Operands:
    """x_SK, w_GNK, grad_SN: bf16. ends_G: int32. main_grad_GNK: fp32, shared by all that accumulate into it."""

    shape: Shape
    x_SK: torch.Tensor
    w_GNK: torch.Tensor
    grad_SN: torch.Tensor
    ends_G: torch.Tensor
    main_grad_GNK: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.x_SK.device

    def padded(self, multiple: int) -> Operands:
        """The same rows in groups that end at multiples of `multiple`, and rows of zeros between them."""
        shape = self.shape.padded(multiple)
        if shape.rows == self.shape.rows:
            return replace(self, shape=shape)
        ends_G, padded_ends_G = self.ends_G.tolist(), _ends(shape, self.device)
        starts = [0, *padded_ends_G.tolist()]
        group_S = torch.arange(shape.groups).repeat_interleave(torch.tensor(self.shape.sizes))
        moved_G = torch.tensor([new - old for new, old in zip(starts, [0, *ends_G], strict=True)])
        place_S = (torch.arange(self.shape.rows) + moved_G[group_S]).to(self.device)

        def spread(rows: torch.Tensor) -> torch.Tensor:
            return rows.new_zeros(shape.rows, rows.shape[1]).index_copy_(0, place_S, rows)

        return replace(self, shape=shape, x_SK=spread(self.x_SK), grad_SN=spread(self.grad_SN), ends_G=padded_ends_G)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(group, first row, end) of at most three groups that have rows: the first, the largest, the last."""
        spans, start = [], 0
        for g, size in enumerate(self.shape.sizes):
            if size:
                spans.append((g, start, start + size))
            start += size
        largest = max(spans, key=lambda span: span[2] - span[1])
        return sorted({spans[0], largest, spans[-1]})

    def error(self, op: str, result: torch.Tensor) -> float:
        """Relative error (Frobenius) of parts of a result against fp32: first and last rows of groups, or corners."""
        wrong = right = 0.0
        for g, start, end in self.spans:
            if op in ("forward", "dgrad"):
                rows = sorted({*range(start, min(start + PART, end)), *range(max(end - PART, start), end)})
                index = torch.tensor(rows, device=self.device)
                if op == "forward":
                    expected = self.x_SK[index].float() @ self.w_GNK[g, -PART:].float().t()
                    found = result[index, -PART:].float()
                else:
                    expected = self.grad_SN[index].float() @ self.w_GNK[g, :, -PART:].float()
                    found = result[index, -PART:].float()
            else:
                expected = self.grad_SN[start:end, -PART:].float().t() @ self.x_SK[start:end, -PART:].float()
                found = result[g, -PART:, -PART:].float()
            wrong += (found.double() - expected.double()).square().sum().item()
            right += expected.double().square().sum().item()
        return (wrong / right) ** 0.5


def make(shape: Shape, device: torch.device, seed: int) -> Operands:
    """Operands of a shape. Raises UserError where they would not fit the GPU."""
    s, g, n, k = shape.rows, shape.groups, shape.n, shape.k
    needed = 2 * (2 * s * (n + k) + g * n * k) + 6 * g * n * k
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed > 0.8 * free:
            raise UserError(
                f"{shape.model} {shape.matrix} needs {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free: raise "
                "--expert-parallel-size or lower --rows"
            )
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)

    return Operands(
        shape,
        normal(s, k),
        normal(g, n, k).mul_(k**-0.5),
        normal(s, n),
        _ends(shape, device),
        torch.zeros(g, n, k, device=device),
    )


def _ends(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.tensor(shape.sizes).cumsum(0).to(device, torch.int32)
