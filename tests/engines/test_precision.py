"""Low-precision recipes in training jobs, on a CPU through the oracles: what runs in which recipe, and that it learns.

The whole jobs run in one process, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.metrics import read_metrics
from maniple.models import load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the process that does the work

CARDS = ("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b")  # MLA, dense layer, shared expert, MTP · GQA · biases
RECIPES = ("fp8", "fp8_block", "mxfp8")
# layers that stay bf16, and what is then said of all layers; the MTP layer of DeepSeek-V3 has number 3
RANGES: dict[tuple[str, str], tuple[dict[str, int], dict[str, str]]] = {
    ("deepseek-v3", "fp8"): ({"bf16_first_layers": 1}, {"bf16": "0", "fp8": "1-3"}),
    ("deepseek-v3", "mxfp8"): (
        {"bf16_first_layers": 1, "bf16_last_layers": 1},
        {"bf16": "0, 2-3", "mxfp8": "1"},
    ),
    ("qwen3-30b-a3b", "fp8_block"): ({"bf16_last_layers": 1}, {"bf16": "1", "fp8_block": "0"}),
}
# decibels of all gradients together, and of each: DeepSeek's tiny model has twice the layers, each more products deep
TOTAL = {"deepseek-v3": 11, "qwen3-30b-a3b": 19, "gpt-oss-20b": 19}
EACH = 7
RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "layers": {"granularity": "full", "layers": [0, 2, 3]},
    "selective": {"granularity": "selective", "modules": ["core_attn", "mlp", "moe"]},
    "activations": {"granularity": "selective", "modules": ["norm", "mla_up_proj", "moe_act"]},
    "experts": {"granularity": "selective", "modules": ["norm", "mla_up_proj", "experts", "shared_experts"]},
}


def work(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: every job and every step."""
    train(folder)
    return {
        "cached": cached(folder),
        "resumed": resumed(folder),
        "gradients": gradients(),
        "products": products(),
        "disagreement": disagreement(),
        "recomputed": recomputed(),
    }


def train(folder: Path) -> None:
    from tests.engines import jobs

    for card in CARDS:
        for recipe in ("bf16", *RECIPES):
            precision = {"dtype": "bf16", "recipe": recipe, **RANGES.get((card, recipe), ({}, {}))[0]}
            jobs.run(jobs.make_job(folder, f"{card}-{recipe}", precision=precision), jobs.tiny_card(card))


def gradients() -> dict[str, dict[str, tuple[float, float, list[str]]]]:
    """By card and recipe: SNR of all gradients against bf16's, the least of one, and those below `EACH`.

    Every token goes to every expert: a choice that flips is another function, not noise.
    """
    from tests.engines import helpers
    from tests.kernels.test_low_precision import snr

    found: dict[str, dict[str, tuple[float, float, list[str]]]] = {}
    for name in CARDS:
        card = load_card(name).tiny()
        router = {"group_topk": card.moe.router.num_groups}
        card = card.with_overrides({"moe": {"topk": card.moe.num_experts, "router": router}})
        by_recipe = {}
        for recipe in ("bf16", *RECIPES):
            engine = helpers.Engine(card, helpers.make_job(precision={"dtype": "bf16", "recipe": recipe}))
            engine.step(helpers.make_batches(card.vocab_size, 2, 2))
            # sinks of unit scale have gradients of sums that cancel
            by_recipe[recipe] = {k: g for k, g in engine.gradients().items() if not k.endswith("softmax_offset")}
        wanted = by_recipe.pop("bf16")
        whole = torch.cat([g.flatten() for g in wanted.values()])
        found[name] = {}
        for recipe, got in by_recipe.items():
            each = {key: snr(got[key], wanted[key]) for key in wanted}
            total = snr(torch.cat([g.flatten() for g in got.values()]), whole)
            found[name][recipe] = total, min(each.values()), [key for key, db in each.items() if not db >= EACH]
    return found


