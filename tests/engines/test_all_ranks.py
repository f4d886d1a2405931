"""Dry runs of whole jobs: sound layouts pass, broken programs are found, and what is recorded is what real ranks do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

import maniple
from maniple.config.schema import TrainConfig
from maniple.models import load_card
from maniple.models.card import ModelCard

pytestmark = pytest.mark.timeout(900)  # the first test waits for the processes that do the work

ROOT = Path(__file__).parents[2]
OVERLAPPED = "overlapped, recomputed"
INTERLEAVED = {"pipeline_parallel_size": 2, "pipeline_layout": "Et|t|t|mL", "expert_parallel_size": 2}
# one dense layer: the first stage has no MoE layer
DENSE_STAGE = {"pipeline_parallel_size": 2, "pipeline_layout": "Et|ttmL", "expert_parallel_size": 2}
# name -> (world size, sections of the job)
SOUND: dict[str, tuple[int, dict[str, Any]]] = {
    "dense stage": (4, {"parallel": DENSE_STAGE}),
    "no pipeline, expert tensor parallel": (
        4,
        {"parallel": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_parallel_size": 2}},
    ),
    OVERLAPPED: (
        4,
        {
            "parallel": INTERLEAVED | {"overlap_grad_reduce": True, "overlap_param_gather": True},
            "recompute": {"granularity": "full"},
        },
    ),
    "context parallel": (4, {"parallel": {"context_parallel_size": 2, "expert_parallel_size": 2}}),
    "local experts": (2, {"parallel": {"distributed_optimizer": False}, "recompute": {"granularity": "full"}}),
}
# MTP in an earlier stage than the loss: some borders carry more than others, and shapes are sent beforehand
APART = {"pipeline_parallel_size": 4, "pipeline_layout": "Et|tt|m|L"}
APART_INTERLEAVED = {"pipeline_parallel_size": 4, "pipeline_layout": "Et|t|t|t|t|t|m|L"}
# A cut DeepSeek-V3: four stages of two uneven chunks, tensor and expert parallel, MTP
CUT = {
    "pipeline_parallel_size": 4,
    "pipeline_layout": "Ett|t|tt|t|t|t|t|mL",
    "tensor_parallel_size": 2,
    "expert_parallel_size": 8,
}


def card(**overrides: Any) -> ModelCard:
    return load_card("deepseek-v3").tiny().with_overrides(overrides)


def card_for(job: TrainConfig) -> ModelCard:
    """The tiny card with as many layers as the job's layout has."""
    layers = (job.parallel.pipeline_layout or "").count("t")
    return card(num_layers=layers) if layers else card()


def make_job(**sections: dict[str, Any]) -> TrainConfig:
    from tests.engines import jobs

    base: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "bf16"},
        "parallel": {"distributed_optimizer": True},
        "data": {"sequence_length": 32},
        "train": {"micro_batch_size": 2, "global_batch_size": 32},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return jobs.make_job(Path("unused"), "job", **base)


# --- in a process of their own


@contextlib.contextmanager
def _whole(rank: int) -> Iterator[None]:
    yield


def programs(job: TrainConfig, model: ModelCard, world: int, broken: Callable[[int], Any] = _whole):
    """Of the distinct ranks: one a stage, and those run whole that are to be like them; of rank r in the context
    `broken(r)`."""
    from maniple.engines.megatron.dry_run import all_ranks, one_rank

    def program(one: int, whole: bool):
        with broken(one):
            return one_rank.program_of(job, model, one, world, whole)

    first, again = all_ranks.distinct_ranks(world, job.parallel.pipeline_parallel_size)
    return [program(one, False) for one in first], [program(one, True) for one in again]


def faults(job: TrainConfig, model: ModelCard, world: int, broken: Callable[[int], Any] = _whole) -> list[str]:
    from maniple.engines.megatron.dry_run import all_ranks

    return [str(fault) for fault in all_ranks.examine(*programs(job, model, world, broken), world)]


def sound_jobs(rank: int, world_size: int) -> dict[str, Any]:
    from tests.engines import jobs

    report: dict[str, Any] = {}
    with jobs.no_process_group():
        for name, (world, sections) in SOUND.items():
            report[name] = faults(make_job(**sections), card(), world)
        cut = make_job(parallel=CUT, train={"global_batch_size": 256})
        report["cut"] = faults(cut, card(num_layers=9), 64)
        apart = make_job(parallel=APART | {"tensor_parallel_size": 2, "expert_parallel_size": 4})
        report["MTP and loss apart"] = faults(apart, card(), 16)
        report["apart, interleaved"] = faults(
            make_job(parallel=APART_INTERLEAVED, train={"global_batch_size": 16}), card(num_layers=6), 4
        )
        report["passes"] = _passes(make_job(**SOUND[OVERLAPPED][1]), card())
    return report


