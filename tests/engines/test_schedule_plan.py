"""Combined 1F1B: upstream cuts our layers into stages; one micro-batch's forward runs beside another's backward.

The plan's nodes are upstream's own (`build_layer_callables`): each runs one stage on detached inputs and frees what it
believes is no longer needed. Losses and gradients must equal those of plain forward and backward: on one rank, with the
dispatcher of more ranks, whose buffers may be freed; and on two that exchange tokens, in bf16, which is what it is for.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed_utils import run_ranks

from maniple.metrics import read_metrics
from maniple.models import load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

# MLA, dense layer, shared expert, MTP; biases and sinks
MODELS = ("deepseek-v3", "gpt-oss-20b")


def compare(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """In a process of its own: errors of losses and gradients by model, and what upstream takes each layer for."""
    return {name: _compare(name, rank) for name in MODELS}


def compare_exchanging(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The same on two expert-parallel ranks in bf16."""
    sections = {"parallel": {"expert_parallel_size": 2}, "precision": {"dtype": "bf16"}}
    return {name: _compare(name, rank, **sections) for name in MODELS}


def _compare(card_name: str, rank: int, **sections: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core.models.common.fine_grained_callables import build_layer_callables, get_layer_moe_metadata
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan as Plan
    from megatron.core.pipeline_parallel.utils import set_streams
    from tests.engines import helpers

    from maniple.engines.megatron.model import unwrap

    card = load_card(card_name).tiny()
    engine = helpers.Engine(card, helpers.make_job(moe={"dispatcher": "all_to_all"}, **sections))
    model = unwrap(engine.chunks[0])
    batches = helpers.make_batches(card.vocab_size, 3, 2, seed=rank)
    inputs = [
        {
            "input_ids": batch["tokens"],
            "position_ids": batch["position_ids"],
            "attention_mask": None,
            "labels": batch["labels"],
            "loss_mask": batch["loss_mask"],
        }
        for batch in batches
    ]
    # not all alike, so that a mixed-up micro-batch shows
    grads_BS = [torch.rand_like(batch["loss_mask"]) for batch in batches]

    plain = [model(**words) for words in inputs]
    for losses_BS, grad_BS in zip(plain, grads_BS, strict=True):
        losses_BS.backward(grad_BS)
    wanted = engine.gradients()
    engine.chunks[0].zero_grad_buffer()

    set_streams()
    losses, before = [], None
    for step in range(len(inputs) + 1):
        plan = model.build_schedule_plan(**inputs[step]) if step < len(inputs) else None
        out_BS = Plan.run(plan, before, b_grad=grads_BS[step - 1] if before else None)
        losses += [] if plan is None else [out_BS]
        before = plan
    got = engine.gradients()
    layers = [*model.decoder.layers, *(model.mtp.layers if card.num_mtp_layers else [])]
    return {
        "zeros": [name for name, g in wanted.items() if not g.any()],
        "losses": max(error(a, b) for a, b in zip(losses, plain, strict=True)),
        "gradients": {name: error(got[name], wanted[name]) for name in wanted},
        "layers": [get_layer_moe_metadata(layer) for layer in layers],
        "callables": [len(build_layer_callables(layer)[0]) for layer in layers],
    }


def error(got, wanted) -> float:
    scale = wanted.abs().max()
    return float((got - wanted).abs().max() / (scale if scale > 0 else 1))


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    return run_ranks(compare, 1, timeout=400)[0]


@pytest.fixture(scope="module")
def exchanging() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(compare_exchanging, 2, timeout=400)


@pytest.mark.parametrize("name", MODELS)
def test_overlap_equals_plain_forward_and_backward(reports, name):
    report = reports[name]
    assert report["losses"] <= 1e-6
    assert not report["zeros"]
    assert not {key: e for key, e in report["gradients"].items() if not e <= 1e-5}


@pytest.mark.parametrize("name", MODELS)
def test_overlapped_exchange_in_bf16_equals_plain(exchanging, name):
    # The embedding of a model with MTP is used twice: one backward pass sums both in bf16, the plan's two in fp32.
    rounded = {"embedding.word_embeddings.weight"} if load_card(name).num_mtp_layers else set()
    for report in exchanging:
        assert report[name]["losses"] == 0
        assert not report[name]["zeros"]
        assert not {key: e for key, e in report[name]["gradients"].items() if e and key not in rounded}
        assert all(report[name]["gradients"][key] <= 2**-8 for key in rounded)


@pytest.mark.parametrize("name", MODELS)
def test_upstream_sees_moe_layers(reports, name):
    card = load_card(name).tiny()
    moe = [card.is_moe_layer(layer) for layer in range(card.num_layers + card.num_mtp_layers)]
    assert reports[name]["layers"] == [(True, 8) if kind else (False, None) for kind in moe]
    assert reports[name]["callables"] == [5] * len(moe)


# --- jobs with `moe.overlap_exchange`

EXCHANGING: dict[str, dict[str, Any]] = {
    "no pipeline": {"expert_parallel_size": 2},
    "interleaved": {"pipeline_parallel_size": 2, "pipeline_layout": "Et|t|t|mL", "expert_parallel_size": 2},
}


def whole_jobs(rank: int, world_size: int, folder) -> None:
    from tests.engines import jobs

    for name, parallel in EXCHANGING.items():
        for overlap in (False, True):
            job = jobs.make_job(
                folder / name.replace(" ", "-"),
                "overlapped" if overlap else "plain",
                parallel=parallel,
                precision={"dtype": "bf16"},
                moe={"overlap_exchange": overlap},
                train={"steps": 3, "global_batch_size": 4 * world_size, "eval_interval": 3},
            )
            jobs.run(job, jobs.tiny_card("deepseek-v3", num_layers=3))


@pytest.fixture(scope="module")
def curves(tmp_path_factory) -> dict[str, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("jobs")
    run_ranks(whole_jobs, 4, folder, timeout=400)
    return {
        name: {
            kind: read_metrics(folder / name.replace(" ", "-") / kind / "metrics.jsonl")
            for kind in ("plain", "overlapped")
        }
        for name in EXCHANGING
    }


@pytest.mark.parametrize("name", EXCHANGING)
def test_a_job_that_overlaps_has_the_curve_of_one_that_does_not(curves, name):
    plain, overlapped = ([r for r in curves[name][kind] if "loss" in r] for kind in ("plain", "overlapped"))
    assert [r["step"] for r in plain] == [r["step"] for r in overlapped] == [1, 2, 3]
    for one, other in zip(plain, overlapped, strict=True):
        for key in ("loss", "mtp_loss", "aux_loss", "grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=2e-3), key  # the embedding's gradient is rounded once more
    assert overlapped[0]["expert_counts"] == plain[0]["expert_counts"]
    assert overlapped[0]["loss"] == plain[0]["loss"]
    assert any("validation_loss" in r for r in curves[name]["overlapped"])
