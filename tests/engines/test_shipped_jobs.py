"""Every job file that is shipped is built, at full size and in its own world: the first and the last rank of each."""

from pathlib import Path
from typing import Any

import pytest
from tests.config.test_check import WORLD
from tests.distributed_utils import run_ranks

from maniple.models import counting

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = pytest.mark.timeout(600)


def build_all(rank: int, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """In a process of its own: what the engine builds of each, on the meta device."""
    from tests.engines import jobs

    from maniple.config.load import load

    out: dict[str, list[dict[str, Any]]] = {}
    with jobs.no_process_group():
        for path in sorted(CONFIGS.glob("*.yaml")):
            job = load(path, ["train.device=cpu"]).config
            world = WORLD[path.stem]
            out[path.stem] = [_build(job, one, world) for one in sorted({0, world - 1})]
    return out


def _build(job, rank: int, world: int) -> dict[str, Any]:
    """Model, gradient buffers, optimizer and schedule: all that a job's words become arguments of upstream's for."""
    from maniple.config.check import check, resolve_card
    from maniple.engines.megatron import model, step
    from maniple.engines.megatron.dry_run.meta import META, stand_in
    from maniple.engines.megatron.optimizer import build_optimizer

    card = resolve_card(job)
    check(job, card, world)
    with stand_in(job, rank, world):
        chunks = model.build_chunks(card, job, maniple_static_splits=True, perform_initialization=False)
        facts = {"chunks": len(chunks), "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters())}
        facts["layers"] = sum(len(chunk.decoder.layers) for chunk in chunks)
        wrapped = model.wrap(chunks, job, META)
        optimizer, scheduler = build_optimizer(wrapped, job)
        step.connect(wrapped, optimizer, job)
        scheduler.step(increment=1)
        facts["rates"] = sorted({group["lr"] for group in optimizer.param_groups})
    return facts


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    return run_ranks(build_all, 1, timeout=400)[0]


def test_every_job_is_built(built):
    assert set(built) == {path.stem for path in CONFIGS.glob("*.yaml")} == set(WORLD)


@pytest.mark.parametrize("name", WORLD)
def test_each_rank_has_a_part_of_the_model(built, name):
    from maniple.config.check import resolve_card
    from maniple.config.load import load

    job = load(CONFIGS / f"{name}.yaml").config
    card = resolve_card(job)
    total = counting.count(card).total
    assert {type(rate) for facts in built[name] for rate in facts["rates"]} == {float}
    for facts in built[name]:
        assert 0 < facts["layers"] <= card.num_layers
        if job.parallel.pipeline_parallel_size == 1:
            assert facts["layers"] == card.num_layers
        if WORLD[name] == 1:
            assert facts["parameters"] >= total  # and the vocabulary's padding
        else:
            assert facts["parameters"] < total
