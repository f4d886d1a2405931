"""The router in the engine: what it counts is exact, counted once, and neither rounded nor cast with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "first layers": {"granularity": "full", "num_layers": 2},  # a dense and an MoE layer
    "moe": {"granularity": "selective", "modules": ["moe"]},
}
AUX = ("sequence", "micro_batch", "global_batch")
AUX_WEIGHT, Z_WEIGHT, SCALE = 0.3, 0.1, 0.25


def check(rank: int, world_size: int) -> dict[str, Any]:
    """In a process of its own: everything that the tests look at."""
    steps = {aux: {name: _step(aux, words) for name, words in {"none": {}, **RECOMPUTE}.items()} for aux in AUX}
    return {
        "steps": steps,
        "eval": _evaluated(),
        "casts": _casts(),
        "counts": _counts(),
        "padding": _padding(),
        "gradients": {aux: _gradient(aux) for aux in AUX},
    }


def _step(aux: str, recompute: dict[str, Any]) -> dict[str, Any]:
    """One step of a model with a dense layer, MoE layers and an MTP layer."""
    from tests.engines import helpers

    from maniple.engines.megatron.model import routers

    card = load_card("deepseek-v3").tiny()
    engine = helpers.Engine(card, helpers.make_job(moe={"aux_loss_type": aux}, recompute=recompute))
    stats = engine.step(helpers.make_batches(card.vocab_size, 2, 2))
    left = [
        int(counts.abs().sum())
        for router in routers(engine.chunks).values()
        for counts in (router.local_tokens_per_expert, router.running_counts, router.loss_sums)
    ]
    return {"stats": stats, "gradients": engine.gradients(), "left": left}


def _evaluated() -> list[float]:
    """Sum of all counts and losses after validation."""
    from tests.engines import helpers

    from maniple.engines.megatron import step
    from maniple.engines.megatron.model import routers

    card = load_card("deepseek-v3").tiny()
    engine = helpers.Engine(card, helpers.make_job(moe={"aux_loss_type": "global_batch"}, train={"eval_batches": 1}))
    batches = helpers.make_batches(card.vocab_size, 2, 2)
    step.evaluate(engine.chunks, [iter(batches)], engine.job, engine.device)
    return [
        float(buffer.abs().sum())
        for router in routers(engine.chunks).values()
        for buffer in (router.local_tokens_per_expert, router.running_counts, router.loss_sums)
    ]


def _router(**sections: dict[str, Any]):
    from tests.engines import helpers

    from maniple.engines.megatron.model import routers

    engine = helpers.Engine(load_card("deepseek-v3").tiny(), helpers.make_job(**sections))
    return engine.chunks[0], routers(engine.chunks)[1]


def _casts() -> dict[str, list[str]]:
    """Dtypes of the router's buffers and of its weight, in a bf16 job and after casts by hand; and the bias, kept."""
    chunk, router = _router(precision={"dtype": "bf16"})
    seen = {"bf16 job": _dtypes(router)}
    bias_E = router.expert_bias
    bias_E.copy_(0.1 + 1e-5 * torch.arange(8))  # bf16 would make them all alike
    wanted = bias_E.clone()
    for name, cast in {
        "bfloat16()": lambda: chunk.bfloat16(),
        "half()": lambda: chunk.half(),
        "to(dtype)": lambda: chunk.to(torch.bfloat16),
        "to(device)": lambda: chunk.to("cpu"),
        "double()": lambda: chunk.double(),
    }.items():
        cast()
        seen[name] = _dtypes(router)
    seen["bias kept"] = [str(torch.equal(router.expert_bias, wanted))]
    return seen


def _dtypes(router) -> list[str]:
    buffers = ("expert_bias", "loss_sums", "local_tokens_per_expert", "running_counts")
    return [str(getattr(router, name).dtype).removeprefix("torch.") for name in (*buffers, "weight")]


