"""Who takes part in the grouped GEMM benchmark on a CPU. Peers that need a GPU have stand-ins."""

from __future__ import annotations

import types

import pytest
import torch
from tests.bench.small import CEILINGS, CPU

from maniple.bench import contest, grouped_gemm, peers
from maniple.bench.contender import Absent
from maniple.bench.operands import BOUNDS
from maniple.bench.ours import ours
from maniple.bench.shapes import OPS


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recipe", grouped_gemm.RECIPES)
def test_ours_are_right(op, recipe, operands):
    found = list(ours(op, recipe, operands, None))
    assert next(each.role for each in found) == "selected"
    for each in found:
        operands.main_grad_GNK.zero_()
        error = operands.error(op, each.call())
        assert error < BOUNDS[recipe], (each.name, error)
        if recipe != "bf16":
            assert error > 1e-2, f"{each.name} has no quantization error"


@pytest.mark.parametrize("op", OPS)
def test_torch_is_right(op, operands):
    operands.main_grad_GNK.zero_()
    assert operands.error(op, peers.torch_grouped(op, operands).call()) < BOUNDS["bf16"]
    dense = peers.dense_bf16(op, operands).call()
    assert dense.shape == {"forward": (256, 48), "dgrad": (256, 64)}.get(op, (48, 64))


def deep_gemm(alignment=128):
    """DeepGEMM's functions as it documents them, in plain torch; groups that it would not take are refused."""

    def rows_by(weight):
        def function(a, b, out, groups_S, *rest):
            a, b = (t if isinstance(t, torch.Tensor) else dequantized(*t) for t in (a, b))
            for g in groups_S.unique().tolist():
                assert int((groups_S == g).sum()) % alignment == 0
            out.copy_(torch.stack([weight(b[g].float()) @ row.float() for row, g in zip(a, groups_S, strict=True)]))

        return function

    def wgrad(a, b, out, sizes, counts, into):
        assert out is into
        assert counts.tolist() == sizes
        start = 0
        for g, size in enumerate(sizes):
            assert size % alignment == 0
            out[g] += a[start : start + size].float().t() @ b[start : start + size].float()
            start += size

    def dequantized(data, scales):
        assert data.dim() == 3 or (scales.stride(0) == 1 and scales.stride(1) % 4 == 0)
        side = (128, 128) if data.dim() == 3 else (1, 128)
        wide = scales.repeat_interleave(side[0], -2).repeat_interleave(side[1], -1)
        return data.float() * wide[..., : data.shape[-2], : data.shape[-1]]

    return types.SimpleNamespace(
        m_grouped_bf16_gemm_nt_contiguous=rows_by(lambda w: w),
        m_grouped_bf16_gemm_nn_contiguous=rows_by(lambda w: w.t()),
        m_grouped_fp8_fp4_gemm_nt_contiguous=rows_by(lambda w: w),
        k_grouped_bf16_gemm_tn_contiguous=wgrad,
    )


@pytest.mark.parametrize(
    ("recipe", "op"),
    [
        ("bf16", "forward"),
        ("bf16", "dgrad"),
        ("bf16", "wgrad_accumulate"),
        ("fp8_block", "forward"),
        ("fp8_block", "dgrad"),
    ],
)
def test_deep_gemm_gets_what_it_takes(recipe, op, operands, monkeypatch):
    monkeypatch.setattr(peers, "_deep_gemm", deep_gemm)
    build = peers.deep_gemm_bf16 if recipe == "bf16" else peers.deep_gemm_fp8
    peer = build(op, operands)
    assert peer.multiple == 128
    operands.main_grad_GNK.zero_()
    assert operands.padded(128).error(op, peer.call()) < BOUNDS[recipe]


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_scaled_grouped_mm_gets_what_it_takes(op, operands, monkeypatch):
    def scaled(a, b, a_scale, b_scale, *, offs, out_dtype, use_fast_accum):
        ends, start, parts = offs.tolist(), 0, []
        for g, end in enumerate(ends):
            if b.dim() == 3:
                assert b.stride(1) == 1
                part = (a[start:end].float() * a_scale[start:end, None]) @ (b[g].float() * b_scale[g])
            else:
                n, k = a.shape[0], b.shape[1]
                assert a.stride(1) == b.stride(0) == 1
                assert (end - start) % 16 == 0
                scales = a_scale.view(-1, n)[g, :, None] * b_scale.view(-1, k)[g]
                part = (a[:, start:end].float() @ b[start:end].float()) * scales
            parts.append(part.to(out_dtype))
            start = end
        return torch.cat(parts) if b.dim() == 3 else torch.stack(parts)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    peer = peers.torch_scaled_grouped(op, operands)
    assert 1e-2 < operands.padded(peer.multiple).error(op, peer.call()) < BOUNDS["fp8"]
    assert isinstance(peers.torch_scaled_grouped("wgrad_accumulate", operands), Absent)


def test_a_peer_that_cannot_run_says_why(operands, monkeypatch):
    (deep,) = (p for p in peers.peers("forward", "bf16", operands) if p.name == "DeepGEMM")
    assert deep == Absent("DeepGEMM", "peer", "needs an NVIDIA GPU")
    assert "No module named 'deep_gemm'" in peers.deep_gemm_bf16("forward", operands).reason
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: 1 / 0)
    found = grouped_gemm._product("forward", "bf16", operands, None)
    torch_row = next(r for r in contest.hold(found, CEILINGS, CPU, 1) if r["implementation"] == "torch._grouped_mm")
    assert torch_row["not_run"] == "ZeroDivisionError: division by zero"
    assert torch_row["milliseconds"] is None


def test_preparing_a_peer_may_fail(operands, monkeypatch):
    monkeypatch.setitem(peers._BUILDERS, "bf16", (("x", "peer", "", lambda op, o: o.shape.rounded(100)),))
    assert list(peers.peers("forward", "bf16", operands)) == [
        Absent("x", "peer", "ValueError: 256 rows are no multiple of 100")
    ]
