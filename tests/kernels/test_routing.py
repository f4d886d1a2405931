"""Routing against its written semantic, spelled out token by token in Python; edge cases; gradients; counts."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.poison import relative_error

from maniple.kernels.routing import RouterSpec, bias_update, route, z_loss
from maniple.models.card import MoE, Router

DEEPSEEK_V3 = RouterSpec(16, 4, score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2", route_scale=2.5)
DEEPSEEK_V2 = RouterSpec(16, 4, renormalize=False, num_groups=4, group_topk=2, route_scale=16.0)
QWEN3 = RouterSpec(16, 4)
GPT_OSS = RouterSpec(16, 4, score_before_topk=False)
SIGMOID_LATE = RouterSpec(16, 4, score="sigmoid", score_before_topk=False, num_groups=2, group_topk=1)
SPECS = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2": DEEPSEEK_V2,
    "qwen3": QWEN3,
    "gpt-oss": GPT_OSS,
    "sigmoid late": SIGMOID_LATE,
}


def naive_ids(selection, spec):
    """Ids of one token from its selection scores: Python's sort, in which ties keep the lower id first."""

    def best(values, count):
        return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]

    size = spec.num_experts // spec.num_groups
    groups = [selection[g * size : (g + 1) * size] for g in range(spec.num_groups)]
    if spec.group_score == "max":
        group_scores = [max(group) for group in groups]
    else:
        group_scores = [torch.tensor(sorted(group)[-2:]).sum().item() for group in groups]
    kept = sorted(best(group_scores, spec.group_topk)) if spec.num_groups > 1 else range(spec.num_groups)
    candidates = [g * size + i for g in kept for i in range(size)]
    return [candidates[i] for i in best([selection[e] for e in candidates], spec.topk)]


def check(logits_TE, spec, bias_E=None):
    routing = route(logits_TE, spec, bias_E)
    logits = logits_TE.float()
    scores_TE = torch.softmax(logits, -1) if spec.score == "softmax" else torch.sigmoid(logits)
    basis_TE = scores_TE if spec.score_before_topk else logits
    for t in range(logits.shape[0]):
        selection_E = basis_TE[t] if bias_E is None else basis_TE[t] + bias_E
        ids = naive_ids(selection_E.tolist(), spec)
        assert routing.ids_TK[t].tolist() == ids
        weights = [scores_TE[t, e].double().item() for e in ids]
        if not spec.score_before_topk and spec.score == "softmax":
            weights = [w / sum(weights) for w in weights]
        if spec.renormalize:
            weights = [w / (sum(weights) + 1e-20) for w in weights]
        torch.testing.assert_close(
            routing.probs_TK[t].double(), spec.route_scale * torch.tensor(weights).double(), rtol=2e-6, atol=1e-30
        )
    assert routing.ids_TK.dtype == torch.int64
    assert routing.probs_TK.dtype == routing.scores_TE.dtype == torch.float32
    torch.testing.assert_close(routing.scores_TE.sum(1), torch.ones(logits.shape[0]), rtol=1e-5, atol=1e-5)
    return routing


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_choice_and_weights(spec, biased, tokens):
    torch.manual_seed(0)
    check(torch.randn(tokens, 16), spec, 0.3 * torch.randn(16) if biased else None)


@given(
    group_size=st.integers(2, 4),
    num_groups=st.integers(1, 4),
    data=st.data(),
    score=st.sampled_from(["softmax", "sigmoid"]),
    before=st.booleans(),
    group_score=st.sampled_from(["max", "sum_top2"]),
    renormalize=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_any_router_with_many_ties(group_size, num_groups, data, score, before, group_score, renormalize, seed):
    group_topk = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(1, group_topk * group_size))
    spec = RouterSpec(
        group_size * num_groups, topk, score, before, renormalize, num_groups, group_topk, group_score, 1.5
    )
    logits_TE, bias_E = hard_operands(data, spec, seed)
    check(logits_TE, spec, bias_E)


