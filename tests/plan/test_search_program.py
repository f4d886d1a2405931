"""Stages and recomputed layers by integer program: against brute force, and against the full plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.plan.layouts import legal_layouts
from tests.plan.test_search import _job

from maniple.config.check import check
from maniple.config.load import load
from maniple.hardware import load_gpu
from maniple.hardware.efficiency import load_software
from maniple.hardware.units import three_digits
from maniple.plan import search_report, search_stages
from maniple.plan.imbalance import Imbalance
from maniple.plan.report import band
from maniple.plan.search import _bounds, _Costing, search
from maniple.plan.search_linear import Cut, Linear, Moment, Run, linear_of
from maniple.plan.search_program import solve
from maniple.plan.search_space import Layout, balanced_stages, layout_text
from maniple.plan.stages import place


def _model(seed: int, pipeline: int, chunks: int, lengths: list[int], mtp: bool) -> Linear:
    """Any times and sizes; the ceiling is such that some cuts fit."""
    draw = random.Random(seed)
    stages, runs, number = pipeline * chunks, [], 0
    for index, length in enumerate(lengths):
        last = mtp and index == len(lengths) - 1
        units = ((number,),) if last else tuple((number + unit,) for unit in range(length))
        number += len(units)
        forward, kept = draw.uniform(0.5, 2), draw.uniform(0.5, 2) * 2**30
        runs.append(
            Run(
                units,
                "m" if last else "t",
                forward,
                2 * forward,
                forward * draw.uniform(0.8, 1),
                draw.uniform(0.5, 2) * 2**30,
                kept,
                kept * draw.uniform(0.5, 0.9),
                range(max(0, stages - pipeline + 1), stages) if last else range(stages),
            )
        )
    ends = [0.3, *[0.0] * (stages - 2), draw.uniform(0.5, 2)] if stages > 1 else [1.0]
    moments = []
    for rank in range(pipeline):
        waiting = [pipeline - rank] if chunks == 1 else [pipeline + 1 - min(rank, chunk) for chunk in range(chunks)]
        other = [max(0, number - 1) for number in waiting]
        moments.append((Moment(tuple(waiting), 0.0), Moment(tuple(other), draw.uniform(0, 2) * 2**30)))
    return Linear(
        runs=tuple(runs),
        pipeline=pipeline,
        chunks=chunks,
        micro_batches=draw.choice([1, 2, 4]) * pipeline,
        forward=tuple(ends),
        backward=tuple(2 * end for end in ends),
        kept=tuple(draw.uniform(0, 1) * 2**30 for _ in range(stages)),
        sends=(0.1,) * pipeline,
        travel=0.2,
        moments=tuple(moments),
        constant=tuple(draw.uniform(0, 1) * 2**30 for _ in range(pipeline)),
        ceiling=draw.uniform(6, 16) * 2**30,
        recomputes=draw.random() < 0.8,
    )


def _every(linear: Linear):
    """All legal cuts."""
    rows = [
        [tuple(row) for row in zip(*columns, strict=True)]
        for columns in itertools.product(*(_shares(run, linear.stages) for run in linear.runs))
    ]
    for held in rows:
        none = tuple((0,) * len(linear.runs) for _ in held)
        if not linear.is_legal(Cut(tuple(held), none)):
            continue
        free = [range(number + 1 if linear.recomputes else 1) for row in held for number in row]
        for flat in itertools.product(*free):
            again = tuple(itertools.batched(flat, len(linear.runs)))
            yield Cut(tuple(held), again)


def _shares(run: Run, stages: int):
    def cut(left: int, stage: int):
        if stage == stages - 1:
            yield (left,)
            return
        for here in range(left + 1 if stage in run.stages else 1):
            for rest in cut(left - here, stage + 1):
                yield (here, *rest)

    return list(cut(run.length, 0))


CASES = [
    (1, 1, [2, 5], False),
    (2, 1, [1, 6, 1], True),
    (3, 1, [7], False),
    (4, 1, [6, 1], True),
    (2, 2, [1, 6], False),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pipeline", "chunks", "lengths", "mtp"), CASES)
def test_a_program_finds_what_trying_all_cuts_finds(pipeline, chunks, lengths, mtp, seed):
    linear = _model(seed, pipeline, chunks, lengths, mtp)
    cuts = list(_every(linear))
    fits = [cut for cut in cuts if max(linear.sizes(cut)) <= linear.ceiling]
    least = min(max(linear.sizes(cut)) for cut in cuts)
    small = solve(linear, "memory", nodes=10000)
    assert max(linear.sizes(small.cut)) == pytest.approx(max(least, linear.ceiling), rel=2e-3) or not small.missing
    assert small.missing == pytest.approx(max(0.0, least - linear.ceiling), rel=2e-3, abs=2**10)
    found, relaxed = solve(linear, nodes=10000), solve(linear, relaxed=True)
    if not fits:
        assert found is None
        return
    best = min(map(linear.seconds, fits))
    assert linear.is_legal(found.cut)
    assert max(linear.sizes(found.cut)) <= linear.ceiling * (1 + 1e-6)
    assert found.proven
    assert best * (1 - 1e-6) <= found.seconds <= best * (1 + 1.1e-3)
    assert relaxed.seconds <= best * (1 + 1e-6)
    one = fits[len(fits) // 2]
    stay = solve(linear, fixed=one, nodes=10000)
    assert stay.cut.held == one.held
    assert stay.seconds <= min(linear.seconds(cut) for cut in fits if cut.held == one.held) * (1 + 1.1e-3)
    begun = solve(linear, start=one, nodes=0)
    assert begun.seconds <= linear.seconds(one) * (1 + 1e-6)


def test_both_kinds_of_cases_were_there():
    """Else the test above would not have tried what it says."""
    models = [_model(seed, *case) for case in CASES for seed in range(4)]
    fits = [any(max(model.sizes(cut)) <= model.ceiling for cut in _every(model)) for model in models]
    assert 3 <= sum(fits) <= len(fits) - 3
    assert {model.recomputes for model in models} == {True, False}


# --- the model and the planner ----------------------------------------------------------------------------------------

MODELS = {
    "qwen, 1F1B": ("qwen3-30b-a3b", "{num_layers: 5}", 4, 1, []),
    "deepseek, MTP": (
        *("deepseek-v3", "{num_layers: 4, moe: {num_experts: 16, num_dense_layers: 2, router: {num_groups: 4}}}"),
        *(4, 1, []),
    ),
    "qwen, interleaved": ("qwen3-30b-a3b", "{num_layers: 6}", 2, 2, []),
    "windows, fp8": ("gpt-oss-20b", "{num_layers: 6}", 2, 1, ["precision.recipe=fp8_block"]),
}


def _setup(name: str):
    model, overrides, pipeline, chunks, sets = MODELS[name]
    config, card = _job(model, f"model.overrides={overrides}", "train.global_batch_size=16", *sets)
    gpu = load_gpu("h200-sxm")
    layout = Layout(1, pipeline, chunks, layout_text(balanced_stages(card, pipeline * chunks)), 1, 1, 1)
    where = place(layout.applied(config), card, pipeline)
    costing = _Costing(config, card, gpu, pipeline, Imbalance())
    linear = linear_of(_bounds(costing, layout), layout, where, gpu.memory_bytes, recomputes=True)
    return costing, layout, where, linear


def _sizes(costing: _Costing, layout: Layout) -> list[int]:
    return [rank.total for rank in costing.ranks(layout)]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_right_where_it_was_put_and_close_nearby(name):
    costing, layout, where, linear = _setup(name)
    here = linear.cut_of(where, ())
    assert linear.is_legal(here)
    linear = linear.through(here, _sizes(costing, layout))
    assert linear.sizes(here) == pytest.approx(_sizes(costing, layout))
    cuts = list(_every(linear))
    random.Random(0).shuffle(cuts)
    off = []
    for cut in cuts[:40]:
        other = search_stages.layout_of(layout, linear, cut, costing.card)
        check(other.applied(costing.config), costing.card, where.world_size)
        full = costing.full(other)
        assert linear.cut_of(full.where, full.config.recompute.layers) == cut
        off.append(linear.seconds(cut) / full.time.pipeline_seconds - 1)
        for model, size in zip(linear.sizes(cut), _sizes(costing, other), strict=True):
            assert model == pytest.approx(size, rel=0.25 if name == "windows, fp8" else 0.12)
    if linear.chunks == 1 and name != "windows, fp8":  # whose layers take turns, and are taken to be alike
        assert max(off) <= 1e-9  # a bound
    assert sorted(map(abs, off))[len(off) // 2] < 0.06


@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_nearly_that_of_planning_every_cut(name):
    costing, layout, where, linear = _setup(name)
    every = [search_stages.layout_of(layout, linear, cut, costing.card) for cut in _every(linear)]
    sizes = {one: max(_sizes(costing, one)) for one in every}
    ceiling = sorted(sizes.values())[len(every) // 5]
    fits = [one for one in every if sizes[one] <= ceiling]
    best = min(costing.full(one).time.seconds for one in fits)
    bounds = _bounds(costing, layout)
    shape = search_stages.Shape(layout, where, True, True)
    tried = search_stages.improve(
        *(bounds, [(0.0, [shape])], ceiling, costing.ranks, float("inf")),
        lambda one: costing.full(one).time.pipeline_seconds,
        0.0,
    )
    assert all(max(_sizes(costing, one.layout)) <= ceiling for one in tried.fits)
    assert min(costing.full(one.layout).time.seconds for one in tried.fits) <= 1.02 * best


def test_what_cannot_fit_is_said():
    costing, layout, where, linear = _setup("deepseek, MTP")
    linear = linear.through(linear.cut_of(where, ()), _sizes(costing, layout))
    tight = replace(linear, ceiling=20e9)
    assert solve(tight) is None
    assert solve(tight, relaxed=True) is None
    answer = solve(tight, "memory")
    assert answer.missing == pytest.approx(max(tight.sizes(answer.cut)) - 20e9, rel=1e-6)
    config, card = costing.config, costing.card
    found = search(config, card, costing.gpu.model_copy(update={"memory_gb": 14}), 4)
    assert found.best is None
    assert found.programs.tried.fits == ()
    (said,) = (line for line in search_report.explanation(found) if line.startswith("nor does another cut of layers: "))
    assert f"all {found.programs.tried.shapes:,} shapes of stages are too large by states alone" in said


def test_a_program_finds_a_layout_where_no_balanced_one_fits(tmp_path):
    """Stages that are even in work are uneven in memory: MTP has an embedding of its own, beside the head."""
    overrides = "{num_layers: 5, moe: {num_experts: 16, num_dense_layers: 2, router: {num_groups: 4}}}"
    sets = ["parallel.pipeline_parallel_size=4", "parallel.tensor_parallel_size=1", "train.micro_batch_size=1"]
    config, card = _job("deepseek-v3", f"model.overrides={overrides}", "train.global_batch_size=16", *sets)
    held = [each.split("=")[0] for each in sets]
    gpu = load_gpu("h200-sxm").model_copy(update={"memory_gb": 60})
    plain, found = (search(config, card, gpu, 4, held=held, ceilings=(), program=program) for program in (False, True))
    assert plain.best is None
    assert found.best.memory.total <= gpu.memory_bytes
    check(found.best.config, card, 4)
    assert "without programs: nothing fits" in search_report.explanation(found)
    # the job file is one that the engine takes
    file = tmp_path / "job.yaml"
    search_report.write_job(found, file, "maniple plan search --set 'name=a\ntrain: {steps: 3}'")
    job = load(file).config
    assert job.train.steps != 3  # a new line within a value is no way out of the remark
    check(job, card, 4)
    from maniple.engines.megatron.transformer import transformer_config

    built = transformer_config(card, job)
    parts = [[part.name for part in chunks[0]] for chunks in built.pipeline_model_parallel_layout.layout]
    stages = found.best.where.stages
    assert [names.count("decoder") for names in parts] == [len(stage.layers) for stage in stages]
    assert [names.count("mtp") for names in parts] == [len(stage.mtp) for stage in stages]
    assert built.maniple_recompute == frozenset(found.best.config.recompute.layers)


def test_it_beats_the_heuristic_and_says_so(capfd):
    sets = [
        f"parallel.{size}" for size in ("tensor_parallel_size=1", "pipeline_parallel_size=4", "virtual_pipeline_size=6")
    ]
    config, card = _job("qwen3-30b-a3b", "train.global_batch_size=64", *sets)
    held = [each.split("=")[0] for each in sets]
    gpu = load_gpu("h200-sxm").model_copy(update={"memory_gb": 141})
    found = search(config, card, gpu, 8, held=held)
    best, before = found.best, found.programs.before
    assert best.time.seconds < 0.98 * before.time.seconds
    assert best.memory.total <= gpu.memory_bytes
    check(best.config, card, 8)
    lines = search_report.explanation(found)
    assert lines[1].startswith("stages 2×")
    assert "; recompute layers 0-" in lines[1]
    assert "by its linear model" in lines[2]
    assert lines[3].startswith(f"without programs: {three_digits(before.time.seconds)} s a step (TP ")
    assert capfd.readouterr() == ("", "")  # the solver prints nothing
    again = search(config, card, gpu, 8, held=held)
    assert again.best.layout == best.layout


def test_rows_beneath_the_best_are_certain_to_fit():
    """Where the best without programs, which is smaller, is as near to the GPU's memory as the best."""
    held = {"tensor_parallel_size": 1, "pipeline_parallel_size": 4, "virtual_pipeline_size": 6}
    sets = [f"parallel.{key}={size}" for key, size in held.items()]
    gpu = load_gpu("h200-sxm").model_copy(update={"memory_gb": 130})
    found = search(
        *_job("qwen3-30b-a3b", "train.global_batch_size=64", *sets), gpu, 8, held=[f"parallel.{key}" for key in held]
    )
    best, *rows = found.pareto
    before = found.programs.before
    for one in (best, before):
        assert band(one.memory.total)[1] > gpu.memory_bytes
    assert before.memory.total < best.memory.total
    assert rows[0].memory.total > 0.9 * gpu.memory_bytes
    assert all(band(row.memory.total)[1] <= gpu.memory_bytes for row in rows)


