"""Recomputation changes memory and nothing else: whole layers, layers by number, modules; with pipelines too.

Gradients and weights after a step with three micro-batches must be those of a run that keeps everything, expert counts
and balancing bias the same integers and bits, and what a router chose stays chosen.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tests.distributed import parity
from tests.distributed_utils import run_ranks

from maniple.config.check import RECOMPUTE_MODULES
from maniple.models import load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

# a dense layer, two MoE layers and an MTP layer: 0, 1 and 2, 3
CARD = "deepseek-v3"
OURS = ["norm", "mla_up_proj", "moe_act", "permute"]
MIXED = ["norm", "mla_up_proj", "experts", "core_attn", "mlp", "shared_experts"]
KINDS: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "first layers": {"granularity": "full", "num_layers": 2},
    "layers": {"granularity": "full", "layers": [0, 2]},
    "mtp layer": {"granularity": "full", "layers": [3]},
    "all layers": {"granularity": "full", "layers": [0, 1, 2, 3]},
    "several modules": {"granularity": "selective", "modules": ["core_attn", "moe", "mlp"]},
    "ours": {"granularity": "selective", "modules": OURS},
    "ours with upstream's": {"granularity": "selective", "modules": MIXED},
    "norm in moe": {"granularity": "selective", "modules": ["norm", "moe", "mlp"]},
    **{module: {"granularity": "selective", "modules": [module]} for module in RECOMPUTE_MODULES},
}
OVERLAPPED = {"parts": ["mla_up_proj", "moe_act"], "experts": ["experts"]}
MIX = "ours with upstream's"
TWO_STAGES = {"pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"}
FOUR_CHUNKS = {"pipeline_parallel_size": 2, "pipeline_layout": "Et|t|t|mL"}


def case(ranks: int, parallel: dict[str, Any], recompute: dict[str, Any]) -> parity.Case:
    sections = {"recompute": recompute}
    return parity.Case(CARD, ranks, parallel, sequences=6, steps=1, sections=sections)


PIPELINES = {
    "two stages": case(2, TWO_STAGES, KINDS["layers"]),
    "two stages, full": case(2, TWO_STAGES, KINDS["full"]),
    "interleaved": case(2, FOUR_CHUNKS, {"granularity": "full", "layers": [1, 3]}),
    "interleaved, moe": case(2, FOUR_CHUNKS, KINDS["moe"]),
    "experts": case(2, {"expert_parallel_size": 2}, KINDS["all layers"]),
    "tensors": case(2, {"tensor_parallel_size": 2}, KINDS["layers"]),
    "tensors, ours": case(2, {"tensor_parallel_size": 2}, KINDS["ours"]),
    "experts and context, mixed": case(2, {"expert_parallel_size": 2, "context_parallel_size": 2}, KINDS[MIX]),
    "interleaved, mixed": case(2, FOUR_CHUNKS, KINDS[MIX]),
}


def check(rank: int, world_size: int) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"none": {}, **KINDS}
    steps = {name: parity._run(case(1, {}, words)) for name, words in kinds.items()}
    kept = {name: _kept(words) for name, words in kinds.items()}
    return {"steps": steps, "bytes": kept, "ids": _choices(), "plans": {name: _overlapped(name) for name in OVERLAPPED}}


def _overlapped(name: str) -> dict[str, Any]:
    """Errors of a schedule that cuts layers in pieces, beside the same layers run whole."""
    from tests.engines.test_schedule_plan import _compare

    return _compare(CARD, 0, recompute={"granularity": "selective", "modules": OVERLAPPED[name]})


def _kept(recompute: dict[str, Any]) -> int:
    """Bytes that a forward pass leaves for the backward pass."""
    from tests.engines import helpers

    from maniple.engines.megatron.dry_run.memory import StorageMeter

    card = load_card(CARD).tiny()
    assert card.mla is not None
    # values as wide as keys: torch's attention for a CPU then keeps queries, keys and values, as a GPU's do
    width = card.mla.qk_nope_head_dim + card.mla.qk_rope_head_dim
    card = card.with_overrides({"mla": {"v_head_dim": width}})
    engine = helpers.Engine(card, helpers.make_job(recompute=recompute))
    (batch,) = helpers.make_batches(card.vocab_size, 1, 4)
    inputs = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "attention_mask": None}
    with StorageMeter() as meter:
        losses_BS = engine.chunks[0](**inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    kept = meter.live
    losses_BS.sum().backward()
    return kept


def _choices() -> dict[str, Any]:
    """Two micro-batches whose logits all differ when they are computed again."""
    import torch
    from megatron.core import tensor_parallel
    from tests.engines import helpers

    from maniple.engines.megatron.model import routers

    engine = helpers.Engine(load_card(CARD).tiny(), helpers.make_job())
    router = routers(engine.chunks)[1]
    seen: list[list[int]] = []
    passes = iter(range(100))

    def choose(logits_SBE: torch.Tensor) -> torch.Tensor:
        logits_SBE = logits_SBE.roll(next(passes) * 3, -1)
        probs_TK, ids_TK = router.routing(logits_SBE)
        seen.append(ids_TK.tolist())
        return probs_TK

    torch.manual_seed(0)
    outputs = []
    for _ in range(2):
        logits_SBE = torch.randn(6, 1, 8, requires_grad=True)
        outputs.append(tensor_parallel.checkpoint(choose, False, logits_SBE))
    for probs_TK in outputs:
        probs_TK.sum().backward()
    fresh = router.routing(torch.randn(6, 1, 8))[1]
    return {
        "seen": seen,
        "left": len(router.first_choices),
        "counted": router.local_tokens_per_expert.sum().item(),
        "fresh": fresh.shape,
    }


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_ranks(check, 1, timeout=400)[0]


@pytest.mark.parametrize("name", KINDS)
def test_it_changes_nothing(report, name):
    found = parity.judge([report["steps"][name]], report["steps"]["none"])
    assert found.counts_agree
    assert not found.missing
    assert not found.too_far(1e-6)
    (stats,) = report["steps"][name]["stats"]
    assert {sum(row) for row in stats.expert_counts.values()} == {6 * 24 * 2}  # each choice once


@pytest.mark.parametrize("name", ["full", "first layers", "layers", "all layers", "mtp layer", "moe"])
def test_less_is_kept(report, name):
    assert report["bytes"][name] < 0.95 * report["bytes"]["none"]


@pytest.mark.parametrize("name", ["norm", "mla_up_proj", "moe_act", "permute", "experts", "ours", MIX, "norm in moe"])
def test_modules_of_ours_keep_less(report, name):
    assert report["bytes"][name] < report["bytes"]["none"]


def test_the_more_modules_the_less_is_kept(report):
    kept = report["bytes"]
    assert kept["ours"] < min(kept[name] for name in OURS)
    assert kept[MIX] < min(kept[name] for name in MIXED)
    assert kept["experts"] < kept["moe_act"]
    assert kept["norm in moe"] < kept["moe"]
    # rows that are gathered again from a norm's output that is made again: both are gone
    assert kept["none"] - kept["ours"] == sum(kept["none"] - kept[name] for name in OURS)


def test_the_more_layers_the_less_is_kept(report):
    kept = report["bytes"]
    assert kept["all layers"] < kept["layers"] < kept["none"]
    assert kept["all layers"] < 0.5 * kept["none"]


@pytest.mark.parametrize("name", OVERLAPPED)
def test_where_a_schedule_cuts_layers(report, name):
    found = report["plans"][name]
    assert found["losses"] <= 1e-6
    assert not found["zeros"]
    assert not {key: e for key, e in found["gradients"].items() if not e <= 1e-5}


def test_a_choice_is_kept_and_counted_once(report):
    found = report["ids"]
    first, second, first_again, second_again = found["seen"]
    assert (first_again, second_again) == (first, second)
    assert first != second
    assert found["left"] == 0
    assert found["counted"] == (2 + 1) * 6 * 2  # both, and the fresh one after them


@pytest.fixture(scope="module")
def pipelines() -> dict[str, parity.Outcome]:
    return parity.compare(PIPELINES)


@pytest.mark.parametrize("name", PIPELINES)
def test_at_other_layouts(pipelines, name):
    found = pipelines[name]
    assert found.counts_agree
    assert not found.missing
    assert not found.unequal
    assert not found.too_far(1e-5)


def test_upstreams_way_still_compiles_an_extension():
    from megatron.core.tensor_parallel import random

    assert "_get_share_storage()" in inspect.getsource(random.CheckpointWithoutOutput)
    assert "load_inline(" in inspect.getsource(random._get_share_storage)
