"""States in pinned host memory: updates of them are, bit for bit, those of states on the device, and take what was
planned of its memory; a job learns with them as without."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest
import torch

from maniple.engines.megatron import offload
from maniple.engines.megatron.offload import HostStates
from maniple.errors import UserError
from maniple.kernels.adamw import Shard, adamw_

pytestmark = pytest.mark.timeout(600)
BF16, FP32 = torch.bfloat16, torch.float32
# dtypes of main parameter (bf16: the model's own, on the device) and moments
MIXES = {"fp32": (FP32, FP32), "moments": (FP32, BF16), "bf16": (BF16, BF16), "fp32 model": (FP32, FP32)}


def made(mix: str, number: int, n: int, host: HostStates | None) -> Shard:
    main, moments = MIXES[mix]
    g = torch.Generator("cuda").manual_seed(number)
    grad, values = torch.randn(n, generator=g, device="cuda"), torch.randn(n, generator=g, device="cuda").to(main)
    apart = main == FP32 and mix != "fp32 model"

    def kept(dtype: torch.dtype) -> torch.Tensor:
        zeros_like = torch.zeros_like if host is None else host.zeros_like
        return zeros_like(values, dtype=dtype)

    kept_values = kept(FP32).copy_(values) if apart else values
    model = torch.empty(n, dtype=BF16, device="cuda") if apart else None
    return Shard(grad, kept_values, kept(moments), kept(moments), model, seed=number, first=2**32 - 1001)


@pytest.mark.parametrize("mix", MIXES)
def test_updates_are_those_of_states_on_the_device(mix):
    sizes = (3 * offload.CHUNK + 17, offload.CHUNK, 1, 4097, 2 * offload.CHUNK - 1)
    host = HostStates()
    here, there = ([made(mix, i, n, where) for i, n in enumerate(sizes)] for where in (None, host))
    scale = torch.tensor(0.3, device="cuda")
    for step in (1, 2, 3):
        how = dict(step=step, learning_rate=0.03, weight_decay=0.2, grad_scale=scale)
        adamw_(here, **how)
        offload.update((shard, how) for shard in there)
        for one, other in zip(here, there, strict=True):
            for name in ("main", "exp_avg", "exp_avg_sq", "model"):
                a, b = getattr(one, name), getattr(other, name)
                assert a is None or torch.equal(a.cpu(), b.cpu()), (mix, step, name)
            one.grad.mul_(-0.7)
            other.grad.copy_(one.grad)


def test_memory_is_pinned_while_it_is_used_and_the_device_holds_chunks_alone():
    host = HostStates()
    shard = made("fp32", 0, 8 * offload.CHUNK, host)
    kept = (shard.main, shard.exp_avg, shard.exp_avg_sq)
    assert not any(tensor.is_cuda for tensor in kept)
    assert all(tensor.is_pinned() for tensor in kept)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    offload.update([(shard, dict(step=1, learning_rate=0.1))])
    assert torch.cuda.max_memory_allocated() - before <= 12 * offload.SLOTS * offload.CHUNK
    assert torch.cuda.memory_allocated() == before
    del host
    gc.collect()
    assert not any(tensor.is_pinned() for tensor in kept)


def test_memory_that_cannot_be_had_is_one_line():
    host = HostStates()
    with pytest.raises(UserError, match="in pinned host memory, and cannot: ") as refused:
        host.zeros_like(torch.empty(1, device="cuda").expand(2**50), torch.float32)
    assert "\n" not in str(refused.value)


JOB = """
model: {card: deepseek-v3, variant: tiny}
precision: {dtype: bf16}
data: {source: synthetic, sequence_length: 128}
train: {steps: 3, global_batch_size: 4, micro_batch_size: 2, device: gpu, eval_batches: 1}
optimizer: {warmup_steps: 0, learning_rate: 0.01, clip_grad: 0.1, moments_dtype: bf16}
log: {tensorboard: false, figure: false, progress: false}
"""


def test_a_job_learns_with_states_in_host_memory_as_without(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    losses = []
    for share in ("0", "1"):
        words = ["--nproc", "1", "--name", share, f"optimizer.offload_fraction={share}"]
        done = subprocess.run(
            [sys.executable, "-m", "maniple", "train", "job.yaml", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        lines = (tmp_path / "runs" / share / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "grad_norm" in record])
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0] - 0.3
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)  # backward passes on a GPU add up in no fixed order
