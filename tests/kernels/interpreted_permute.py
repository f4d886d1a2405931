"""What the reference of permutation passes, for the Triton kernels under Triton's interpreter, bit for bit.

The interpreter cuts fp32 off where it makes it bf16: bf16 numbers are small integers here, whose sums are bf16 too.
That a sum is rounded once is tried in `tests/gpu/test_permute.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_permute as suite
from tests.kernels.test_permute import (  # noqa: F401 (collected here, with the fixture below)
    test_rows_sums_and_gradients_are_those_of_the_loop,
    test_slots_that_are_not_there_add_nothing_and_are_not_read,
    test_static_shapes_without_values,
)

from maniple.kernels import registry
from maniple.kernels.permute import launch, permute, permute_probs, reference, sort_by_expert, unpermute
from maniple.kernels.permute import triton as kernels
from maniple.kernels.permute.triton_kernels import gather_kernel

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("permute", "interpreted", {"bf16"}, {"cpu"}, kernels, preference=-1)
MINE = {"kernels": "interpreted"}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for name in ("sort_by_expert", "permute", "permute_probs", "unpermute"):
        monkeypatch.setattr(suite, name, functools.partial(getattr(suite, name), kernels="interpreted"))


def check_sort(ids_TK, experts):
    """Order, inverse and ends are the oracle's, also in the slots past the last end."""
    got, wanted = sort_by_expert(ids_TK, experts, **MINE), reference.sort_by_expert(ids_TK, experts)
    for name in ("order_S", "position_TK", "ends_E"):
        a, b = getattr(got, name), getattr(wanted, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    return got


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 23),
    topk=st.integers(1, 4),
    experts=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 999),
)
def test_any_choice_is_sorted_as_the_oracle_sorts_it(tokens, topk, experts, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-2, experts + 2, (tokens, topk), generator=g)  # repeated and dropped ones too
    check_sort(ids_TK.to(dtype), experts)


@pytest.mark.parametrize("experts", [128, 2304])
def test_the_blocks_of_a_gpu_and_unusual_choices(monkeypatch, experts):
    block = launch.sort_block("nvidia", experts)
    assert block == launch.sort_block("amd", experts)
    assert block.chunk < 2**16  # two counts share a number
    assert launch.width(experts) > experts
    monkeypatch.setattr(launch, "sort_block", lambda *_: block)
    g = torch.Generator().manual_seed(0)
    check_sort(torch.randint(-9, experts + 9, (150, 8), generator=g), experts)
    check_sort(torch.full((2 * block.chunk + 1, 1), experts - 1), experts)
    check_sort(torch.tensor([[2**40, -(2**40), experts, 0, 2**31, 2**32]]), experts)
    check_sort(torch.arange(block.chunk).view(-1, 2).t(), experts)  # strided


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 12),
    topk=st.integers(1, 4),
    d=st.sampled_from([1, 3, 15, 16, 17, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_any_rows_are_copied_and_summed_bit_for_bit(tokens, topk, d, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, 6, (tokens, topk), generator=g)
    permutation = check_sort(ids_TK, 5)
    used = int(permutation.ends_E[-1])

    def random(*shape):
        numbers = torch.randn(shape, generator=g)
        return (8 * numbers).round().to(dtype) if dtype == torch.bfloat16 else numbers

    x_TD, probs_TK = random(tokens, 2 * d)[:, ::2].requires_grad_(), random(tokens, topk).float().requires_grad_()
    rows_SD, grad_SD, grad_TD = random(tokens * topk, d), random(tokens * topk, d), random(tokens, d)
    rows_SD[used:], grad_SD[used:] = torch.nan, torch.nan
    rows_SD.requires_grad_()
    for _ in range(2):
        results = []
        for pin in (MINE, {"kernels": "reference"}):
            out_SD, sums_TD = permute(x_TD, permutation, **pin), unpermute(rows_SD, permutation, **pin)
            probs_S = permute_probs(probs_TK, permutation, **pin)
            grads = torch.autograd.grad(
                [out_SD, sums_TD, probs_S], [x_TD, rows_SD, probs_TK], [grad_SD, grad_TD, grad_SD[:, 0].float()]
            )
            results.append([out_SD[:used], sums_TD, probs_S[:used], grads[0], grads[1][:used], grads[2]])
        for got, wanted in zip(*results, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


def test_rows_past_the_last_end_are_not_written():
    permutation = sort_by_expert(torch.tensor([[0, 9], [9, 1], [9, 9]]), 2, **MINE)
    out_SD = permute(torch.ones(3, 5), permutation, **MINE)
    assert out_SD[:2].eq(1).all()
    assert out_SD[2:].isnan().all()  # as memory was


def test_rows_past_the_slots_are_not_written():
    permutation = sort_by_expert(torch.tensor([[0, 1], [0, 1], [1, 0]]), 2, **MINE)
    memory = torch.full((9, 3), torch.inf)
    sizes = {"TOPK": 2, "ROWS": 8, "COLUMNS": 4}
    x_TD = torch.randn(3, 3)
    gather_kernel[(1, 1)](x_TD, permutation.order_S, permutation.ends_E[-1:], memory[2:], 4, 3, *x_TD.stride(), **sizes)
    assert torch.equal(memory[2:6], x_TD[permutation.order_S[:4] // 2])
    assert memory[:2].isinf().all()
    assert memory[6:].isinf().all()


def test_fewer_slots_than_choices():
    permutation = sort_by_expert(torch.tensor([[1, -1], [0, -1]]), 2, **MINE)
    assert permute(torch.tensor([[5.0], [7.0]]), permutation, slots=2, **MINE).tolist() == [[7], [5]]
    assert unpermute(torch.tensor([[7.0], [5.0]]), permutation, **MINE).tolist() == [[5], [7]]
    assert permute(torch.ones(2, 0), permutation, **MINE).shape == (4, 0)


def test_what_would_be_summed_in_less_than_its_precision_is_refused():
    permutation = sort_by_expert(torch.zeros(2, 1, dtype=torch.int64), 1, **MINE)
    with pytest.raises(ValueError, match="kernels='reference'"):
        unpermute(torch.ones(2, 3).double(), permutation, **MINE)


@pytest.mark.parametrize("target", ["nvidia", "amd"])
@pytest.mark.parametrize("columns", [1, 3, 128, 7168])
def test_blocks_of_rows_are_powers_of_two_and_as_large_for_any_width(target, columns):
    block = launch.rows_block(target, columns)
    assert block.rows * block.columns == (1024 if target == "nvidia" else 2048)
    assert block.rows & (block.rows - 1) == block.columns & (block.columns - 1) == 0


def test_the_operators_are_those_of_the_kernels():
    ids_TK = torch.tensor([[0, 3], [2, 1]])
    torch.library.opcheck(torch.ops.maniple.sort_by_expert.default, (ids_TK, 3))
    order_S, position_TK, ends_E = torch.ops.maniple.sort_by_expert(ids_TK, 4)
    x_TD = torch.randn(2, 3)
    torch.library.opcheck(torch.ops.maniple.gather_rows.default, (x_TD, order_S, ends_E, 2, 4))
    torch.library.opcheck(torch.ops.maniple.sum_rows.default, (torch.randn(4, 3), position_TK, ends_E))


def test_these_kernels_ran():
    sort_by_expert(torch.zeros(1, 1, dtype=torch.int64), 1, **MINE)
    assert ("permute", "bf16", "cpu", "interpreted") in registry.used()
