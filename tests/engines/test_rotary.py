"""Queries and keys turned by our function, as on a GPU, give the losses and gradients of Megatron-Core's operators."""

from __future__ import annotations

import pytest
import torch
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(300)  # the first test waits for the process that does the work
CARDS = ("glm-4.5", "gpt-oss-20b")  # half of each head; whole heads and YaRN, whose factor is not 1


def both_ways(rank: int, world_size: int) -> dict[str, list]:
    from tests.engines import helpers

    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.attention import GroupedAttention
    from maniple.models import load_card

    found: dict[str, list] = {}
    for name in CARDS:
        card = load_card(name).tiny()
        for ours in (False, True):
            GroupedAttention._takes_kernel = lambda self, hidden, others, ours=ours: ours  # `hidden` is on a CPU
            engine = helpers.Engine(card, helpers.make_job(recompute={"granularity": "full"} if ours else {}))
            stats = engine.step(helpers.make_batches(card.vocab_size, 2, 2))
            found.setdefault(name, []).append((stats.loss, engine.gradients()))
            parallel.stop_groups()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list]:
    return run_ranks(both_ways, 1, timeout=250)[0]


@pytest.mark.parametrize("card", CARDS)
def test_losses_and_gradients_are_upstreams(card, found):
    (loss, gradients), (own_loss, own_gradients) = found[card]
    assert own_loss == pytest.approx(loss, rel=1e-6)
    for name, wanted in gradients.items():
        torch.testing.assert_close(own_gradients[name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert any("linear_qkv" in name and float(wanted.abs().max()) > 0 for name, wanted in gradients.items())
