"""The suite of pages for the Triton kernels, under Triton's interpreter."""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from tests.kernels import test_pages as suite
from tests.kernels.test_pages import (  # noqa: F401 (collected here)
    poisoned_memory,
    test_an_odd_place_in_memory,
    test_any_order_of_taking_and_freeing,
    test_most_is_the_most_at_once,
    test_what_is_used_comes_back,
)

from maniple.kernels import pages, registry
from maniple.kernels.pages import launch, reference
from maniple.kernels.pages import triton as kernels

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("pages", "interpreted", {"bf16"}, {"cpu"}, kernels, preference=-1)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for name in ("keep", "bring", "give"):
        monkeypatch.setattr(suite, name, functools.partial(getattr(pages, name), kernels="interpreted"))


def test_tables_and_states_are_the_oracles():
    both = []
    for how in (reference, kernels):
        ring_P, state, tables = torch.arange(11, dtype=torch.int32), torch.tensor([9, 11, 0, 0]), []
        for used in (4, 0, 7, 3):
            tables.append(how.take(ring_P, state, torch.tensor([used], dtype=torch.int32), 10, 16, 6))
        how.give(ring_P, state, tables[2])
        how.give(ring_P, state, tables[0])
        both.append([*tables, state, torch.tensor([ring_P[(state[0] + n) % 11] for n in range(state[1])])])
    for got, wanted in zip(*both, strict=True):
        assert torch.equal(got, wanted)


def test_the_block_of_a_gpu(monkeypatch):
    assert launch.copy_block("nvidia").words <= launch.copy_block("amd").words
    monkeypatch.setattr(launch, "copy_block", lambda *_: launch.CopyBlock(2048, 1024, 4))
    suite.test_an_odd_place_in_memory()
    suite.test_most_is_the_most_at_once()


def test_what_is_behind_the_used_part_is_left_alone():
    pool, x, used = pages.new_pool(9, 64, "cpu"), torch.randn(5, 24), torch.tensor([2])
    table, out = suite.keep(pool, x, used, 4), torch.full((5, 24), 7.0)
    suite.bring(pool, table, out, used, 4)
    assert torch.equal(out[:, :8], x[:, :8])
    assert (out[:, 8:] == 7).all()


def test_the_operators_are_those_of_the_kernels():
    pool, x, used = pages.new_pool(9, 64, "cpu"), torch.randn(5, 24), torch.tensor([2])
    ring, state = pool.ring_P, pool.state
    torch.library.opcheck(torch.ops.maniple.pages_take.default, (ring, state, used, 20, 16, 8))
    table = torch.ops.maniple.pages_take(ring, state, used, 20, 16, 8)
    data, words = pool.data.view(torch.int32), x.view(torch.int32)
    torch.library.opcheck(torch.ops.maniple.pages_store.default, (data, words, used, 4, table))
    torch.library.opcheck(torch.ops.maniple.pages_load.default, (data, words, used, 4, table))
    torch.library.opcheck(torch.ops.maniple.pages_give.default, (ring, state, table))


def test_these_kernels_ran():
    suite.test_most_is_the_most_at_once()
    assert ("pages", "bf16", "cpu", "interpreted") in registry.used()
