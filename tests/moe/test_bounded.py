"""Bounded buffers against exact splits, bit for bit; what does not fit is said, and never reaches a result that counts.

Factors are far above or just at what the routing asks for. Sizes are multiples of a CPU's vectors: torch's elementwise
operations round otherwise in the last elements of a tensor, and the two kinds of buffers end at different rows.
"""

import pytest
import torch
import torch.distributed as dist
from tests.distributed_utils import run_ranks
from tests.moe.oracle import GPT_OSS, SPEC, E, K
from tests.moe.test_dispatch import FIRST_RANK, SECOND_RANK, bias_towards
from tests.poison import poison

from maniple.moe.bounded import BoundedDispatcher
from maniple.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from maniple.moe.layer import moe_forward
from maniple.moe.room import Room

pytestmark = pytest.mark.distributed
WORST = 1e9
D = F = 32

# tokens by rank, the experts that are the only choice (None: any), and the buffers' factor
TWO_RANKS = [
    ((4, 4), None, WORST),
    ((7, 3), None, WORST),
    ((5, 0), None, WORST),
    ((0, 5), FIRST_RANK, 2.0),
    ((5, 5), FIRST_RANK, 2.0),  # every row of both ranks: twice the balanced load
    ((0, 0), None, 1.0),
    ((1, 6), SECOND_RANK, 2.0),
    ((255, 256), None, 1.5),
]
FOUR_RANKS = [((5, 0, 7, 3), None, WORST), ((0, 0, 5, 0), None, WORST), ((7, 3, 0, 5), FIRST_RANK, 4.0)]


def tokens_of(counts, rank):
    """Tokens and result gradients of one rank."""
    g = torch.Generator().manual_seed(5)
    x_TD, grad_TD = torch.randn(sum(counts), D, generator=g), torch.randn(sum(counts), D, generator=g)
    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return x_TD[part].clone().requires_grad_(), grad_TD[part]


