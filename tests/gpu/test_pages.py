"""The page kernels on a GPU against the oracle there, at the sizes of models."""

from __future__ import annotations

import pytest
import torch

from maniple.kernels.pages import bring, give, keep, new_pool

PAGE = 1 << 16
MINE = {"kernels": "triton"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
@pytest.mark.parametrize(("lines", "slots", "unit"), [(1, 65_536, 2048), (1, 4097, 2880), (2048, 512, 128), (7, 99, 3)])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_what_is_used_comes_back(dtype, lines, slots, unit, share):
    x_LW = torch.randint(0, 99, (lines, slots * unit), device="cuda").to(dtype)
    used = torch.tensor([int(slots * share)], dtype=torch.int32, device="cuda")
    results = []
    for pin in (MINE, {"kernels": "reference"}):
        pool = new_pool(x_LW.nbytes // PAGE + 5, PAGE, "cuda")
        tables = [keep(pool, x_LW, used, unit, **pin) for _ in range(2)]
        give(pool, tables[0], **pin)
        tables.append(keep(pool, x_LW, used, unit, **pin))
        outs = [torch.zeros_like(x_LW) for _ in tables[1:]]
        for out_LW, table in zip(outs, tables[1:], strict=True):
            bring(pool, table, out_LW, used, unit, **pin)
        front = int(used) * unit
        results.append([*tables, pool.state.clone(), *(out_LW[:, :front] for out_LW in outs)])
        if int(tables[2][0]) == int(tables[2][1]):
            assert torch.equal(outs[1][:, :front], x_LW[:, :front])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


def test_past_32_bits():
    x = torch.arange(3 * 2**30, dtype=torch.int16, device="cuda").view(1, -1)
    used, pool = torch.tensor([x.shape[1] // 2**14], device="cuda"), new_pool(x.nbytes // PAGE, PAGE, "cuda")
    table = keep(pool, x, used, 2**14, **MINE)
    out = torch.zeros_like(x)
    bring(pool, table, out, used, 2**14, **MINE)
    assert torch.equal(out, x)
