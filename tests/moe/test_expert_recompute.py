"""What an expert MLP keeps for backward, to the byte, and that keeping less changes no gradient."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from maniple.kernels import forgotten, registry
from maniple.kernels.grouped_gemm import low_precision_swiglu
from maniple.moe.experts import ExpertActivation, expert_mlp

S, D, F, G = 40, 16, 32, 3
ENDS = torch.tensor([7, 7, 33], dtype=torch.int32)
GPT_OSS = ExpertActivation(alpha=1.702, limit=1.0, up_offset=1.0, layout="interleaved")


class Kept:
    """Bytes that are saved for backward, each storage once, but those of `leaves`; handles instead of tensors: none."""

    def __init__(self, *leaves: torch.Tensor) -> None:
        self.known = {leaf.untyped_storage()._cdata for leaf in leaves}
        self.bytes = 0
        self.alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor):
        saved = forgotten.pack(tensor)
        if isinstance(saved, torch.Tensor) and saved.untyped_storage()._cdata not in self.known:
            self.known.add(saved.untyped_storage()._cdata)
            self.alive.append(saved)
            self.bytes += saved.untyped_storage().nbytes()
        return saved


def operands(dtype=torch.bfloat16, bias: bool = True):
    g = torch.Generator().manual_seed(0)

    def leaf(*shape: int, of=dtype) -> torch.Tensor:
        return (
            (torch.randn(shape, generator=g) / shape[-1] ** 0.5 if len(shape) == 3 else torch.randn(shape, generator=g))
            .to(of)
            .requires_grad_()
        )

    rows_SD, probs_S = leaf(S, D), leaf(S, of=torch.float32)
    return rows_SD, probs_S, leaf(G, 2 * F, D), leaf(G, D, F), *((leaf(G, 2 * F), leaf(G, D)) if bias else (None, None))


def run(monkeypatch, leaves, recompute: str, **words):
    """(bytes kept, gradients) of one pass. Inputs may be looked at only through the hooks in force."""
    rows_SD, probs_S, w13, w2, b13, b2 = leaves
    kept = Kept(*[leaf for leaf in leaves if leaf is not None])
    # the scope's own hooks lie above those of this test
    monkeypatch.setattr(forgotten, "saved_tensors_hooks", lambda *_: saved_tensors_hooks(kept.pack, forgotten.unpack))
    with saved_tensors_hooks(kept.pack, forgotten.unpack):
        out_SD = expert_mlp(rows_SD, probs_S, ENDS, w13, w2, b13_GF=b13, b2_GD=b2, recompute=recompute, **words)
    used = int(ENDS[-1])
    grad_SD = torch.randn(S, D, generator=torch.Generator().manual_seed(1)).to(out_SD.dtype)
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    out_SD.backward(grad_SD)
    grads = [leaf.grad for leaf in leaves if leaf is not None]
    rows = [None if grad is None else grad[:used] for grad in grads[:2]]
    return kept.bytes, [out_SD[:used], *rows, *grads[2:]]


@pytest.mark.parametrize("activation", [None, GPT_OSS])
@pytest.mark.parametrize("recompute", ["activation", "all"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_block", "mxfp8"])
def test_less_is_kept_and_no_bit_changes(monkeypatch, recipe, recompute, activation):
    leaves = operands()
    before, wanted = run(monkeypatch, leaves, "none", recipe=recipe, activation=activation)
    after, got = run(monkeypatch, leaves, recompute, recipe=recipe, activation=activation)
    assert after < before
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", [(), (0,), (2,), (3,), (0, 2)])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_an_activation_quantized_where_it_is_made_is_the_same(monkeypatch, recompute, frozen):
    leaves = operands(bias=False)
    for number in frozen:
        leaves[number].requires_grad_(False)
    found = [run(monkeypatch, leaves, recompute, recipe="fp8_block")]
    monkeypatch.setattr(low_precision_swiglu, "_fused", lambda *operands: "reference")
    found.append(run(monkeypatch, leaves, recompute, recipe="fp8_block"))
    assert ("quantized_swiglu", "fp8_block", "cpu", "reference") in registry.used()
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_to_the_byte(monkeypatch):
    """bf16: rows are the caller's; gate and up take 4 F bytes a row, the activation 2 F."""
    ends = ENDS.nbytes
    for recompute, kept in (("none", S * 6 * F + ends), ("activation", S * 4 * F + ends), ("all", 0)):
        assert run(monkeypatch, operands(bias=False), recompute)[0] == kept


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_twice_through_one_graph(monkeypatch, recipe):
    monkeypatch.setattr(low_precision_swiglu, "_fused", lambda *operands: "reference")
    rows_SD, probs_S, w13, w2, *_ = operands(bias=False)
    out_SD = expert_mlp(rows_SD, probs_S, ENDS, w13, w2, recipe=recipe, recompute="activation")
    for weight in (w13, w2):
        first, second = (torch.autograd.grad(out_SD[:33].sum(), weight, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert first.abs().sum() > 0


def test_no_entry_outlives_its_tensor():
    rows_SD, probs_S, w13, w2, *_ = operands(bias=False)
    out_SD = expert_mlp(rows_SD, probs_S, ENDS, w13, w2, recompute="activation")
    del out_SD
    assert not forgotten._known


def test_weights_gradients_are_added_in_place(monkeypatch):
    for recompute in ("none", "activation", "all"):
        leaves = operands(bias=False)
        w13, w2 = leaves[2:4]
        for weight in (w13, w2):
            weight.main_grad = torch.ones(weight.shape)
        run(monkeypatch, (*leaves[:4], None, None), recompute, fuse_wgrad_accumulation=True)
        found = [weight.main_grad for weight in (w13, w2)]
        if recompute == "none":
            wanted = found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(weight.grad_added_to_main_grad for weight in (w13, w2))