def weights_of(rank, ranks, etp_rank=0, etp=1):
    """This rank's experts, and the router, as `moe_forward` names them."""
    g = torch.Generator().manual_seed(0)
    mine = slice(rank * E // ranks, (rank + 1) * E // ranks)
    columns = torch.arange(F).chunk(etp)[etp_rank]
    both = torch.cat([columns, columns + F])
    shapes = (E, D), (E, 2 * F, D), (E, D, F), (E, 2 * F), (E, D)
    router_ED, w13, w2, b13, b2 = (torch.randn(*shape, generator=g) / shape[-1] ** 0.5 for shape in shapes)
    weights = {"router_ED": router_ED, "w13_GFD": w13[mine][:, both], "w2_GDF": w2[mine][:, :, columns]}
    weights |= {"b13_GF": b13[mine][:, both]} | ({} if etp_rank else {"b2_GD": b2[mine]})
    return {name: weight.contiguous() for name, weight in weights.items()}


def run_layer(x_TD, grad_TD, weights, dispatcher, experts):
    """Output, gradient of x, and the gradient of each weight, after the second of two backwards."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    for _ in range(2):
        for tensor in (x_TD, *leaves.values()):
            tensor.grad = None
        bias_E = bias_towards(experts)
        out_TD, _ = moe_forward(
            x_TD, spec=SPEC, dispatcher=dispatcher, expert_bias_E=bias_E, activation=GPT_OSS, **leaves
        )
        out_TD.backward(grad_TD)
    return out_TD.detach(), x_TD.grad, {name: tensor.grad for name, tensor in leaves.items()}


def _groups(rank, world_size, etp):
    """This rank's expert-parallel and expert-tensor-parallel groups."""
    ranks = world_size // etp
    ep_groups = [dist.new_group([r * etp + x for r in range(ranks)]) for x in range(etp)]
    etp_groups = [dist.new_group(list(range(r * etp, (r + 1) * etp))) for r in range(ranks)]
    return ep_groups[rank % etp], etp_groups[rank // etp] if etp > 1 else None


def _both(rank, world_size, cases, etp):
    """Results with exact splits and with bounded buffers, and what these asked for and had."""
    ep_group, etp_group = _groups(rank, world_size, etp)
    weights = weights_of(rank // etp, world_size // etp, rank % etp, etp)
    results = []
    for counts, experts, factor in cases:
        exact = AllToAllDispatcher(E, ep_group, etp_group=etp_group)
        bounded = BoundedDispatcher(E, ep_group, etp_group=etp_group, room=Room(factor), tokens=max(counts))
        with poison():
            wanted = run_layer(*tokens_of(counts, rank), weights, exact, experts)
            got = run_layer(*tokens_of(counts, rank), weights, bounded, experts)
        results.append((wanted, got, bounded.room.asked.item(), bounded.room.rows))
    return results


def check_equal_bits(results, cases):
    for index, (counts, *_) in enumerate(cases):
        for rank, result in enumerate(results):
            (out_TD, grad_TD, grads), (got_TD, got_grad_TD, got_grads), asked, rows = result[index]
            assert asked <= rows
            assert torch.equal(out_TD, got_TD), (counts, rank)
            assert torch.equal(grad_TD, got_grad_TD), (counts, rank)
            assert set(grads) == set(got_grads)
            for name in grads:
                assert torch.equal(grads[name], got_grads[name]), (counts, rank, name)


def _everything(rank, world_size):
    return {
        "ep": _both(rank, world_size, TWO_RANKS, 1),
        "etp": _both(rank, world_size, [((3, 5), None, WORST), ((4, 0), FIRST_RANK, 1.0), ((0, 0), None, 1.0)], 2),
        "overflow": _overflow(rank),
        "late": _in_flight(rank),
    }


@pytest.fixture(scope="module")
def two_ranks():
    results = run_ranks(_everything, 2)
    return {name: [result[name] for result in results] for name in results[0]}


def test_two_ranks_give_the_bits_of_exact_splits(two_ranks):
    check_equal_bits(two_ranks["ep"], TWO_RANKS)
    assert [result[4][2:] for result in two_ranks["ep"]] == [(5 * K, 5 * K)] * 2  # the buffer was full to its last slot


def test_expert_tensor_ranks_give_the_bits_of_exact_splits(two_ranks):
    check_equal_bits(two_ranks["etp"], [(None,)] * 3)


def _on_four(rank, world_size):
    return {etp: _both(rank, world_size, FOUR_RANKS, etp) for etp in (1, 2)}


def test_four_ranks_give_the_bits_of_exact_splits():
    results = run_ranks(_on_four, 4)
    for etp in (1, 2):
        check_equal_bits([result[etp] for result in results], FOUR_RANKS)


def _overflow(rank):
    """A pass that overflows, and the same again with the room that it asked for."""
    counts, weights = (6, 6), weights_of(rank, 2)
    bounded = BoundedDispatcher(E, dist.group.WORLD, room=Room(1.0))
    said = []
    with poison():
        for _ in range(2):
            bounded.room.reset() if bounded.room.asked is not None else None
            got = run_layer(*tokens_of(counts, rank), weights, bounded, FIRST_RANK)
            said.append((bounded.room.asked.item(), bounded.room.rows))
            asked = bounded.room.asked.clone()
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            finite = all(tensor.isfinite().all() for tensor in (got[0], got[1], *got[2].values()))
            if asked.item() > bounded.room.rows:
                bounded.room.grow(asked.item())
    wanted = run_layer(*tokens_of(counts, rank), weights, AllToAllDispatcher(E, dist.group.WORLD), FIRST_RANK)
    return said, finite, wanted, got


def test_an_overflow_is_said_and_the_next_pass_has_room(two_ranks):
    for said, finite, wanted, got in two_ranks["overflow"]:
        assert said == [(12, 6), (12, 12)]  # all 6 tokens chose two experts of the first rank
        assert finite
        assert torch.equal(wanted[0], got[0])
        assert torch.equal(wanted[1], got[1])
        assert all(torch.equal(wanted[2][name], got[2][name]) for name in wanted[2])


def _in_flight(rank):
    """dispatch, dispatch, combine, combine over one dispatcher whose room grows in between; rows are multiplied by
    their weights only."""
    bounded, flights = BoundedDispatcher(E, dist.group.WORLD, room=Room(1.25), tokens=8), []
    for seed in range(2):
        g = torch.Generator().manual_seed(10 * seed + rank)
        x_TD, probs_TK = torch.randn(8, D, generator=g).requires_grad_(), torch.rand(8, K, generator=g).requires_grad_()
        ids_TK = torch.stack([torch.arange(K) * (4 - 2 * seed) + t % 2 for t in range(8)])
        rows, probs, handle = bounded.dispatch_preprocess(x_TD, ids_TK, probs_TK)
        flights.append([x_TD, probs_TK, *bounded.token_dispatch(rows, probs, handle), handle])
        assert bounded.room.asked <= bounded.room.rows
        bounded.room.factor = 2.0
    outs = []
    for x_TD, probs_TK, rows, probs, handle in flights:
        rows_SD, probs_S, _ = bounded.dispatch_postprocess(rows, probs, handle)
        rows = bounded.token_combine(bounded.combine_preprocess(rows_SD * probs_S[:, None], handle), handle)
        outs.append((x_TD, probs_TK, bounded.combine_postprocess(rows, handle)))
    for *_, out_TD in reversed(outs):
        out_TD.square().sum().backward()
    for x_TD, probs_TK, out_TD in outs:
        total_T1 = probs_TK.sum(1, keepdim=True)
        wanted_TD = (x_TD * total_T1).detach()
        torch.testing.assert_close(out_TD, wanted_TD)
        torch.testing.assert_close(x_TD.grad, (2 * wanted_TD * total_T1).detach())
        torch.testing.assert_close(probs_TK.grad, (2 * wanted_TD * x_TD).sum(1, keepdim=True).expand(8, K).detach())
    return True


def test_two_in_flight_with_other_sizes(two_ranks):
    assert two_ranks["late"] == [True, True]


def test_more_tokens_than_the_buffers_are_for():
    class Group:
        def size(self):
            return 2

    bounded = BoundedDispatcher(E, Group(), room=Room(1.0), tokens=3)
    with pytest.raises(ValueError, match="4 tokens on this rank, and its buffers are for 3"):
        bounded.dispatch_preprocess(torch.ones(4, D), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))


def _slice(experts, factor, ids_TK, x_TD, probs_TK):
    """What one rank's experts would be given, and what comes back from them unchanged."""
    dispatcher = LocalDispatcher(E, experts=experts, room=None if factor is None else Room(factor))
    rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, ids_TK, probs_TK)
    rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
    out_TD = dispatcher.combine_postprocess(rows_SD * probs_S[:, None], handle)
    return rows_SD, ends_G, out_TD, dispatcher.room


def test_slices_of_the_experts_add_up_to_all_of_them():
    g = torch.Generator().manual_seed(3)
    ids_TK = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(40)])
    x_TD, probs_TK = torch.randn(40, D, generator=g).requires_grad_(), torch.rand(40, K, generator=g).requires_grad_()
    inputs = ids_TK, x_TD, probs_TK
    whole_TD = _slice(range(E), None, *inputs)[2]
    parts = [_slice(range(first, first + 2), 2.0, *inputs) for first in range(0, E, 2)]
    for rows_SD, ends_G, _, room in parts:
        assert rows_SD.shape[0] == room.rows == 40
        assert ends_G[-1] == room.asked <= 40
    torch.testing.assert_close(sum(part[2] for part in parts), whole_TD, rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(whole_TD.square().sum(), [x_TD, probs_TK])
    got = torch.autograd.grad(sum(part[2] for part in parts).square().sum(), [x_TD, probs_TK])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_slice_that_overflows_keeps_to_its_rows():
    ids_TK, x_TD = torch.tensor([[1, 2]]).expand(16, 2), torch.arange(16.0)[:, None].expand(16, D)
    rows_SD, ends_G, out_TD, room = _slice(range(2), 1.25, ids_TK, x_TD, torch.ones(16, 2))
    assert (room.asked.item(), room.rows, rows_SD.shape[0]) == (16, 10, 10)
    assert ends_G.tolist() == [0, 10]
    assert torch.equal(out_TD[:10], x_TD[:10])
    assert (out_TD[10:] == 0).all()
    room.grow(16)
    assert room.rows == 18


def test_room():
    room = Room(1.25)
    assert room.size(100, 1000) == 125
    assert room.size(101, 1000) == 127
    assert room.size(100, 110) == 110
    room.size(100, 1000)
    room.note(torch.tensor([90]))
    room.note(torch.tensor(180, dtype=torch.int32))
    room.note(torch.tensor(20))
    assert room.asked.tolist() == [180]
    room.reset()
    assert room.asked.tolist() == [0]
    room.grow(180)
    assert room.size(100, 1000) == 198
    for _ in range(3):
        room.grow(200)
    assert room.size(100, 1000) == 1000  # it has been wrong too often
    with pytest.raises(ValueError, match="at least the balanced load"):
        Room(0.9)


def test_an_empty_run_of_experts_is_refused():
    with pytest.raises(ValueError, match="a run of some"):
        LocalDispatcher(E, experts=range(2, 2))