def _passes(job: TrainConfig, model: ModelCard) -> dict[str, Any]:
    """How a rank's program with remembered passes differs from the whole one, and how many were run for each."""
    from maniple.engines.megatron.dry_run import one_rank
    from maniple.engines.megatron.language_model import LanguageModel

    patch, run, count = pytest.MonkeyPatch(), LanguageModel.forward, 0

    def forward(self, *words, **more):
        nonlocal count
        count += 1
        return run(self, *words, **more)

    patch.setattr(LanguageModel, "forward", forward)
    found = []
    for whole in (True, False):
        count = 0
        program = one_rank.program_of(job, model, 2, 4, whole).program
        found.append((program, [call.where for call in program.calls], count))
    patch.undo()
    (all_of_it, places, made), (short, short_places, made_of_short) = found
    same = all_of_it.events == short.events and places == short_places
    return {"same": same, "run": (made, made_of_short)}


def broken_jobs(rank: int, world_size: int) -> dict[str, Any]:
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import all_ranks, one_rank

    report: dict[str, Any] = {}
    dense, interleaved = make_job(parallel=DENSE_STAGE), make_job(parallel=INTERLEAVED)
    with jobs.no_process_group():
        for name, job, broken in (
            ("statistics of MoE stages only", dense, _statistics_of_moe_stages_only),
            ("two groups in another order", dense, _two_groups_in_another_order),
            ("no tokens, no exchange", dense, _no_exchange_on_rank_2),
            ("batched messages", interleaved, _batched_messages),
            ("another group", dense, _another_group_on_rank_2),
            ("a pass like no other", dense, _a_call_more_in_the_third_pass),
        ):
            report[name] = faults(job, card(), 4, broken)
        longer = make_job(parallel=DENSE_STAGE, data={"sequence_length": 48})
        stages = [one_rank.program_of(job, card(), one, 4) for one, job in ((0, dense), (2, longer))]
        with _one_wait_for_all_passes():
            job = make_job(parallel=DENSE_STAGE)
            report["cannot repeat"] = _passes(job, card())
        report["another shape"] = [str(fault) for fault in all_ranks.examine(stages, [], 4)]
        report["growth"] = _growth(interleaved)
    return report


def _before_statistics(what: Callable[[Any], None]) -> Any:
    """Does `what(chunks)` before step.py sums a step's statistics."""
    from maniple.engines.megatron import step

    patch, original = pytest.MonkeyPatch(), step._gather

    def gather(chunks, *args, **kwargs):
        what(chunks)
        return original(chunks, *args, **kwargs)

    patch.setattr(step, "_gather", gather)
    return contextlib.closing(_Undo(patch))


class _Undo:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.close = patch.undo


def _statistics_of_moe_stages_only(rank: int):
    """Megatron-LM's own fault of old: what MoE layers log is summed by the stages that have some."""
    import torch
    import torch.distributed as dist

    from maniple.engines.megatron.model import routers

    def reduce(chunks):
        if routers(chunks):
            dist.all_reduce(torch.zeros(15, device="meta"))

    return _before_statistics(reduce)


def _two_groups_in_another_order(rank: int):
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    def reduce(chunks):
        groups = [dist.group.WORLD, parallel_state.get_model_parallel_group()]
        for group in groups if rank < 2 else reversed(groups):
            dist.all_reduce(torch.zeros(3, device="meta"), group=group)

    return _before_statistics(reduce)


def _no_exchange_on_rank_2(rank: int):
    from maniple.moe import dispatch

    patch = pytest.MonkeyPatch()
    if rank == 2:
        patch.setattr(dispatch, "_exchange", lambda group, sent, received, *tensors: tensors)
    return contextlib.closing(_Undo(patch))


def _batched_messages(rank: int):
    """The interleaved schedule on two stages with upstream's batches, which upstream's own arguments refuse."""
    from maniple.engines.megatron import model

    patch, original = pytest.MonkeyPatch(), model.build_chunks

    def build(card, job, **changes):
        return original(card, job, **changes, batch_p2p_comm=True, overlap_p2p_comm=False)

    patch.setattr(model, "build_chunks", build)
    return contextlib.closing(_Undo(patch))


