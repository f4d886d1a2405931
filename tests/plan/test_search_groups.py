"""Groups of layouts: all sizes that are legal are in them, and their bounds hold; ETP is searched as EP is."""

from __future__ import annotations

import itertools

import pytest
from tests.plan.layouts import legal_layouts
from tests.plan.test_search import _gpu, _job

from maniple.config.check import check
from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.hardware.efficiency import load_software
from maniple.plan import search_report
from maniple.plan.imbalance import Imbalance
from maniple.plan.search import _bounds, _Costing, search
from maniple.plan.search_groups import Opened, Space
from maniple.plan.search_space import Layout

CASES = {
    "mixtral": ("mixtral-8x7b", "{num_layers: 3}", 8, ["train.global_batch_size=8"]),
    "deepseek, MTP": (
        *("deepseek-v3", "{num_layers: 4, moe: {num_experts: 16, num_dense_layers: 1, router: {num_groups: 4}}}", 4),
        ["train.global_batch_size=8", "optimizer.offload_fraction=0.3"],
    ),
    "overlapped": (
        *("qwen3-30b-a3b", "{num_layers: 8, moe: {num_experts: 32}}", 4),
        ["train.global_batch_size=16", "moe.overlap_exchange=true"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_layout_is_below_its_groups_bounds(case, monkeypatch):
    model, overrides, world, sets = CASES[case]
    config, card = _job(model, f"model.overrides={overrides}", *sets)
    software = load_software("maniple").model_copy(update={"hidden": 0.6})
    monkeypatch.setattr("maniple.plan.time.load_software", lambda name: software)
    gpu = load_gpu("h200-sxm")
    space = Space(config, card, gpu, world)
    bounds = _bounds(_Costing(config, card, gpu, world, Imbalance()), space.first)
    opened = Opened(space, bounds, gpu.memory_bytes)
    near = []
    for group in space.groups:
        seconds, memory = bounds.of_all_cuts(group.layout, group.where)
        for one in opened._open(group, too_large=False):
            assert memory <= one.memory, one.layout
            assert seconds <= one.seconds, one.layout
            if one.layout.pipeline == 1:
                near.append(seconds / one.seconds)
    assert max(near) > 0.8  # tails of a step are not in them


def test_what_is_asked_for_comes_in_order_and_all_of_it():
    config, card = _job("mixtral-8x7b", "model.overrides={num_layers: 3}", "train.global_batch_size=8")
    gpu = _gpu("h200-sxm", 40)
    space = Space(config, card, gpu, 4)
    bounds = _bounds(_Costing(config, card, gpu, 4, Imbalance()), space.first)
    every = [one for group in space.groups for one in Opened(space, bounds, gpu.memory_bytes)._open(group, False)]
    for share in (1.0, 0.5):
        opened = Opened(space, bounds, gpu.memory_bytes)
        ceiling = round(share * gpu.memory_bytes)
        came = list(opened.fastest_first(ceiling))
        assert [one.seconds for one in came] == sorted(one.seconds for one in every if one.memory <= ceiling)
    came = list(opened.smallest_first())
    assert [one.memory for one in came] == sorted(one.memory for one in every)
    few = Opened(space, bounds, gpu.memory_bytes)
    next(few.fastest_first(gpu.memory_bytes))
    assert len(few._layouts) < 0.6 * len(space.groups)  # others are not looked into


@pytest.mark.parametrize(("model", "world"), [("mixtral-8x7b", 8), ("gpt-oss-20b", 4), ("qwen3-30b-a3b", 16)])
def test_all_sizes_that_are_legal_are_looked_at(model, world):
    """By the check of a job alone: every TP, PP, EP and ETP, layers cut as they divide."""
    config, card = _job(model, "model.overrides={num_layers: 4}", f"train.global_batch_size={world}")
    legal = set()
    for shape in itertools.product([1, 2, 4, 8], [1, 2, 4], [1, 2, 4, 8, 16, 32], [1, 2, 4, 8]):
        tensor, pipeline, expert, expert_tensor = shape
        layout = Layout(tensor, pipeline, 1, None, expert, expert_tensor, 1)
        try:
            check(layout.applied(config), card, world)
        except UserError:
            continue
        legal.add(shape)
    found = {
        layout.shape
        for layout, _, _ in legal_layouts(config, card, load_gpu("h200-sxm"), world, ())
        if layout.pipeline in (1, 2, 4) and layout.micro_batch == 1
    }
    assert found == legal
    assert ({expert_tensor for *_, expert_tensor in found} == {1}) == (model == "gpt-oss-20b")  # experts with biases


def test_experts_are_cut_where_that_wins():
    config, card = _job("mixtral-8x7b", "model.overrides={num_layers: 3}", "train.global_batch_size=8")
    gpu, key = _gpu("h200-sxm", 40), "parallel.expert_tensor_parallel_size"
    free = search(config, card, gpu, 8, program=False, ceilings=())
    held = search(config, card, gpu, 8, program=False, ceilings=(), held=[key])
    assert free.best.layout.expert_tensor > 1
    assert held.best.layout.expert_tensor == 1
    assert free.best.time.seconds < held.best.time.seconds
    size = free.best.layout.expert_tensor
    assert f", ETP {size}, " in search_report.said(free.best)
    assert search_report.settings(free.best)[key] == size
    assert search_report.job_of(free.best)["parallel"]["expert_tensor_parallel_size"] == size
    row = dict(zip(search_report.HEADINGS, search_report.rows(free)[0], strict=True))
    assert (row["EP"], row["ETP"]) == (str(free.best.layout.expert), str(size))
    # one that differs in ETP alone is another shape
    assert free.second.layout.shape != free.best.layout.shape
    set_, _ = _job("mixtral-8x7b", "model.overrides={num_layers: 3}", "train.global_batch_size=8", f"{key}=2")
    two = search(set_, card, gpu, 8, program=False, ceilings=(), held=[key])
    assert two.best.layout.expert_tensor == two.best.where.expert_tensor == 2


def test_programs_move_layers_where_experts_are_cut():
    sets = [
        f"parallel.{key}={size}" for key, size in (("pipeline_parallel_size", 2), ("expert_tensor_parallel_size", 2))
    ]
    config, card = _job("mixtral-8x7b", "model.overrides={num_layers: 5}", "train.global_batch_size=16", *sets)
    held = [each.split("=")[0] for each in sets]
    gpu = _gpu("h200-sxm", 46)
    found = search(config, card, gpu, 4, held=held, ceilings=())
    assert found.programs.tried.solved > 0
    assert found.programs.found
    for one in [found.best, *found.programs.found]:
        assert one.where.expert_tensor == 2
        check(one.config, card, 4)
    assert found.best.memory.total <= gpu.memory_bytes
