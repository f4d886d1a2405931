"""Context parallelism: which part of each sequence a rank holds, and how ranks show each other their parts.

A sequence of S tokens is cut into 2 * CP chunks of equal length; rank i holds chunk i and chunk 2 * CP - 1 - i, one
behind the other. Under a causal mask a late chunk has more to look at than an early one, and the pairs are all alike.
Megatron-Core cuts its rotary embeddings by the same rule.

The model is given whole sequences and cuts what it embeds and what it is asked for. MTP shifts tokens and labels before
they are cut, which needs no communication, and documents stay whole, for a query looks at the keys of all chunks.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def spans(length: int, size: int, rank: int) -> list[tuple[int, int]]:
    """Start and end, in a whole sequence of `length` tokens, of the chunks that `rank` of `size` holds, in order."""
    if size == 1:
        return [(0, length)]
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens does not divide into 2 x {size} chunks")
    chunk = length // (2 * size)
    return [(number * chunk, (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank)]


def cut(x: torch.Tensor, group: torch.distributed.ProcessGroup, dim: int = 1) -> torch.Tensor:
    """This rank's part of `x`, whose dimension `dim` is a whole sequence. Raises ValueError if it does not divide."""
    if group.size() == 1:
        return x
    chunks = [x.narrow(dim, first, end - first) for first, end in spans(x.shape[dim], group.size(), group.rank())]
    return torch.cat(chunks, dim)


def gather(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Whole sequences `[S, ...]`, in their order, from each rank's `[S / CP, ...]`.

    Every rank receives S (CP - 1) / CP rows. In backward the ranks' gradients of each row are summed, in the dtype of
    `x`, on the rank that holds it (reduce-scatter), which sends as much again.
    """
    size = group.size()
    if size == 1:
        return x
    parts = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    early, late = parts.unflatten(0, (size, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)
