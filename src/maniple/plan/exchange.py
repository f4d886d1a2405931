"""What ranks send each other, and how long it takes: token exchange, tensor, context, pipeline and data parallelism.

Links are the two of the card: inside a node (or NVLink domain) and one NIC a GPU to other nodes. Of a cluster whose
fabric is known (`GPU.fabric`), what leaves a pod shares its way out. Ranks are laid out as Megatron-Core lays them: TP
innermost, then CP, DP, PP; for experts ETP, EP, expert DP, PP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, gcd, inf

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

    @property
    def pod(self) -> float:
        """GPUs between which every NIC has its full rate."""
        return self.gpu.fabric.pod_gpus if self.gpu.fabric else inf

    def out_of_pod(self, size_bytes: float, how: str) -> float:
        """Seconds until every GPU's `size_bytes` have left the pod, on average over its GPUs."""
        return size_bytes / (self.scale_out(how) * self.gpu.fabric.taper) if self.gpu.fabric else 0.0

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
        sent = size_bytes * (ranks - 1) / ranks
        seconds = sent / speed
        if ranks * stride > self.pod:  # as many rings as ranks lie between two members, each leaving the pod once
            seconds = max(seconds, self.out_of_pod(sent * min(1.0, stride / self.pod), "ring"))
        return seconds + calls * self.latency(ranks - 1, -(-ranks // near) - 1)

    def send_seconds(self, size_bytes: float, distance: int, world_size: int) -> float:
        """One message to the rank `distance` further on, while all ranks of a stage send theirs."""
        if distance < self.gpu.gpus_per_node:
            return size_bytes / self.link("ring") + self.latency()
        seconds = size_bytes / self.scale_out("ring")
        if world_size > self.pod:
            seconds = max(seconds, self.out_of_pod(size_bytes * min(1.0, distance / self.pod), "ring"))
        return seconds + self.latency(far=1)

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
        in_pod = min(ranks, max(near, int(min(self.pod, ranks * stride) // stride)))  # of the group's ranks
        if how == "all_to_all":
            inside = moe.topk * (near - 1) / ranks
            outside = moe.topk * (ranks - near) / ranks
            beyond = moe.topk * (ranks - in_pod) / ranks
        else:
            # of what arrives in a node from outside, all goes on over the links but what is for the NIC's own GPU
            inside = (
                distinct_units(moe, ranks) * (ranks - 1) / ranks
                if nodes == 1
                else (distinct_units(moe, ranks) * (near - 1) / near)
            )
            outside = distinct_units(moe, nodes) * (nodes - 1) / nodes
            beyond = distinct_units(moe, nodes) * (ranks - in_pod) / ranks
        near_s = inside * tokens * token_bytes * load / self.link(how)
        far_s = outside * tokens * token_bytes * load / self.scale_out(how)
        beyond_s = self.out_of_pod(beyond * tokens * token_bytes * load, how)
        return max(near_s, far_s, beyond_s) + self.latency(far=int(nodes > 1))  # all links run at once


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
