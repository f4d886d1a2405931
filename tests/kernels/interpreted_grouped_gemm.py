"""What the reference of grouped GEMM passes, for the portable Triton kernels under Triton's interpreter.

Triton decides at its import whether it interprets: `test_interpreted.py` runs this file in a process of its own. In
fp32: the interpreter multiplies the bits of bf16 numbers as integers (interpreter.py, `create_dot`).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import triton
from tests.kernels import test_grouped_gemm as suite
from tests.kernels.test_grouped_gemm import (  # noqa: F401 (collected here, with the fixture below)
    test_any_shape,
    test_bias_and_its_gradients,
    test_gathered_rows,
    test_gathered_rows_of_any_integer_type_and_without_rows,
    test_result_and_each_gradient,
    test_strided_operands,
    test_the_tail_is_zeroed_on_demand_and_only_then,
)

from maniple.kernels import registry
from maniple.kernels.grouped_gemm import grouped_gemm, launch, reference
from maniple.kernels.grouped_gemm import triton as portable

pytestmark = pytest.mark.timeout(300)  # hypothesis runs dozens of interpreted kernels in one test
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("grouped_gemm", "interpreted", {"bf16"}, {"cpu"}, portable, preference=-1)


def tiles(choose) -> list[launch.Tile]:
    """All tiles that a target may choose, with an eighth of the rows and columns and a quarter of the depth."""
    kinds = itertools.product(("hopper", "nvidia", "amd"), (2, 4), (128, 4096))
    found = {choose(*kind) for kind in kinds} | {
        choose(*kind, fp32=True) for kind in kinds if choose is launch.wgrad_tile
    }
    return [replace(tile, rows=tile.rows // 8, columns=tile.columns // 8, depth=tile.depth // 4) for tile in found]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(suite, "grouped_gemm", functools.partial(grouped_gemm, kernels="interpreted"))


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("k", "n"), [(40, 72), (37, 66)], ids=["descriptors", "pointers"])
def test_several_tiles_in_every_direction(k, n, layout):
    suite.check([5, 0, 37, 1, 20], bias=True, scale=True, k=k, n=n, tail=9, layout=layout, bound=2e-6)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("k", "n"), [(40, 72), (37, 66)], ids=["descriptors", "pointers"])
def test_several_tiles_of_gathered_rows(k, n, layout):
    suite.check_gathered([5, 0, 20], k=k, n=n, tail=9, layout=layout, bound=2e-6)


def test_sums_of_gathered_rows_are_those_of_the_oracle_bit_for_bit():
    """Every token's rows, in the order of its slots, those of no row left out."""
    g = torch.Generator().manual_seed(0)
    slots_TK = torch.randint(-2, 30, (11, 5), generator=g)
    rows_SD = torch.randn(25, 37, generator=g)
    rows_SD[20:] = torch.nan
    ends_G = torch.tensor([3, 20], dtype=torch.int32)
    for rows in (rows_SD, rows_SD.t().contiguous().t()):
        assert torch.equal(portable.gather_sum(rows, slots_TK, ends_G), reference.gather_sum(rows, slots_TK, ends_G))


@pytest.mark.parametrize("tile", tiles(launch.rows_tile), ids=str)
@pytest.mark.parametrize(("k", "n"), [(24, 40), (21, 34)], ids=["descriptors", "pointers"])
def test_every_tile_of_rows(tile, k, n, monkeypatch):
    monkeypatch.setattr(launch, "rows_tile", lambda *arguments: tile)
    suite.check([3, 0, 11], bias=True, scale=True, k=k, n=n, tail=9, bound=2e-6)


@pytest.mark.parametrize("tile", tiles(launch.wgrad_tile), ids=str)
def test_every_tile_of_weight_gradients(tile, monkeypatch):
    monkeypatch.setattr(launch, "wgrad_tile", lambda *arguments, **more: tile)
    suite.check([3, 0, 11], bias=False, scale=False, k=24, n=40, tail=9, bound=2e-6)


def test_the_same_inputs_give_the_same_bits():
    x_SK, w_G, ends_G, _, _, grad_SN = suite.case([5, 0, 37], k=40, n=72)
    x_TK, source_S, slots_TK = suite.gather([5, 0, 37], k=40)
    runs = []
    for _ in range(2):
        out = portable.forward(x_SK, w_G, ends_G)[:42]
        dx, dw = portable.dgrad(grad_SN, w_G, ends_G), portable.wgrad(x_SK, grad_SN, ends_G)
        runs.append((out, dx[:42], dw, portable.gather_sum(dx, slots_TK, ends_G)))
        runs[-1] += (portable.wgrad(x_TK, grad_SN, ends_G, source_S=source_S),)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("strided", [False, True])
def test_weight_gradients_are_written_or_added_once(strided):
    x_SK, _, ends_G, _, _, grad_SN = suite.case([2, 0, 35], k=24, n=40)
    once = reference.wgrad(x_SK, grad_SN, ends_G)
    out = torch.full((3, 40, 48), torch.nan)[:, :, ::2] if strided else torch.full_like(once, torch.nan)
    assert portable.wgrad(x_SK, grad_SN, ends_G, out=out) is out
    assert suite.relative_error(out, once) < 1e-6
    before = out.clone()
    portable.wgrad(x_SK, grad_SN, ends_G, out=out, accumulate=True)
    assert suite.relative_error(out - before, once) < 1e-6
    with pytest.raises(ValueError, match="pass it"):
        portable.wgrad(x_SK, grad_SN, ends_G, accumulate=True)
    with pytest.raises(ValueError, match="shape"):
        portable.wgrad(x_SK, grad_SN, ends_G, out=out[:2])


def test_these_kernels_ran():
    suite.check([3], bias=False, scale=False)
    assert ("grouped_gemm", "bf16", "cpu", "interpreted") in registry.used()
