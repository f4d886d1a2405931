"""The balance loss is its definition, whatever the padding and the micro-batches, and it reaches the router."""

import pytest
import torch
import torch.nn.functional as F
from tests.poison import relative_error
from torch.utils.checkpoint import checkpoint

from maniple.kernels.routing import RouterSpec, route, router_logits
from maniple.moe.router import attach_aux_loss, load_balance_loss

S, B, E, K = 5, 3, 8, 2
V3 = RouterSpec(E, K, score="sigmoid", num_groups=4, group_topk=2, group_score="sum_top2")


def naive_loss(routing, kind, valid_T=None):
    """Sum over experts of f_i * P_i, token by token in fp64."""
    total, counted = 0.0, 0
    sequences = B if kind == "sequence" else 1
    for b in range(sequences):
        tokens = [t for t in range(S * B) if t % sequences == b and (valid_T is None or valid_T[t])]
        if not tokens:
            continue
        counted += 1
        for e in range(E):
            chosen = sum(int(e in routing.ids_TK[t].tolist()) for t in tokens)
            mean = sum(routing.scores_TE[t, e].item() for t in tokens) / len(tokens)
            total += E / (K * len(tokens)) * chosen * mean
    return total / max(1, counted)


def masks():
    some_T = torch.rand(S * B, generator=torch.Generator().manual_seed(3)) < 0.6
    one_sequence_gone_T = torch.arange(S * B) % B != 1
    return {
        "none": None,
        "some": some_T,
        "a sequence": one_sequence_gone_T,
        "all": torch.zeros(S * B, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", ["sequence", "micro_batch", "global_batch"])
@pytest.mark.parametrize("valid_T", masks().values(), ids=masks())
def test_the_loss_is_its_definition_over_the_choice_that_dispatch_follows(kind, valid_T):
    torch.manual_seed(0)
    bias_E = torch.randn(E)  # strong enough that a choice without it would count otherwise
    routing = route(torch.randn(S * B, E), V3, bias_E)
    loss = load_balance_loss(routing, kind=kind, sequence_length=S, batch_size=B, valid_T=valid_T)
    assert loss.item() == pytest.approx(naive_loss(routing, kind, valid_T), rel=1e-5)
    other = route(torch.zeros(S * B, E), RouterSpec(E, K))
    assert not torch.equal(routing.counts(), other.counts())


def test_an_even_load_costs_one_and_one_expert_for_all_costs_more():
    ids_TK = torch.arange(16).view(8, 2) % 8
    even = 10.0 * F.one_hot(ids_TK, 8).sum(1).float()
    even = even - 1e-3 * torch.arange(8)
    routing = route(even, RouterSpec(8, 2))
    assert load_balance_loss(routing, kind="micro_batch", sequence_length=8, batch_size=1).item() == pytest.approx(1)
    skewed = torch.zeros(8, 8)
    skewed[:, :2] = 10
    routing = route(skewed, RouterSpec(8, 2))
    assert load_balance_loss(routing, kind="micro_batch", sequence_length=8, batch_size=1).item() > 3.9


@pytest.mark.parametrize("kind", ["sequence", "micro_batch"])
def test_padding_changes_nothing(kind):
    torch.manual_seed(1)
    logits_SBE = torch.randn(S, B, E)
    padded_SBE = torch.full((S + 4, B, E), torch.nan)
    padded_SBE[:S] = logits_SBE
    valid_T = (torch.arange(S + 4)[:, None].expand(-1, B) < S).reshape(-1)
    plain, padded = logits_SBE.view(-1, E).requires_grad_(), padded_SBE.view(-1, E)
    padded[~valid_T] = 3.0
    padded.requires_grad_()
    a, b = route(plain, V3), route(padded, V3)
    assert torch.equal(a.counts(), b.counts(valid_T))
    left = load_balance_loss(a, kind=kind, sequence_length=S, batch_size=B)
    right = load_balance_loss(b, kind=kind, sequence_length=S + 4, batch_size=B, valid_T=valid_T)
    assert right.item() == pytest.approx(left.item(), rel=1e-6)
    left.backward()
    right.backward()
    torch.testing.assert_close(padded.grad[valid_T], plain.grad, rtol=1e-5, atol=1e-7)
    assert (padded.grad[~valid_T] == 0).all()


def test_the_sequence_loss_does_not_depend_on_how_sequences_share_micro_batches():
    torch.manual_seed(2)
    logits_SBE = torch.randn(S, B, E)
    whole = load_balance_loss(route(logits_SBE.view(-1, E), V3), kind="sequence", sequence_length=S, batch_size=B)
    each = [
        load_balance_loss(route(logits_SBE[:, b], V3), kind="sequence", sequence_length=S, batch_size=1)
        for b in range(B)
    ]
    assert whole.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "micro_batch"])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_an_attached_loss_gives_the_router_its_gradient(kind, scale):
    """Against central differences of `main + scale * loss` in each weight of the router."""
    torch.manual_seed(3)
    x_TD = torch.randn(S * B, 4)
    weight_ED = torch.randn(E, 4, requires_grad=True)
    bias_E = 0.1 * torch.randn(E)
    main_TK = torch.randn(S * B, K)
    ids_TK = route(router_logits(x_TD, weight_ED), V3, bias_E).ids_TK

    def losses(weight):
        routing = route(router_logits(x_TD, weight), V3, bias_E)
        assert torch.equal(routing.ids_TK, ids_TK)  # a step that flips a choice would make the difference meaningless
        return routing.probs_TK, load_balance_loss(routing, kind=kind, sequence_length=S, batch_size=B)

    scale_tensor = torch.tensor(0.0)
    probs_TK, loss = losses(weight_ED)
    carried_TK = attach_aux_loss(probs_TK, loss, scale_tensor)
    assert torch.equal(carried_TK, probs_TK)
    scale_tensor.fill_(scale)  # the engine may set it as late as this
    (got,) = torch.autograd.grad((carried_TK * main_TK).sum(), weight_ED)

    eps = 1e-2
    want = torch.zeros_like(got)
    with torch.no_grad():
        for i in range(E):
            for j in range(4):
                ends = []
                for sign in (1, -1):
                    moved = weight_ED.clone()
                    moved[i, j] += sign * eps
                    probs, loss = losses(moved)
                    ends.append((probs * main_TK).sum().double() + scale * loss.double())
                want[i, j] = (ends[0] - ends[1]) / (2 * eps)
    assert relative_error(got, want) < 3e-3
    without = torch.autograd.grad((losses(weight_ED)[0] * main_TK).sum(), weight_ED)[0]
    assert relative_error(without, want) > 1e-2


