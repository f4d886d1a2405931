"""Experts spread over processes equal one process: values and every gradient, for any number of tokens on a rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from tests.distributed_utils import run_ranks
from tests.moe.oracle import GPT_OSS, SPEC, D, E, Weights
from tests.poison import relative_error

from maniple.kernels.routing import route, router_logits
from maniple.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from maniple.moe.experts import expert_mlp
from maniple.moe.layer import moe_forward
from maniple.moe.router import load_balance_loss

pytestmark = pytest.mark.distributed


def tokens_of(counts, rank=None):
    """Tokens and result gradients: of all ranks together, or of one."""
    g = torch.Generator().manual_seed(5)
    x_TD, grad_TD = torch.randn(sum(counts), D, generator=g), torch.randn(sum(counts), D, generator=g)
    part = slice(None) if rank is None else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return x_TD[part].clone().requires_grad_(), grad_TD[part]


def bias_towards(experts):
    """Selection bias [E] that leaves the router no choice but these; None: its own choice."""
    bias_E = torch.zeros(E)
    if experts is not None:
        bias_E[list(experts)] = 100.0
    return bias_E


def run_layer(x_TD, grad_TD, weights, dispatcher, experts):
    """Output, gradient of x, and the gradient of each weight, after the second of two backwards."""
    weights = weights.leaves()
    for _ in range(2):
        for tensor in (x_TD, *weights.named().values()):
            tensor.grad = None
        out_TD, _ = moe_forward(
            x_TD,
            spec=SPEC,
            dispatcher=dispatcher,
            expert_bias_E=bias_towards(experts),
            activation=GPT_OSS,
            **weights.named(),
        )
        out_TD.backward(grad_TD)
    return out_TD.detach(), x_TD.grad, {name: tensor.grad for name, tensor in weights.named().items()}


def _layers(rank, world_size, cases, etp):
    ranks = world_size // etp
    ep_groups = [dist.new_group([r * etp + x for r in range(ranks)]) for x in range(etp)]
    ep_group = ep_groups[rank % etp]
    etp_groups = [dist.new_group(list(range(r * etp, (r + 1) * etp))) for r in range(ranks)]
    etp_group = etp_groups[rank // etp] if etp > 1 else None
    weights = Weights.random().rank(rank // etp, ranks, rank % etp, etp)
    dispatcher = AllToAllDispatcher(E, ep_group, etp_group=etp_group)
    return [run_layer(*tokens_of(counts, rank), weights, dispatcher, experts) for counts, experts in cases]


def check_against_one_process(results, cases, etp=1):
    ranks = len(results) // etp
    for index, (counts, experts) in enumerate(cases):
        out_TD, grad_x_TD, grads = run_layer(*tokens_of(counts), Weights.random(), LocalDispatcher(E), experts)
        mine = [result[index] for result in results]
        assert relative_error(torch.cat([m[0] for m in mine]), out_TD) < 1e-6, (counts, "out")
        assert relative_error(torch.cat([m[1] for m in mine]), grad_x_TD) < 2e-6, (counts, "x")
        assert relative_error(sum(m[2]["router_ED"] for m in mine), grads["router_ED"]) < 5e-6, (counts, "router")
        for rank, (_, _, got) in enumerate(mine):
            want = Weights(**grads).rank(rank // etp, ranks, rank % etp, etp).named()
            assert set(got) == set(want)
            for name in set(want) - {"router_ED"}:
                assert relative_error(got[name], want[name]) < 2e-6, (counts, rank, name)


FIRST_RANK, SECOND_RANK = (0, 1), (6, 7)
TWO_RANKS = [
    ((4, 4), None),
    ((7, 3), None),
    ((5, 0), None),
    ((0, 5), FIRST_RANK),
    ((5, 5), FIRST_RANK),  # the second rank receives nothing
    ((5, 5), SECOND_RANK),
    ((0, 0), None),
    ((1, 6), SECOND_RANK),
    ((4095, 4096), None),
]


ETP_CASES = [((3, 5), None), ((4, 0), FIRST_RANK), ((0, 0), None)]


def _everything(rank, world_size):
    """All scenarios of two ranks in one pair of processes, since starting those takes the time."""
    return {
        "layers": _layers(rank, world_size, TWO_RANKS, 1),
        "etp": _layers(rank, world_size, ETP_CASES, 2),
        "in flight": _two_in_flight(rank, world_size),
        "cut": [_cut_graph(rank, world_size)],
        "static": _static(rank, world_size),
        "sequence": _sequence_halves(rank, "sequence"),
        "global_batch": _sequence_halves(rank, "global_batch"),
    }


@pytest.fixture(scope="module")
def two_ranks():
    results = run_ranks(_everything, 2)
    return {name: [result[name] for result in results] for name in results[0]}


def test_two_expert_parallel_ranks(two_ranks):
    results = two_ranks["layers"]
    check_against_one_process(results, TWO_RANKS)
    second_receives_nothing = results[1][4][2]
    for name in ("w13_GFD", "w2_GDF", "b13_GF", "b2_GD"):  # and yet has a gradient, exactly zero
        assert (second_receives_nothing[name] == 0).all()


def test_expert_tensor_parallel_ranks_with_uneven_tokens(two_ranks):
    check_against_one_process(two_ranks["etp"], ETP_CASES, etp=2)


FOUR_RANKS = [((5, 0, 7, 3), None), ((0, 0, 5, 0), None), ((7, 3, 0, 5), FIRST_RANK), ((3, 0, 0, 2), SECOND_RANK)]


def _on_four(rank, world_size):
    return {etp: _layers(rank, world_size, FOUR_RANKS, etp) for etp in (1, 2)}


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(_on_four, 4)


@pytest.mark.parametrize("etp", [1, 2])
def test_four_ranks_with_uneven_tokens(four_ranks, etp):
    check_against_one_process([result[etp] for result in four_ranks], FOUR_RANKS, etp=etp)


def _two_in_flight(rank, world_size):
    """dispatch, dispatch, combine, combine, with different tokens; then their backwards in both orders."""
    dispatcher = AllToAllDispatcher(E, dist.group.WORLD)
    weights = Weights.random().rank(rank, world_size).leaves()
    results = []
    for order in ((0, 1), (1, 0)):
        flights = []
        for experts, counts in ((None, (3, 5)), (FIRST_RANK, (6, 2))):
            x_TD, grad_TD = tokens_of(counts, rank)
            routing = route(router_logits(x_TD, weights.router_ED), SPEC, bias_towards(experts))
            rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
            for field in dataclasses.fields(handle):
                value = getattr(handle, field.name)
                tensors = value.__dict__.values() if dataclasses.is_dataclass(value) else [value]
                assert not any(torch.is_tensor(t) and t.is_floating_point() for t in tensors), field.name
            flights.append([x_TD, grad_TD, *dispatcher.token_dispatch(rows, probs, handle), handle])
        outs = []
        for x_TD, grad_TD, rows, probs, handle in flights:
            rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
            rows_SD = expert_mlp(
                rows_SD,
                probs_S,
                ends_G,
                weights.w13_GFD,
                weights.w2_GDF,
                b13_GF=weights.b13_GF,
                b2_GD=weights.b2_GD,
                activation=GPT_OSS,
            )
            outs.append((x_TD, grad_TD, dispatcher.combine_preprocess(rows_SD, handle), handle))
        outs = [(x, grad, dispatcher.token_combine(rows, handle), handle) for x, grad, rows, handle in outs]
        outs = [(x, grad, dispatcher.combine_postprocess(rows, handle)) for x, grad, rows, handle in outs]
        for i in order:
            outs[i][2].backward(outs[i][1])
        results.append([(out.detach(), x.grad) for x, _, out in outs])
    return results


def test_two_handles_in_flight(two_ranks):
    results = two_ranks["in flight"]
    for order in range(2):
        for flight, (experts, counts) in enumerate(((None, (3, 5)), (FIRST_RANK, (6, 2)))):
            out_TD, grad_x_TD, _ = run_layer(*tokens_of(counts), Weights.random(), LocalDispatcher(E), experts)
            mine = [result[order][flight] for result in results]
            assert relative_error(torch.cat([m[0] for m in mine]), out_TD) < 1e-6
            assert relative_error(torch.cat([m[1] for m in mine]), grad_x_TD) < 2e-6


def _cut_graph(rank, world_size):
    """The graph cut at every stage border, as an overlapping schedule does, with the pieces' backwards run by hand."""
    dispatcher = AllToAllDispatcher(E, dist.group.WORLD)
    weights = Weights.random().rank(rank, world_size).leaves()
    x_TD, grad_TD = tokens_of((5, 3), rank)
    stages = []

    def cut(*outputs):
        leaves = [t.detach().requires_grad_() for t in outputs]
        stages.append((outputs, leaves))
        return leaves

    routing = route(router_logits(x_TD, weights.router_ED), SPEC)
    rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
    rows, probs = cut(*dispatcher.token_dispatch(*cut(rows, probs), handle))
    rows, probs, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
    rows, probs = cut(rows, probs)
    experts = (weights.w13_GFD, weights.w2_GDF)
    rows = expert_mlp(rows, probs, ends_G, *experts, b13_GF=weights.b13_GF, b2_GD=weights.b2_GD, activation=GPT_OSS)
    (rows,) = cut(rows)
    (rows,) = cut(dispatcher.combine_preprocess(rows, handle))
    (rows,) = cut(dispatcher.token_combine(rows, handle))
    out_TD = dispatcher.combine_postprocess(rows, handle)
    out_TD.backward(grad_TD)
    for outputs, leaves in reversed(stages):
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])
    return out_TD.detach(), x_TD.grad, {name: tensor.grad for name, tensor in weights.named().items()}


