"""Every family computes what transformers' own class computes from the same weights: logits, loss, every gradient.

The weights go through files, as a user's do: saved by transformers, converted, loaded by the engine. Sizes are both
unequal, so that a wrong shape fails, and square, so that a wrong transpose cannot hide behind a shape that fits.
"""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(480)  # the first test waits for the process that runs all models
SQUARE = {"moe": {"expert_ffn_size": 64}}  # hidden_size 64
MODELS: dict[str, tuple[str, dict]] = {
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3-square": (
        "deepseek-v3",
        {"moe": {"expert_ffn_size": 64, "shared_ffn_size": 64}, "dense_ffn_size": 64},
    ),
    "deepseek-v3-no-yarn": ("deepseek-v3", {"rope": {"yarn": None}}),
    "deepseek-v3-other-epsilon": ("deepseek-v3", {"norm_eps": 1e-2}),  # which latent norms do not have
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "kimi-k2": ("kimi-k2", {}),
    "glm-4.5": ("glm-4.5", {}),
    "glm-4.5-air": ("glm-4.5-air", {}),  # no norm of queries and keys
    "glm-4.5-groups": ("glm-4.5", {"moe": {"router": {"num_groups": 4, "group_topk": 2, "group_score": "sum_top2"}}}),
    "minimax-m2": ("minimax-m2", {}),
    "minimax-m2-wide-heads": ("minimax-m2", {"head_dim": 32}),  # 4 x 32 is not the hidden size
    "qwen3": ("qwen3-30b-a3b", {}),
    "qwen3-square": ("qwen3-30b-a3b", SQUARE),
    "qwen3-one-key-tied": ("qwen3-30b-a3b", {"num_kv_heads": 1, "tied_embeddings": True}),
    "qwen3-not-renormalized": ("qwen3-30b-a3b", {"moe": {"router": {"renormalize": False}}}),
    "gpt-oss": ("gpt-oss-20b", {}),
    "gpt-oss-square": ("gpt-oss-20b", {"moe": {"expert_ffn_size": 32}}),  # both gate and up: 64
    "gpt-oss-clamped": ("gpt-oss-20b", {"moe": {"activation_limit": 0.5}}),  # met at unit scale
    "mixtral": ("mixtral-8x7b", {}),
    "mixtral-window": ("mixtral-8x7b", {"sliding_layers": "all", "sliding_window": 16}),
    "mixtral-square": ("mixtral-8x7b", SQUARE),
}


def compare(rank: int, world_size: int) -> dict:
    """In a process of its own: the verdict on each model, or a traceback."""
    from maniple.engines.megatron.huggingface import parity

    torch.set_num_threads(1)
    verdicts = {}
    for name, (card, overrides) in MODELS.items():
        with tempfile.TemporaryDirectory() as work:
            try:
                card = load_card(card).tiny().with_overrides({"name": name, **overrides})
                verdicts[name] = parity.check(card, None, Path(work), tokens=24)
            except Exception:
                verdicts[name] = traceback.format_exc()
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict:
    return run_ranks(compare, 1, timeout=300)[0]


@pytest.fixture(params=MODELS)
def verdict(request, verdicts):
    found = verdicts[request.param]
    assert not isinstance(found, str), found
    return found


def test_logits_are_the_same(verdict):
    assert verdict.logits <= 1e-5  # a tenth of what `maniple models check` admits
    assert verdict.beyond == 0


def test_the_loss_is_the_same(verdict):
    ours, theirs = verdict.loss
    assert ours == pytest.approx(theirs, rel=2e-6)
    assert 3 < theirs < 10  # of 256 tokens at random: 5.5


def test_every_gradient_is_the_same(verdict):
    name, worst = verdict.worst
    assert worst <= 2e-5, name
    assert len(verdict.gradients) > 20
    assert verdict.equal
