"""Exchanges and imbalance against sums by hand and by enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest

from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.hardware.card import Fabric
from maniple.hardware.efficiency import load_efficiency
from maniple.models.card import MoE, Router
from maniple.plan.exchange import Network, distinct_units
from maniple.plan.imbalance import BALANCED, Imbalance


def _moe(experts: int, topk: int, groups: int = 1, kept: int = 1) -> MoE:
    return MoE(num_experts=experts, topk=topk, expert_ffn_size=64, router=Router(num_groups=groups, group_topk=kept))


def _network(name: str = "h200-sxm") -> Network:
    return Network(load_gpu(name), load_efficiency(name))


@pytest.mark.parametrize(
    ("units", "groups", "kept"), [(8, 1, 1), (2, 1, 1), (4, 4, 2), (8, 4, 2), (2, 4, 2), (16, 4, 3), (4, 2, 1)]
)
def test_distinct_units_are_what_enumeration_counts(units, groups, kept):
    experts, topk = 16, 3
    size, group = experts // units, experts // groups
    counts = [
        len({expert // size for expert in chosen})
        for kept_groups in combinations(range(groups), kept)
        for chosen in combinations([e for e in range(experts) if e // group in kept_groups], topk)
    ]
    assert distinct_units(_moe(experts, topk, groups, kept), units) == pytest.approx(sum(counts) / len(counts))


def test_deepseek_sends_a_token_to_5_25_of_8_ranks_without_groups():
    assert distinct_units(_moe(256, 8), 8) == pytest.approx(5.30, abs=0.05)
    assert distinct_units(_moe(256, 8, 8, 4), 8) < 4


def test_dispatch_sends_no_more_copies_than_all_to_all():
    network, moe = _network(), _moe(256, 8)
    for ranks in (8, 16, 64):
        fewer = network.exchange_seconds(4096, 14336, moe, ranks, 1, "dispatch")
        assert fewer < network.exchange_seconds(4096, 14336, moe, ranks, 1, "all_to_all")


def test_an_exchange_by_hand():
    """In a node: 8 copies, 7/8 of them to others, over NCCL's 327 GB/s; the load of the fullest rank multiplies it."""
    network, moe = _network(), _moe(256, 8)
    seconds = network.exchange_seconds(4096, 14336, moe, 8, 1, "all_to_all")
    assert seconds == pytest.approx(4096 * 14336 * 7 / (450e9 * 0.727) + 11.8e-6)
    uneven = network.exchange_seconds(4096, 14336, moe, 8, 1, "all_to_all", load=1.5)
    assert uneven - 11.8e-6 == pytest.approx(1.5 * (seconds - 11.8e-6))
    assert network.exchange_seconds(4096, 14336, moe, 1, 1, "all_to_all") == 0.0


def test_between_nodes_the_nic_is_the_limit():
    network, moe = _network(), _moe(256, 8)
    seconds = network.exchange_seconds(4096, 14336, moe, 16, 1, "dispatch")
    # all but one token in 256 need the other of two nodes
    copies = distinct_units(moe, 2) / 2
    assert seconds == pytest.approx(4096 * 14336 * copies / (50e9 * 0.9) + 22.4e-6)
    assert copies == pytest.approx(0.9967, abs=1e-3)


def test_rings_cross_nodes_over_as_many_nics_as_a_node_has_members():
    network = _network()
    size = 1e9
    inside = network.ring_seconds(size, 8, 1)
    assert inside == pytest.approx(size * 7 / 8 / (450e9 * 0.8) + (8.4 + 7 * 3.4) * 1e-6)
    wide = network.ring_seconds(size, 16, 1)  # 8 a node
    thin = network.ring_seconds(size, 16, 8)  # 1 a node
    assert wide == pytest.approx(size * 15 / 16 / (450e9 * 0.8) + (8.4 + 14 * 3.4 + 14) * 1e-6)
    assert thin == pytest.approx(size * 15 / 16 / 45e9 + (8.4 + 15 * 14) * 1e-6)
    # each of four collectives has its own hops to go, and their bytes are those of one
    assert network.ring_seconds(size, 16, 8, 4) - thin == pytest.approx(3 * (8.4 + 15 * 14) * 1e-6)
    assert network.ring_seconds(size, 1, 1) == 0.0


def test_messages_know_how_far_they_go():
    network = _network()
    assert network.send_seconds(1e9, 64, 128) > 5 * network.send_seconds(1e9, 1, 2)


def _pods(gpus: int, taper: float) -> Network:
    gpu = load_gpu("h200-sxm").model_copy(update={"fabric": Fabric(pod_gpus=gpus, taper=taper)})
    return Network(gpu, load_efficiency("h200-sxm"))


