"""The engine's model equals the plain one: logits, losses, every gradient, router statistics, bias and weight updates.

The engine runs in fp32 through Megatron-Core's schedule and DDP buffers, the plain model in float64 (so that what is
measured is the engine's error alone), over two micro-batches with masked labels, aux loss, z-loss and expert bias on.
Two steps are run, so that what a step must reset is seen to be reset.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks
from tests.oracles.plain_model import Forward, Objective, PlainModel

from maniple.config.schema import TrainConfig
from maniple.models import load_card
from maniple.models.card import ModelCard

pytestmark = pytest.mark.timeout(480)  # the first test waits for the engine's process, which runs all models
TOLERANCE = 1e-5  # of the largest magnitude in the tensor
MODELS: dict[str, tuple[str, dict]] = {
    "deepseek-v3": ("deepseek-v3", {}),  # MLA, dense layer, groups by the two best, bias, shared expert, MTP
    "deepseek-v3-two-mtp": ("deepseek-v3", {"num_layers": 2, "num_mtp_layers": 2}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),  # query without low rank
    "deepseek-v2": ("deepseek-v2", {}),  # groups by the best, softmax, route scale
    "kimi-k2": ("kimi-k2", {}),  # YaRN with equal betas
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),  # GQA, norm of each head
    "qwen3-micro-batch": ("qwen3-30b-a3b", {}),
    "qwen3-global-batch": ("qwen3-30b-a3b", {}),
    "glm-4.5": ("glm-4.5", {}),  # part of a head rotated, biases of q, k, v, MTP
    "minimax-m2": ("minimax-m2", {}),  # norm over all heads
    "gpt-oss-20b": ("gpt-oss-20b", {}),  # sinks, windows, biases, score after top-k
    "gpt-oss-clamped": ("gpt-oss-20b", {"moe": {"activation_limit": 0.5}}),  # the limit is met at unit scale
    "mixtral-8x7b": ("mixtral-8x7b", {}),
}
AUX = {"qwen3-micro-batch": "micro_batch", "qwen3-global-batch": "global_batch"}
Report = dict[str, Any]


def compare(rank: int, world_size: int) -> dict[str, Report | str]:
    """In a process of its own: for each model how far the engine is from the plain one, or a traceback."""
    from tests.engines import helpers

    reports: dict[str, Report | str] = {}
    for name, (card_name, overrides) in MODELS.items():
        try:
            card = load_card(card_name).tiny().with_overrides(overrides)
            job = helpers.make_job(moe={"aux_loss_type": AUX.get(name, "sequence")})
            engine = helpers.Engine(card, job)
            batches = helpers.make_batches(card.vocab_size, 4, 2)
            reports[name] = [_step(engine, batches[:2]), _step(engine, batches[2:])]
        except Exception:
            reports[name] = traceback.format_exc()
    return reports


def _step(engine, batches: list[dict[str, torch.Tensor]]) -> Report:
    before = engine.weights()
    seen = [engine.look(batch) for batch in batches]
    stats = engine.step(batches)
    gradients, after = engine.gradients(), engine.weights()

    weights = {name: w.double().requires_grad_(name in gradients) for name, w in before.items()}
    plain = PlainModel(engine.card, weights, _objective(engine.job))
    passes = [plain.forward(b["tokens"], b["labels"], b["loss_mask"].double()) for b in batches]
    names = [name for name, w in weights.items() if w.requires_grad]
    wanted = dict(zip(names, torch.autograd.grad(plain.total(passes), [weights[n] for n in names]), strict=True))
    layers = passes[0].counts.keys()
    report: Report = {
        "logits": max(error(s[0], p.logits_BSV) for s, p in zip(seen, passes, strict=True)),
        "losses": max(error(s[1], p.losses_BS) for s, p in zip(seen, passes, strict=True)),
        "unmatched": sorted(set(names) ^ set(gradients)),
        "gradients": {name: error(gradients[name], wanted[name]) for name in names},
        "zeros": [name for name in names if not wanted[name].any()],
        "tokens": (stats.tokens, sum(p.tokens for p in passes)),
        "loss": (stats.loss, float(sum(p.loss_sum for p in passes)) / sum(p.tokens for p in passes)),
        "aux_loss": (stats.aux_loss, _mean([_mean(p.aux.values()) for p in passes])),
        "z_loss": (stats.z_loss, _mean([_mean(p.z.values()) for p in passes])),
        "grad_norm": (stats.grad_norm, float(sum(g.square().sum() for g in wanted.values()) ** 0.5)),
        "counts": (
            stats.expert_counts,
            {n: torch.tensor([p.counts[n] for p in passes]).sum(0).tolist() for n in layers},
        ),
        "bias": {n: error(after[n], b) for n, b in _updated_biases(engine.card, before, passes).items()},
        "weights": {n: error(after[n], w) for n, w in _updated_weights(engine.job, before, gradients).items()},
    }
    if engine.card.num_mtp_layers:
        sums = torch.tensor([p.mtp for p in passes]).sum(0)  # by depth: losses, labels
        report["mtp_loss"] = (stats.mtp_loss, _mean(sums[:, 0] / sums[:, 1]))
    return report


def _objective(job: TrainConfig) -> Objective:
    coefficient = job.moe.aux_loss_coefficient
    return Objective(job.moe.aux_loss_type, coefficient, job.moe.z_loss_coefficient, job.train.mtp_loss_coefficient)


def _updated_biases(card: ModelCard, before: dict[str, torch.Tensor], passes: list[Forward]) -> dict[str, torch.Tensor]:
    """`bias + 0.001 * sign(mean load - load)` for each router that has one (Wang et al., 2024)."""
    biases = {}
    for layer in passes[0].counts if card.moe.router.expert_bias else ():
        depth = layer - card.num_layers
        place = f"decoder.layers.{layer}" if depth < 0 else f"mtp.layers.{depth}.mtp_model_layer"
        name = f"{place}.mlp.router.expert_bias"
        load_E = torch.tensor([p.counts[layer] for p in passes]).sum(0).double()
        biases[name] = before[name] + 1e-3 * torch.sign(load_E.mean() - load_E)
    return biases


def _updated_weights(job: TrainConfig, before: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]):
    """AdamW's first step (m = g, v = g^2 after the correction of bias); matrices decay, biases and norms do not."""
    section, updated = job.optimizer, {}
    for name, g in gradients.items():
        decays = g.dim() > 1 and not name.endswith((".b13", ".b2"))
        w = before[name].double() * (1 - section.learning_rate * section.weight_decay * decays)
        updated[name] = w - section.learning_rate * g.double() / (g.double().abs() + section.epsilon)
    return updated


