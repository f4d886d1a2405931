"""`maniple plan --schedule`: memory and time of schedules that split backward passes, which are simulated only."""

from __future__ import annotations

import json

import pytest
from tests.plan.test_search import _job

from maniple import cli
from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.plan import memory, schedules
from maniple.plan.memory_schedule import passes
from maniple.plan.simulator import StageCost, simulate
from maniple.plan.stages import folded, place
from maniple.plan.time import estimate

CHUNKS = {"zb-h1": 1, "zbv": 2}


def _pipeline(chunks: int, ranks: int = 4, micro_batches: int = 16):
    sets = [f"parallel.pipeline_parallel_size={ranks}", f"train.global_batch_size={micro_batches}"]
    sets += [f"parallel.virtual_pipeline_size={chunks}"] if chunks > 1 else []
    return _job("qwen3-30b-a3b", "model.overrides={num_layers: 16, moe: {num_experts: 32}}", *sets)


@pytest.mark.parametrize("name", schedules.SPLIT)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 16), (8, 64)])
def test_as_many_passes_wait_as_the_simulator_says(name, ranks, micro_batches):
    chunks = CHUNKS[name]
    config, card = _pipeline(chunks, ranks, micro_batches)
    where = place(config, card, ranks)
    schedule = schedules.build(name, ranks, micro_batches, chunks)
    run = simulate(schedule, [StageCost(1.0, 1.0, 1.0)] * (ranks * chunks))
    for rank in range(ranks):
        held = most = 0
        for each in passes(where, rank, schedule=name):
            held += each.forward
            most = max(most, held)
            held -= each.weights
        assert held == 0
        assert most == run.peak_in_flight(rank)


def test_a_v_has_both_ends_on_the_first_rank():
    config, card = _pipeline(2)
    plain, v = place(config, card, 4), folded(place(config, card, 4))
    assert [(stage.rank, stage.chunk) for stage in v.stages] == [
        *((rank, 0) for rank in range(4)),
        *((rank, 1) for rank in (3, 2, 1, 0)),
    ]
    assert [stage.layers for stage in v.stages] == [stage.layers for stage in plain.stages]
    first, last = v.of_rank(0)
    assert first.embedding
    assert last.head


def test_memory_is_of_what_waits_for_weights_too():
    """ZB-H1 keeps as many micro-batches on every rank as 1F1B on the first; ZBV two halves of each, on all alike."""
    config, card = _pipeline(1)
    plain, split = (memory.of_job(config, card, 4, schedule=name) for name in (None, "zb-h1"))
    assert [rank.in_flight for rank in plain] == [4, 3, 2, 1]
    assert [rank.in_flight for rank in split] == [4, 4, 4, 4]
    assert [rank.states for rank in split] == [rank.states for rank in plain]
    assert split[0].total == plain[0].total
    assert split[2].activations == split[1].activations
    assert sum(split[1].activations.values()) == pytest.approx(4 / 3 * sum(plain[1].activations.values()), rel=0.1)

    config, card = _pipeline(2)
    v = memory.of_job(config, card, 4, schedule="zbv")
    assert {rank.in_flight for rank in v} == {8}
    assert v[1].activations == v[2].activations
    assert sum(v[1].activations.values()) == pytest.approx(sum(split[1].activations.values()), rel=0.05)
    turned = memory.of_job(config, card, 4)
    assert sum(rank.state_bytes for rank in v) == sum(rank.state_bytes for rank in turned)
    assert v[0].parameters.by_component["embedding"] == v[0].parameters.by_component["head"]
    assert "head" not in v[3].parameters.by_component


def test_they_idle_less_than_the_engines_schedules():
    gpu = load_gpu("h200-sxm")
    times = {}
    for name in (None, "zb-h1", "zbv"):
        config, card = _pipeline(CHUNKS.get(name, 1))
        times[name] = estimate(config, card, gpu, 4, schedule=name)
    assert times["zbv"].pipeline_seconds < times["zb-h1"].pipeline_seconds < times[None].pipeline_seconds
    work = [sum(1 - idle for idle in time.bubbles) * time.pipeline_seconds for time in times.values()]
    assert work == pytest.approx([work[0]] * 3)
    with pytest.raises(UserError, match="zbv has 2 model chunks a rank, not 1"):
        memory.of_job(*_pipeline(1), 4, schedule="zbv")


WORDS = ["plan", "qwen3-30b-a3b", "--gpus", "32", "--gpu", "h200", "--set", "parallel.pipeline_parallel_size=4"]


def test_the_command_says_that_it_is_simulated_only(capsys, tmp_path):
    assert cli.main([*WORDS, "--schedule", "zb-h1"]) == 0
    out = capsys.readouterr().out
    assert "schedule zb-h1: simulated only; the engine runs 1f1b and interleaved" in out.splitlines()
    assert "schedule zb-h1, ranks idle" in out
    file = tmp_path / "pipeline.json"
    assert cli.main([*WORDS, "--schedule", "zb-h1", "--json", "--pipeline-trace", str(file)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["simulated_only"]
    assert [rank["passes_in_flight"] for rank in plan["ranks"]] == [4, 4, 4, 4]
    assert "W0" in file.read_text(encoding="utf-8")
    assert cli.main([*WORDS, "--schedule", "1f1b"]) == 0
    assert "simulated only" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "zbv"], "schedule zbv has 2 model chunks a rank, not 1"),
        (["--schedule", "dualpipe"], "no pipeline schedule is named 'dualpipe': choose one of 1f1b"),
        (["--schedule", ""], "no pipeline schedule is named ''"),
        (["--schedule", "zb-h1", "--trace"], "--schedule zb-h1 is simulated only, and --trace is of the engine's"),
        (["--schedule", "zb-h1", "--report", "plan.html"], "and --report is of the engine's"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.main([*WORDS, *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
