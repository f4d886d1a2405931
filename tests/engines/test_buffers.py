"""Bounded buffers and pages in whole steps: the numbers are those of exact sizes to the bit, whatever overflows.

Gloo's processes stand for ranks. Every figure of a step, every gradient and every weight and balancing bias after it
are compared, over several steps, of jobs that differ in `moe.buffer_factor` and `moe.pages_factor` alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from tests.distributed.parity import STEEP
from tests.distributed_utils import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from maniple.metrics.records import read_metrics

pytestmark = [pytest.mark.timeout(300), pytest.mark.distributed]

DEEPSEEK, QWEN, MIXTRAL = "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"
EP2 = {"expert_parallel_size": 2}
INTERLEAVED = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "roomy": {"buffer_factor": 1e3, "pages_factor": 1.0},  # the worst case
    "tight": {"buffer_factor": 1.0, "pages_factor": 1.0},
}

# card, ranks, layout, sections of the job beside, balancing bias of every router (None: small and random)
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], tuple[float, ...] | None]] = {
    "ep2": (QWEN, 2, EP2, {"moe": {"aux_loss_type": "global_batch"}}, None),
    "moe-recomputed": (DEEPSEEK, 2, EP2, {"recompute": {"granularity": "selective", "modules": ["moe"]}}, None),
    "parts-recomputed": (
        DEEPSEEK,
        2,
        EP2,
        {"recompute": {"granularity": "selective", "modules": ["norm", "moe_act", "mla_up_proj"]}},
        None,
    ),
    "ep4-skewed": (DEEPSEEK, 4, {"expert_parallel_size": 4}, {}, (9.0, 9.0, 0, 0, 9.0, 9.0, 0, 0)),
    "pp2-mtp-recomputed": (
        DEEPSEEK,
        4,
        {**EP2, "pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"},
        {"recompute": {"granularity": "full"}},
        None,
    ),
    "interleaved-overlapped": (QWEN, 4, {**EP2, **INTERLEAVED, **OVERLAPPED}, {}, None),
    "combined": (  # one micro-batch's forward beside another's backward, which pages are not for
        QWEN,
        4,
        {**EP2, **INTERLEAVED},
        {"moe": {"overlap_exchange": True, "pages_factor": None}, "precision": {"dtype": "bf16"}},
        None,
    ),
    "etp2": (MIXTRAL, 4, {**EP2, "expert_tensor_parallel_size": 2}, {}, None),
}
LAYERS = {"interleaved-overlapped": {"num_layers": 4}, "combined": {"num_layers": 4}}


def _run(name: str, way: str, steps: int = 2) -> dict[str, Any]:
    """In each rank: what the steps gave, and what they held."""
    from tests.engines import helpers

    from maniple.engines.megatron.moe import moe_layers
    from maniple.models import load_card

    model, _, layout, sections, bias = CASES[name]
    card = load_card(model).tiny().with_overrides(LAYERS.get(name, {}))
    rest = {key: words for key, words in sections.items() if key != "moe"}
    job = helpers.make_job(
        parallel=layout,
        moe=WAYS[way] | sections.get("moe", {}),
        optimizer=STEEP,
        train={"micro_batch_size": 1, "global_batch_size": 4},
        **rest,
    )
    bias_E = None if bias is None else torch.tensor(bias).repeat(card.moe.num_experts // len(bias))
    engine = helpers.Engine(card, job, bias_E=bias_E)
    layers = moe_layers(engine.chunks)
    pages = layers[0].pages if layers else None
    for layer in layers:
        assert layer.pages is pages  # one pool for all
    if pages is not None:
        pages.page_bytes = 256  # the tensors are small
    stats, gradients = [], []
    for step in range(steps):
        batches = helpers.make_batches(card.vocab_size, 4, 1, seed=step)
        stats.append(engine.step(batches[engine.data_parallel_rank :: engine.data_parallel_size]))
        gradients.append({} if job.parallel.distributed_optimizer else engine.gradients())
    for chunk in engine.chunks:
        if job.parallel.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    held = None
    if pages is not None and pages.pool is not None:
        numbers = sorted(pages.pool.ring_P.tolist())[: pages.pages]
        held = {"state": pages.pool.state.tolist(), "pages": pages.pages, "numbers": numbers}
    return {"stats": stats, "gradients": gradients, "weights": engine.weights(), "held": held}


def _all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    mine = [name for name, (_, ranks, *_) in CASES.items() if ranks == world_size]
    found = {name: {way: _run(name, way) for way in ("exact", "tight")} for name in mine}
    if world_size == 2:
        found["ep2"]["roomy"] = _run("ep2", "roomy")
        found |= {"layer": _watched_layer(), "replay": _replayed()}
    return found


@pytest.fixture(scope="module")
def outcomes():
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        results = run_ranks(_all, ranks, timeout=250.0)
        found |= {name: [result[name] for result in results] for name in results[0]}
    return found


@pytest.mark.parametrize(("name", "way"), [*((name, "tight") for name in CASES), ("ep2", "roomy")])
def test_the_bits_of_exact_sizes(outcomes, name, way):
    for rank in outcomes[name]:
        wanted, got = rank["exact"], rank[way]
        for right, found in zip(wanted["stats"], got["stats"], strict=True):
            assert right.updated
            assert dataclasses.replace(found, overflows=()) == right
        tensors = [*wanted["gradients"], wanted["weights"]], [*got["gradients"], got["weights"]]
        for right, found in zip(*tensors, strict=True):
            assert set(right) == set(found)
            for tensor in right:
                assert torch.equal(right[tensor], found[tensor]), tensor


@pytest.mark.parametrize("name", CASES)
def test_what_was_too_small_is_named_alike_on_every_rank(outcomes, name):
    said = [[stats.overflows for stats in rank["tight"]["stats"]] for rank in outcomes[name]]
    assert said.count(said[0]) == len(said)
    first = said[0][0]
    layers = {overflow.layer for overflow in first[0]}
    assert (None in layers) == (name != "combined")  # the first pass of all has no pages
    assert layers - {None}  # and this routing is not balanced
    for overflow in itertools.chain(*itertools.chain(*said[0])):
        assert overflow.asked > overflow.had
    if name == "ep4-skewed":  # what grew stays so
        rooms = {overflow.layer: overflow.had for overflow in first[0]}
        for overflow in itertools.chain(*said[0][1]):
            assert overflow.had > rooms[overflow.layer]


def test_roomy_buffers_overflow_in_nothing_but_pages_once(outcomes):
    for rank in outcomes["ep2"]:
        overflows = [stats.overflows for stats in rank["roomy"]["stats"]]
        assert [[overflow.layer for overflow in one] for one in overflows[0]] == [[None]]
        assert overflows[1:] == [()] * (len(overflows) - 1)


@pytest.mark.parametrize("name", CASES)
def test_every_page_comes_back(outcomes, name):
    for rank in outcomes[name]:
        if (held := rank["tight"]["held"]) is not None:
            _, free, now, most = held["state"]
            assert (free, now) == (held["pages"], 0)
            assert held["numbers"] == list(range(held["pages"]))
            assert 0 < most <= held["pages"] or not held["pages"]


class _NoHostValues(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host would have to wait for; not inside our own operators,
    whose oracles may (`tests/moe/test_no_host_values.py` looks at what calls them)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1].split(".")[0]
        assert name not in ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "equal"), name
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert not masks, "a mask as an index"
        return func(*args, **(kwargs or {}))


def _watched_layer() -> dict[str, Any]:
    """The engine's own layer, forward and backward, with padding and every balance loss."""
    from tests.engines import helpers

    from maniple.engines.megatron.moe import moe_layers
    from maniple.models import load_card

    found: dict[str, Any] = {}
    for kind in ("sequence", "micro_batch", "global_batch"):
        card = load_card(DEEPSEEK).tiny()
        job = helpers.make_job(parallel=EP2, moe={"aux_loss_type": kind, "buffer_factor": 1.25, "pages_factor": 1.25})
        layer = moe_layers(helpers.Engine(card, job).chunks)[0]
        layer.pages.page_bytes = 256
        hidden_SBD = torch.randn(24, 2, card.hidden_size, requires_grad=True)
        padding_SB = torch.zeros(24, 2, dtype=torch.bool)
        padding_SB[20:, 1] = True
        before = layer.router.local_tokens_per_expert.clone()
        with _NoHostValues():
            out_SBD = layer(hidden_SBD, padding_mask=padding_SB)[0]
            out_SBD.sum().backward()
        counted = (layer.router.local_tokens_per_expert - before).sum().item()
        found[kind] = hidden_SBD.grad.norm().item() > 0, counted, layer.pages.pool.state[2].item()
        if kind == "sequence":
            layer.eval()
            counts_before = layer.room.asked.clone()
            layer(hidden_SBD, padding_mask=padding_SB)
            found["evaluation notes"] = not torch.equal(counts_before, layer.room.asked)
            found["topk"] = card.moe.topk
    return found