def test_every_stage_border_can_be_cut(two_ranks):
    check_against_one_process(two_ranks["cut"], [((5, 3), None)])


def _sequence_halves(rank, kind):
    """Each rank holds half of every sequence: [S / 2, B]."""
    logits_SBE = torch.randn(6, 3, E, generator=torch.Generator().manual_seed(6))
    valid_SB = torch.rand(6, 3, generator=torch.Generator().manual_seed(7)) < 0.7
    mine = slice(3 * rank, 3 * rank + 3)
    logits_TE = logits_SBE[mine].reshape(-1, E).requires_grad_()
    running_E = None if kind == "sequence" else torch.zeros(E, dtype=torch.int64)
    loss = load_balance_loss(
        route(logits_TE, SPEC),
        kind=kind,
        sequence_length=3,
        batch_size=3,
        valid_T=valid_SB[mine].reshape(-1),
        group=dist.group.WORLD,
        running_counts_E=running_E,
    )
    loss.backward()
    return loss.item(), logits_TE.grad.view(3, 3, E)


@pytest.mark.parametrize("kind", ["sequence", "global_batch"])
def test_balance_loss_shares_add_up_to_the_loss_of_one_process(kind, two_ranks):
    shares = two_ranks[kind]
    logits_SBE = torch.randn(6, 3, E, generator=torch.Generator().manual_seed(6)).requires_grad_()
    valid_SB = torch.rand(6, 3, generator=torch.Generator().manual_seed(7)) < 0.7
    routing = route(logits_SBE.view(-1, E), SPEC)
    loss = load_balance_loss(routing, kind=kind, sequence_length=6, batch_size=3, valid_T=valid_SB.view(-1))
    loss.backward()
    assert sum(share for share, _ in shares) == pytest.approx(loss.item(), rel=1e-6)
    assert relative_error(torch.cat([grad for _, grad in shares]), logits_SBE.grad) < 1e-6


def _static(rank, world_size):
    """Every expert gets the same load, whatever the ids say."""
    dispatcher = AllToAllDispatcher(E, dist.group.WORLD, static_splits=True)
    x_TD, probs_TK = torch.randn(6, D), torch.rand(6, 2)
    ids_TK = torch.zeros(6, 2, dtype=torch.int64)
    rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, ids_TK, probs_TK)
    rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs, handle), handle)
    rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows_SD, handle), handle)
    torch.testing.assert_close(dispatcher.combine_postprocess(rows, handle), 2 * x_TD)
    return ends_G.tolist(), probs_S.shape[0]


def test_static_splits_are_even_and_move_real_rows(two_ranks):
    # 12 choices over 8 experts: experts 0 to 3 twice, the others once, from each of two ranks
    assert two_ranks["static"] == [([4, 8, 12, 16], 16), ([2, 4, 6, 8], 8)]


def test_experts_that_do_not_divide_are_refused():
    class Group:
        def size(self):
            return 3

    with pytest.raises(ValueError, match="8 experts do not divide over 3"):
        AllToAllDispatcher(8, Group())
