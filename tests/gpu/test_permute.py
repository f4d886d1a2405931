"""The permutation kernels on a GPU against the oracle there, bit for bit, at the sizes of models; no waits, graphs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from maniple.kernels import registry
from maniple.kernels.permute import permute, permute_probs, reference, sort_by_expert, unpermute

MINE, ORACLE = {"kernels": "triton"}, {"kernels": "reference"}
SIZES = {"E 128, k 8": (65_536, 8, 128), "E 256, k 8": (65_536, 8, 256), "E 2304, k 36": (65_536, 36, 2304)}


@contextmanager
def poisoned():
    """Memory that was never written reads as NaN, integers as the largest."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def choose(kind: str, tokens: int, topk: int, experts: int, seed: int = 0) -> torch.Tensor:
    """ids `[T, K]`, distinct within a token but where all tokens go to one expert."""
    g = torch.Generator("cuda").manual_seed(seed)
    if kind == "to one":
        return torch.full((tokens, topk), experts - 1, device="cuda")
    loads = torch.rand(tokens, experts, device="cuda", generator=g)
    if kind == "skewed":
        loads[:, experts // 4 :] *= 0.5
    ids_TK = loads.topk(topk, dim=1).indices
    if kind == "dropped":
        ids_TK[torch.rand(tokens, topk, device="cuda", generator=g) < 0.3] = -1
        ids_TK[::7, 0] = experts
    return ids_TK


def same_sort(ids_TK: torch.Tensor, experts: int):
    with poisoned():
        got = sort_by_expert(ids_TK, experts, **MINE)
    wanted = reference.sort_by_expert(ids_TK, experts)
    for name in ("order_S", "position_TK", "ends_E"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    return got


@pytest.mark.parametrize("kind", ["even", "skewed", "to one", "dropped"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sorting(size, kind):
    tokens, topk, experts = size
    same_sort(choose(kind, tokens, topk, experts), experts)


@pytest.mark.parametrize("tokens", [0, 1, 2, 255, 256, 257, 4095])
@pytest.mark.parametrize(("topk", "experts"), [(1, 1), (1, 7), (4, 60), (8, 513), (36, 2304)])
def test_sorting_of_any_size(tokens, topk, experts):
    g = torch.Generator("cuda").manual_seed(tokens)
    ids_TK = torch.randint(-1, experts + 1, (tokens, topk), device="cuda", generator=g)
    same_sort(ids_TK, experts)
    same_sort(ids_TK.int(), experts)


def check_rows(tokens, topk, experts, d, dtype, kind="dropped"):
    """Rows, sums and gradients, twice, with NaN past the last end."""
    permutation = same_sort(choose(kind, tokens, topk, experts), experts)
    used, slots = int(permutation.ends_E[-1]), tokens * topk
    x_TD = torch.randn(tokens, d, device="cuda").to(dtype).requires_grad_()
    rows_SD = torch.randn(slots, d, device="cuda").to(dtype)
    rows_SD[used:] = torch.nan
    probs_TK = torch.rand(tokens, topk, device="cuda").requires_grad_()
    for _ in range(2):
        with poisoned():
            out_SD = permute(x_TD, permutation, **MINE)
            grad_TD = torch.autograd.grad(out_SD, x_TD, rows_SD)[0]
            assert torch.equal(out_SD[:used], reference.gather(x_TD, permutation, used))
            del out_SD
            probs_S = permute_probs(probs_TK, permutation, **MINE)
            grad_S = rows_SD[:, 0].float()
            grad_TK = torch.autograd.grad(probs_S, probs_TK, grad_S)[0]
        sums_TD = reference.scatter_sum(rows_SD, permutation)
        assert torch.equal(unpermute(rows_SD, permutation, **MINE), sums_TD)
        assert torch.equal(grad_TD, sums_TD)
        probs_TS = permute_probs(probs_TK, permutation, **ORACLE)
        assert torch.equal(probs_S[:used], probs_TS[:used])
        assert torch.equal(grad_TK, torch.autograd.grad(probs_TS, probs_TK, grad_S)[0])
    leaf_SD = rows_SD.requires_grad_()
    back_SD = torch.autograd.grad(unpermute(leaf_SD, permutation, **MINE), leaf_SD, x_TD.detach())[0]
    assert torch.equal(back_SD[:used], reference.gather(x_TD, permutation, used))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_rows(size):
    check_rows(*size, 512, torch.bfloat16)


@pytest.mark.parametrize("d", [1, 3, 136, 1000, 2880])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rows_of_any_width(d, dtype):
    check_rows(777, 4, 30, d, dtype)


def test_beyond_2_to_31_elements():
    check_rows(65_536, 8, 256, 7168, torch.bfloat16, kind="even")  # 3.8e9


def test_strided_tokens():
    permutation = same_sort(choose("even", 500, 4, 16), 16)
    wide_TD = torch.randn(500, 2 * 203 + 5, device="cuda")
    for x_TD in (wide_TD[:, 5::2], wide_TD[:203].t()[:, :203].contiguous().t(), wide_TD[:, 3:206]):
        some = same_sort(choose("even", x_TD.shape[0], 4, 16), 16) if x_TD.shape[0] != 500 else permutation
        assert torch.equal(permute(x_TD, some, **MINE), permute(x_TD, some, **ORACLE))


def step(ids_TK, experts, x_TD, probs_TK):
    """What a layer does with the kernels, forward and backward."""
    permutation = sort_by_expert(ids_TK, experts, **MINE)
    rows_SD, probs_S = permute(x_TD, permutation, **MINE), permute_probs(probs_TK, permutation, **MINE)
    out_TD = unpermute(rows_SD * probs_S[:, None], permutation, **MINE)
    return [permutation.ends_E, out_TD, *torch.autograd.grad(out_TD.square().sum(), [x_TD, probs_TK])]


def test_the_host_waits_for_nothing():
    ids_TK = choose("skewed", 4096, 8, 128)
    x_TD = torch.randn(4096, 256, device="cuda", requires_grad=True)
    probs_TK = torch.rand(4096, 8, device="cuda", requires_grad=True)
    step(ids_TK, 128, x_TD, probs_TK)  # compile first
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ids_TK, 128, x_TD, probs_TK)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_other_choices():
    x_TD = torch.randn(4096, 256, device="cuda", requires_grad=True)
    probs_TK = torch.rand(4096, 8, device="cuda", requires_grad=True)
    ids_TK = choose("even", 4096, 8, 128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ids_TK, 128, x_TD, probs_TK)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(ids_TK, 128, x_TD, probs_TK)
    for seed, kind in enumerate(["even", "skewed", "to one"]):
        ids_TK.copy_(choose(kind, 4096, 8, 128, seed=seed + 1))
        graph.replay()
        for got, wanted in zip(captured, step(ids_TK, 128, x_TD, probs_TK), strict=True):
            assert torch.equal(got, wanted)


def test_the_kernels_are_what_ran():
    sort_by_expert(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), 1, **MINE)
    assert ("permute", "bf16", "cuda", "triton") in registry.used()