def _counts() -> dict[str, Any]:
    """Counts of a bf16 model as one more token comes, and where the balancing bias moves by them."""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    _, router = _router(precision={"dtype": "bf16"})
    logits_SBE = torch.linspace(1, 2, 8).view(1, 1, 8).to(torch.bfloat16)
    counted = {}
    for start in (256, 40_840, 1 << 24, 1 << 40):
        router.local_tokens_per_expert.fill_(start)
        _, ids_TK = router.routing(logits_SBE.requires_grad_())
        counted[start] = (router.local_tokens_per_expert.tolist(), ids_TK.flatten().tolist())
    router.local_tokens_per_expert.fill_(40_840)
    router.local_tokens_per_expert[3] += 1
    before = router.expert_bias.clone()
    moved = get_updated_expert_bias(router.local_tokens_per_expert, router.expert_bias, 1e-3) - before
    return {"counted": counted, "moved": torch.sign(moved).tolist()}


def _padding() -> dict[str, Any]:
    """Counts and losses of 12 tokens of two sequences, and of the same with four at the end that are padding."""
    found = {}
    for aux in AUX:
        _, router = _router(moe={"aux_loss_type": aux})
        logits_SBE = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
        padded_SBE = torch.cat([logits_SBE, torch.full((2, 2, 8), 9.0)])
        mask_SB = torch.arange(8)[:, None].expand(8, 2) >= 6
        for name, words in {"bare": (logits_SBE,), "padded": (padded_SBE, mask_SB)}.items():
            router.routing(words[0].requires_grad_(), *words[1:])
            found[aux, name] = (router.local_tokens_per_expert.tolist(), router.loss_sums.tolist())
            for buffer in (router.local_tokens_per_expert, router.running_counts, router.loss_sums):
                buffer.zero_()
    return found


