"""Gradient buffers at the beginning of a step: what is zeroed, and what the first micro-batch writes itself.

Experts are nearly all of a model. The first gradient of a step of their matrices is written, and only later ones are
added, so that the buffers are neither zeroed for them nor read: 8 bytes a parameter and step that are not moved.
"""

from __future__ import annotations

from functools import partial

import torch

from maniple.engines.megatron.experts import GroupedExperts


def write_first(chunks: list) -> None:
    """Makes `zero_grad_buffer()` of these chunks, which are in Megatron-Core's DDP, spare the gradients of experts'
    matrices and set their `overwrite_main_grad` (`maniple.kernels.main_grad`): see `zero_unwritten`."""
    known = set(_matrices(chunks))
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if weights := [weight for weight in buffer.params if weight in known]:
                buffer.reset = partial(_zero_beside, buffer, weights)


def zero_unwritten(chunks: list) -> None:
    """Zeroes the gradient of a matrix that no backward pass has reached: to be called when all micro-batches are done,
    before ranks exchange what is left."""
    for weight in _matrices(chunks):
        if getattr(weight, "overwrite_main_grad", False):
            weight.main_grad.zero_()
            weight.overwrite_main_grad = False


def _matrices(chunks: list) -> list[torch.nn.Parameter]:
    experts = [each for chunk in chunks for each in chunk.modules() if isinstance(each, GroupedExperts)]
    return [weight for each in experts for weight in (each.w13, each.w2)]


def _zero_beside(buffer, weights: list[torch.nn.Parameter]) -> None:
    """Upstream's `reset` of a gradient buffer (param_and_grad_buffer.py), but for the parts of these weights."""
    first, size = 0, buffer.grad_data.numel()
    for start, end in [*sorted(buffer.param_index_map[weight][:2] for weight in weights), (size, size)]:
        buffer.grad_data[first:start].zero_()
        first = end
    for grad in buffer.extra_main_grads:
        grad.zero_()
    for weight in weights:
        weight.overwrite_main_grad = True
