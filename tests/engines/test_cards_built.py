"""Every published model is built at full size, under fake tensors, and its parameters are counted one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.distributed_utils import run_ranks

from maniple.models import counting, list_cards, load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

# billions, rounded to three decimals: of models built by other code than ours
PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "data" / "model_counts.yaml").read_text(encoding="utf-8"))


def build(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    """In a process of its own: elements of each card's parameters, of the base model and of what MTP adds."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from maniple.config.schema import TrainConfig
    from maniple.engines.megatron import cpu, model, parallel

    cpu.install()
    # one row a token: nothing is padded
    job = TrainConfig.model_validate({"model": {"vocab_size_multiple": 1}, "train": {"device": "cpu"}})
    parallel.start_groups(job)
    counts = {}
    for name in list_cards():
        with FakeTensorMode(allow_non_fake_inputs=True):
            chunks = model.build_chunks(load_card(name), job, perform_initialization=False)
        sizes = {"base": 0, "mtp": 0}
        for parameter_name, parameter in chunks[0].named_parameters():
            sizes["mtp" if parameter_name.startswith("mtp.") else "base"] += parameter.numel()
        counts[name] = sizes
    return counts


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, int]]:
    return run_ranks(build, 1, timeout=400)[0]


@pytest.mark.parametrize("name", list_cards())
def test_full_model_has_as_many_parameters_as_published(built, name):
    parameters, counted = built[name], counting.count(load_card(name))
    assert parameters == {"base": counted.total, "mtp": counted.mtp}
    assert parameters["base"] / 1e9 == pytest.approx(PUBLISHED[name]["total"], abs=5.0001e-4)
    assert parameters["mtp"] / 1e9 == pytest.approx(PUBLISHED[name]["mtp"], abs=5.0001e-4)