def test_recompute_gives_the_same_gradient():
    torch.manual_seed(4)
    x_TD, weight_ED = torch.randn(S * B, 4, requires_grad=True), torch.randn(E, 4, requires_grad=True)

    def layer(x):
        routing = route(router_logits(x, weight_ED), V3)
        loss = load_balance_loss(routing, kind="sequence", sequence_length=S, batch_size=B)
        return attach_aux_loss(routing.probs_TK, loss)

    plain = torch.autograd.grad(layer(x_TD).square().sum(), [x_TD, weight_ED])
    for reentrant in (True, False):
        x_TD.grad = weight_ED.grad = None
        checkpoint(layer, x_TD, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x_TD.grad, plain[0])
        assert torch.equal(weight_ED.grad, plain[1])


def test_logits_are_fp32_of_operands_cast_first():
    torch.manual_seed(5)
    x_TD, weight_ED, bias_E = (torch.randn(*shape).bfloat16() for shape in ((6, 32), (E, 32), (E,)))
    logits_TE = router_logits(x_TD, weight_ED, bias_E)
    assert logits_TE.dtype == torch.float32
    want = x_TD.double() @ weight_ED.double().t() + bias_E.double()
    assert relative_error(logits_TE, want) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kind="batch"), "not 'batch'"),
        (dict(sequence_length=4), "are not 3 sequences of 4"),
        (dict(running_counts_E=torch.zeros(E, dtype=torch.int64)), "running counts"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    routing = route(torch.zeros(S * B, E), V3)
    with pytest.raises(ValueError, match=words):
        load_balance_loss(routing, **(dict(kind="sequence", sequence_length=S, batch_size=B) | change))