def _mean(values) -> float:
    values = [float(v) for v in values]
    return sum(values) / len(values)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest magnitude wanted; NaN (which no bound admits) if there is one anywhere."""
    scale = wanted.abs().max()
    return float((got.double() - wanted.double()).abs().max() / (scale if scale > 0 else 1))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report | str]:
    return run_ranks(compare, 1, timeout=180)[0]


@pytest.fixture(params=MODELS)
def report(request, reports) -> list[Report]:
    found = reports[request.param]
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found


def test_logits_and_losses(report):
    for step in report:
        assert step["logits"] <= TOLERANCE
        assert step["losses"] <= TOLERANCE
        assert step["loss"][0] == pytest.approx(step["loss"][1], rel=TOLERANCE)
        assert step["tokens"][0] == step["tokens"][1]


def test_every_gradient(report):
    for step in report:
        assert not step["unmatched"]
        assert not step["zeros"]
        assert not {name: e for name, e in step["gradients"].items() if not e <= TOLERANCE}
        assert step["grad_norm"][0] == pytest.approx(step["grad_norm"][1], rel=TOLERANCE)


def test_statistics(report):
    for step in report:
        assert step["counts"][0] == step["counts"][1]
        for name in ("aux_loss", "z_loss", "mtp_loss"):
            if name in step:
                assert step[name][0] == pytest.approx(step[name][1], rel=TOLERANCE), name


def test_updates(report):
    assert not {name: e for name, e in report[0]["weights"].items() if not e <= 1e-6}
    for step in report:
        assert not {name: e for name, e in step["bias"].items() if not e <= 1e-6}
