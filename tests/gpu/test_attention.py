"""Core attention on a GPU: a kernel without scores takes every kind, and gives what plain operators in fp32 do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from maniple.engines.megatron import attention, context, flash

LENGTH = 512
# heads, groups, query/key size, value size
SIZES = {"gqa": (8, 2, 64, 64), "wide": (8, 1, 128, 128), "mla": (4, 4, 192, 128)}
KINDS = {  # window, sinks, documents
    "causal": (None, False, False),
    "window": (96, False, False),
    "sinks": (None, True, False),
    "window, sinks": (128, True, False),
    "documents": (None, False, True),
    "all": (128, True, True),
}
MATH = SDPBackend.MATH  # stays allowed: it must not be needed
ALLOWED = {
    "default": list(SDPBackend.__members__.values()),
    "bias": list(SDPBackend.__members__.values()),  # where our own call of flash attention is not for the operands
    "bias, without cuDNN": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, MATH],
    "flash alone": [SDPBackend.FLASH_ATTENTION, MATH],
}
CASES = [(kind, allowed) for kind in KINDS for allowed in list(ALLOWED)[:3]] + [("causal", "flash alone")]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # of the largest magnitude in a tensor


def plain(q_BHSD, k_BGSD, v_BGSV, window, sinks_H, documents_BS, scale):
    """In the dtype of its operands, with all scores."""
    k_BHSD, v_BHSV = (t.repeat_interleave(q_BHSD.shape[1] // t.shape[1], 1) for t in (k_BGSD, v_BGSV))
    scores_BHSS = q_BHSD @ k_BHSD.transpose(-1, -2) * scale
    i_S1 = torch.arange(q_BHSD.shape[2], device="cuda")[:, None]
    seen = (i_S1 >= i_S1.T)[None]
    if window is not None:
        seen = seen & (i_S1 - i_S1.T < window)
    if documents_BS is not None:
        seen = seen & (documents_BS[:, :, None] == documents_BS[:, None])
    scores_BHSS = scores_BHSS.masked_fill(~seen[:, None], -torch.inf)
    if sinks_H is not None:
        sinks_BHS1 = sinks_H[None, :, None, None].expand(*scores_BHSS.shape[:3], 1)
        return torch.cat([scores_BHSS, sinks_BHS1], -1).softmax(-1)[..., :-1] @ v_BHSV
    return scores_BHSS.softmax(-1) @ v_BHSV


def operands(size: str, sinks: bool, dtype: torch.dtype, length: int = LENGTH, batch: int = 2):
    heads, groups, width, value = SIZES[size]
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = [(batch, heads, length, width), (batch, groups, length, width), (batch, groups, length, value)]
    shapes += [(heads,)] if sinks else []
    found = [torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    gradient = torch.randn(batch, heads, length, value, generator=generator, device="cuda").to(dtype)
    return found, gradient


def documents(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    """Several a row, of sizes that are no multiples of anything, and padding at the end of one."""
    documents_BS = torch.arange(length, device="cuda")[None].expand(batch, -1) // 150 + 1
    documents_BS = documents_BS.clone().int()
    documents_BS[0, -37:] = 0
    return documents_BS


def layer(window, sinks_H, width) -> SimpleNamespace:
    return SimpleNamespace(window=window, softmax_offset=sinks_H, softmax_scale=width**-0.5, biases={})


def taken(out: torch.Tensor) -> set[str]:
    """Names of the attention kernels that a result came from; `softmax` of the plain operators."""
    names, seen, waiting = set(), set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(word in node.name() for word in ("ScaledDotProduct", "Softmax", "Flash")):
            names.add(node.name())
        waiting += [following for following, _ in node.next_functions]
    return names


@pytest.mark.parametrize(("kind", "allowed"), CASES)
@pytest.mark.parametrize("size", list(SIZES))
def test_results_and_gradients(size, kind, allowed, monkeypatch):
    if allowed.startswith("bias"):
        monkeypatch.setattr(flash, "takes", lambda *operands: False)
    window, sinks, apart = KINDS[kind]
    for dtype, chunks in itertools.product(TOLERANCE, [1, 2]):
        if allowed == "flash alone" and (dtype == torch.float32 or chunks > 1):
            continue  # it takes neither fp32 nor, for a later chunk, a bias
        inputs, gradient = operands(size, sinks, dtype)
        documents_BS = documents() if apart else None
        it = layer(window, inputs[3] if sinks else None, inputs[0].shape[-1])
        spans = sorted(itertools.chain(*(context.spans(LENGTH, chunks, rank) for rank in range(chunks))))
        with sdpa_kernel(ALLOWED[allowed]):
            parts = [
                attention.SDPAttention._attend(it, inputs[0][:, :, first:end], *inputs[1:3], first, documents_BS)
                for first, end in spans
            ]
            out = torch.cat(parts, 2)
            kernels = taken(out)
            assert not [name for name in kernels if "Softmax" in name], (kernels, dtype, chunks)
            found = [out, *torch.autograd.grad(out, inputs, gradient)]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        right = plain(*exact[:3], window, exact[3] if sinks else None, documents_BS, it.softmax_scale)
        wanted = [right, *torch.autograd.grad(right, exact, gradient.double())]
        for name, got, right in zip(["out", "q", "k", "v", "sinks"], found, wanted, strict=False):
            assert got.isfinite().all(), (name, dtype, chunks)
            error = float((got.detach().double() - right.detach()).abs().max() / right.detach().abs().max())
            assert error <= TOLERANCE[dtype], f"{name}: {error:.1e} in {dtype}, {chunks} chunks, by {kernels}"


@pytest.mark.parametrize("allowed", list(ALLOWED)[:3])
@pytest.mark.parametrize("kind", ["window, sinks", "documents"])
def test_no_scores_and_no_bias_for_every_head(kind, allowed, monkeypatch):
    """Forward and backward together hold less than a half of one bf16 number for each score."""
    if allowed.startswith("bias"):
        monkeypatch.setattr(flash, "takes", lambda *operands: False)
    length, (window, sinks, apart) = 4096, KINDS[kind]
    inputs, gradient = operands("gqa", sinks, torch.bfloat16, length, batch=1)
    documents_BS = documents(length, 1) if apart else None
    it = layer(window, inputs[3] if sinks else None, 64)
    with sdpa_kernel(ALLOWED[allowed]):
        attention.SDPAttention._attend(it, *inputs[:3], 0, documents_BS)  # makes the bias, which layers share
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention.SDPAttention._attend(it, *inputs[:3], 0, documents_BS)
        torch.autograd.grad(out, inputs, gradient)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < SIZES["gqa"][0] * length * length, f"{peak / 2**20:.0f} MiB"


LAYER = """
import json, sys, torch
from tests.engines import helpers
from maniple.engines.megatron import model
from maniple.engines.megatron.attention import GroupedAttention
from maniple.models import load_card