def test_what_leaves_a_pod_shares_its_way_out():
    """By hand, in pods of 32 GPUs that a quarter of their NICs' rate leaves, 45 GB/s of each."""
    plain, pods, size = _network(), _pods(32, 0.25), 1e9
    wire = 1e9 / 45e9
    # pipeline: stages 32 apart, all 32 leave; 8 apart, a quarter of the pod's GPUs do and have its way out alone
    assert pods.send_seconds(size, 32, 64) == pytest.approx(4 * wire + 22.4e-6)
    assert pods.send_seconds(size, 8, 64) == pytest.approx(wire + 22.4e-6) == plain.send_seconds(size, 8, 64)
    assert pods.send_seconds(size, 16, 32) == plain.send_seconds(size, 16, 32)  # one pod
    # rings: one leaves each pod, or, of members 32 apart, 32 do
    assert pods.ring_seconds(size, 64, 1) == plain.ring_seconds(size, 64, 1)
    assert pods.ring_seconds(size, 4, 32) == pytest.approx(4 * 0.75 * wire + (8.4 + 3 * 14) * 1e-6)
    assert pods.ring_seconds(size, 4, 8) == plain.ring_seconds(size, 4, 8)
    # experts: half of 64 ranks are in the other pod
    moe = _moe(256, 8)
    every = 4096 * 14336 * 8
    assert pods.exchange_seconds(4096, 14336, moe, 64, 1, "all_to_all") == pytest.approx(
        every / 2 / (50e9 * 0.8 * 0.25) + 22.4e-6
    )
    copies = distinct_units(moe, 8) / 2
    assert pods.exchange_seconds(4096, 14336, moe, 64, 1, "dispatch") == pytest.approx(
        4096 * 14336 * copies / (50e9 * 0.9 * 0.25) + 22.4e-6
    )
    for how in ("all_to_all", "dispatch"):
        alone = plain.exchange_seconds(4096, 14336, moe, 32, 1, how)
        assert pods.exchange_seconds(4096, 14336, moe, 32, 1, how) == alone
        even = _pods(32, 1.0).exchange_seconds(4096, 14336, moe, 64, 1, how)
        assert even == plain.exchange_seconds(4096, 14336, moe, 64, 1, how)


def test_a_fabric_in_words():
    assert Fabric.parse("256:0.5") == Fabric(pod_gpus=256, taper=0.5)
    assert str(Fabric.parse("256:0.50")) == "256:0.5"
    wrong = ["", "256", "256:", "0:0.5", "256:0", "256:1.5", "256:nan", "x:1", "256:0.5:1", "-8:0.5"]
    for text in [*wrong, "8:1e-320", "\u0668:0.5", " 8:0.5"]:
        with pytest.raises(UserError, match="expected GPUS:SHARE"):
            Fabric.parse(text)


def test_imbalance_is_a_seeded_distribution():
    assert BALANCED.factor(128, 8) == 1.0
    assert Imbalance("factor", 1.7).factor(128, 8) == 1.7
    few, many = Imbalance().factor(256, 64), Imbalance().factor(256, 8)
    assert 1.0 < many < few < 2.0  # sums over more experts are more even
    assert Imbalance().factor(256, 8) == many
    assert Imbalance(seed=1).factor(256, 8) != many
    assert Imbalance("dirichlet", 0.5).factor(256, 8) > many
    assert Imbalance("lognormal", 0.0).factor(256, 8) == pytest.approx(1.0)
    assert Imbalance().factor(256, 1) == 1.0


def test_imbalance_in_words():
    assert Imbalance.parse("balanced") == BALANCED
    assert Imbalance.parse("1.4") == Imbalance.parse("factor:1.4") == Imbalance("factor", 1.4)
    assert Imbalance.parse("dirichlet:8") == Imbalance()
    for text in ("", "even", "dirichlet", "lognormal:much", "factor:0.5", "factor:nan"):
        with pytest.raises(UserError, match="imbalance"):
            Imbalance.parse(text)


@pytest.mark.parametrize(
    ("kind", "parameter"),
    [
        ("factor", 0.9),
        ("dirichlet", 0.0),
        ("lognormal", -1.0),
        ("dirichlet", 1e-5),
        ("dirichlet", 1e308),
        ("lognormal", 300.0),
    ],
)
def test_impossible_imbalance_is_refused(kind, parameter):
    """Or one that fp64 cannot draw."""
    with pytest.raises(UserError, match=f"--imbalance {kind} takes a parameter"):
        Imbalance(kind, parameter)