def products() -> tuple[set[str], set[str]]:
    """Linear layers of DeepSeek-V3's last decoder layer and of the rest of the model: (low-precision, bf16)."""
    from tests.engines import helpers

    from maniple.engines.megatron import precision
    from maniple.engines.megatron.model import unwrap

    job = helpers.make_job(precision={"dtype": "bf16", "recipe": "fp8"})
    engine = helpers.Engine(load_card("deepseek-v3").tiny(), job)
    kinds: tuple[set[str], set[str]] = set(), set()
    for name, module in unwrap(engine.chunks[0]).named_modules():
        if isinstance(module, precision.LINEARS) and not name.startswith(("decoder.layers.0.", "decoder.layers.1.")):
            kinds[precision.product_of(module) is None].add(name)
    return kinds


def disagreement() -> dict[str, str]:
    """What is said of layers of which one linear layer does not run in the recipe."""
    from tests.engines import helpers

    from maniple.engines.megatron import precision
    from maniple.engines.megatron.model import unwrap

    card = load_card("qwen3-30b-a3b").tiny()
    engine = helpers.Engine(card, helpers.make_job(precision={"dtype": "bf16", "recipe": "mxfp8"}))
    before = precision.in_short(precision.by_layer(engine.chunks))
    assert before == {"": "0-1"}, before  # nothing has run
    del unwrap(engine.chunks[0]).decoder.layers[1].self_attention.linear_proj.__dict__["_forward_impl"]
    engine.step(helpers.make_batches(card.vocab_size, 2, 2))
    return precision.in_short(precision.by_layer(engine.chunks))


@contextlib.contextmanager
def quantizing(cache: bool) -> Iterator[list[int]]:
    """Counts the weights that are quantized. With the cache each use is checked; without, there is none."""
    from maniple.kernels.quantize import QuantizedWeight, quantize_weight
    from maniple.kernels.quantize import cache as module

    count: list[int] = []
    call = QuantizedWeight.__call__

    def counted(*args, **kwargs):
        count.append(1)
        return quantize_weight(*args, **kwargs)

    def checked(self, w_GNK):
        self._check = True
        return call(self, w_GNK) if cache else counted(w_GNK, self._recipe, **self._settings)

    module.quantize_weight, QuantizedWeight.__call__ = counted, checked
    try:
        yield count
    finally:
        module.quantize_weight, QuantizedWeight.__call__ = quantize_weight, call


def weights(trainer) -> dict[str, torch.Tensor]:
    from maniple.engines.megatron.model import unwrap

    state = [unwrap(chunk).state_dict() for chunk in trainer.chunks]
    return {
        f"{number}.{name}": tensor.clone()
        for number, each in enumerate(state)
        for name, tensor in each.items()
        if isinstance(tensor, torch.Tensor)
    }


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert set(a) == set(b)
    return [name for name in a if not torch.equal(a[name], b[name])]