def test_the_engines_layer_asks_for_no_value(outcomes):
    for found in outcomes["layer"]:
        for kind in ("sequence", "micro_batch", "global_batch"):
            assert found[kind] == (True, 44 * found["topk"], 0)


def _dry_runs(rank: int, world_size: int) -> dict[str, Any]:
    """Bytes that a micro-batch's experts keep for backward, by layer, and rows of their buffers, on paper."""
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import one_rank

    ways = {
        "exact": {},
        "wide": {"buffer_factor": 3.0},
        "paged": {"buffer_factor": 3.0, "pages_factor": 1.5},
        "worst": {"buffer_factor": 1e3, "pages_factor": 1.5},
    }
    found = {}
    with jobs.no_process_group():
        for way, moe in ways.items():
            sections = {"data": {"sequence_length": 4096}, "parallel": {"expert_parallel_size": 4}, "moe": moe}
            job = jobs.make_job("unused", "dry", **sections, train={"micro_batch_size": 1, "global_batch_size": 4})
            card = jobs.tiny_card(QWEN, num_layers=1, hidden_size=256)
            run = one_rank.trace(job, card, 0, 4)
            kept = sum(k.bytes for k in run.kept if k.module in ("mlp", "mlp.experts"))
            found[way] = run.even.rows, kept
    return found


