"""What ranks send each other, and how long it takes: token exchange, tensor, context, pipeline and data parallelism.

Links are the two of the card: inside a node (or NVLink domain) and one NIC a GPU to other nodes. Ranks are laid out as
Megatron-Core lays them: TP innermost, then CP, DP, PP; for experts ETP, EP, expert DP, PP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, gcd

from maniple.hardware.card import GPU
from maniple.hardware.efficiency import Efficiency
from maniple.models.card import MoE


@dataclass(frozen=True)
class Network:
    gpu: GPU
    efficiency: Efficiency

    def link(self, how: str) -> float:
        """Bytes a second, one way, inside a node."""
        return self.gpu.link_bytes_per_s * self.efficiency.link[how]

    def scale_out(self, how: str) -> float:
        return self.gpu.scale_out_bytes_per_s * self.efficiency.scale_out[how]

    def latency(self, hops: int = 1, far: int = 0) -> float:
        """What a collective or a message costs beside its bytes: so many hops one after another, `far` of them from
        node to node."""
        each = self.efficiency.latency
        return (each.base + (hops - far) * each.link + far * each.scale_out) * 1e-6

    def in_node(self, size: int, stride: int) -> int:
        """How many of a group's ranks, `stride` apart, are in one node."""
        return max(1, min(size, self.gpu.gpus_per_node // stride)) if stride < self.gpu.gpus_per_node else 1

    def ring_seconds(self, size_bytes: float, ranks: int, stride: int, calls: int = 1) -> float:
        """All-gathers or reduce-scatters, `calls` of them, whose whole tensors have `size_bytes`: each rank sends
        (n - 1) / n of it.

        Between nodes all members in a node share the work, each over its NIC, so a ring has as many NICs as members.
        What comes first has n - 1 hops to go, of which one leads out of each node.
        """
        if ranks == 1:
            return 0.0
        near = self.in_node(ranks, stride)
        speed = self.link("ring")
        if near < ranks:
            speed = min(speed, near * self.scale_out("ring"))
        return size_bytes * (ranks - 1) / ranks / speed + calls * self.latency(ranks - 1, -(-ranks // near) - 1)

    def send_seconds(self, size_bytes: float, distance: int) -> float:
        """One message to the rank `distance` further on."""
        if distance < self.gpu.gpus_per_node:
            return size_bytes / self.link("ring") + self.latency()
        return size_bytes / self.scale_out("ring") + self.latency(far=1)

    def exchange_seconds(
        self, tokens: float, token_bytes: float, moe: MoE, ranks: int, stride: int, how: str, load: float = 1.0
    ) -> float:
        """One way of the token exchange: `tokens` of a rank go to their experts' ranks (or come back).

        how: `all_to_all` sends a copy to each expert chosen; `dispatch` one to each rank, and one to each node, where
        it is passed on. load: the fullest rank's tokens over the mean.
        """
        if ranks == 1:
            return 0.0
        near = gcd(ranks, self.in_node(ranks, stride))  # nodes that are not full hold equal shares
        nodes = ranks // near
        if how == "all_to_all":
            inside = moe.topk * (near - 1) / ranks
            outside = moe.topk * (ranks - near) / ranks
        else:
            # of what arrives in a node from outside, all goes on over the links but what is for the NIC's own GPU
            inside = (
                distinct_units(moe, ranks) * (ranks - 1) / ranks
                if nodes == 1
                else (distinct_units(moe, ranks) * (near - 1) / near)
            )
            outside = distinct_units(moe, nodes) * (nodes - 1) / nodes
        near_s = inside * tokens * token_bytes * load / self.link(how)
        far_s = outside * tokens * token_bytes * load / self.scale_out(how)
        return max(near_s, far_s) + self.latency(far=int(nodes > 1))  # both links run at once, to all ranks at once


def distinct_units(moe: MoE, units: int) -> float:
    """How many of `units` (ranks or nodes), with the experts dealt to them in order, a token's top-k experts are on.

    The choice is uniform over the experts; of a router with groups, over the kept groups, themselves chosen uniformly.
    Expected number = units x (1 - chance that none of the k is in a unit), which is hypergeometric.
    """
    experts, topk, groups, kept = moe.num_experts, moe.topk, moe.router.num_groups, moe.router.group_topk
    size, group = experts // units, experts // groups
    if max(size, group) % min(size, group):  # units cut groups in unequal parts: taken as a router without groups
        group, groups, kept = experts, 1, 1
    pool = kept * group

    def unused(inside: int) -> float:
        return comb(pool - inside, topk) / comb(pool, topk)

    if size <= group:  # a part of one group, or all of it
        return units * kept / groups * (1.0 - unused(size))
    covers = size // group
    ways = comb(groups, kept)
    none = sum(
        comb(covers, inside) * comb(groups - covers, kept - inside) / ways * unused(inside * group)
        for inside in range(max(0, kept - groups + covers), min(covers, kept) + 1)
    )
    return units * (1.0 - none)
