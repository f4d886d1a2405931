"""The routing kernels on a GPU against the oracle there, at the sizes of models: choice, gradients, waits, graphs."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from tests.poison import unit_error

from maniple.kernels import registry
from maniple.kernels.routing import RouterSpec, reference, route

MINE = {"kernels": "triton"}
DEEPSEEK = RouterSpec(256, 8, "sigmoid", True, True, 8, 4, "sum_top2", 2.5)
SPECS = {
    "E 128, k 8": RouterSpec(128, 8),
    "E 128, k 4, late": RouterSpec(128, 4, score_before_topk=False),
    "E 160, k 6, groups": RouterSpec(160, 6, renormalize=False, num_groups=8, group_topk=3, route_scale=16.0),
    "E 256, k 8, groups": DEEPSEEK,
    "E 288, k 1": RouterSpec(288, 1, "sigmoid", False),
    "E 1024, k 16": RouterSpec(1024, 16),
    "E 160, k 36": RouterSpec(160, 36, "sigmoid"),
    "E 2304, k 36": RouterSpec(2304, 36),
    "E 2304, k 36, groups": RouterSpec(2304, 36, "sigmoid", False, True, 48, 12, "max"),
}


@contextmanager
def poisoned():
    """Memory that was never written reads as NaN, integers as the largest."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [65_536, 1, 1023])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_choice_weights_counts_and_gradients(spec, tokens, biased):
    logits_TE = random(tokens, spec.num_experts).requires_grad_()
    bias_E = 0.1 * random(spec.num_experts, seed=1) if biased else None
    with poisoned():
        got = route(logits_TE, spec, bias_E, **MINE)
    own = reference.route(logits_TE.detach(), spec, bias_E)
    # an exponential may differ in its last place, and then near scores may change their order
    same_T = (got.ids_TK == own.ids_TK).all(1)
    assert same_T.float().mean() > (0.999 if spec.num_experts < 1024 else 0.98)
    ranked = got.ids_TK.sort(1).values
    assert (ranked[:, 0] >= 0).all()
    assert (ranked[:, -1] < spec.num_experts).all()
    assert (ranked[:, 1:] > ranked[:, :-1]).all()
    counts_E = torch.bincount(got.ids_TK.flatten(), minlength=spec.num_experts)
    assert torch.equal(got.counts(), counts_E)
    assert torch.equal(own.counts(), counts_E) or not same_T.all()

    wanted = reference.route(logits_TE, spec, bias_E, got.ids_TK)  # of one choice, so that all can be compared
    experts = spec.num_experts
    assert unit_error(got.probs_TK * spec.topk, wanted.probs_TK * spec.topk) < 1e-6
    assert unit_error(got.scores_TE * experts, wanted.scores_TE * experts) < 1e-6
    grads = [random(tokens, spec.topk, seed=2) * spec.topk, random(tokens, experts, seed=3) * experts]
    for _ in range(2):
        with poisoned():
            a = torch.autograd.grad([got.probs_TK, got.scores_TE], logits_TE, grads, retain_graph=True)[0]
        b = torch.autograd.grad([wanted.probs_TK, wanted.scores_TE], logits_TE, grads, retain_graph=True)[0]
        assert unit_error(a, b) < 1e-6
    again = route(logits_TE, spec, bias_E, ids_TK=got.ids_TK, **MINE)
    assert torch.equal(again.counts(), counts_E)
    assert unit_error(again.probs_TK, got.probs_TK) < 1e-6


