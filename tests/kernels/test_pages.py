"""Pages keep what is used of a buffer, in no more pages than that needs, whatever order they are freed in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.poison import poisoned_memory  # noqa: F401 (a fixture)

from maniple.kernels import pages
from maniple.kernels.pages import bring, give, keep, new_pool

PAGE = 64  # bytes
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


def numbers(shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=g).to(torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


def free(pool):
    """The numbers of the free pages."""
    first, count = pool.state[:2].tolist()
    return [pool.ring_P[(first + n) % pool.ring_P.shape[0]].item() for n in range(count)]


@settings(max_examples=30, deadline=None)
@given(
    lines=st.sampled_from([1, 1, 3, 8]),
    slots=st.integers(1, 20),
    unit=st.sampled_from([1, 2, 3, 16, 40]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_what_is_used_comes_back(lines, slots, unit, dtype, data):
    used = data.draw(st.integers(0, slots))
    x_LW = numbers((lines, slots * unit + data.draw(st.integers(0, 3))), dtype, used)
    pool = new_pool(data.draw(st.integers(0, 60)), PAGE, "cpu")
    size = torch.tensor([used], dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    table = keep(pool, x_LW, size, unit)
    wanted = -(-lines * used * unit * dtype.itemsize // PAGE)
    got = min(wanted, pool.pages)
    assert table[:2].tolist() == [wanted, got]
    assert pool.state[1:].tolist() == [pool.pages - got, wanted, wanted]
    assert (table[2 + got :] == -1).all()
    out_LW = torch.full_like(as_bytes(x_LW), 255).view(dtype)
    bring(pool, table, out_LW, size, unit)
    front = as_bytes(x_LW).view(lines, -1)[:, : used * unit * dtype.itemsize].flatten()
    back = as_bytes(out_LW).view(lines, -1)[:, : used * unit * dtype.itemsize].flatten()
    there = got * PAGE
    assert torch.equal(back[:there], front[:there])
    assert (back[there:] == 0).all()  # what had no page
    give(pool, table)
    assert pool.state[1:].tolist() == [pool.pages, 0, wanted]
    assert sorted(free(pool)) == list(range(pool.pages))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 12), moves=st.lists(st.integers(-4, 9), max_size=30), seed=st.integers(0, 99))
def test_any_order_of_taking_and_freeing(size, moves, seed):
    """A move n >= 0 keeps n rows of 48 bytes, -n frees one of what is kept. What is kept is never written to."""
    pool, kept = new_pool(size, PAGE, "cpu"), []
    for number, move in enumerate(moves):
        if move >= 0:
            x = numbers((1, 9 * 12), torch.float32, seed + number)
            used = torch.tensor([move])
            kept.append((x, used, keep(pool, x, used, 12)))
        elif kept:
            x, used, table = kept.pop(-move % len(kept))
            give(pool, table)
        held = [page for _, _, table in kept for page in table[2 : 2 + table[1]].tolist()]
        assert sorted(held + free(pool)) == list(range(size))  # each page has one place
        assert pool.state[2] == sum(int(table[0]) for *_, table in kept)
    for x, used, table in kept:
        out = torch.empty_like(x)
        bring(pool, table, out, used, 12)
        there = min(int(used) * 12, int(table[1]) * PAGE // 4)
        assert torch.equal(out[:, :there], x[:, :there])


def test_most_is_the_most_at_once():
    pool, x, used = new_pool(8, PAGE, "cpu"), torch.ones(1, 64), torch.tensor([64])
    tables = [keep(pool, x, used, 1) for _ in range(3)]
    assert pool.most.tolist() == [12]  # of which 4 were not there
    for table in tables:
        give(pool, table)
    give(pool, keep(pool, x, used, 1))
    assert pool.state.tolist()[1:] == [8, 0, 12]


def test_an_odd_place_in_memory():
    whole = torch.arange(200, dtype=torch.uint8)
    x, pool, used = whole[3:103].view(1, -1), new_pool(4, PAGE, "cpu"), torch.tensor([90])
    table, out = keep(pool, x, used, 1), torch.zeros_like(whole)[5:105].view(1, -1)
    bring(pool, table, out, used, 1)
    assert torch.equal(out[:, :90], x[:, :90])


def test_refusals():
    pool = new_pool(1, PAGE, "cpu")
    with pytest.raises(ValueError, match="contiguous"):
        keep(pool, torch.ones(4, 6).t(), torch.tensor([1]), 1)
    with pytest.raises(ValueError, match="24 bytes"):
        new_pool(1, 24, "cpu")


def test_nothing_depends_on_values_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        pool, x, used = pages.new_pool(5, PAGE, "cpu"), torch.empty(3, 128), torch.empty(1, dtype=torch.int32)
        table = pages.keep(pool, x, used, 4)
        assert table.shape == (2 + 24,)
        pages.bring(pool, table, torch.empty_like(x), used, 4)
        pages.give(pool, table)
