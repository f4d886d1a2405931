"""The same job on fewer GPUs: as searched there, and a table in which no row is worse than another in all."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from tests.plan.layouts import legal_layouts
from tests.plan.test_search import _gpu, _job

from maniple import cli
from maniple.hardware import load_gpu
from maniple.plan import search_fewer, search_report
from maniple.plan.imbalance import Imbalance
from maniple.plan.search import _Costing, search
from maniple.plan.search_context import search_contexts
from maniple.plan.search_fewer import fewer, has_most_tgs, table

PLAIN = {
    "ceilings": search_fewer.CEILINGS,
    "runner_up": False,
    "refine_rows": False,
    "program": False,
    "overlap": False,
}


def _found(model: str, overrides: str, gpu, world: int, *sets: str, held=()):
    config, card = _job(model, f"model.overrides={overrides}", *sets)
    return search(config, card, gpu, world, held=held)


@pytest.fixture(scope="module")
def small():
    """(found on 8 GPUs, the same on fewer)."""
    found = _found("mixtral-8x7b", "{num_layers: 3}", _gpu("h200-sxm", 60), 8, "train.global_batch_size=16")
    return found, fewer(found, (), 1)


def test_fewer_gpus_are_as_if_asked_for(small):
    found, others = small
    assert [one.world_size for one in others] == [4, 2, 1]
    for one in others:
        alone = search(found.bounds.config, found.card, found.gpu, one.world_size, **PLAIN)
        assert [row.layout for row in one.found.pareto] == [row.layout for row in alone.pareto]
        assert [row.time for row in one.found.pareto] == [row.time for row in alone.pareto]
        assert one.found.pruned == alone.pruned
        assert one.why == "" or not alone.pareto
    assert others[-1].found.best is None  # else the sizes are not those that this test is for


def test_fewer_gpus_are_as_costing_all_says(small):
    found, others = small
    config, card, gpu = found.bounds.config, found.card, found.gpu
    for one in others:
        costing = _Costing(config, card, gpu, one.world_size, Imbalance())
        costed = [
            costing.full(replace(layout, recompute=kind))
            for layout, _, kinds in legal_layouts(config, card, gpu, one.world_size, ())
            for kind in kinds
        ]
        best = []
        for share in (1.0, *search_fewer.CEILINGS):
            fits = [each.time.seconds for each in costed if each.memory.total <= round(share * gpu.memory_bytes)]
            best += [min(fits)] if fits else []
        assert [row.time.seconds for row in one.found.pareto] == sorted(set(best))


def test_no_row_is_worse_than_another_in_all(small):
    found, others = small
    rows = table(found, others)

    def said(one):
        return one.where.world_size, one.memory.total, one.time.seconds

    every = [one for each in (found, *(one.found for one in others)) for one in each.pareto]
    for one, other in itertools.permutations(rows, 2):
        assert any(mine < its for mine, its in zip(said(one), said(other), strict=True))
    for one in every:
        if one not in rows:
            assert any(all(map(int.__le__, said(row)[:2], said(one)[:2])) and row.tgs > one.tgs for row in rows)
    assert rows[0] is found.best
    assert {one.where.world_size for one in rows} == {8, 4, 2}
    assert [(-one.where.world_size, one.time.seconds) for one in rows] == sorted(
        (-one.where.world_size, one.time.seconds) for one in rows
    )
    most = [one for one in rows if has_most_tgs(one, rows)]
    for one in rows:
        beaten = any(
            other.tgs >= one.tgs and all(its <= mine for its, mine in zip(said(other)[:2], said(one)[:2], strict=True))
            for other in rows
            if other is not one
        )
        assert (one in most) != beaten
    assert len(most) > 0


def test_a_row_that_fewer_gpus_beat_is_left_out(small):
    found, others = small
    slow = replace(found.best, time=replace(found.best.time, seconds=1e9))
    worse = replace(found, best=slow, pareto=(slow,))
    quick = replace(found.best, where=others[0].found.best.where)
    lean = replace(others[0], found=replace(others[0].found, pareto=(quick,)))
    assert slow not in table(worse, [lean])
    assert search_report.of_fewer(worse, [lean])[-1].startswith("the best on 8 GPUs is left out: ")
    assert slow in table(worse, [])


def test_all_is_in_the_table_and_in_json(small):
    found, others = small
    rows = [dict(zip(search_report.HEADINGS, row, strict=True)) for row in search_report.rows(found, others)]
    said = json.loads(json.dumps(search_report.as_json(found, others)))
    assert [row["GPUs"] for row in rows] == [str(one["gpus"]) for one in said["pareto"]]
    for row, one in zip(rows, said["pareto"], strict=True):
        assert row["tokens/s"] == f"{one['tokens_per_second']:,.0f}"
        assert row["seconds"] == f"{one['seconds']:.3g}"
        assert (row["*"] == "*") == one["most_tokens_per_second_per_gpu"]
        tokens = one["settings"]["train.global_batch_size"] * one["settings"]["data.sequence_length"]
        assert tokens == 16 * 4096  # the batch is the same on every number
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"])
        assert one["tokens_per_second_per_gpu"] == pytest.approx(one["tokens_per_second"] / one["gpus"])
    assert [one["gpus"] for one in said["fewer_gpus"]] == [4, 2, 1]
    assert [one["best"] is None for one in said["fewer_gpus"]] == [False, False, True]
    assert said["fewer_gpus"][-1]["why"].startswith("nothing fits without integer programs: the smallest needs ")
    alone = search_report.as_json(found)
    assert {one["gpus"] for one in alone["pareto"]} == {8}
    assert alone["fewer_gpus"] == []


def test_why_there_is_nothing_is_one_line(small):
    found, others = small
    lines = search_report.of_fewer(found, others)
    assert lines[0].startswith("*: most tokens/s a GPU (TGS)")
    assert lines[1].startswith("1 GPUs: nothing fits without integer programs: the smallest needs ")
    assert len(lines) == 2
    assert search_report.of_fewer(found, []) == []


@pytest.mark.parametrize(
    ("world", "least", "numbers", "lines"),
    [
        (24, None, [12, 6, 3], ["12 GPUs: no whole nodes of 8"]),
        (12, 1, [6, 3], ["3 GPUs: no half of that"]),
        (40, 1, [20, 10, 5], ["20, 10 GPUs: no whole nodes of 8", "5 GPUs: no half of that"]),
        (16, None, [8, 4, 2], []),
        (16, 8, [8], []),
        (16, 9, [], []),
        (1, None, [], []),
    ],
)
def test_numbers_are_halved(world, least, numbers, lines):
    sets = ["train.global_batch_size=240", "train.micro_batch_size=1", "parallel.tensor_parallel_size=1"]
    held = [each.split("=")[0] for each in sets[1:]]
    model = "qwen3-30b-a3b", "{num_layers: 2, moe: {num_experts: 8}}"
    config, card = _job(model[0], f"model.overrides={model[1]}", *sets)
    found = search(config, card, load_gpu("mi355x"), world, held=held, ceilings=(), program=False)
    others = fewer(found, held, least)
    assert list(dict.fromkeys(one.world_size for one in others)) == numbers
    said = search_report.of_fewer(found, others)
    assert [line for line in said if not line.startswith(("*", "+"))] == lines
    assert all(row.layout.tensor == 1 and row.layout.micro_batch == 1 for row in table(found, others))


def test_what_is_not_legal_there_is_said_and_fewer_still_tried():
    sets = "parallel.pipeline_parallel_size=1", "train.micro_batch_size=2", "parallel.tensor_parallel_size=1"
    held = [each.split("=")[0] for each in sets]
    overrides = "{num_layers: 2, moe: {num_experts: 8}}"
    more = "parallel.context_parallel_size=2", "parallel.expert_parallel_size=8"
    found = _found(
        *("qwen3-30b-a3b", overrides, load_gpu("mi355x"), 16, "train.global_batch_size=32", *sets, *more),
        held=[*held, "parallel.expert_parallel_size"],
    )
    assert found.best.where.context == 2
    others = fewer(found, [*held, "parallel.expert_parallel_size"], 4)
    assert [one.world_size for one in others] == [8, 4]
    assert {row.where.context for row in others[0].found.pareto} == {2}
    assert others[1].found is None
    (line,) = (line for line in search_report.of_fewer(found, others) if line.startswith("4 GPUs: "))
    assert "are not a multiple of 8 = expert_parallel_size 8" in line


def test_states_in_host_memory_are_named_where_that_would_fit(small):
    found, others = small
    (line,) = (line for line in search_report.of_fewer(found, others) if line.startswith("1 GPUs: nothing fits"))
    with_it = _found(
        *("mixtral-8x7b", "{num_layers: 3}", _gpu("h200-sxm", 60), 1),
        *("train.global_batch_size=16", "optimizer.offload_fraction=1"),
    )
    assert ("optimizer.offload_fraction=1 it would fit" in line) == (with_it.best is not None)
    assert with_it.best is not None  # else the sizes are not those that this test is for


def test_it_ends_after_so_much_work_whatever_the_clock_says(small, monkeypatch):
    found, others = small
    assert others[0].found.work > 0
    for work, numbers in ((0, [4, 2]), (others[0].found.work, [4, 2, 1])):
        monkeypatch.setattr(search_fewer, "WORK", work)
        less = fewer(found, (), 1)
        assert [one.world_size for one in less] == numbers
    monkeypatch.setattr(search_fewer, "WORK", 0)
    less = fewer(found, (), 1)
    assert [row.layout for row in less[0].found.pareto] == [row.layout for row in others[0].found.pareto]
    assert less[1].found is None
    (line,) = (line for line in search_report.of_fewer(found, less) if line.startswith("2 GPUs: "))
    assert line.startswith("2 GPUs: not looked at after so many layouts of more GPUs")


def test_nothing_is_tried_where_nothing_fits():
    config, card = _job("deepseek-v3", "train.global_batch_size=64")
    found, _ = search_contexts(config, card, load_gpu("h200-sxm"), 8)
    assert found.best is None
    assert fewer(found, ()) == []


WORDS = ["plan", "search", "mixtral-8x7b", "--set", "model.overrides={num_layers: 2}", "--gpu", "h200"]


def test_the_command_goes_as_far_down_as_it_is_told(capsys):
    def gpus(*words):
        assert cli.main([*WORDS, *words, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        return said["pareto"][0]["gpus"], [one["gpus"] for one in said["fewer_gpus"]]

    assert gpus("--gpus", "8") == (8, [4, 2, 1])
    assert gpus("--gpus", "8", "--gpus-from", "2") == (8, [4, 2])
    assert gpus("--gpus", "8", "--gpus-from", "8") == (8, [])
    assert cli.main([*WORDS, "--gpus", "4", "--gpus-from", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[:2] == ["GPUs", "TP"]
    ends = lines.index("*: most tokens/s a GPU (TGS) of the rows on as few GPUs with as little memory")
    assert {line.split()[0] for line in lines[5:ends]} == {"4", "2"}
    assert lines[ends + 1] == ""
    assert lines[ends + 2].startswith("best: ")


@pytest.mark.parametrize("number", ["0", "9", "-1"])
def test_a_wrong_number_is_one_line(number, capsys):
    assert cli.main([*WORDS, "--gpus", "8", "--gpus-from", number]) == 2
    _, err = capsys.readouterr()
    assert err == f"maniple: error: --gpus-from {number}: it is from 1 to --gpus 8\n"
