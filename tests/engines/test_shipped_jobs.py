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
    """In a process of its own: what the engine builds of each, under fake tensors."""
    import torch.distributed as dist

    from maniple.config.load import load
    from maniple.engines.megatron import cpu

    dist.destroy_process_group()
    cpu.install()
    out: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        job = load(path, ["train.device=cpu"]).config
        world = WORLD[path.stem]
        out[path.stem] = [_build(job, one, world) for one in sorted({0, world - 1})]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return out


def _build(job, rank: int, world: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from maniple.config.check import check, resolve_card
    from maniple.engines.megatron import model, parallel

    card = resolve_card(job)
    check(job, card, world)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel.start_groups(job)
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunks = model.build_chunks(card, job, perform_initialization=False)
    facts = {"chunks": len(chunks), "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters())}
    facts["layers"] = sum(len(chunk.decoder.layers) for chunk in chunks)
    parallel.stop()
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
    for facts in built[name]:
        assert 0 < facts["layers"] <= card.num_layers
        if job.parallel.pipeline_parallel_size == 1:
            assert facts["layers"] == card.num_layers
        if WORLD[name] == 1:
            assert facts["parameters"] >= total  # and the vocabulary's padding
        else:
            assert facts["parameters"] < total