name, device, dtype = sys.argv[1:]
card = load_card(name).tiny()
engine = helpers.Engine(card, helpers.make_job(precision={"dtype": dtype}, train={"device": device}))
net = model.unwrap(engine.chunks[0])
layer, weight = net.decoder.layers[0].self_attention, net.decoder.layers[0].self_attention.linear_qkv.weight
shape, kind = (250, 2, card.hidden_size), {"dtype": weight.dtype, "device": weight.device}
given, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**kind) for seed in (1, 2))
takes, found = GroupedAttention._takes_kernel, []
angles = net.rotary_pos_emb(250)  # with YaRN the factor beside it is the layer's own affair
for own in (True, False):
    used = []
    GroupedAttention._takes_kernel = lambda self, *rest: used.append(takes(self, *rest)) or own
    engine.chunks[0].zero_grad_buffer()
    hidden = given.clone().requires_grad_()
    out = layer(hidden, None, rotary_pos_emb=angles[0] if isinstance(angles, tuple) else angles)[0]
    out.backward(gradient)
    found.append([t.detach().double().cpu() for t in (out, hidden.grad, weight.main_grad)])
    assert used == [device == "gpu"]
errors = [float((got - wanted).norm() / wanted.norm()) for got, wanted in zip(*found)]
print(json.dumps({"errors": errors, "same": [torch.equal(*pair) for pair in zip(*found)]}))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("card", ["glm-4.5", "gpt-oss-20b"])  # half of each head; YaRN, whose factor is not 1
def test_rotary_kernel_inside_the_layer_is_upstreams(card):
    """Output and gradients (of the input, of the projection) of a layer in bf16, which upstream's operators round more
    often than the kernel does."""
    done = subprocess.run([sys.executable, "-c", LAYER, card, "gpu", "bf16"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    print(card, said)
    assert max(said["errors"]) < 2e-2
    assert not any(said["same"])  # else both went the same way
