"""The oracles give on a GPU what they give on the CPU, and a tiny model trains there through the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from maniple.kernels.routing import RouterSpec, route
from maniple.moe.dispatch import LocalDispatcher
from maniple.moe.experts import ExpertActivation
from maniple.moe.layer import moe_forward

T, D, F, E, K = 96, 64, 48, 8, 2


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": random(T, D),
        "router": random(E, D) / D**0.5,
        "w13": random(E, 2 * F, D) / D**0.5,
        "w2": random(E, D, F) / F**0.5,
    }


def test_routing_chooses_the_same_experts_with_ties_and_groups():
    logits = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # many ties
    bias = torch.linspace(-0.5, 0.5, 64)
    for score, group_score in (("sigmoid", "sum_top2"), ("softmax", "max")):
        spec = RouterSpec(64, 6, score=score, num_groups=8, group_topk=4, group_score=group_score)
        on_cpu, on_gpu = route(logits, spec, bias), route(logits.cuda(), spec, bias.cuda())
        same = (on_cpu.ids_TK == on_gpu.ids_TK.cpu()).all(1)
        # exp differs in its last bit between devices, which may break a tie of sums the other way
        assert same.float().mean() > 0.999
        torch.testing.assert_close(on_gpu.probs_TK.cpu()[same], on_cpu.probs_TK[same], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [ExpertActivation(), ExpertActivation(alpha=1.702, limit=7.0, up_offset=1.0)])
def test_layer_and_every_gradient_equal_the_cpus(activation):
    spec, results = RouterSpec(E, K), []
    torch.backends.cuda.matmul.allow_tf32 = False
    for device in ("cpu", "cuda"):
        tensors = {name: value.to(device).requires_grad_() for name, value in _inputs().items()}
        out, _ = moe_forward(
            tensors["x"],
            tensors["router"],
            tensors["w13"],
            tensors["w2"],
            spec,
            LocalDispatcher(E),
            activation=activation,
        )
        out.square().sum().backward()
        results.append([out, *(value.grad for value in tensors.values())])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_gpu.cpu() - on_cpu).norm() <= 1e-5 * on_cpu.norm()


@pytest.mark.parametrize("card", ["deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b", "minimax-m2"])
def test_tiny_model_trains_in_bf16(card, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{card: {card}, variant: tiny}}\ndata: {{source: synthetic, sequence_length: 64}}\n")
    settings = ["train.steps=12", "train.global_batch_size=4", "train.device=gpu", f"output_dir={tmp_path}"]
    settings += ["optimizer.warmup_steps=2", "optimizer.learning_rate=5e-3", "name=tiny"]
    command = [sys.executable, "-m", "maniple", "train", str(job), "--nproc", "1", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [json.loads(line).get("loss") for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0] - 0.1
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["hardware"]["device"] == "cuda"
