"""Dry runs: each rank has the parameters that it must, memory adds up and moves as it should, and a big job builds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

import maniple
from maniple.config.layout import parse_layout
from maniple.errors import UserError
from maniple.models import counting, load_card
from maniple.models.card import ModelCard

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

ROOT = Path(__file__).parents[2]
WORLD, STAGES, LAYOUT = 8, 2, "Et|t|t|mL"
PARALLEL = {"pipeline_parallel_size": STAGES, "pipeline_layout": LAYOUT, "expert_parallel_size": 2}
TOKENS = {"data": {"sequence_length": 64}, "train": {"micro_batch_size": 2, "global_batch_size": 64}}
# one rank of each pipeline stage and expert-parallel rank: the other four are their data-parallel copies
RANKS = {0: (0, 0), 1: (0, 1), 4: (1, 0), 5: (1, 1)}
# rank 1 of four without a pipeline, and the same with one thing changed
FOUR = {"parallel": {"expert_parallel_size": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "micro-batch of 4": {"train": {"micro_batch_size": 4}},
    "sequences of 128": {"data": {"sequence_length": 128}},
    "expert-parallel 4": {"parallel": {"expert_parallel_size": 4}},
    "expert-parallel 1": {"parallel": {"expert_parallel_size": 1}, "moe": {"dispatcher": "all_to_all"}},
    "fp32": {"precision": {"dtype": "fp32"}},
    "tensor-parallel 2": {"parallel": {"tensor_parallel_size": 2}},
    "one optimizer": {"parallel": {"distributed_optimizer": False}},
    "overlapped": {"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
}
# the same with eight layers
DEEP: dict[str, dict[str, Any]] = {"deep": {}, "deep, recomputed": {"recompute": {"granularity": "full"}}}
# four stages, MTP and loss each in one of its own: two ranks of each
APART, APART_RANKS = "Et|tt|m|L", {0: 0, 2: 1, 5: 2, 7: 3}
BIG = {0: (0, 0), 70: (1, 6), 959: (14, 7), 1023: (15, 7)}  # of 1,024: stage and expert-parallel rank


def card() -> ModelCard:
    return load_card("deepseek-v3").tiny()


def dry_runs(rank: int, world_size: int) -> dict[str, Any]:
    """In a process of its own: every dry run, what a rank outside is told, and ranks of the big job, only built."""
    from tests.engines import jobs

    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.engines.megatron.dry_run import one_rank

    def job(base: dict[str, Any], changes: dict[str, Any]):
        sections: dict[str, Any] = {"precision": {"dtype": "bf16"}, "parallel": {"distributed_optimizer": True}}
        for name, values in [*TOKENS.items(), *base.items(), *changes.items()]:
            sections[name] = sections.get(name, {}) | values
        return jobs.make_job(Path("unused"), "job", **sections)

    def trace(*, rank: int, world_size: int, base: dict[str, Any], changes: dict[str, Any], **overrides: int):
        result = one_rank.trace(job(base, changes), card().with_overrides(overrides), rank, world_size)
        return dataclasses.asdict(result) | {"activation_bytes": result.activation_bytes}

    with jobs.no_process_group():
        pipeline = {"parallel": PARALLEL}
        report: dict[str, Any] = {}
        for name, changes in VARIANTS.items():
            small = {"num_layers": 2, "num_mtp_layers": 0}
            report[name] = trace(rank=1, world_size=4, base=FOUR, changes=changes, **small)
        for name, changes in DEEP.items():
            report[name] = trace(rank=1, world_size=4, base=FOUR, changes=changes, num_layers=8, num_mtp_layers=0)
        # after those, as upstream makes a tensor in a process's first step that all later ones use
        report["ranks"] = {r: trace(rank=r, world_size=WORLD, base=pipeline, changes={}) for r in RANKS}
        full = one_rank._micro_batches_until_full
        one_rank._micro_batches_until_full = lambda chunks: full(chunks) + 2 * STAGES
        report["longer"] = {r: trace(rank=r, world_size=WORLD, base=pipeline, changes={}) for r in (0, 4)}
        one_rank._micro_batches_until_full = full
        apart = {"parallel": {"pipeline_parallel_size": 4, "pipeline_layout": APART, "expert_parallel_size": 2}}
        report["apart"] = {r: trace(rank=r, world_size=WORLD, base=apart, changes={}) for r in APART_RANKS}
        for outside in (-1, WORLD):
            with pytest.raises(UserError, match=rf"rank {outside} is not in a world of {WORLD}: ranks are 0 to 7"):
                one_rank.trace(job(pipeline, {}), card(), outside, WORLD)
        report["big"] = {r: _build_big(r) for r in BIG}
        measured = load(ROOT / "configs" / "h200_qwen3_1b.yaml").config
        report["measured"] = dataclasses.asdict(one_rank.trace(measured, resolve_card(measured), 0, 1))
    return report


def _build_big(rank: int) -> dict[str, int]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from maniple.config.check import check, resolve_card
    from maniple.config.load import load
    from maniple.engines.megatron import model, parallel

    job = load(ROOT / "configs" / "deepseek_v3_1024.yaml", ["data.train=[x]", "data.tokenizer=y"]).config
    deepseek = resolve_card(job)
    check(job, deepseek, 1024)
    dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
    parallel.start_groups(job)
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunks = model.build_chunks(deepseek, job, perform_initialization=False)
    facts = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "expert rank": parallel_state.get_expert_model_parallel_rank(),
        "chunks": len(chunks),
        "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
    }
    parallel.stop()
    return facts


def parameters(card: ModelCard, layout: str, stages: int, stage: int, experts: int, vocabulary: int) -> int:
    """By hand: what a rank of pipeline rank `stage` holds with the experts over `experts` ranks."""
    chunks = parse_layout(layout)
    total, first = 0, 0
    for number, chunk in enumerate(chunks):
        layers = range(first, first := first + chunk.count("t"))
        if number % stages != stage:
            continue
        held = [counting.layer_parameters(card, layer) for layer in layers]
        if "m" in chunk:  # the MTP layer embeds the next token: its stage has the embedding too
            held += counting.count(card).mtp_layers
            total += 0 if "E" in chunk else vocabulary * card.hidden_size
        total += sum(sum(layer.values()) for layer in held)
        total -= sum(layer["routed_experts"] for layer in held) // experts * (experts - 1)
        total += vocabulary * card.hidden_size * ("E" in chunk)
        total += vocabulary * card.hidden_size * ("L" in chunk)
        total += card.hidden_size * (card.num_layers - 1 in layers)  # the final norm is the last decoder layer's
    return total


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return run_ranks(dry_runs, 1, timeout=400)[0]


def test_each_rank_has_its_parameters(runs):
    for rank, (stage, _) in RANKS.items():
        assert runs["ranks"][rank]["pipeline_stage"] == stage
        assert runs["ranks"][rank]["parameters"] == parameters(card(), LAYOUT, STAGES, stage, 2, 256)


def test_ranks_add_up_to_the_model(runs):
    held = {rank: runs["ranks"][rank]["parameters"] for rank in RANKS}
    counted = counting.count(card())
    experts = counted.routed_experts + sum(layer["routed_experts"] for layer in counted.mtp_layers)
    # expert-parallel peers of a stage hold other experts and the same of everything else
    once = (sum(held.values()) - experts) // 2 + experts
    assert once == counted.total_with_mtp + counted.embedding  # MTP's copy on the last stage


def test_memory_adds_up(runs):
    for run in [*runs["ranks"].values(), *(runs[name] for name in VARIANTS)]:
        static = run["parameter_bytes"] + run["gradient_bytes"] + run["optimizer_bytes"]
        assert run["activation_bytes"] == run["peak_bytes"] - static > 0
    for run in runs["ranks"].values():  # bf16 weights and fp32 gradients, within the buffers' padding
        assert 2 * run["parameters"] <= run["parameter_bytes"] <= 2.2 * run["parameters"]
        assert 4 * run["parameters"] <= run["gradient_bytes"] <= 4.4 * run["parameters"]
    whole, cut = runs["one optimizer"], runs["usual"]
    assert 12 * whole["parameters"] <= whole["optimizer_bytes"] <= 12.5 * whole["parameters"]
    assert whole["optimizer_bytes"] / 4 < cut["optimizer_bytes"] < whole["optimizer_bytes"] / 2  # over 4, experts 2
    assert runs["fp32"]["parameter_bytes"] > 1.9 * cut["parameter_bytes"]


def test_activations_move_as_they_should(runs):
    usual = runs["usual"]["activation_bytes"]

    def activations(name: str) -> float:
        return runs[name]["activation_bytes"] / usual

    assert 1.8 < activations("micro-batch of 4") < 2.2
    assert 1.8 < activations("sequences of 128") < 2.1  # a GPU's attention keeps no scores
    assert 1.1 < activations("fp32") < 2.2  # losses are fp32 in both
    assert runs["deep, recomputed"]["activation_bytes"] < 0.5 * runs["deep"]["activation_bytes"]
    assert activations("tensor-parallel 2") < 0.8
    # with balanced routing a rank computes as many rows, however many ranks share the experts
    assert activations("expert-parallel 1") == pytest.approx(1, abs=0.05)
    assert activations("expert-parallel 4") == pytest.approx(1, abs=0.05)


def test_the_peak_is_what_a_gpu_measured(runs):
    """The same job on one H200, see README.md: what its allocator gave to tensors at most."""
    rows = (ROOT / "benchmarks" / "results" / "2026-11-29-h200-grouped-gemm-training.jsonl").read_text().splitlines()
    measured = {json.loads(row)["summary"]["peak_memory_bytes"] for row in rows}
    assert runs["measured"]["peak_bytes"] == pytest.approx(measured.pop(), rel=0.01)
    assert not measured


def test_an_even_load_takes_no_more_than_the_worst(runs):
    """Weights that were there before are not counted, whatever hooks look at them: rows alone decide."""
    for name in ("usual", "overlapped", "expert-parallel 4", "fp32"):
        even, worst = runs[name]["even"], runs[name]["worst"]
        more = worst["rows"] / even["rows"]
        assert more == {"expert-parallel 4": 4}.get(name, 2)  # as many ranks send all they have
        assert 0.8 * more < worst["kept"] / even["kept"] <= more
        assert even["peak"] < worst["peak"]
    assert runs["overlapped"]["even"] == runs["usual"]["even"]


def test_the_pipeline_is_filled(runs):
    for rank, (stage, _) in RANKS.items():
        run = runs["ranks"][rank]
        assert run["micro_batches_a_step"] == 64 // (2 * 4)
        assert 2 <= run["micro_batches_run"] <= run["micro_batches_a_step"]
        assert run["micro_batches_run"] % STAGES == 0, stage
    assert runs["ranks"][0]["micro_batches_run"] >= runs["ranks"][4]["micro_batches_run"]


def test_more_micro_batches_have_the_same_peak(runs):
    for rank, longer in runs["longer"].items():
        run, (stage, _) = runs["ranks"][rank], RANKS[rank]
        more = longer["micro_batches_run"] - run["micro_batches_run"]
        assert more > 0
        # each micro-batch's loss, 512 bytes as allocated, stays until the step's end
        assert longer["peak_bytes"] == run["peak_bytes"] + 512 * more * (stage == STAGES - 1)


def test_mtp_and_loss_in_different_stages(runs):
    """The last stage receives the hidden states of MTP's depth beside the decoder's."""
    for rank, stage in APART_RANKS.items():
        run = runs["apart"][rank]
        assert run["pipeline_stage"] == stage
        assert run["parameters"] == parameters(card(), APART, 4, stage, 2, 256)
        assert run["activation_bytes"] > 0


def test_ranks_of_deepseek_v3_on_1024_gpus_build(runs):
    deepseek = load_card("deepseek-v3")
    layout = "Et*4|(t*4|)*14,tmL"
    for rank, (stage, expert_rank) in BIG.items():
        built = runs["big"][rank]
        assert (built["stage"], built["expert rank"], built["chunks"]) == (stage, expert_rank, 1)
        assert built["parameters"] == parameters(deepseek, layout, 16, stage, 8, deepseek.vocab_size)


def test_json_from_the_command_line():
    command = [sys.executable, "-m", "maniple", "train", str(ROOT / "configs" / "demo.yaml"), "--dry-run", "--json"]
    command += ["--rank", "1", "--world-size", "2", "train.micro_batch_size=1", "train.global_batch_size=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(maniple.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rank"], result["world_size"], result["pipeline_stage"]) == (1, 2, 0)
    static = result["parameter_bytes"] + result["gradient_bytes"] + result["optimizer_bytes"]
    assert result["peak_bytes"] == static + result["activation_bytes"] > static > 0
    assert result["parameters"] > 1_000_000
