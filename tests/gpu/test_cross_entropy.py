"""Head and loss in one on a GPU: numbers of torch's own cross-entropy at the sizes of models, and the memory taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from maniple.kernels.cross_entropy import linear_cross_entropy


def operands(tokens: int, vocabulary: int, width: int):
    g = torch.Generator("cuda").manual_seed(0)
    hidden_TD = torch.randn(tokens, width, device="cuda", generator=g).bfloat16().requires_grad_()
    w_VD = (torch.randn(vocabulary, width, device="cuda", generator=g) / width**0.5).bfloat16().requires_grad_()
    labels_T = torch.randint(vocabulary, (tokens,), device="cuda", generator=g)
    return hidden_TD, w_VD, labels_T, torch.rand(tokens, device="cuda", generator=g) / tokens


@pytest.mark.parametrize("keep", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"), [(1, 1000, 64), (5000, 129_280, 1024), (4096, 151_936, 2048)]
)
def test_losses_and_gradients_are_torchs(tokens, vocabulary, width, keep):
    hidden_TD, w_VD, labels_T, grad_T = operands(tokens, vocabulary, width)
    w_VD.main_grad = torch.zeros(w_VD.shape, device="cuda")
    losses_T = linear_cross_entropy(
        hidden_TD, w_VD, labels_T, kernels="triton", fuse_wgrad_accumulation=True, keep_logits=keep
    )
    losses_T.backward(grad_T)
    ours = losses_T.detach(), hidden_TD.grad.clone(), w_VD.main_grad.clone()
    hidden_TD.grad = w_VD.grad = None
    # in fp32 of the same rounded logits
    logits_TV = hidden_TD @ w_VD.T
    wanted_T = F.cross_entropy(logits_TV.float(), labels_T, reduction="none")
    wanted_T.backward(grad_T)
    torch.testing.assert_close(ours[0], wanted_T.detach(), rtol=1e-5, atol=1e-5)
    for got, want in zip(ours[1:], (hidden_TD.grad, w_VD.grad), strict=True):
        assert (got.float() - want.float()).abs().max() <= 2e-2 * want.float().abs().max()


@pytest.mark.parametrize("keep", [False, True], ids=["fused", "fused_kept"])
def test_it_takes_the_memory_of_a_chunk_or_of_bf16_logits(keep):
    hidden_TD, w_VD, labels_T, grad_T = operands(16_384, 129_280, 1024)
    w_VD.main_grad = torch.zeros(w_VD.shape, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(
        hidden_TD, w_VD, labels_T, kernels="triton", fuse_wgrad_accumulation=True, keep_logits=keep
    ).backward(grad_T)
    taken = torch.cuda.max_memory_allocated() - before
    # a chunk of logits or all of them in bf16, never in fp32; the gradient of the hidden states, a workspace
    logits = 2 * 16_384 * 129_280 if keep else 512 << 20
    assert taken < logits + 4 * hidden_TD.numel() + (128 << 20)


def test_the_host_does_not_wait():
    hidden_TD, w_VD, labels_T, grad_T = operands(4096, 32_000, 512)
    w_VD.main_grad = torch.zeros(w_VD.shape, device="cuda")

    def step() -> None:
        linear_cross_entropy(hidden_TD, w_VD, labels_T, kernels="triton", fuse_wgrad_accumulation=True).backward(grad_T)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
