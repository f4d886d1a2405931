"""A training step's MoE layer on a GPU: the host waits for nothing, and a CUDA graph of it follows any routing.

The layer is router, dispatch, experts in pages, combine, z and balance loss, forward and backward. A graph that was
captured with one input is replayed with others, balanced and skewed, and gives the eager pass's bits. "slice" stands
for one rank of four: a quarter of the experts in a buffer of 1.25 times their balanced load, which skewed routing
overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from maniple.engines.megatron.precision import float8
from maniple.errors import UserError
from maniple.kernels import registry
from maniple.kernels.grouped_gemm.low_precision import OP
from maniple.kernels.quantize import QuantizedWeight
from maniple.kernels.routing import RouterSpec, route, router_logits, z_loss
from maniple.moe.bounded import BoundedDispatcher
from maniple.moe.dispatch import Dispatcher, LocalDispatcher
from maniple.moe.experts import expert_mlp
from maniple.moe.pages import ActivationPages
from maniple.moe.room import Room
from maniple.moe.router import load_balance_loss

pytestmark = pytest.mark.timeout(600)
T, D, F, E, K, LENGTH = 2048, 512, 256, 32, 4, 256
SPEC = RouterSpec(E, K, "sigmoid", True, True, 8, 4, "sum_top2", 2.5)
FACTOR = 1.25
RECIPES = ("bf16", "fp8", "fp8_block", "mxfp8")
WAYS = ("local", "slice")
SKEWED = (0, 1, 2, 3)  # the slice's experts, and four of `local`'s


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def served(recipe: str) -> None:
    if recipe == "bf16":
        return
    try:
        choice = registry.select(OP, recipe, "cuda", None, (torch.bfloat16, 2 * F, D, float8(recipe), float8(recipe)))
    except UserError as error:
        pytest.skip(str(error))
    if choice.name == "reference":
        pytest.skip(f"{recipe} has only its oracle here, which reads sizes on the host")


@dataclass
class Layer:
    """The layer with static inputs, so that a graph of `step` sees what is copied into them."""

    recipe: str
    dispatcher: Dispatcher
    local: int
    room: Room | None
    pages: ActivationPages | None
    x_TD: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shapes = (E, D), (self.local, 2 * F, D), (self.local, D, F)
        weights = [random(*shape, seed=n) / shape[-1] ** 0.5 for n, shape in enumerate(shapes)]
        self.weights = [weight.bfloat16().requires_grad_() for weight in weights]
        self.x_TD = torch.zeros(T, D, dtype=torch.bfloat16, device="cuda").requires_grad_()
        self.grad_TD = random(T, D, seed=9).bfloat16()
        self.bias_E = torch.zeros(E, device="cuda")
        self.counts_E = torch.zeros(E, dtype=torch.int64, device="cuda")
        self.caches = None
        if self.recipe != "bf16":
            dtype = float8(self.recipe)
            self.caches = QuantizedWeight(self.recipe, dtype=dtype), QuantizedWeight(self.recipe, dtype=dtype)

    @torch.no_grad()
    def feed(self, seed: int, experts: tuple[int, ...] = ()) -> None:
        """Other tokens, and a balancing bias that leaves no choice but these experts, if any are named."""
        self.x_TD.copy_(random(T, D, seed=seed))
        self.bias_E.zero_()
        if experts:
            self.bias_E[list(experts)] = 100.0

    def step(self) -> list[torch.Tensor]:
        """Output, balance loss, and the gradients of input and weights."""
        router_ED, w13_GFD, w2_GDF = self.weights
        logits_TE = router_logits(self.x_TD, router_ED)
        routing = route(logits_TE, SPEC, self.bias_E)
        self.counts_E += routing.counts()
        how = dict(sequence_length=LENGTH, batch_size=T // LENGTH)
        loss = load_balance_loss(routing, kind="sequence", **how) + z_loss(logits_TE, None)
        d = self.dispatcher
        rows, probs, handle = d.dispatch_preprocess(self.x_TD, routing.ids_TK, routing.probs_TK)
        rows, probs, ends_G = d.dispatch_postprocess(*d.token_dispatch(rows, probs, handle), handle)
        with self.pages.keeping(ends_G, rows.shape[0], T * K * self.local // E) if self.pages else torch.enable_grad():
            dtype = torch.float8_e4m3fn if self.recipe == "bf16" else float8(self.recipe)
            how = dict(recipe=self.recipe, dtype=dtype, caches=self.caches)
            rows = expert_mlp(rows, probs, ends_G, w13_GFD, w2_GDF, **how)
        out_TD = d.combine_postprocess(d.token_combine(d.combine_preprocess(rows, handle), handle), handle)
        inputs = [self.x_TD, *self.weights]
        gradients = torch.autograd.grad([out_TD, loss], inputs, [self.grad_TD, torch.ones_like(loss)])
        return [out_TD.detach(), loss.detach(), *gradients]

    def eager(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.step()]


def layer_of(recipe: str, way: str, *, paged: bool = False) -> Layer:
    served(recipe)
    room = Room(FACTOR) if way == "slice" else None
    local = E // 4 if way == "slice" else E
    dispatcher = LocalDispatcher(E, experts=range(local), room=room)
    pages = ActivationPages(FACTOR, kernels="triton") if paged else None
    layer = Layer(recipe, dispatcher, local, room, pages)
    layer.feed(0)
    for seed in range(3):  # compiles, tunes, quantizes the weights, and makes what stays
        layer.feed(seed)
        layer.step()
        if pages is not None and not pages.pages:
            pages.grow(int(pages.most))
    layer.feed(1, SKEWED)
    layer.step()
    torch.cuda.synchronize()
    return layer


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_for_nothing(recipe, way, paged):
    layer = layer_of(recipe, way, paged=paged)
    for experts in ((), SKEWED):
        layer.feed(5, experts)
        with no_waiting():
            results = layer.step()
        assert all(tensor.isfinite().all() for tensor in results)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_follows_any_routing_bit_for_bit(recipe, way, paged):
    layer = layer_of(recipe, way, paged=paged)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    layer.feed(10)
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = layer.step()
    outs = []
    for seed, experts in ((11, ()), (12, SKEWED), (13, (2, 9, 17, 30)), (10, ())):
        layer.feed(seed, experts)
        for buffer in (layer.room, layer.pages):
            if buffer is not None:
                buffer.reset()
        layer.counts_E.zero_()
        wanted, counts_E = layer.eager(), layer.counts_E.clone()
        asked = None if layer.room is None else layer.room.asked.clone()
        layer.counts_E.zero_()
        for tensor in static:
            tensor.fill_(torch.nan)
        if layer.room is not None:
            layer.room.reset()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(layer.counts_E, counts_E)
        assert asked is None or torch.equal(layer.room.asked, asked)
        for number, (got, want) in enumerate(zip(static, wanted, strict=True)):
            assert torch.equal(got, want), (seed, number)
        if layer.room is not None:
            assert (int(layer.room.asked) > layer.room.rows) == (experts == SKEWED)
        if layer.pages is not None:
            assert int(layer.pages.pool.state[2]) == 0  # all pages are free again
            assert layer.pages.pool.ring_P.sort().values.tolist() == list(range(layer.pages.pages))
        outs.append(static[0].clone())
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_pages_change_no_bit(recipe):
    plain, paged = layer_of(recipe, "slice"), layer_of(recipe, "slice", paged=True)
    for seed in (20, 21):
        for layer in (plain, paged):
            layer.feed(seed)
        paged.pages.reset()
        wanted, got = plain.eager(), paged.eager()
        assert int(paged.pages.most) <= paged.pages.pages
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.fixture
def one_rank():
    """NCCL or RCCL, alone in its group."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES)
def test_bounded_exchange_waits_for_nothing(recipe, one_rank):
    served(recipe)
    room = Room(FACTOR)
    layer = Layer(recipe, BoundedDispatcher(E, one_rank, room=room), E, room, None)
    same = Layer(recipe, LocalDispatcher(E), E, None, None)
    for seed in range(3):
        layer.feed(seed)
        layer.step()
    layer.feed(7)
    with no_waiting():
        results = layer.step()
    same.feed(7)
    assert int(room.asked) == room.rows == T * K
    for got, wanted in zip(results, same.step(), strict=True):
        assert torch.equal(got, wanted)