@pytest.mark.parametrize("spec", [SPECS["E 128, k 4, late"], SPECS["E 2304, k 36, groups"]], ids=str)
def test_ties_are_the_oracles_bit_for_bit(spec):
    """Selection is by the logits themselves here: no exponential has a say."""
    logits_TE = random(4096, spec.num_experts).round()
    bias_E = random(spec.num_experts, seed=1).round()
    for bias in (None, bias_E):
        got, wanted = route(logits_TE, spec, bias, **MINE), reference.route(logits_TE, spec, bias)
        assert torch.equal(got.ids_TK, wanted.ids_TK)
        assert torch.equal(got.counts(), wanted.counts())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_identical_logits_go_to_the_lowest_ids(spec):
    signs = torch.where(random(1, spec.num_experts) > 0, 0.0, -0.0)  # zero of either sign is one logit
    for logits_E in (torch.full_like(signs, 0.25), signs):
        got = route(logits_E.repeat(100, 1), spec, **MINE)
        assert torch.equal(got.ids_TK, torch.arange(spec.topk, device="cuda").expand(100, -1))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_not_finite_is_chosen_as_the_oracle_chooses(spec):
    logits_TE = random(500, spec.num_experts)
    for number, value in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        logits_TE[100 * number : 100 * number + 100, number::7] = value
    got, wanted = route(logits_TE, spec, **MINE), reference.route(logits_TE, spec)
    for start in (0, 100, 200):
        assert torch.equal(got.ids_TK[start : start + 100], wanted.ids_TK[start : start + 100]), start
    assert (got.ids_TK == wanted.ids_TK).all(1).float().mean() > 0.99
    torch.testing.assert_close(got.scores_TE, wanted.scores_TE, rtol=2e-6, atol=1e-30, equal_nan=True)
    assert got.probs_TK[400:].isfinite().all()
    bias_E = torch.full((spec.num_experts,), -5.0, device="cuda")  # all selection scores are negative
    got, wanted = route(logits_TE[400:], spec, bias_E, **MINE), reference.route(logits_TE[400:], spec, bias_E)
    size = spec.num_experts // spec.num_groups
    assert all(len(set(row)) <= spec.group_topk for row in (got.ids_TK // size).tolist())
    assert (got.ids_TK == wanted.ids_TK).float().mean() > 0.95  # scores near -5 have fewer places


def test_exponentials_keep_their_places_far_from_zero():
    logits_TE = -torch.linspace(0, 60, 128, device="cuda")[None]
    wanted = logits_TE.double().softmax(-1)
    got = route(logits_TE, RouterSpec(128, 8), **MINE).scores_TE
    assert ((got - wanted) / wanted).abs().max() < 1e-6  # 2^(x log2 e) alone loses 4e-6 at -60
    far = torch.tensor([[-1000.0, -104, -100, -88.5, -87, 0, 60, 87, 88.5, 100, 104, 1000]], device="cuda")
    for score in ("softmax", "sigmoid"):
        for shift in (0.0, 950.0):
            spec = RouterSpec(12, 2, score)
            got, wanted = route(far - shift, spec, **MINE), reference.route(far - shift, spec)
            torch.testing.assert_close(got.scores_TE, wanted.scores_TE, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_logits_are_cast_first(dtype):
    logits_TE = random(5000, 256).to(dtype).requires_grad_()
    got, wanted = route(logits_TE, DEEPSEEK, **MINE), route(logits_TE.float(), DEEPSEEK, **MINE)
    assert (got.ids_TK == wanted.ids_TK).all(1).float().mean() > 0.999
    torch.testing.assert_close(got.scores_TE, wanted.scores_TE, rtol=1e-6, atol=0)  # sums of other lanes
    oracle = reference.route(logits_TE, DEEPSEEK, None, got.ids_TK)
    grad_TK = random(5000, 8)
    a, b = (torch.autograd.grad(r.probs_TK, logits_TE, grad_TK)[0] for r in (got, oracle))
    assert a.dtype == dtype
    assert (a.float() - b.float()).norm() < 2e-3 * b.float().norm()


def step(logits_TE, bias_E):
    """Forward and backward of a router with a balance loss."""
    routing = route(logits_TE, DEEPSEEK, bias_E, **MINE)
    counts_E = routing.counts()
    loss = routing.probs_TK.square().sum() + (routing.scores_TE.mean(0) * counts_E).sum()
    return [routing.ids_TK, routing.probs_TK, counts_E, torch.autograd.grad(loss, logits_TE)[0]]


def test_the_host_waits_for_nothing():
    logits_TE, bias_E = random(4096, 256).requires_grad_(), random(256, seed=1)
    step(logits_TE, bias_E)  # compile first
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(logits_TE, bias_E)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_other_logits():
    logits_TE, bias_E = random(4096, 256).requires_grad_(), 0.1 * random(256, seed=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(logits_TE, bias_E)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(logits_TE, bias_E)
    for seed in (5, 6):
        with torch.no_grad():
            logits_TE.copy_(random(4096, 256, seed=seed))
            bias_E.copy_(random(256, seed=seed + 2))
        graph.replay()
        for got, wanted in zip(captured, step(logits_TE, bias_E), strict=True):
            assert torch.equal(got, wanted)


def test_the_kernels_are_what_ran():
    route(torch.zeros(1, 4, device="cuda"), RouterSpec(4, 1), **MINE)
    assert ("routing", "bf16", "cuda", "triton") in registry.used()


def test_beyond_two_to_the_31_elements():
    """Of 933,000 tokens and 2,304 experts: the last tokens as if they were alone, forward and backward."""
    spec, tokens = SPECS["E 2304, k 36, groups"], 2**31 // 2304 + 1000
    logits_TE = torch.randn(tokens, spec.num_experts, device="cuda", dtype=torch.bfloat16).requires_grad_()
    last = slice(tokens - 64, tokens)
    alone_TE = logits_TE.detach()[last].clone().requires_grad_()
    got, alone = route(logits_TE, spec, **MINE), route(alone_TE, spec, **MINE)
    assert torch.equal(got.ids_TK[last], alone.ids_TK)
    assert torch.equal(got.probs_TK[last], alone.probs_TK)
    assert torch.equal(got.scores_TE[last], alone.scores_TE)
    assert got.counts().sum() == tokens * spec.topk
    grads = [torch.rand_like(got.probs_TK), torch.rand_like(got.scores_TE)]
    (grad_TE,) = torch.autograd.grad([got.probs_TK, got.scores_TE], logits_TE, grads)
    of_last = [grad[last].clone() for grad in grads]
    (wanted_TE,) = torch.autograd.grad([alone.probs_TK, alone.scores_TE], alone_TE, of_last)
    assert torch.equal(grad_TE[last], wanted_TE)
