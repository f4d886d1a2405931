"""Experts whose saved activations are kept in pages have the same gradients to the bit, at the memory of what came."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.moe.oracle import GPT_OSS

from maniple.moe.dispatch import LocalDispatcher
from maniple.moe.experts import expert_mlp
from maniple.moe.pages import ActivationPages, _Fronts
from maniple.moe.room import Room

RECIPES = ["bf16", "fp8", "fp8_block", "mxfp8"]
D, F, E, K, G = 128, 64, 16, 4, 4
PAGE = 256  # bytes: smaller than any row of what is kept


def tokens_of(counts, seed=0):
    """Tokens, ids and weights whose first G experts get `counts` rows, all others going elsewhere."""
    g = torch.Generator().manual_seed(seed)
    rows = [expert for expert, count in enumerate(counts) for _ in range(count)]
    ids_TK = torch.full((256, K), E - 1)
    ids_TK[: len(rows), 0] = torch.tensor(rows, dtype=torch.int64)
    x_TD = torch.randn(ids_TK.shape[0], D, generator=g).bfloat16().requires_grad_()
    probs_TK = torch.rand(ids_TK.shape, generator=g).requires_grad_()
    return x_TD, ids_TK, probs_TK


class Layer:
    """One rank's experts over `slots` slots, whatever comes."""

    def __init__(self, recipe, pages, *, biases=False, recompute="none"):
        g = torch.Generator().manual_seed(7)
        self.weights = [torch.randn(G, 2 * F, D, generator=g) / D**0.5, torch.randn(G, D, F, generator=g) / F**0.5]
        self.weights += [torch.randn(G, 2 * F, generator=g), torch.randn(G, D, generator=g)] if biases else []
        self.weights = [weight.bfloat16().requires_grad_() for weight in self.weights]
        self.how, self.pages = dict(recipe=recipe, recompute=recompute, activation=GPT_OSS), pages

    def __call__(self, tokens, *, balanced, slots):
        x_TD, ids_TK, probs_TK = tokens
        room = Room(1.0)
        room.size = lambda *_: slots
        dispatcher = LocalDispatcher(E, experts=range(G), room=room)
        rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, ids_TK, probs_TK)
        w13, w2, *biases = self.weights
        named = dict(zip(("b13_GF", "b2_GD"), biases, strict=False))
        with self.pages.keeping(handle.ends_E, slots, balanced) if self.pages else torch.enable_grad():
            rows = expert_mlp(rows, probs, handle.ends_E, w13, w2, **self.how, **named)
        return dispatcher.combine_postprocess(rows, handle)

    def gradients(self, tokens, out_TD):
        g = torch.Generator().manual_seed(9)
        grad_TD = torch.randn(out_TD.shape, generator=g).to(out_TD.dtype)
        leaves = [tokens[0], tokens[2], *self.weights]
        for leaf in leaves:
            leaf.grad = None
        out_TD.backward(grad_TD)
        return [leaf.grad for leaf in leaves]


def pool_for(pages):
    """A pool as the trainer makes it after the first pass."""
    pages.grow(int(pages.most))
    return pages


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (20, 0, 3, 1), (0, 0, 0, 0), (0, 0, 0, 64)])
def test_gradients_are_the_same_to_the_bit(recipe, biases, counts):
    tokens, pages = tokens_of(counts), ActivationPages(1.0, page_bytes=PAGE)
    plain, paged = Layer(recipe, None, biases=biases), Layer(recipe, pages, biases=biases)
    wanted_TD = plain(tokens, balanced=32, slots=64)
    wanted = plain.gradients(tokens, wanted_TD)
    first = paged(tokens, balanced=32, slots=64)
    assert torch.equal(first, wanted_TD)
    assert all(grad.isfinite().all() for grad in paged.gradients(tokens, first))  # without a page
    pool_for(pages)
    for _ in range(2):
        out_TD = paged(tokens, balanced=32, slots=64)
        assert pages.pool.state[2] > 0 or not sum(counts)
        got = paged.gradients(tokens, out_TD)
        assert torch.equal(out_TD, wanted_TD)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert pages.pool.state[2] == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_balanced_routing_costs_balanced_memory(recipe):
    """Whatever the buffers' size: pages of the rows that came, counted on the device and on the host alike."""
    wanted = []
    for slots in (256, 1024):
        pages = ActivationPages(1.0, page_bytes=PAGE)
        layer, tokens = Layer(recipe, pages), tokens_of((64, 64, 64, 64))
        layer(tokens, balanced=256, slots=slots).sum().backward()
        wanted.append(int(pages.most))
        assert pages.balanced_now == 0
        if recipe in ("bf16", "mxfp8"):  # the transposes of others are padded, each group by up to 128
            assert pages.balanced_most == wanted[-1]
    assert wanted[0] == wanted[1]
    half = ActivationPages(1.0, page_bytes=PAGE)
    Layer(recipe, half)(tokens_of((32, 32, 32, 32)), balanced=256, slots=1024).sum().backward()
    assert int(half.most) <= wanted[0] * (1 if recipe.startswith("fp8") else 0.5)


