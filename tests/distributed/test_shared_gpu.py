"""The backend by which ranks share a GPU (tests/gpu/shared_gpu.py), on CPU tensors: results told by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.distributed_utils import run_ranks
from tests.gpu import shared_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
LONG = (8 << 20) // 4 + 3  # one piece, and some


def everything(rank: int, world: int) -> None:
    dist.Backend.register_backend("staged", shared_gpu.Staged, devices=["cpu", "cuda"])
    group = dist.new_group(backend="staged")
    assert group.size() == world
    for dtype in DTYPES:
        _collectives(rank, group, dtype)
    _uneven_exchange(rank, group)
    _sends(rank, group)
    with pytest.raises(ValueError, match="not contiguous"):
        dist.all_reduce(torch.ones(3, 3).t()[1:], group=group)
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": 0}, {"rank": 1}]
    dist.barrier(group=group)
    alone = [dist.new_group([other], backend="staged") for other in range(world)][rank]
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, torch.arange(4.0), group=alone)
    dist.reduce_scatter_tensor(out, out + 1, group=alone)
    dist.all_reduce(out, group=alone)
    assert out.tolist() == [1, 2, 3, 4]


def _collectives(rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    both = torch.stack([torch.arange(6).view(3, 2) + 10 * r for r in (0, 1)]).to(dtype)
    mine = both[rank].clone()
    whole = torch.empty(6, 2, dtype=dtype)
    dist.all_gather_into_tensor(whole, mine, group=group)
    assert torch.equal(whole, both.view(6, 2))
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine, group=group)
    assert torch.equal(torch.stack(parts), both)
    for op, expected in (("SUM", both.sum(0)), ("MAX", both[1]), ("MIN", both[0]), ("AVG", both.sum(0) / 2)):
        x = mine.clone()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op), group=group)
        assert torch.equal(x, expected.to(dtype)), (dtype, op)
    part = torch.empty(3, 2, dtype=dtype)
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as handle:
        dist.reduce_scatter_tensor(part, both.view(6, 2) + rank, group=group, async_op=True)
    handle.wait()
    assert torch.equal(part, 2 * both[rank] + 1)
    x = mine.clone()
    dist.broadcast(x, src=1, group=group)
    assert torch.equal(x, both[1])
    long = torch.full((LONG,), rank + 1).to(dtype)
    dist.all_reduce(long, group=group)
    assert (long == 3).all()


def _uneven_exchange(rank: int, group: dist.ProcessGroup) -> None:
    sent, received = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    x = torch.arange(sum(sent) * 4).view(-1, 4) + 100 * rank
    out = x.new_empty(sum(received), 4)
    dist.all_to_all_single(out, x, received, sent, group=group)
    assert out[:, 0].tolist() == ([0] if rank == 0 else [4, 8, 100, 104, 108])


def _sends(rank: int, group: dist.ProcessGroup) -> None:
    """Each sends before it receives: done in order, one would wait for the other."""
    out = torch.zeros(5, dtype=torch.bfloat16)
    sends = dist.P2POp(dist.isend, torch.full_like(out, rank + 1), 1 - rank, group)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, out, 1 - rank, group)]):
        work.wait()
    assert (out == 2 - rank).all()


def test_ranks_that_share_a_gpu_exchange_what_they_should():
    run_ranks(everything, 2)