def _another_group_on_rank_2(rank: int):
    import torch.distributed as dist

    from maniple.engines.megatron import parallel

    patch, original = pytest.MonkeyPatch(), parallel.start_groups

    def start(job):
        original(job)
        dist.new_group([0, 2] if rank == 2 else [0, 1])

    patch.setattr(parallel, "start_groups", start)
    return contextlib.closing(_Undo(patch))


def _a_call_more_in_the_third_pass(rank: int):
    import torch
    import torch.distributed as dist

    from maniple.engines.megatron import step
    from maniple.engines.megatron.model import unwrap

    patch, original = pytest.MonkeyPatch(), step.forward_step

    def forward_step(device, batches, model, *words):
        if unwrap(model).decoder.layers[0].current_microbatch == 2:
            dist.all_reduce(torch.zeros(3, device="meta"))
        return original(device, batches, model, *words)

    patch.setattr(step, "forward_step", forward_step)
    return contextlib.closing(_Undo(patch))


def _one_wait_for_all_passes():
    """Every pass waits for one call that the first made: what it does depends on where it stands."""
    import torch
    import torch.distributed as dist

    from maniple.engines.megatron import step

    patch, original, works = pytest.MonkeyPatch(), step.forward_step, {}

    def forward_step(device, batches, model, *words):
        world = id(dist.group.WORLD)
        if world not in works:
            works[world] = dist.all_reduce(torch.zeros(3, device="meta"), async_op=True)
        works[world].wait()
        return original(device, batches, model, *words)

    patch.setattr(step, "forward_step", forward_step)
    return contextlib.closing(_Undo(patch))


def _growth(job: TrainConfig) -> list[tuple[int, int]]:
    """(events, different calls) of the first stage with 6, 8 and 10 micro-batches."""
    from maniple.engines.megatron.dry_run import one_rank

    found = []
    for count in (6, 8, 10):
        patch = pytest.MonkeyPatch()
        patch.setattr(one_rank, "micro_batches_that_show_all", lambda *sizes, count=count: count)
        longer = job.model_copy(update={"train": job.train.model_copy(update={"global_batch_size": 4 * 10})})
        program = one_rank.program_of(longer, card(), 0, 4, whole=True).program
        patch.undo()
        found.append((len(program.events), len(set(program.calls))))
    return found


REAL: dict[str, dict[str, Any]] = {
    "interleaved": {"parallel": INTERLEAVED, "train": {"global_batch_size": 8}},
    "MTP and loss apart": {"parallel": APART_INTERLEAVED, "train": {"global_batch_size": 8}},
    "tensor parallel": {
        "parallel": {"tensor_parallel_size": 2, "expert_parallel_size": 2, "overlap_grad_reduce": True},
        "recompute": {"granularity": "full"},
        "train": {"global_batch_size": 8},
    },
}


def real_calls(rank: int, world_size: int) -> dict[str, list]:
    """What this rank of a real job calls, each with everything that does not depend on the data."""
    import torch

    from maniple.engines.megatron import model, parallel, step
    from maniple.engines.megatron.dry_run.collectives import Recorder
    from maniple.engines.megatron.optimizer import build_optimizer

    found = {}
    for name, sections in REAL.items():
        job = make_job(**sections)
        job = job.model_copy(update={"train": job.train.model_copy(update={"eval_batches": 1})})
        device = parallel.pick_device(job)
        with Recorder(really=True) as recorder:
            parallel.start(job, device)
            chunks = model.wrap(model.build_chunks(card_for(job), job), job, device)
            optimizer, scheduler = build_optimizer(chunks, job)
            step.connect(chunks, optimizer, job)
            ids_BS = torch.arange(2 * 32).view(2, 32) % 250
            batch = {"tokens": ids_BS, "labels": ids_BS, "position_ids": torch.arange(32).expand(2, -1)}
            batch["loss_mask"] = torch.ones(2, 32)
            batches = [iter([batch] * 8) for _ in chunks]
            step.train_step(chunks, optimizer, scheduler, batches, job, device)
            step.evaluate(chunks, batches, job, device)
        parallel.stop_groups()
        found[name] = _plain(recorder.groups, recorder.events)
    return found


def dry_calls(rank: int, world_size: int) -> dict[str, list]:
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import one_rank

    with jobs.no_process_group():
        return {
            name: [
                _plain(program.groups, program.events)
                for program in (one_rank.program_of(job, card_for(job), one, 4).program for one in range(4))
            ]
            for name, job in ((name, make_job(**sections)) for name, sections in REAL.items())
        }


def _plain(groups, events) -> list:
    """What of it concerns others: without a rank's calls to itself."""
    batches = [event for event in events if not isinstance(event, int)]
    shared = [batch for batch in batches if len(groups[batch[0].group].ranks) > 1]
    return [groups, [[replace(call.fixed, where="") for call in batch] for batch in shared]]