def test_bf16_keeps_its_rows_and_no_more():
    pages = ActivationPages(1.0, page_bytes=PAGE)
    Layer("bf16", pages)(tokens_of((10, 0, 7, 3)), balanced=64, slots=64)
    rows = 20 * 2  # bytes a column
    assert int(pages.most) == sum(-(-rows * width // PAGE) for width in (D, 2 * F, F))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("recompute", ["activation", "all"])
def test_what_is_computed_again_takes_no_page(recipe, recompute):
    tokens, pages = tokens_of((20, 0, 3, 9)), ActivationPages(1.0, page_bytes=PAGE)
    plain, paged = Layer(recipe, None), Layer(recipe, pages, recompute=recompute)
    wanted_TD = plain(tokens, balanced=32, slots=64)
    wanted = plain.gradients(tokens, wanted_TD)
    for _ in range(2):
        out_TD = paged(tokens, balanced=32, slots=64)
        kept = int(pages.pool.state[2])
        got = paged.gradients(tokens, out_TD)
        if not pages.pages:
            pool_for(pages)
    assert torch.equal(out_TD, wanted_TD)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    if recipe == "bf16":
        assert kept == sum(-(-32 * 2 * width // PAGE) for width in ((D, 2 * F) if recompute == "activation" else (D,)))


def test_layers_and_micro_batches_are_freed_in_any_order():
    pages = ActivationPages(1.0, page_bytes=PAGE)
    layer, plain = Layer("bf16", pages), Layer("bf16", None)
    flights = [tokens_of(counts, seed) for seed, counts in enumerate([(5, 1, 9, 0), (0, 0, 30, 2), (7, 7, 7, 7)])]
    for order in ((0, 1, 2), (0, 1, 2), (2, 1, 0), (1, 2, 0)):
        outs = [layer(tokens, balanced=28, slots=64) for tokens in flights]
        held = [int(pages.pool.state[2])]
        for number in order:
            got = layer.gradients(flights[number], outs[number])
            held.append(int(pages.pool.state[2]))
            wanted = plain.gradients(flights[number], plain(flights[number], balanced=28, slots=64))
            if pages.pages:
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert held == sorted(held, reverse=True)
        assert held[-1] == 0
        if not pages.pages:
            pool_for(pages)
    assert sorted(pages.pool.ring_P.tolist()) == list(range(pages.pages))


def test_what_is_kept_lets_the_buffers_go():
    pages, seen = ActivationPages(1.0, page_bytes=PAGE), []
    layer, tokens = Layer("bf16", pages), tokens_of((8, 8, 8, 8))
    pack = pages._pack

    def watched(fronts, x):
        kept = pack(fronts, x)
        if kept is not x:
            seen.append(weakref.ref(x.untyped_storage()))
        return kept

    pages._pack = watched
    out_TD = layer(tokens, balanced=32, slots=64)
    gc.collect()
    assert len(seen) == 3
    assert not any(storage() is not None and storage().size() for storage in seen)
    del out_TD  # and a graph that is dropped without a backward pass gives its pages back
    assert pages.pool.state[2] == 0


def test_too_few_pages_are_said_and_nothing_else_is_harmed():
    pages = ActivationPages(1.0, page_bytes=PAGE)
    layer, few, many = Layer("bf16", pages), tokens_of((2, 2, 2, 2)), tokens_of((30, 0, 0, 30), 1)
    layer(few, balanced=8, slots=64)
    pool_for(pages)
    first = layer(few, balanced=8, slots=64)
    second = layer(many, balanced=8, slots=64)
    assert int(pages.most) > pages.pages
    assert all(grad.isfinite().all() for grad in layer.gradients(many, second))
    plain = Layer("bf16", None)
    wanted = plain.gradients(few, plain(few, balanced=8, slots=64))
    assert all(torch.equal(a, b) for a, b in zip(layer.gradients(few, first), wanted, strict=True))
    pages.grow(int(pages.most))
    got = layer.gradients(many, layer(many, balanced=8, slots=64))
    assert int(pages.most) <= pages.pages
    wanted = plain.gradients(many, plain(many, balanced=8, slots=64))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    pages.reset()
    assert int(pages.most) == 0


def test_a_tensor_that_might_be_either_stays_as_it_is():
    pages, slots = ActivationPages(1.0, page_bytes=16), 256
    ends_G, padded = torch.tensor([100, 200], dtype=torch.int32), 384

    def stays(x):
        return pages._pack(_Fronts(ends_G, slots, 128), x) is x

    assert not stays(torch.ones(slots, 6))
    assert not stays(torch.ones(6, slots).t().contiguous().t())
    assert not stays(torch.ones(6, padded).to(torch.float8_e4m3fn))
    assert not stays(torch.ones(3, 6).t())  # scales of blocks of 128, and of 32
    assert not stays(torch.ones(12, 6, dtype=torch.uint8).t())
    assert stays(torch.ones(6, padded))
    assert stays(torch.ones(6, 3))
    assert stays(torch.ones(slots, padded).to(torch.float8_e4m3fn))
    assert stays(torch.ones(slots, 6).requires_grad_())
    assert stays(torch.ones(slots, 6, dtype=torch.int64))
    assert stays(torch.ones(slots))
    assert stays(torch.ones(2, slots, 6))
    assert stays(torch.ones(slots + 1, 6))


def test_nothing_is_kept_without_gradients():
    pages = ActivationPages(1.0, page_bytes=PAGE)
    with torch.no_grad():
        Layer("bf16", pages)(tokens_of((2, 2, 2, 2)), balanced=8, slots=64)
    assert pages.pool is None


def test_a_factor_below_one_is_refused():
    with pytest.raises(ValueError, match="at least the balanced load"):
        ActivationPages(0.5)