def _gradient(aux: str) -> dict[str, Any]:
    """What a router with groups and a bias gives for two sequences of six tokens, and the gradient of its logits
    of `probs * main + SCALE * (balance loss + z loss)`."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    _, router = _router(moe={"aux_loss_type": aux, "aux_loss_coefficient": AUX_WEIGHT, "z_loss_coefficient": Z_WEIGHT})
    generator = torch.Generator().manual_seed(2)
    logits_SBE = torch.randn(6, 2, 8, generator=generator).requires_grad_()
    main_TK = torch.randn(12, 2, generator=generator)
    router.expert_bias.copy_(0.2 * torch.randn(8, generator=generator))
    probs_TK, ids_TK = router.routing(logits_SBE)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))  # as schedules do, after the forward pass
    (probs_TK * main_TK).sum().backward()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    return {
        "logits": logits_SBE.detach().reshape(12, 8),
        "main": main_TK,
        "ids": ids_TK,
        "bias": router.expert_bias.clone(),
        "gradient": logits_SBE.grad.reshape(12, 8),
        "losses": router.loss_sums.tolist(),
        "counts": router.local_tokens_per_expert.tolist(),
    }


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_ranks(check, 1, timeout=400)[0]


@pytest.mark.parametrize("aux", AUX)
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_changes_nothing(report, aux, name):
    wanted, got = report["steps"][aux]["none"], report["steps"][aux][name]
    for figure in ("loss", "mtp_loss", "aux_loss", "z_loss", "tokens", "expert_counts"):
        assert getattr(got["stats"], figure) == getattr(wanted["stats"], figure), figure
    assert got["stats"].grad_norm == pytest.approx(wanted["stats"].grad_norm, rel=1e-6)
    for key, gradient in wanted["gradients"].items():
        assert (got["gradients"][key] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), key


def test_each_token_is_counted_once(report):
    card = load_card("deepseek-v3").tiny()
    for steps in report["steps"].values():
        for found in steps.values():
            counts = found["stats"].expert_counts
            assert list(counts) == [1, 2, 3]  # the dense layer 0 has none, 3 is the MTP layer
            assert {sum(row) for row in counts.values()} == {4 * 24 * card.moe.topk}
            assert found["left"] == [0] * 9  # nothing is left for the next step


def test_validation_does_not_count(report):
    assert report["eval"] == [0.0] * 9


def test_casts_spare_what_must_be_exact(report):
    exact = ["float32", "float32", "int64", "int64"]
    casts = dict(report["casts"])
    assert casts.pop("bias kept") == ["True"]
    assert {name: found[:4] for name, found in casts.items()} == dict.fromkeys(casts, exact)
    weights = {name: found[4] for name, found in casts.items()}
    assert weights["bf16 job"] == weights["bfloat16()"] == weights["to(dtype)"] == weights["to(device)"] == "bfloat16"
    assert (weights["half()"], weights["double()"]) == ("float16", "float64")  # the casts did happen


def test_counts_are_exact_in_a_bf16_model(report):
    for start, (counts, ids) in report["counts"]["counted"].items():
        assert counts == [start + (expert in ids) for expert in range(8)]
        assert len(set(ids)) == 2
    # one token more than the others in 40,840 sends that expert's bias down and the others' up
    assert report["counts"]["moved"] == [1, 1, 1, -1, 1, 1, 1, 1]


@pytest.mark.parametrize("aux", AUX)
def test_padding_takes_no_part(report, aux):
    bare, padded = report["padding"][aux, "bare"], report["padding"][aux, "padded"]
    assert padded[0] == bare[0]
    assert sum(bare[0]) == 12 * 2
    assert padded[1] == pytest.approx(bare[1], rel=1e-6)
    assert min(bare[1]) > 0


def _by_definition(logits_TE: torch.Tensor, ids_TK: torch.Tensor, aux: str) -> tuple[torch.Tensor, float, float]:
    """(weights of the chosen, balance loss, z loss) of float64 logits; token t is of sequence t % 2."""
    scores_TE = logits_TE.sigmoid()
    chosen_TK = scores_TE.gather(1, ids_TK)
    probs_TK = 2.5 * chosen_TK / chosen_TK.sum(1, keepdim=True)
    shares_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    balance = 0.0
    parts = [slice(0, None, 2), slice(1, None, 2)] if aux == "sequence" else [slice(None)]
    for part in parts:
        load_E = torch.bincount(ids_TK[part].flatten(), minlength=8) * 8 / ids_TK[part].numel()
        balance += float((load_E * shares_TE[part].mean(0)).sum()) / len(parts)
    return probs_TK, balance, float(logits_TE.logsumexp(1).square().mean())


@pytest.mark.parametrize("aux", AUX)
def test_gradient_is_that_of_central_differences(report, aux):
    """In float64, over the choice that dispatch follows: of the routing weights, the balance loss and the z loss."""
    found = report["gradients"][aux]
    logits_TE, tokens = found["logits"].double(), found["logits"].shape[0]

    def value(moved_TE: torch.Tensor) -> float:
        probs_TK, balance, z = _by_definition(moved_TE, found["ids"], aux)
        # a loss weighs as much as the micro-batch's tokens: the step divides by all of them
        added = tokens * (AUX_WEIGHT * balance + Z_WEIGHT * z)
        return float((probs_TK * found["main"]).sum()) + SCALE * added

    wanted = torch.zeros_like(logits_TE)
    for place in torch.cartesian_prod(torch.arange(tokens), torch.arange(8)).tolist():
        step = torch.zeros_like(logits_TE)
        step[tuple(place)] = 1e-5
        wanted[tuple(place)] = (value(logits_TE + step) - value(logits_TE - step)) / 2e-5
    assert (found["gradient"] - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    _, balance, z = _by_definition(logits_TE, found["ids"], aux)
    assert found["losses"] == pytest.approx([balance, z], rel=1e-6)


def test_statistics_are_of_the_choice_that_dispatch_follows(report):
    """With four groups, of which two stay, and a bias: a choice without either counts otherwise."""
    for found in report["gradients"].values():
        assert found["counts"] == torch.bincount(found["ids"].flatten(), minlength=8).tolist()
        scores_TE = found["logits"].sigmoid()
        for plain_TE in (scores_TE, scores_TE + found["bias"]):
            counts = torch.bincount(plain_TE.topk(2).indices.flatten(), minlength=8).tolist()
            assert counts != found["counts"]