# --- tests


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return run_ranks(broken_jobs, 1, timeout=400)[0]


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    return run_ranks(sound_jobs, 1, timeout=400)[0]


def test_sound_jobs_have_no_fault(sound):
    wanted = [*SOUND, "cut", "MTP and loss apart", "apart, interleaved"]
    assert {name: faults for name, faults in sound.items() if name != "passes"} == {name: [] for name in wanted}


def test_passes_that_are_remembered_say_what_they_would_if_they_were_run(sound):
    whole, short = sound["passes"]["run"]
    assert sound["passes"]["same"]
    assert 0 < short < whole


def test_statistics_that_only_moe_stages_sum(runs):
    compared, *_, simulated = runs["statistics of MoE stages only"]
    assert compared.startswith("call ")
    assert "on world: different" in compared
    assert "ranks 2-3: all_reduce, 15 float32 (engines/test_all_ranks.py" in compared
    assert "ranks 0-1: all_reduce" in compared
    assert "the step cannot end" in simulated
    assert "waiting for ranks 0-1" in simulated


def test_two_groups_in_another_order(runs):
    (found,) = runs["two groups in another order"]
    assert "the step cannot end: 4 of 4 ranks wait for ever" in found
    assert "ranks 0-1 in all_reduce, 3 float32 on world (engines/test_all_ranks.py" in found
    assert "ranks 2-3 in all_reduce, 3 float32 on model_parallel (engines/test_all_ranks.py" in found


def test_a_rank_without_tokens_that_leaves_an_exchange_out(runs):
    found = runs["no tokens, no exchange"]
    assert "taken to be alike and are not" in found[0]
    assert "ranks 3 and 2" in found[0]


def test_a_message_of_another_shape(runs):
    found = "\n".join(runs["another shape"])
    assert "from rank 0 to rank 2 on pipeline_model_parallel: 4,096 elements are sent and 6,144 expected" in found


def test_a_pass_that_is_unlike_those_before_it(runs):
    found = runs["a pass like no other"]
    assert len(found) == 3
    assert all("taken to be alike and are not" in fault and "all_reduce, 3 float32" in fault for fault in found)


def test_passes_that_cannot_be_told_from_their_place_are_all_run(runs):
    found = runs["cannot repeat"]
    whole, tried_and_whole = found["run"]
    assert found["same"]
    assert tried_and_whole > whole


def test_batched_messages_of_two_stages_mix_up_their_neighbours(runs):
    found = "\n".join(runs["batched messages"])
    assert "sent to the previous stage and taken for a message of the previous one" in found


def test_a_group_that_others_do_not_make(runs):
    (found,) = runs["another group"]
    assert "ranks make different groups" in found
    assert "unnamed of 0-1 on rank 0 and unnamed of 0, 2 on rank 2" in found


def test_more_micro_batches_repeat_what_was_seen(runs):
    (first, kinds), (second, kinds_2), (third, kinds_3) = runs["growth"]
    assert third - second == second - first > 0
    assert kinds == kinds_2 == kinds_3


def test_a_dry_run_records_what_real_ranks_call():
    real, dry = run_ranks(real_calls, 4, timeout=400), run_ranks(dry_calls, 1, timeout=400)[0]
    for name in REAL:
        for rank in range(4):
            groups, calls = real[rank][name]
            dry_groups, dry_ones = dry[name][rank]
            assert groups == dry_groups
            assert len(calls) > 50
            for place, (one, other) in enumerate(zip(calls, dry_ones, strict=False)):
                assert one == other, f"{name}: rank {rank}, call {place}"
            assert len(calls) == len(dry_ones)


def test_json_from_the_command_line():
    command = [sys.executable, "-m", "maniple", "train", str(ROOT / "configs" / "demo.yaml"), "--dry-run", "--json"]
    command += ["--all-ranks", "--world-size", "4", "parallel.pipeline_parallel_size=2"]
    command += ["train.micro_batch_size=1", "train.global_batch_size=8"]
    environment = {**os.environ, "PYTHONPATH": str(Path(maniple.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["world_size"], result["ranks_a_stage"], result["faults"]) == (4, 2, [])
    assert [stage["rank"] for stage in result["stages"]] == [0, 3]
    assert result["also_run"] == [1, 2, 3]
    for stage in result["stages"]:
        assert stage["parameters"] > 1_000_000
        assert stage["groups"]["pipeline_model_parallel"]["bytes"] > 0
