"""What the reference of routing passes, for the Triton kernels under Triton's interpreter.

Choices and counts are the oracle's, weights and gradients within 1e-6 of it at unit scale. Two exponentials may differ
in the last place: where scores are to tie here, they tie whatever those places are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import astuple

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_routing as suite
from tests.kernels.test_routing import (  # noqa: F401 (collected here, with the fixture below)
    test_choice_and_weights,
    test_dropped_groups_stay_dropped_where_every_selection_score_is_negative,
    test_minus_infinity_and_nan_logits,
    test_no_tokens,
    test_the_bias_enters_selection_only,
    test_ties_go_to_the_lowest_ids,
)
from tests.poison import unit_error

from maniple.kernels import registry
from maniple.kernels.routing import RouterSpec, launch, reference, route
from maniple.kernels.routing import triton as kernels

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("routing", "interpreted", {"bf16"}, {"cpu"}, kernels.route, preference=-1)
MINE = {"kernels": "interpreted"}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(suite, "route", functools.partial(suite.route, **MINE))


def check(logits_TE, spec, bias_E=None, ids_TK=None, seed=0):
    """Against the oracle: choice, counts, weights, scores, and each gradient, twice."""
    g = torch.Generator().manual_seed(seed)
    mine, theirs = logits_TE.clone().requires_grad_(), logits_TE.float().requires_grad_()
    got = route(mine, spec, bias_E, ids_TK=ids_TK, **MINE)
    wanted = reference.route(theirs, spec, bias_E, ids_TK)
    assert torch.equal(got.ids_TK, wanted.ids_TK)
    assert torch.equal(got.counts(), wanted.counts())
    assert got.counts().dtype == got.ids_TK.dtype == torch.int64
    assert not got.ids_TK.requires_grad
    assert not got.counts().requires_grad
    assert got.probs_TK.dtype == got.scores_TE.dtype == torch.float32
    experts, tolerance = spec.num_experts, 1e-6 if logits_TE.dtype == torch.float32 else 8e-3
    assert unit_error(got.probs_TK * spec.topk, wanted.probs_TK * spec.topk) < 1e-6
    assert unit_error(got.scores_TE * experts, wanted.scores_TE * experts) < 1e-6
    grad_TK = torch.randn(got.probs_TK.shape, generator=g) * spec.topk
    grad_TE = torch.randn(got.scores_TE.shape, generator=g) * experts
    both = [(a.probs_TK, a.scores_TE) for a in (got, wanted)]
    for picked in ([0], [1], [0, 1], [0, 1]):
        grads = [(grad_TK, grad_TE)[i] for i in picked]
        a, b = (
            torch.autograd.grad([results[i] for i in picked], x, grads, retain_graph=True)[0]
            for results, x in zip(both, (mine, theirs), strict=True)
        )
        assert a.dtype == logits_TE.dtype
        assert unit_error(a, b) < tolerance
    return got


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    group_size=st.integers(1, 5),
    num_groups=st.integers(1, 5),
    score=st.sampled_from(["softmax", "sigmoid"]),
    before=st.booleans(),
    renormalize=st.booleans(),
    bias=st.sampled_from([None, "few", "random"]),
    seed=st.integers(0, 1000),
)
def test_any_router_with_many_ties(data, group_size, num_groups, score, before, renormalize, bias, seed):
    sums = num_groups == 1 or group_size > 1
    group_score = data.draw(st.sampled_from(["max", "sum_top2"] if sums else ["max"]))
    group_topk = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(1, group_topk * group_size))
    experts = group_size * num_groups
    spec = RouterSpec(experts, topk, score, before, renormalize, num_groups, group_topk, group_score, 1.5)
    g = torch.Generator().manual_seed(seed)
    hard_TE, hard_E = suite.hard_operands(data, spec, seed, exact=False)
    check(hard_TE[:3], spec, hard_E, seed=seed)
    values = torch.tensor([-1.0, 0.25, 1.5])
    logits_TE = values[torch.randint(0, 3, (data.draw(st.integers(1, 5)), experts), generator=g)]
    bias_E = None
    if bias == "few" and (group_score == "max" or not before):  # sums of two scores and two biases round either way
        bias_E = torch.randint(-2, 1, (experts,), generator=g).float()
    elif bias is not None:
        bias_E = torch.randn(experts, generator=g)
    check(logits_TE, spec, bias_E, seed=seed)
    ids_TK = torch.rand(logits_TE.shape, generator=g).argsort(1)[:, :topk]
    check(logits_TE, spec, bias_E, ids_TK, seed=seed)


LARGE = {
    "E 128, k 8": RouterSpec(128, 8),
    "E 160, k 16, groups": RouterSpec(160, 16, renormalize=False, num_groups=8, group_topk=3, route_scale=16.0),
    "E 256, k 8, groups": RouterSpec(256, 8, "sigmoid", True, True, 8, 4, "sum_top2", 2.5),
    "E 288, k 1": RouterSpec(288, 1, "sigmoid", False),
    "E 1024, k 36, late": RouterSpec(1024, 36, score_before_topk=False),
    "E 2304, k 36": RouterSpec(2304, 36, "sigmoid", renormalize=False),
    "E 2304, k 36, groups": RouterSpec(2304, 36, "sigmoid", True, True, 48, 12, "sum_top2"),
    "E 2304, k 36, a group each": RouterSpec(2304, 36, num_groups=2304, group_topk=36),
    "E 1001, k 16, groups": RouterSpec(1001, 16, num_groups=7, group_topk=3),
}


@pytest.mark.parametrize("spec", LARGE.values(), ids=LARGE)
def test_many_experts_and_the_programs_of_a_gpu(monkeypatch, spec):
    rows = launch.rows
    monkeypatch.setattr(launch, "rows", lambda target, lanes: rows("nvidia", lanes))
    logits_TE = torch.randn(3, spec.num_experts, generator=torch.Generator().manual_seed(spec.num_experts))
    check(logits_TE, spec)
    check(logits_TE, spec, 0.1 * torch.randn(spec.num_experts, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("spec", suite.SPECS.values(), ids=suite.SPECS)
def test_what_is_not_finite_is_chosen_as_the_oracle_chooses(spec):
    g = torch.Generator().manual_seed(0)
    hard = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, 1e-42, -1e-42])
    logits_TE = torch.randn(40, 16, generator=g)
    places = torch.rand(40, 16, generator=g) < 0.3
    logits_TE[places] = hard[torch.randint(0, 8, (40, 16), generator=g)][places]
    logits_TE[:10] = torch.randn(10, 16, generator=g)
    bias_E = torch.randn(16, generator=g)
    for wild in (None, torch.where(torch.rand(16, generator=g) < 0.4, hard[torch.arange(16) % 5], bias_E)):
        got, wanted = route(logits_TE, spec, wild, **MINE), reference.route(logits_TE, spec, wild)
        assert torch.equal(got.ids_TK, wanted.ids_TK)
        torch.testing.assert_close(got.probs_TK, wanted.probs_TK, rtol=2e-6, atol=1e-30, equal_nan=True)
        torch.testing.assert_close(got.scores_TE, wanted.scores_TE, rtol=2e-6, atol=1e-30, equal_nan=True)
    mine = logits_TE.clone().requires_grad_()
    routing = route(mine, spec, **MINE)
    grad_TE = torch.autograd.grad([routing.probs_TK.sum() + routing.scores_TE.square().sum()], mine)[0]
    assert grad_TE[:10].isfinite().all()  # a NaN stays in its row


def test_zero_of_either_sign_is_one_score():
    logits_TE = torch.tensor([[-0.0, 0.0] * 8, [0.0, -0.0] * 8])
    assert route(logits_TE, suite.GPT_OSS, **MINE).ids_TK.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_far_logits(score):
    logits_TE = torch.tensor([[-1000.0, -104, -100, -88.5, -87, 0, 60, 87, 88.5, 100, 104, 1000]])
    for shift in (0.0, 950.0):
        got, wanted = (f(logits_TE - shift, RouterSpec(12, 5, score)) for f in (kernels.route, reference.route))
        assert torch.equal(got.ids_TK[:, :2], wanted.ids_TK[:, :2])  # scores of 1 tie below
        torch.testing.assert_close(got.scores_TE, wanted.scores_TE, rtol=1e-5, atol=1e-37)


def test_any_rows_and_bf16():
    g = torch.Generator().manual_seed(0)
    wide = torch.full((5, 40), math.nan)
    wide[:, 3::2] = torch.randn(5, 19, generator=g)
    for logits_TE in (wide[:, 3::2], wide[:, 3::2].t().contiguous().t(), wide[:, 3::2].contiguous()[::2]):
        got = route(logits_TE, RouterSpec(19, 3), **MINE)
        assert torch.equal(got.ids_TK, reference.route(logits_TE, RouterSpec(19, 3)).ids_TK)
        check(logits_TE, RouterSpec(19, 3))
    spec = RouterSpec(64, 8, score="sigmoid", num_groups=8, group_topk=4, group_score="sum_top2")
    check(torch.randn(20, 64, generator=g).bfloat16(), spec)  # in bf16 arithmetic near scores would collapse


def test_counts_are_copies_and_those_of_the_oracle_for_any_tokens():
    logits_TE = torch.randn(13, 16, generator=torch.Generator().manual_seed(6))
    got, wanted = (f(logits_TE, suite.DEEPSEEK_V3) for f in (kernels.route, reference.route))
    got.sequence_counts(1).add_(7)  # as a sum over ranks does
    got.counts().add_(7)
    for valid_T in (None, torch.arange(13) % 3 > 0):
        for sequences in (1, 13):
            assert torch.equal(got.sequence_counts(sequences, valid_T), wanted.sequence_counts(sequences, valid_T))
    assert got.counts().sum() == 13 * 4


def test_shapes_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits_TE = torch.empty(6, 16, requires_grad=True)
        routing = route(logits_TE, suite.DEEPSEEK_V3, torch.empty(16), **MINE)
        assert (routing.ids_TK.shape, routing.scores_TE.shape) == ((6, 4), (6, 16))
        assert routing.counts().shape == (16,)
        (routing.probs_TK.sum() + routing.scores_TE.sum()).backward()
        assert logits_TE.grad.shape == (6, 16)
        given_TK = torch.zeros(6, 4, dtype=torch.int64)
        assert route(logits_TE, suite.DEEPSEEK_V3, ids_TK=given_TK, **MINE).ids_TK is given_TK


@pytest.mark.parametrize("ids_TK", [None, torch.tensor([[0, 1], [1, 2], [3, 0]])], ids=["chosen", "given"])
def test_the_operators_are_those_of_the_kernels(ids_TK):
    logits_TE, bias_E, settings = torch.randn(3, 4, requires_grad=True), torch.randn(4), astuple(RouterSpec(4, 2))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth wants floats for results
    torch.library.opcheck(torch.ops.maniple.route.default, (logits_TE, bias_E, ids_TK, *settings), test_utils=tests)
    compiled = torch.compile(torch.ops.maniple.route, backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, torch.ops.maniple.route, kernels._Route.apply):
        out = call(logits_TE, bias_E, ids_TK, *settings)
        grad_TE = torch.autograd.grad(out[1].square().sum() + out[2].square().sum(), logits_TE)[0]
        results.append([*out, grad_TE])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    grads = (torch.randn(3, 2), None, logits_TE.detach(), torch.tensor([[0, 1], [1, 2], [3, 0]]))
    torch.library.opcheck(torch.ops.maniple.route_backward.default, (*grads, *settings))


def test_what_backward_keeps():
    """The logits and the ids."""
    kept = []
    logits_TE = torch.randn(5, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        routing = route(logits_TE, suite.QWEN3, **MINE)
    assert [t.data_ptr() for t in kept] == [logits_TE.data_ptr(), routing.ids_TK.data_ptr()]


def test_these_kernels_ran():
    route(torch.zeros(1, 4), RouterSpec(4, 1), **MINE)
    assert ("routing", "bf16", "cpu", "interpreted") in registry.used()