def hard_operands(data, spec, seed, *, exact=True):
    """Logits of six tokens and a bias that are hard to rank: few values, all the same, minus infinity, a last place
    apart, every selection score negative. exact: every implementation has the same exponentials."""
    g, shape = torch.Generator().manual_seed(seed), (6, spec.num_experts)
    late = not spec.score_before_topk
    kinds = ["few values", "all the same", "negative"]
    if not (late and spec.score == "softmax"):  # of none but minus infinity no softmax is made
        kinds.append("minus infinity")
    if spec.group_score == "max" and (exact or late):  # a sum of two rounds either way
        kinds.append("a last place apart")
    kind = data.draw(st.sampled_from(kinds))
    few_TE, bias_E = (
        torch.randint(-1, 2, shape, generator=g).float(),
        torch.randint(-2, 1, shape[1:], generator=g).float(),
    )
    if kind == "all the same":
        return torch.full(shape, float(seed % 7 - 3)), None
    if kind == "negative":
        return few_TE, bias_E - 5
    if kind == "a last place apart":
        return 1 + torch.randint(0, 3, shape, generator=g) * 2.0**-23, None
    if kind == "minus infinity":
        few_TE.masked_fill_(torch.rand(shape, generator=g) < 0.6, -math.inf)[:, 0] = 0.0
        bias_E.masked_fill_(torch.rand(shape[1:], generator=g) < 0.2 * (seed % 3), -math.inf)
    return few_TE, bias_E


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_ties_go_to_the_lowest_ids(spec):
    for experts in (16, 160, 1024):
        wide = dataclasses.replace(spec, num_experts=experts)
        routing = route(torch.full((3, experts), 0.25), wide)
        assert routing.ids_TK.tolist() == [[0, 1, 2, 3]] * 3


def test_dropped_groups_stay_dropped_where_every_selection_score_is_negative():
    """A mask of zeros instead of leaving them out would choose exactly the dropped experts here."""
    torch.manual_seed(1)
    routing = check(torch.randn(30, 16), DEEPSEEK_V3, torch.full((16,), -5.0))
    groups = routing.ids_TK // 4
    assert all(len(set(row)) <= 2 for row in groups.tolist())
    bias_E = torch.full((16,), -math.inf)
    bias_E[4] = 0.0  # groups 1 and 0 stay, and all their experts but one have selection score -inf
    routing = route(torch.randn(5, 16), dataclasses.replace(DEEPSEEK_V3, group_score="max"), bias_E)
    assert routing.ids_TK.tolist() == [[4, 0, 1, 2]] * 5


def test_the_bias_enters_selection_only():
    torch.manual_seed(2)
    logits_TE = torch.randn(20, 16)
    bias_E = torch.zeros(16)
    bias_E[7] = 100.0
    routing = route(logits_TE, QWEN3, bias_E)
    assert (routing.ids_TK[:, 0] == 7).all()
    chosen = logits_TE.softmax(-1).gather(1, routing.ids_TK)
    torch.testing.assert_close(routing.probs_TK, chosen / chosen.sum(1, keepdim=True))
    assert torch.equal(routing.scores_TE, route(logits_TE, QWEN3).scores_TE)


def test_minus_infinity_and_nan_logits():
    logits_TE = torch.full((2, 16), -math.inf)
    logits_TE[:, 9] = 1.0
    for spec in SPECS.values():
        routing = route(logits_TE, spec)
        assert (routing.ids_TK[:, 0] == 9).all()
        assert routing.probs_TK.isfinite().all()
        assert routing.scores_TE.isfinite().all()
    torch.manual_seed(3)
    logits_TE = torch.randn(3, 16)
    logits_TE[1, 5] = math.nan
    for spec in SPECS.values():
        routing = route(logits_TE, spec)
        assert routing.probs_TK[1].isnan().any()
        assert routing.probs_TK[[0, 2]].isfinite().all()
        assert ((routing.ids_TK >= 0) & (routing.ids_TK < 16)).all()
        assert all(len(set(row)) == 4 for row in routing.ids_TK.tolist())


