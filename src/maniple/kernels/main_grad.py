"""Weights whose gradient a kernel adds to `weight.main_grad` itself, or writes there.

Where `weight.overwrite_main_grad` is true (Transformer Engine's name), the next gradient takes the place of what
`main_grad` holds, which need not be zeroed before and is not read. A CUDA graph does at each replay what was captured.
"""

from __future__ import annotations

import torch


def adds(weight: torch.Tensor) -> bool:
    """Whether the next gradient of a leaf is added to its `main_grad`."""
    return not getattr(weight, "overwrite_main_grad", False)


def added(weight: torch.Tensor) -> torch.Tensor | None:
    """Says that a leaf's gradient is in its `main_grad`, and gives what backward returns for it.

    The next one will be added. Sets `grad_added_to_main_grad`, and a `.grad` of zeros where there is none, since
    Megatron-Core's DDP asserts one under overlap_grad_reduce (distributed_data_parallel.py,
    `_make_backward_post_hook`) and then drops it. It is one number, expanded: of the weight's shape and of no memory. A
    graph that is being compiled sets no attributes: there a gradient of undefined values is returned.
    """
    weight.grad_added_to_main_grad = True
    if not adds(weight):
        weight.overwrite_main_grad = False
    if torch.compiler.is_compiling():
        return torch.empty_like(weight)
    if weight.is_leaf and weight.grad is None:
        weight.grad = weight.new_zeros(1).expand(weight.shape)
    return None
