"""How a global batch is cut into micro-batches changes nothing but time, and each micro-batch's gradient counts once.

The balance loss of sequences has no say in it. Those of the micro-batch and of the global batch so far depend on the
cut by definition (a load is counted over one micro-batch, or over those up to it): docs/training.md says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import parity
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work
TOLERANCE = 1e-5
GUIDE = Path(__file__).parents[2] / "docs" / "training.md"

CUTS = {"8 x 1": 1, "4 x 2": 2, "2 x 4": 4, "1 x 8": 8}
MODELS = {"deepseek-v3": {}, "gpt-oss-20b": {}}  # MLA, shared expert, MTP; sinks and biases
LAYOUTS = {
    "data-parallel": {"expert_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"},
}
SIZES = [
    (layout, size) for layout, sizes in {"data-parallel": (1, 2, 4), "pipeline": (1, 4, 8)}.items() for size in sizes
]
SUMS = {
    "plain": {},
    "overlapped": {"overlap_grad_reduce": True},
    "overlapped pipeline": {"overlap_grad_reduce": True, "pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"},
    "experts": {"overlap_grad_reduce": True, "expert_parallel_size": 2},
}


def cut(rank: int, world_size: int) -> dict[str, Any]:
    cases = {
        (card, aux, name): parity.Case(card, 1, aux=aux, micro_batch_size=size, steps=1)
        for card in MODELS
        for aux in ("sequence", "micro_batch", "global_batch")
        for name, size in CUTS.items()
    }
    return parity.run(rank, world_size, cases)


def cut_over_two(rank: int, world_size: int) -> dict[str, Any]:
    """By layout and size of a micro-batch: the same sequences as one process has in `cut`."""
    cases = {
        (layout, size): parity.Case("deepseek-v3", 2, LAYOUTS[layout], micro_batch_size=size, steps=1)
        for layout, size in SIZES
    }
    return parity.run(rank, world_size, cases)


def loss_functions(rank: int, world_size: int) -> dict[str, Any]:
    """What ours gives for six losses of which four count, and how a step ends with others."""
    from tests.engines import helpers

    from maniple.engines.megatron import step
    from maniple.models import load_card

    ours = step.reduce_loss
    total, tokens, log = ours(torch.tensor([[1, 0, 1], [1, 1, 0]]), torch.arange(6.0).view(2, 3).bfloat16())
    found: dict[str, Any] = {"given": (total.item(), tokens.item(), str(tokens.dtype), log["loss"].tolist())}
    card = load_card("gpt-oss-20b").tiny()
    batches = helpers.make_batches(card.vocab_size, 2, 2)
    for name, wrong in {
        "mean": lambda mask, losses: (losses.mean(), {"loss": losses.mean()}),
        "four": lambda mask, losses: (*ours(mask, losses), None),
        "alone": lambda mask, losses: losses.mean(),
    }.items():
        step.reduce_loss = wrong
        try:
            helpers.Engine(card, helpers.make_job()).step(batches)
        except TypeError as error:
            found[name] = str(error)
    step.reduce_loss = ours
    return found


def gradients_alone(rank: int, world_size: int) -> dict[str, Any]:
    """By layout: the gradient of three micro-batches in one step, and of each alone, times the tokens divided by.

    A step's gradient is a sum over its tokens, divided by their number; a balance loss is a mean over micro-batches,
    so there is none.
    """
    from tests.engines import helpers

    from maniple.engines.megatron.gradients import zero_unwritten
    from maniple.models import load_card

    def forget(engine: helpers.Engine) -> None:
        """What the buffers held before a step is nothing to it."""
        for chunk in engine.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                buffer.grad_data.fill_(torch.nan)

    card = load_card("deepseek-v3").tiny()
    engine = helpers.Engine(card, helpers.make_job())
    forget(engine)
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    zero_unwritten(engine.chunks)
    found: dict[str, Any] = {"unreached": max(g.abs().max().item() for g in engine.gradients().values())}
    for name, parallel in SUMS.items():
        ranks = 1 if name == "overlapped pipeline" else 2  # data-parallel ones
        batches = helpers.make_batches(card.vocab_size, 3 * ranks, 1)

        def step(chosen: list, parallel=parallel) -> tuple[dict[str, torch.Tensor], int]:
            job = helpers.make_job(
                parallel=parallel,
                moe={"aux_loss_type": "none", "aux_loss_coefficient": 0.0, "z_loss_coefficient": 0.0},
                train={"micro_batch_size": 1, "global_batch_size": len(chosen)},
            )
            engine = helpers.Engine(card, job)
            forget(engine)
            stats = engine.step(chosen[engine.data_parallel_rank :: engine.data_parallel_size])
            return {key: g * stats.tokens for key, g in engine.gradients().items()}, stats.tokens

        together, tokens = step(batches)
        apart = [step(batches[at : at + ranks]) for at in range(0, len(batches), ranks)]
        found[name] = {
            "errors": {key: parity.error(g, sum(one[key] for one, _ in apart)) for key, g in together.items()},
            "tokens": (tokens, sum(count for _, count in apart)),
        }
    return found


@pytest.fixture(scope="module")
def results() -> dict[Any, dict[str, Any]]:
    return run_ranks(cut, 1, timeout=400)[0]


def two(rank: int, world_size: int) -> dict[str, Any]:
    return {"sums": gradients_alone(rank, world_size), "cuts": cut_over_two(rank, world_size)}


@pytest.fixture(scope="module")
def losses() -> dict[str, Any]:
    return run_ranks(loss_functions, 1)[0]


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return run_ranks(two, 2, timeout=400)


@pytest.mark.parametrize("name", list(CUTS)[1:])
@pytest.mark.parametrize("card", MODELS)
def test_the_cut_changes_nothing(results, card, name):
    found = parity.judge([results[card, "sequence", name]], results[card, "sequence", "8 x 1"])
    assert not found.too_far(TOLERANCE)
    assert found.counts_agree
    assert not found.missing


@pytest.mark.parametrize(("layout", "size"), SIZES)
def test_the_cut_changes_nothing_over_two_processes(results, pair, layout, size):
    found = parity.judge([rank["cuts"][layout, size] for rank in pair], results["deepseek-v3", "sequence", "8 x 1"])
    assert not found.too_far(TOLERANCE)
    assert found.counts_agree
    assert not found.missing
    assert not found.unequal


@pytest.mark.parametrize("aux", ["micro_batch", "global_batch"])
def test_which_losses_depend_on_the_cut_is_said(results, aux):
    losses = [results["deepseek-v3", aux, name]["stats"][0].aux_loss for name in CUTS]
    assert len({round(loss, 5) for loss in losses}) == len(CUTS)  # else the guide is wrong
    assert f"`{aux}`" in GUIDE.read_text().split("## Layouts")[1].split("\n## ")[0]


def test_the_balance_loss_does_not_depend_on_how_often_it_is_attached(results):
    """All sequences at once: both losses over tokens see one batch, and must be one loss."""
    one, other = (results["deepseek-v3", aux, "1 x 8"] for aux in ("micro_batch", "global_batch"))
    assert not parity.judge([one], other).too_far(1e-6)


@pytest.mark.parametrize("name", SUMS)
def test_a_gradient_is_the_sum_of_its_micro_batches(pair, name):
    for rank in pair:
        together, apart = rank["sums"][name]["tokens"]
        assert together == apart
        assert not {key: e for key, e in rank["sums"][name]["errors"].items() if not e <= TOLERANCE}


def test_the_loss_function_says_how_many_tokens_count(losses):
    assert losses["given"] == (9.0, 4, "torch.int32", [9.0, 4.0])


def test_a_gradient_that_no_micro_batch_reached_is_zero(pair):
    assert [rank["sums"]["unreached"] for rank in pair] == [0.0, 0.0]


@pytest.mark.parametrize(("wrong", "size"), [("mean", "2 values"), ("four", "4 values"), ("alone", "a Tensor")])
def test_a_loss_function_that_gives_otherwise_is_refused(losses, wrong, size):
    """Of two values upstream's schedule would take the first for a mean, and count no token."""
    wanted = f"a loss function gives (sum of losses, number of tokens, what is logged), and it gave {size}"
    assert losses[wrong] == wanted
