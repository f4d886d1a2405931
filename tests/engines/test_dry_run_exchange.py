"""The dry run's worst case of a layer's exchange and experts is what real ranks allocate when all tokens go to one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)

TOKENS, WORLD = 48, 2
# experts a token chooses: fewer than a rank has (of 8 over two ranks), and more
TOPKS = (2, 6)


def _job():
    from tests.engines import jobs

    sections: dict[str, dict[str, Any]] = {
        "parallel": {"expert_parallel_size": WORLD},
        "data": {"sequence_length": TOKENS // 2},
    }
    return jobs.make_job(Path("unused"), "skew", **sections)


def _card(topk: int):
    from maniple.models import load_card

    return load_card("qwen3-30b-a3b").tiny().with_overrides({"num_layers": 1, "moe": {"num_experts": 8, "topk": topk}})


def stated(rank: int, world_size: int) -> list[dict[str, dict[str, int]]]:
    """By top-k and rank, what the dry run says."""
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import one_rank

    with jobs.no_process_group():
        found = [[one_rank.trace(_job(), _card(topk), r, WORLD) for r in range(WORLD)] for topk in TOPKS]
    return [[{"even": dataclasses.asdict(r.even), "worst": dataclasses.asdict(r.worst)} for r in of] for of in found]


def allocated(rank: int, world_size: int) -> list[list[dict[str, int]]]:
    """By top-k and busy rank, what this rank allocates."""
    import torch

    from maniple.engines.megatron import model, parallel
    from maniple.engines.megatron.dry_run.exchange import layer_bytes
    from maniple.engines.megatron.moe import ManipleMoELayer
    from maniple.moe import dispatch

    exchange = dispatch._all_to_all

    def exchanged(*args):
        out = exchange(*args)
        time.sleep(0.2)  # a thread of Gloo's holds what it has sent a moment longer
        return out

    dispatch._all_to_all = exchanged  # this process ends with this function
    found = []
    for topk in TOPKS:
        job, card = _job(), _card(topk)
        device = parallel.pick_device(job)
        parallel.start(job, device)
        (chunk,) = model.build_chunks(card, job)
        (layer,) = [module for module in chunk.modules() if isinstance(module, ManipleMoELayer)]
        for weight in layer.experts.parameters():  # as in a job's buffers
            weight.main_grad = torch.zeros_like(weight)
        x_TD = torch.randn(TOKENS, card.hidden_size, requires_grad=True)
        probs_TK = torch.rand(TOKENS, topk, requires_grad=True)
        of = []
        for busy in range(WORLD):
            ids_TK = (torch.arange(topk) + busy * 4).expand(TOKENS, topk) % 8
            of.append(
                dataclasses.asdict(
                    layer_bytes(layer.token_dispatcher.dispatcher, layer.experts, x_TD, ids_TK, probs_TK)
                )
            )
        found.append(of)
        parallel.stop_groups()
    return found


def test_the_worst_case_is_what_real_ranks_allocate():
    said = run_ranks(stated, 1, timeout=300)[0]
    real = run_ranks(allocated, WORLD, timeout=300)
    for number, topk in enumerate(TOPKS):
        for busy in range(WORLD):
            worst, here = said[number][busy]["worst"], real[busy][number][busy]
            assert here["rows"] == worst["rows"] == TOKENS * min(topk, 4) * WORLD
            assert worst["kept"] == pytest.approx(here["kept"], rel=0.01)
            assert worst["peak"] == pytest.approx(here["peak"], rel=0.01)
            even = said[number][busy]["even"]
            assert even["rows"] == TOKENS * topk
            assert even["peak"] < worst["peak"]
