"""Converted weights in several layouts: loss, MTP loss and every gradient are transformers' own.

One conversion serves all layouts. What each rank holds is compared with its part of transformers' gradients, whole and
put into a checkpoint's form by the same links that convert weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(900)
CARDS = {
    "deepseek-v3": ("deepseek-v3", {"num_layers": 2}),
    "deepseek-v3-two-mtp": ("deepseek-v3", {"num_layers": 2, "num_mtp_layers": 2}),
    "glm-4.5": ("glm-4.5", {"num_layers": 2}),
    "gpt-oss": ("gpt-oss-20b", {}),
    "qwen3": ("qwen3-30b-a3b", {}),
    "minimax-m2": ("minimax-m2", {}),
    "deepseek-v2": ("deepseek-v2", {"num_layers": 2}),
    "kimi-k2": ("kimi-k2", {"num_layers": 2}),
    "mixtral": ("mixtral-8x7b", {}),
}
LAYOUTS = {
    "alone": (1, {}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2-etp2": (2, {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
TOLERANCE = 2e-5


def prepare(rank: int, world_size: int, folder: Path) -> dict:
    """Weights of each model, converted; transformers' figures and gradients as a checkpoint has them."""
    from tests.engines import helpers
    from tests.oracles import transformers_model

    from maniple.engines.megatron.huggingface import families
    from maniple.engines.megatron.huggingface.from_hf import from_hf

    torch.set_num_threads(1)
    figures = {}
    for name, (card_name, overrides) in CARDS.items():
        card = load_card(card_name).tiny().with_overrides(overrides)
        source = transformers_model.save(card, folder / name / "hf")
        done = from_hf(source, folder / name / "weights")
        batches = helpers.make_batches(card.vocab_size, 2, 2)
        loss, mtp_loss, gradients = transformers_model.objective(card, source, batches, 0.5)
        whole = {}
        for chunk in families.chunks(card):
            if chunk.fp32:
                continue
            part = torch.full(chunk.size, torch.nan)
            for link in chunk.links:
                theirs = gradients[link.name]
                link.put(theirs if link.row is None else theirs[link.row], part)
            at = tuple(slice(a, a + n) for a, n in zip(chunk.offset, chunk.size, strict=True))
            whole.setdefault(chunk.key, torch.full(chunk.shape, torch.nan))[at] = part
        torch.save(whole, folder / name / "gradients.pt")
        figures[name] = loss, mtp_loss, done.card.model_dump(mode="json")
    return figures


def compare(rank: int, world_size: int, folder: Path, parallel: dict, figures: dict) -> dict:
    """By model: (loss, MTP loss, error of each tensor's gradient on this rank)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from tests.engines import helpers

    from maniple.engines.megatron import model
    from maniple.engines.megatron.checkpoint import state, weights
    from maniple.models.card import ModelCard

    torch.set_num_threads(1)
    found = {}
    for name, (_, _, card) in figures.items():
        card = ModelCard.model_validate(card)
        if card.moe.linear_bias and parallel.get("expert_tensor_parallel_size"):
            continue  # refused: maniple.config.check
        if parallel.get("pipeline_parallel_size"):
            parallel = parallel | {"pipeline_layout": "Et|t" + "m" * card.num_mtp_layers + "L"}
        job = helpers.make_job(
            parallel=parallel,
            moe={"aux_loss_type": "none", "aux_loss_coefficient": 0.0, "z_loss_coefficient": 0.0},
            model={"vocab_size_multiple": 1},
        )
        engine = helpers.Engine(card, job)
        weights.load(folder / name / "weights", engine.chunks, engine.optimizer, card=card, job=job)
        batches = helpers.make_batches(card.vocab_size, 2, 2)
        if engine.data_parallel_size > 1:
            batches = batches[engine.data_parallel_rank :: engine.data_parallel_size]
        stats = engine.step(batches)
        with torch.no_grad():
            for chunk in map(model.unwrap, engine.chunks):
                for parameter in chunk.parameters():
                    parameter.data = parameter.main_grad.clone()
        whole = torch.load(folder / name / "gradients.pt", weights_only=True)
        errors = {}
        for part in nested_values(load_preprocess(state.weights(engine.chunks))[0]):
            if part.key in whole:
                at = tuple(slice(a, a + n) for a, n in zip(part.global_offset, part.data.shape, strict=True))
                scale = whole[part.key].abs().max()
                error = float((part.data - whole[part.key][at]).abs().max() / (scale if scale else 1))
                errors[part.key] = max(errors.get(part.key, 0.0), error)
        found[name] = stats.loss, stats.mtp_loss, errors
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple[dict, dict, dict]:
    folder = tmp_path_factory.mktemp("hf")
    figures = run_ranks(prepare, 1, folder, timeout=200)[0]
    keys = {name: torch.load(folder / name / "gradients.pt", weights_only=True).keys() for name in CARDS}
    ranks = {
        layout: run_ranks(compare, world, folder, parallel, figures, timeout=200)
        for layout, (world, parallel) in LAYOUTS.items()
    }
    return figures, keys, ranks


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in CARDS for layout in LAYOUTS if (name, layout) != ("gpt-oss", "tp2-etp2")],
)
def test_loss_and_gradients_are_those_of_transformers(name, layout, outcomes):
    figures, keys, ranks = outcomes
    loss, mtp_loss, _ = figures[name]
    seen: dict[str, float] = {}
    for found in ranks[layout]:
        here, here_mtp, errors = found[name]
        assert here == pytest.approx(loss, rel=TOLERANCE)
        assert (here_mtp is None) == (mtp_loss is None)
        assert here_mtp is None or here_mtp == pytest.approx(mtp_loss, rel=TOLERANCE)
        for key, error in errors.items():
            seen[key] = max(seen.get(key, 0.0), error)
    assert seen.keys() == keys[name]
    worst = max(seen, key=lambda key: (seen[key] != seen[key], seen[key]))
    assert seen[worst] <= TOLERANCE, worst
