"""One rank of a large world under fake tensors: no values, no peers, static shapes forward and backward."""

import multiprocessing

import pytest

pytestmark = pytest.mark.distributed


def _one_rank_of_many(pipe):
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from maniple.kernels.routing import RouterSpec
    from maniple.moe.dispatch import AllToAllDispatcher
    from maniple.moe.layer import moe_forward

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    ep_group = dist.new_group(list(range(32)))
    etp_group = dist.new_group([5, 37])
    spec = RouterSpec(256, 8, score="sigmoid", num_groups=8, group_topk=4, group_score="sum_top2")
    shapes = []
    for etp in (None, etp_group):
        with FakeTensorMode():
            dispatcher = AllToAllDispatcher(256, ep_group, etp_group=etp, static_splits=True)
            shape = [(128, 7168), (256, 7168), (8, 4096, 7168), (8, 7168, 2048)]
            leaves = [torch.empty(*s, dtype=torch.bfloat16, requires_grad=True) for s in shape]
            out_TD, _ = moe_forward(*leaves, spec, dispatcher)
            out_TD.sum().backward()
            shapes.append((tuple(out_TD.shape), [tuple(leaf.grad.shape) for leaf in leaves] == shape))
    pipe.send(shapes)


def test_a_rank_of_deepseek_v3_runs_without_values():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_one_rank_of_many, args=(sender,), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(90)
        assert receiver.recv() == [((128, 7168), True)] * 2
    finally:
        process.kill()
        process.join()
