"""Nothing in an MoE layer asks the device for a value: forward and backward run on tensors that have none.

Fake tensors refuse whatever depends on a value (`.item()`, `.tolist()`, `nonzero`, a mask as an index). Exact splits,
which read their counts on the host, show that they do.
"""

from __future__ import annotations

import itertools

import pytest
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.distributed

RECIPES = ("bf16", "fp8", "fp8_block", "mxfp8")
WAYS = ("local", "slice", "bounded", "bounded, etp", "exact")
KINDS = ("sequence", "micro_batch", "global_batch")


def _layer(recipe: str, way: str, kind: str, device: str) -> str:
    """One training step's layer, with pages and all losses; what it refused, or ""."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from maniple.kernels.routing import RouterSpec, route, router_logits, z_loss
    from maniple.moe.bounded import BoundedDispatcher
    from maniple.moe.dispatch import AllToAllDispatcher, LocalDispatcher
    from maniple.moe.experts import expert_mlp
    from maniple.moe.pages import ActivationPages
    from maniple.moe.room import Room
    from maniple.moe.router import load_balance_loss

    world, experts = dist.group.WORLD, 16
    local = experts if way == "local" else experts // 4
    spec = RouterSpec(experts, 4, score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2")
    with FakeTensorMode():
        room = Room(1.25)
        dispatcher = {
            "local": lambda: LocalDispatcher(experts),
            "slice": lambda: LocalDispatcher(experts, experts=range(4, 8), room=room),
            "bounded": lambda: BoundedDispatcher(experts, world, room=room),
            "bounded, etp": lambda: BoundedDispatcher(experts, world, room=room, etp_group=world),
            "exact": lambda: AllToAllDispatcher(experts, world),
        }[way]()
        shapes = (256, 128), (experts, 128), (local, 512, 128), (local, 128, 256)
        leaves = [torch.empty(*s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in shapes]
        x_TD, router_ED, w13_GFD, w2_GDF = leaves
        logits_TE = router_logits(x_TD, router_ED)
        valid_T = torch.empty(256, dtype=torch.bool, device=device)
        routing = route(logits_TE, spec, torch.empty(experts, device=device))
        try:
            rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
        except DataDependentOutputException as refusal:
            return str(refusal.func)
        rows, probs = dispatcher.token_dispatch(rows, probs, handle)
        rows, probs, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
        with ActivationPages(1.25, page_bytes=1024).keeping(ends_G, rows.shape[0], 256):
            rows = expert_mlp(rows, probs, ends_G, w13_GFD, w2_GDF, recipe=recipe)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows, handle), handle)
        loss = dispatcher.combine_postprocess(rows, handle).float().sum() + z_loss(logits_TE, valid_T)
        running_E = torch.empty(experts, dtype=torch.int64, device=device) if kind == "global_batch" else None
        loss = loss + load_balance_loss(
            routing,
            kind=kind,
            sequence_length=64,
            batch_size=4,
            valid_T=valid_T,
            group=world,
            running_counts_E=running_E,
        )
        if device == "cpu":  # the backward pass asks for CUDA's own devices, and there may be none
            loss.backward()
            assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    return ""


def _all_of_them(rank: int, world_size: int) -> dict[tuple[str, str, str, str], str]:
    import torch.distributed as dist
    from tests.engines.jobs import no_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with no_process_group():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        cases = [(recipe, way, "sequence", "cpu") for recipe, way in itertools.product(RECIPES, WAYS)]
        cases += [("bf16", "bounded", kind, "cpu") for kind in KINDS]
        cases += [(recipe, "bounded", "sequence", "cuda") for recipe in RECIPES]
        found = {case: _layer(*case) for case in cases}
        dist.destroy_process_group()
    return found


def test_the_host_waits_for_nothing():
    (found,) = run_ranks(_all_of_them, 1, timeout=120.0)
    assert len(found) == 26
    for (recipe, way, kind, device), refused in found.items():
        assert refused == ("aten._local_scalar_dense.default" if way == "exact" else ""), (recipe, way, kind, device)
