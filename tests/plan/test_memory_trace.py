"""The planner's formulas against a dry run of the engine itself, which shares no code with them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.distributed_utils import run_ranks
from tests.plan.traced import CARDS, CASES, ROUGH, WORLD, cuts, numbers, traces

import maniple
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.models import load_card
from maniple.plan import memory, parameters
from maniple.plan.imbalance import BALANCED
from maniple.plan.profile import DRY_RUN
from maniple.plan.stages import place

pytestmark = pytest.mark.timeout(600)  # the first test waits for the process that does the work


@pytest.fixture(scope="module")
def traced() -> dict[str, list[dict]]:
    return run_ranks(traces, 1, timeout=500)[0]


def planned(name: str, rank: int) -> memory.RankMemory:
    words, world, _ = CASES[name]
    job = load(None, words).config
    card = resolve_card(job)
    where = place(job, card, world)
    context_rank = rank // where.tensor % where.context
    every = memory.of_job(job, card, world, DRY_RUN, imbalance=BALANCED, context_rank=context_rank)
    return every[rank // (world // where.pipeline)]


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, list[int]]]:
    return run_ranks(numbers, 1, timeout=300)[0]


@pytest.mark.parametrize(("folder", "other"), [("plan", "engines"), ("engines", "plan")])
def test_neither_imports_the_other(folder, other):
    files = sorted((Path(maniple.__file__).parent / folder).rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not any(f"{name}.".startswith(f"maniple.{other}.") for name in names), (file, names)


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_the_engines(name, built):
    tiny = load_card(name).tiny()
    for cut, words in cuts(name, tiny.num_layers, tiny.num_mtp_layers, tiny.moe.linear_bias).items():
        job = load(None, words).config
        where = place(job, tiny, WORLD)
        counted = [parameters.of_rank(job, tiny, where, rank).total for rank in range(where.pipeline)]
        assert counted == built[name][cut], cut


@pytest.mark.parametrize("name", CASES)
def test_formula_and_trace_agree(name, traced):
    for rank, trace in zip(CASES[name][2], traced[name], strict=True):
        plan = planned(name, rank)
        states = trace["parameter_bytes"] + trace["gradient_bytes"] + trace["optimizer_bytes"]
        others, traced_others = plan.peak - plan.state_bytes, trace["peak_bytes"] - states
        print(
            f"{name}, rank {rank}: states {plan.state_bytes / states - 1:+.3%}, beside them "
            f"{others / traced_others - 1:+.2%}, peak {plan.peak / trace['peak_bytes'] - 1:+.3%} ({plan.moment})"
        )
        assert trace["peaks"][trace["phase"]] == max(trace["peaks"].values()) == trace["peak_bytes"]
        assert plan.parameters.total == trace["parameters"]
        assert plan.rank == trace["pipeline_stage"]
        assert plan.state_bytes == pytest.approx(states, rel=5e-4)
        assert plan.host_bytes == pytest.approx(trace["host_bytes"], rel=5e-4)
        assert others == pytest.approx(traced_others, rel=ROUGH.get(name, 0.02))
        assert plan.peak == pytest.approx(trace["peak_bytes"], rel=0.4 * ROUGH.get(name, 0.01))