def cached(folder: Path) -> dict[str, Any]:
    """A job of two micro-batches a step with a validation after each, with and without the cache."""
    from tests.engines import jobs

    from maniple.engines.megatron import precision

    found: dict[str, Any] = {}
    ends = {}
    for name, cache in (("with", True), ("without", False)):
        job = jobs.make_job(
            folder,
            f"{name}-cache",
            precision={"dtype": "bf16", "recipe": "fp8_block"},
            train={"steps": 3, "eval_interval": 1},
        )
        with quantizing(cache) as count:
            trainer = jobs.run(job, jobs.tiny_card("deepseek-v3"))
        ends[name] = weights(trainer)
        found[name] = len(count)
    found["weights"] = len(list(precision.caches(trainer.chunks)))
    found["differ"] = differing(ends["with"], ends["without"])
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Four steps in one go, and two and two; the same checkpoint in other recipes; what a load frees."""
    from tests.engines import jobs

    from maniple.engines.megatron import precision

    card = jobs.tiny_card("gpt-oss-20b")

    def job(name: str, recipe: str, **checkpoint: Any):
        return jobs.make_job(
            folder, name, precision={"dtype": "bf16", "recipe": recipe}, checkpoint={"save_at_end": True, **checkpoint}
        )

    straight = jobs.run(job("straight", "fp8", save_interval=2), card)
    wanted = weights(straight)
    before = [cache.nbytes for cache in precision.caches(straight.chunks)]
    halfway = str(folder / "straight" / "checkpoints" / "step_00000002")
    again = jobs.run(job("again", "fp8", resume=halfway), card)
    differ = differing(weights(again), wanted)
    others = {
        recipe: jobs.run(job(f"as-{recipe}", recipe, resume=halfway), card).precision for recipe in ("bf16", "mxfp8")
    }
    precision.weights_loaded(straight.chunks)
    after = [cache.nbytes for cache in precision.caches(straight.chunks)]
    sizes = [p.numel() for n, p in straight.chunks[0].named_parameters() if p.dim() > 1 and _is_quantized(n)]
    return {"differ": differ, "others": others, "before": before, "after": after, "sizes": sizes}


def _is_quantized(name: str) -> bool:
    return name.endswith((".w13", ".w2", "linear_qkv.weight", "linear_proj.weight"))


def recomputed() -> dict[str, list[str]]:
    """By recipe and kind of recomputation: the gradients that it changes."""
    from tests.engines import helpers

    card = load_card("deepseek-v3").tiny()
    found: dict[str, list[str]] = {}
    for recipe in ("fp8", "fp8_block", "mxfp8"):
        wanted = None
        for name, words in {"none": {}, **RECOMPUTED}.items():
            job = helpers.make_job(precision={"dtype": "bf16", "recipe": recipe}, recompute=words)
            engine = helpers.Engine(card, job)
            engine.step(helpers.make_batches(card.vocab_size, 2, 1))
            got = engine.gradients()
            wanted = wanted or got
            found[f"{recipe}: {name}"] = differing(got, wanted)
    return found


def dry(rank: int, world_size: int, folder: Path) -> dict[str, tuple[int, int]]:
    """By recipe: (parameters, bytes of activations and temporaries) of a dry run, in a process of its own."""
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import one_rank

    found = {}
    with jobs.no_process_group():
        for recipe in ("bf16", *RECIPES):
            job = jobs.make_job(
                folder,
                "dry",
                parallel={"tensor_parallel_size": 2, "expert_parallel_size": 2},
                precision={"dtype": "bf16", "recipe": recipe},
            )
            traced = one_rank.trace(job, load_card("deepseek-v3").tiny(), 0, 2)
            found[recipe] = traced.parameters, traced.activation_bytes
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def report(folder) -> dict[str, Any]:
    return run_ranks(work, 1, folder, timeout=500)[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("card", CARDS)
def test_a_job_learns_as_in_bf16_and_says_what_ran(report, folder, card, recipe):
    losses, usual = (
        [r["loss"] for r in read_metrics(folder / f"{card}-{name}" / "metrics.jsonl") if "loss" in r]
        for name in (recipe, "bf16")
    )
    assert losses[0] == pytest.approx(usual[0], rel=2e-3)
    assert losses != usual
    assert all(later < sooner for sooner, later in itertools.pairwise(losses))
    assert losses[-1] == pytest.approx(usual[-1], rel=0.03)
    summary = json.loads((folder / f"{card}-{recipe}" / "summary.json").read_text())
    last = {"deepseek-v3": 3}.get(card, 1)
    _, said = RANGES.get((card, recipe), ({}, {recipe: f"0-{last}"}))
    assert summary["precision"] == said
    log = (folder / f"{card}-{recipe}" / "logs" / "rank_0.log").read_text()
    assert f"layers: {'; '.join(f'{name}: {layers}' for name, layers in said.items())}\n" in log
    assert log.count("layers: ") == 1  # not every step anew, and each choice of kernels once
    chosen = [line.split("kernels: ")[1] for line in log.splitlines() if "kernels: " in line]
    assert len(set(chosen)) == len(chosen)
    assert f"kernels: quantized_linear on cpu: grouped (bf16 tensors, recipe {recipe})" in log
    multiplied = "emulated" if recipe == "mxfp8" else "reference"
    assert f"kernels: quantized_grouped_gemm on cpu: {multiplied} (bf16 tensors, recipe {recipe})" in log


def test_a_job_in_bf16_says_so(report, folder):
    summary = json.loads((folder / "deepseek-v3-bf16" / "summary.json").read_text())
    assert summary["precision"] == {"bf16": "0-3"}
    assert "quantize" not in (folder / "deepseek-v3-bf16" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("card", CARDS)
def test_gradients_are_bf16_s_but_for_noise(report, card, recipe):
    total, _, low = report["gradients"][card][recipe]
    assert total >= TOTAL[card]
    assert not low
    assert total < 40  # it was not bf16


def test_projections_are_quantized_and_heads_are_not(report):
    low, plain = report["products"]
    names = {
        *(f"self_attention.{name}" for name in ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")),
        *(f"self_attention.{name}" for name in ("linear_kv_up_proj", "linear_proj")),
        *(f"mlp.shared_experts.{name}" for name in ("linear_fc1", "linear_fc2")),
    }
    layers = "decoder.layers.2", "mtp.layers.0.mtp_model_layer"
    assert low == {f"{layer}.{name}" for layer in layers for name in names}
    assert plain == {"output_layer", "mtp.layers.0.eh_proj"}


def test_a_layer_that_does_not_run_as_asked_is_seen(report):
    assert report["disagreement"] == {"mxfp8": "0", "bf16+mxfp8": "1"}


def test_weights_are_quantized_once_a_step_and_nothing_else_changes(report):
    found = report["cached"]
    assert not found["differ"]
    # first step; validation and step after each of two updates; validation after the last
    assert found["with"] == 4 * found["weights"]
    assert found["without"] > 2 * found["with"]
    # MLA's five projections in four layers, two matrices of dense MLP and of each shared expert, two of each layer's
    # experts
    assert found["weights"] == 4 * 5 + 2 + 3 * 2 + 3 * 2


def test_a_resumed_job_is_the_same_bit_for_bit(report):
    assert not report["resumed"]["differ"]


def test_a_checkpoint_is_of_no_recipe(report):
    assert report["resumed"]["others"] == {"bf16": {"bf16": "0-1"}, "mxfp8": {"mxfp8": "0-1"}}


def test_two_bytes_a_weight_are_kept_and_freed_by_a_load(report):
    before, after, sizes = (report["resumed"][key] for key in ("before", "after", "sizes"))
    assert len(before) == len(sizes) == 8
    assert sum(before) == pytest.approx(2 * sum(sizes), rel=0.01)
    assert not any(after)


def test_recomputation_changes_no_bit(report):
    assert len(report["recomputed"]) == 3 * (1 + len(RECOMPUTED))
    assert not {name: differ for name, differ in report["recomputed"].items() if differ}


def test_a_dry_run_counts_what_recipes_keep(folder):
    found = run_ranks(dry, 1, folder, timeout=120)[0]
    assert len({parameters for parameters, _ in found.values()}) == 1
    assert found["fp8"][1] > found["bf16"][1]
    assert found["fp8"][1] == pytest.approx(found["fp8_block"][1], rel=0.02)


def test_gfx942_multiplies_numbers_of_its_own(monkeypatch):
    from maniple.engines.megatron import precision
    from maniple.kernels import chips

    for chip, recipe, dtype in (
        ("gfx942", "fp8", torch.float8_e4m3fnuz),
        ("gfx942", "fp8_block", torch.float8_e4m3fnuz),
        ("gfx942", "mxfp8", torch.float8_e4m3fn),
        ("gfx950", "fp8", torch.float8_e4m3fn),
        ("", "fp8_block", torch.float8_e4m3fn),
    ):
        monkeypatch.setattr(chips, "chip", lambda chip=chip: chip)
        assert precision.float8(recipe) == dtype


def test_a_gpu_without_kernels_is_refused_and_not_left_to_the_oracle():
    from maniple.engines.megatron import precision
    from maniple.errors import UserError

    weight: Any = types.SimpleNamespace(is_cuda=True, shape=(64, 32))
    with pytest.raises(UserError, match=r"precision.recipe fp8 has no kernels for .* a matrix \[64, 32\]: set"):
        precision._refuse_oracle("grouped reference", "fp8", weight)
    precision._refuse_oracle("grouped hopper", "fp8", weight)
    precision._refuse_oracle("reference", "fp8", types.SimpleNamespace(is_cuda=False, shape=(64, 32)))