def test_a_dry_run_counts_buffers_and_pages():
    (found,) = run_ranks(_dry_runs, 1)
    rows = found["exact"][0]
    assert [found[way][0] / rows for way in found] == [1, 3, 3, 4]
    balanced = found["exact"][1]
    assert found["wide"][1] == pytest.approx(3 * balanced, rel=0.05)
    assert found["paged"][1] == pytest.approx(1.5 * balanced, rel=0.05)
    assert found["worst"][1] == pytest.approx(1.5 * balanced, rel=0.1)  # numbers of rows grow with the buffers


def test_evaluation_has_exact_sizes(outcomes):
    for found in outcomes["layer"]:
        assert not found["evaluation notes"]


def _replayed() -> tuple:
    """What is read and drawn in a step, and when it is run again."""
    from maniple.engines.megatron.buffers import Replay

    replay = Replay([iter("abcd"), iter("wxyz")])
    first = [next(replay.batches[0]), next(replay.batches[1]), next(replay.batches[0])], torch.rand(3).tolist()
    replay.rewind()
    again = [next(replay.batches[0]), next(replay.batches[1]), next(replay.batches[0])], torch.rand(3).tolist()
    return first, again, next(replay.batches[0])


def test_a_step_is_replayed_from_its_beginning(outcomes):
    for first, again, later in outcomes["replay"]:
        assert first == again
        assert first[0] == ["a", "w", "b"]
        assert later == "c"


def _job(rank: int, world_size: int, folder) -> dict[str, Any]:
    """A whole job with validations, of exact and of bounded sizes."""
    from tests.engines import jobs

    found = {}
    for name, moe in (("exact", {}), ("tight", WAYS["tight"])):
        job = jobs.make_job(
            folder,
            name,
            parallel=EP2,
            moe=moe,
            train={"steps": 3, "eval_interval": 2},
            checkpoint={"save_at_end": False},
        )
        trainer = jobs.run(job, jobs.tiny_card(QWEN))
        found[name] = trainer.validation_loss, read_metrics(job.run_dir / "metrics.jsonl") if rank == 0 else []
    return found


def test_a_job_says_what_was_run_again(tmp_path):
    exact, tight = (run_ranks(_job, 2, tmp_path, timeout=120.0)[0][name] for name in ("exact", "tight"))
    assert exact[0] == tight[0]
    losses = [[record["loss"] for record in records if "loss" in record] for _, records in (exact, tight)]
    assert losses[0] == losses[1]
    events = [record for record in tight[1] if "event" in record]
    assert events[0]["step"] == 1
    assert (events[0]["event"], events[0]["action"]) == ("overflow", "rerun")
    assert "rows from one rank to another, room for" in events[0]["why"]
    assert not [record for record in exact[1] if "event" in record]
