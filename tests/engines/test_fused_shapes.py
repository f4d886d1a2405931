"""What a dry run puts in the place of torch's kernels gives what they give, and keeps no scores and no fp32 copies."""

import pytest
import torch
import torch.nn.functional as F

from maniple.engines.megatron.dry_run import fused
from maniple.engines.megatron.dry_run.memory import StorageMeter

HALF, FULL = torch.bfloat16, torch.float32
LENGTH = 512


def operands(
    heads: int, groups: int, size: int, value_size: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """`[1, H, L, D]`, `[1, G, L, D]`, `[1, G, L, V]`"""
    shapes = ((heads, size), (groups, size), (groups, value_size))
    return [torch.zeros(1, n, LENGTH, d, dtype=dtype, device=device, requires_grad=True) for n, d in shapes]


@pytest.mark.parametrize(
    ("heads", "groups", "size", "value_size", "dtype", "masked"),
    [
        (4, 2, 64, 64, HALF, False),
        (4, 4, 64, 64, FULL, False),
        (4, 4, 96, 64, HALF, False),  # MLA
        (4, 4, 64, 64, HALF, True),
        (4, 2, 64, 64, HALF, True),
        (4, 2, 64, 64, FULL, True),  # with keys and values of every head
    ],
)
def test_attention(heads, groups, size, value_size, dtype, masked):
    found = []
    for device, attention in (("cpu", F.scaled_dot_product_attention), ("meta", fused.attention)):
        q, k, v = operands(heads, groups, size, value_size, dtype, device)
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=dtype, device=device) if masked else None
        with StorageMeter() as meter:
            out = attention(q, k, v, attn_mask=mask, is_causal=not masked, scale=0.1, enable_gqa=heads != groups)
        kept = meter.live
        gradients = torch.autograd.grad(out.sum(), [q, k, v])
        found.append([(tuple(t.shape), t.dtype) for t in (out, *gradients)])
    assert found[0] == found[1]
    scores = heads * LENGTH * LENGTH * dtype.itemsize
    assert kept < scores


def test_rms_norm():
    x, weight = (torch.zeros(*s, dtype=HALF, device="meta", requires_grad=True) for s in ((256, 2, 1024), (1024,)))
    with StorageMeter() as meter:
        out = fused.rms_norm(x, (1024,), weight, 1e-5)
    assert (out.shape, out.dtype) == (x.shape, HALF)
    assert meter.live == out.numel() * 2 + 512 * 4  # and one fp32 number a row
    assert [g.shape for g in torch.autograd.grad(out.sum(), [x, weight])] == [x.shape, weight.shape]
