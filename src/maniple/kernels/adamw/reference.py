"""Oracle of AdamW over flat shards, in plain torch, a piece at a time so that no fp32 copy of a shard is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maniple.kernels.adamw.launch import FACTORS, SECOND, SHIFTS, Scalars, key

_PIECE = 2**18  # elements
_WORD = 2**32 - 1


@dataclass(frozen=True)
class Shard:
    """A run of one parameter's elements and what AdamW keeps of them; contiguous, all of one size.

    grad, main, exp_avg, exp_avg_sq: fp32 or bf16 each. model: a bf16 copy of `main` that is written with it, or None.
    seed and first (the number of the first element in its whole tensor) decide how bf16 is rounded, so that it does not
    depend on where a tensor is cut.
    """

    grad: torch.Tensor
    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    model: torch.Tensor | None = None
    seed: int = 0
    first: int = 0


def update(shard: Shard, scalars: Scalars, step: int, grad_scale: torch.Tensor | float | None) -> None:
    """In place, fp32 inside. With gradient g (times `grad_scale`), main p and moments m, v:

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g²
        p = (1 - lr wd) p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    fp32 is stored as it is. Of main and moments, bf16 is rounded up or down at random, in proportion to how near the
    two are (`stochastic`); the model's copy is rounded to the nearest.
    """
    grad, main, exp_avg, exp_avg_sq = (t.view(-1) for t in (shard.grad, shard.main, shard.exp_avg, shard.exp_avg_sq))
    model = None if shard.model is None else shard.model.view(-1)
    for begin in range(0, main.numel(), _PIECE):
        here = slice(begin, min(begin + _PIECE, main.numel()))
        g = grad[here].float()
        if grad_scale is not None:
            g = g * grad_scale
        m = scalars.beta1 * exp_avg[here].float() + scalars.rest1 * g
        v = scalars.beta2 * exp_avg_sq[here].float() + scalars.rest2 * g * g
        p = scalars.decay * main[here].float()
        p = p - scalars.step_size * m / (v.sqrt() * scalars.root + scalars.epsilon)
        first, second = dither(here, shard, step) if torch.bfloat16 in _dtypes(shard) else (None, None)
        for out, value, noise in (
            (main, p, None if first is None else first & 0xFFFF),
            (exp_avg, m, None if first is None else first >> 16),
            (exp_avg_sq, v, second),
        ):
            out[here] = stochastic(value, noise) if out.dtype == torch.bfloat16 and noise is not None else value
        if model is not None:
            model[here] = p


def stochastic(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: `noise` (0 to 65,535, uniform) is added below bf16's last bit, and the rest cut off. The mean over
    noise is x itself. NaN and infinity stay."""
    bits = x.view(torch.int32).to(torch.int64) & _WORD
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + noise) & 0xFFFF0000
    rounded = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32).view(torch.float32)
    return torch.where(finite, rounded, x).to(torch.bfloat16)


def dither(here: slice, shard: Shard, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(32 random bits, 16 more) of each element, int64: a hash of seed, step and the element's number."""
    index = torch.arange(here.start, here.stop, device=shard.main.device) + shard.first
    first = _mixed((index & _WORD) ^ (key(shard.seed, step) & _WORD))
    first = _mixed(first ^ ((index >> 32) * SECOND & _WORD))
    return first, _mixed(first ^ SECOND) & 0xFFFF


def _mixed(word: torch.Tensor) -> torch.Tensor:
    word = _times(word ^ (word >> SHIFTS[0]), FACTORS[0])
    word = _times(word ^ (word >> SHIFTS[1]), FACTORS[1])
    return word ^ (word >> SHIFTS[2])


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    return word * factor & _WORD  # what passes 2^63 wraps around, and the lower 32 bits stay right


def _dtypes(shard: Shard) -> set[torch.dtype]:
    return {shard.main.dtype, shard.exp_avg.dtype, shard.exp_avg_sq.dtype}