def test_bf16_logits_are_cast_before_anything():
    """64 experts in 8 groups: in bf16 arithmetic near scores collapse and other experts win."""
    torch.manual_seed(4)
    spec = RouterSpec(64, 8, score="sigmoid", num_groups=8, group_topk=4, group_score="sum_top2")
    logits_TE = torch.randn(200, 64).bfloat16()
    assert torch.equal(route(logits_TE, spec).ids_TK, route(logits_TE.float(), spec).ids_TK)
    check(logits_TE[:20], spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_of_weights_and_scores(spec):
    """Central differences in the direction of each logit, with the choice held (they are far apart)."""
    torch.manual_seed(5)
    logits_TE = (torch.randperm(32).view(2, 16) / 8).requires_grad_()
    a_TK, b_TE = torch.randn(2, 4), torch.randn(2, 16)

    def value(x):
        routing = route(x, spec)
        return (routing.probs_TK * a_TK).sum() / spec.route_scale + (routing.scores_TE * b_TE).sum()

    got = torch.autograd.grad(value(logits_TE), logits_TE)[0]
    eps = 2e-2
    want = torch.zeros_like(got)
    for t in range(2):
        for e in range(16):
            step = torch.zeros(2, 16)
            step[t, e] = eps
            want[t, e] = (value(logits_TE + step) - value(logits_TE - step)) / (2 * eps)
    assert relative_error(got, want) < 1e-3
    assert not route(logits_TE, spec).ids_TK.requires_grad


def test_counts_are_exact_and_skip_padding():
    torch.manual_seed(6)
    routing = route(torch.randn(12, 16), DEEPSEEK_V3)
    valid_T = torch.tensor([True, False, True] * 4)
    for valid in (None, valid_T):
        for sequences in (1, 2, 3):
            counts_BE = routing.sequence_counts(sequences, valid)
            want = torch.zeros(sequences, 16, dtype=torch.int64)
            for t in range(12):
                if valid is None or valid[t]:
                    for e in routing.ids_TK[t].tolist():
                        want[t % sequences, e] += 1
            assert torch.equal(counts_BE, want)
        assert torch.equal(routing.counts(valid), want.sum(0))
    many = route(torch.zeros(40_840, 2), RouterSpec(2, 1))  # bf16 counts would say 40,704 or 41,216
    assert many.counts().tolist() == [40_840, 0]


def test_no_tokens():
    routing = route(torch.zeros(0, 16, requires_grad=True), DEEPSEEK_V3, torch.zeros(16))
    assert routing.ids_TK.shape == routing.probs_TK.shape == (0, 4)
    assert routing.counts().tolist() == [0] * 16
    assert z_loss(torch.zeros(0, 16)).item() == 0
    routing.probs_TK.sum().backward()


def test_z_loss_is_the_mean_square_of_logsumexp_over_valid_tokens():
    torch.manual_seed(7)
    logits_TE = torch.randn(6, 16)
    want = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_TE.tolist()) / 6
    assert z_loss(logits_TE).item() == pytest.approx(want, rel=1e-6)
    padded = torch.cat([logits_TE, torch.full((3, 16), math.nan)]).requires_grad_()
    valid_T = torch.arange(9) < 6
    loss = z_loss(padded, valid_T)
    assert loss.item() == pytest.approx(want, rel=1e-6)
    loss.backward()
    assert (padded.grad[6:] == 0).all()
    assert padded.grad[:6].isfinite().all()
    assert z_loss(padded, torch.zeros(9, dtype=torch.bool)).item() == 0


def test_bias_update_compares_integers():
    bias_E = torch.tensor([0.5, 0.0, -0.5, 0.0])
    assert bias_update(bias_E, torch.tensor([3, 1, 2, 2]), 0.25).tolist() == [0.25, 0.25, -0.5, 0.0]
    big = 2**40  # one apart: fp32 cannot see it
    assert bias_update(torch.zeros(2), torch.tensor([big, big + 2]), 1.0).tolist() == [1.0, -1.0]
    assert bias_update(torch.zeros(2), torch.tensor([big + 1, big + 1]), 1.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="int64"):
        bias_update(torch.zeros(2), torch.zeros(2), 1.0)


def test_a_spec_comes_from_a_card():
    moe = MoE(
        num_experts=16,
        topk=4,
        expert_ffn_size=8,
        router=Router(score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2", route_scale=2.5),
    )
    assert RouterSpec.from_card(moe) == DEEPSEEK_V3
    late = MoE(num_experts=16, topk=4, expert_ffn_size=8, router=Router(score_before_topk=False))
    assert RouterSpec.from_card(late) == GPT_OSS


@pytest.mark.parametrize(
    "fields",
    [
        dict(num_experts=6, topk=2, num_groups=4),
        dict(num_experts=8, topk=5, num_groups=4, group_topk=2),
        dict(num_experts=8, topk=0),
        dict(num_experts=8, topk=2, num_groups=2, group_topk=3),
        dict(num_experts=4, topk=2, num_groups=4, group_topk=2, group_score="sum_top2"),
    ],
)
def test_an_impossible_spec_is_refused(fields):
    with pytest.raises(ValueError, match=r"groups|experts"):
        RouterSpec(**fields)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"logits \[T, 16\]"):
        route(torch.zeros(3, 8), QWEN3)
    with pytest.raises(ValueError, match="fp32"):
        route(torch.zeros(3, 16), QWEN3, torch.zeros(16, dtype=torch.bfloat16))
