"""Where Megatron-Core's router means the same, the choice, the weights and the losses are the same numbers.

What differs on purpose: its balance losses count a choice made without bias and groups, ours the choice that dispatch
follows; with padding its sequence loss divides by the mean length of the sequences, ours by each one's own; its running
global load weights micro-batches equally, ours by their tokens; and its group score is the sum of the best topk /
group_topk, ours the maximum or the sum of the best two.
"""

import pytest
import torch

from maniple.kernels.routing import RouterSpec, bias_update, route, z_loss
from maniple.moe.router import load_balance_loss

moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")

S, B, E, K = 6, 3, 16, 4


def logits(seed=0):
    return torch.randn(S * B, E, generator=torch.Generator().manual_seed(seed))


CASES = {
    "sigmoid": (
        RouterSpec(E, K, score="sigmoid", route_scale=2.5),
        dict(score_function="sigmoid", scaling_factor=2.5),
    ),
    "sigmoid, groups": (
        RouterSpec(E, K, score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2"),
        dict(score_function="sigmoid", num_groups=4, group_topk=2),
    ),
    "softmax before, raw": (RouterSpec(E, K, renormalize=False), dict(use_pre_softmax=True)),
    "softmax before, groups": (
        RouterSpec(E, K, renormalize=False, num_groups=4, group_topk=4),
        dict(use_pre_softmax=True, num_groups=4, group_topk=4),
    ),
    "softmax renormalised": (RouterSpec(E, K), {}),
    "softmax after": (RouterSpec(E, K, score_before_topk=False), {}),
}


# Megatron-Core has a bias for sigmoid only
BIASES = [
    (name, biased) for name, (spec, _) in CASES.items() for biased in (False, True)[: 1 + (spec.score == "sigmoid")]
]


@pytest.mark.parametrize(("name", "biased"), BIASES)
def test_choice_weights_and_their_gradient(name, biased):
    spec, arguments = CASES[name]
    bias_E = 0.2 * torch.randn(E, generator=torch.Generator().manual_seed(9)) if biased else None
    mine, theirs = logits().requires_grad_(), logits().requires_grad_()
    routing = route(mine, spec, bias_E)
    probs_TE, map_TE = moe_utils.topk_routing_with_score_function(theirs, K, expert_bias=bias_E, **arguments)
    ours_TE = torch.zeros(S * B, E).scatter(1, routing.ids_TK, routing.probs_TK)
    assert torch.equal(map_TE, torch.zeros(S * B, E, dtype=torch.bool).scatter(1, routing.ids_TK, True))
    torch.testing.assert_close(ours_TE, probs_TE, rtol=1e-6, atol=1e-7)
    weight_TE = torch.randn(S * B, E, generator=torch.Generator().manual_seed(1))
    (ours_TE * weight_TE).sum().backward()
    (probs_TE * weight_TE).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(routing.counts(), map_TE.sum(0))


def upstream_loss(x_TE, kind, score):
    """What `TopKRouter._apply_seq_aux_loss` and its two siblings compute on one rank, with coefficient 1."""
    map_TE, scores_TE = moe_utils.compute_routing_scores_for_aux_loss(x_TE, K, score)
    if kind == "sequence":
        map_TE, scores_TE = map_TE.reshape(S, -1), scores_TE.reshape(S, -1)
    loss = moe_utils.switch_load_balancing_loss_func(
        probs=scores_TE,
        tokens_per_expert=map_TE.sum(0),
        total_num_tokens=map_TE.shape[0],
        topk=K,
        num_experts=E,
        moe_aux_loss_coeff=1.0,
    )
    return loss / B if kind == "sequence" else loss


@pytest.mark.parametrize("kind", ["sequence", "micro_batch", "global_batch"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_losses_and_their_gradient(kind, score):
    mine, theirs = logits(2).requires_grad_(), logits(2).requires_grad_()
    ours = load_balance_loss(route(mine, RouterSpec(E, K, score)), kind=kind, sequence_length=S, batch_size=B)
    upstream = upstream_loss(theirs, kind, score)
    assert ours.item() == pytest.approx(upstream.item(), rel=1e-6)
    ours.backward()
    upstream.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_running_global_load():
    """Upstream adds up counts over micro-batches and divides by their number."""
    running_E, sums_E = torch.zeros(E, dtype=torch.int64), torch.zeros(E)
    for step in range(3):
        x_TE = logits(step)
        ours = load_balance_loss(
            route(x_TE, RouterSpec(E, K)),
            kind="global_batch",
            sequence_length=S,
            batch_size=B,
            running_counts_E=running_E,
        )
        map_TE, scores_TE = moe_utils.compute_routing_scores_for_aux_loss(x_TE, K, "softmax")
        sums_E += map_TE.sum(0)
        upstream = moe_utils.switch_load_balancing_loss_func(scores_TE, sums_E / (step + 1), S * B, K, E, 1.0)
        assert ours.item() == pytest.approx(upstream.item(), rel=1e-6)
    assert torch.equal(running_E, sums_E.long())


def test_z_loss_with_padding():
    padding_T = torch.arange(S * B) % 5 == 0
    x_TE = logits(3)
    assert z_loss(x_TE).item() == pytest.approx(moe_utils.z_loss_func(x_TE, 1.0).item(), rel=1e-6)
    upstream = moe_utils.z_loss_func(x_TE, 1.0, padding_mask=padding_T)
    assert z_loss(x_TE, ~padding_T).item() == pytest.approx(upstream.item(), rel=1e-6)


def test_bias_update(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    counts_E = torch.randint(0, 50, (E,), generator=torch.Generator().manual_seed(4))
    upstream = moe_utils.get_updated_expert_bias(counts_E.float(), torch.zeros(E), 1e-3, tp_dp_cp_group=object())
    assert torch.equal(bias_update(torch.zeros(E), counts_E, 1e-3), upstream)