def test_every_shape_is_tried_once():
    config, card = _job("deepseek-v3", "train.global_batch_size=512")
    legal = legal_layouts(config, card, load_gpu("mi355x"), 64, ())
    shapes = search_stages.shapes_to_try(legal, stages_held=False, overlapped=False)
    keys = [
        (one.layout.shape, one.layout.chunks, one.layout.micro_batch, one.layout.recompute.modules) for one in shapes
    ]
    assert len(set(keys)) == len(keys)
    assert {modules for *_, modules in keys} == {(), ("moe_act",), ("moe",)}
    assert all(shape.layers_free == (not shape.layout.recompute.modules) for shape in shapes)
    fixed = search_stages.shapes_to_try(legal, stages_held=True, overlapped=False)
    assert fixed
    assert not any(shape.stages_free for shape in fixed)
    assert not any(
        shape.layers_free for shape in search_stages.shapes_to_try(legal, stages_held=False, overlapped=True)
    )


# --- overlapped exchange ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [0.07, 1.0])
def test_overlap_is_found_where_it_wins(hidden, monkeypatch):
    """As costing every layout with it and without, but for the dozen whose bounds are best."""
    config, card = _job(
        "qwen3-30b-a3b",
        "model.overrides={num_layers: 8, moe: {num_experts: 32}}",
        "train.global_batch_size=32",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
    )
    software = load_software("maniple").model_copy(update={"hidden": hidden})
    monkeypatch.setattr("maniple.plan.time.load_software", lambda name: software)
    gpu, held = load_gpu("h200-sxm"), ["parallel.expert_parallel_size", "train.micro_batch_size"]
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"expert_parallel_size": 8})})
    found = search(config, card, gpu, 16, held=held, ceilings=(), program=False)
    costing = _Costing(config, card, gpu, 16, Imbalance())
    seconds = {}
    for layout, where, kinds in legal_layouts(config, card, gpu, 16, held):
        for kind, overlap in itertools.product(kinds, (False, True)):
            if overlap and (
                kind.granularity == "full" or where.micro_batches == 1 or 1 == layout.chunks < where.pipeline
            ):
                continue
            one = replace(layout, recompute=kind, overlap=overlap)
            check(one.applied(config), card, 16)
            if costing.memory(one).total <= gpu.memory_bytes:
                seconds[one] = costing.full(one).time.seconds
    best = min(seconds, key=seconds.__getitem__)
    assert best.overlap == (hidden == 1.0)
    assert found.best.time.seconds == pytest.approx(seconds[best])
    assert found.best.config.moe.overlap_exchange == best.overlap
    assert ("exchange overlapped" in search_report.said(found.best)) == best.overlap
    job = search_report.job_of(found.best)
    assert job.get("moe", {}).get("overlap_exchange", False) == best.overlap
    assert job["parallel"]["overlap_param_gather"] != best.overlap
    (row,) = search_report.rows(found)
    assert row[search_report.HEADINGS.index("EP")] == ("8 +" if best.overlap else "8")
    assert search_report.of_fewer(found, []) == ["+: exchange overlapped (moe.overlap_exchange)"] * best.overlap
    assert ("moe.overlap_exchange" in search_report.as_json(found)["best"]["settings"]) == best.overlap
    stays = search(config, card, gpu, 16, held=[*held, "moe.overlap_exchange"], ceilings=(), program=False)
    assert not stays.best.config.moe.overlap_exchange
    if best.overlap:  # a job's own is marked and said too
        own = search(found.best.config, card, gpu, 16, held=held, ceilings=(), program=False)
        assert search_report.rows(own)[0][search_report.HEADINGS.index("EP")] == "8 +"
        assert search_report.settings(own.best)["moe.overlap_exchange"]
