"""How long one GPU takes for each operation of a layer: a roofline with attained speeds.

An operation takes as long as its multiplications at the attained matrix speed, or its bytes at the attained memory
bandwidth, whichever is longer. Attained speeds are `hardware/efficiencies.yaml`; nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maniple.hardware.card import GPU
from maniple.hardware.efficiency import Efficiency, Software
from maniple.models.card import ModelCard
from maniple.models.flops import attention_core_flops_per_token

_TILE = 128  # rows of a matrix tile: what a group's last tile is padded to


class Parts(dict[str, float]):
    """Seconds by component; what is not there takes none."""

    def __missing__(self, part: str) -> float:
        return 0.0

    def merge(self, other: Mapping[str, float]) -> None:
        for part, seconds in other.items():
            self[part] += seconds

    @property
    def total(self) -> float:
        return sum(self.values())


@dataclass(frozen=True)
class Machine:
    """One GPU and what it attains. All results are seconds."""

    gpu: GPU
    efficiency: Efficiency
    software: Software

    def flops(self, recipe: str) -> float:
        """Attained FLOP/s of large dense products. mxfp8 without hardware for it is emulated in bf16."""
        if recipe == "mxfp8" and not self.gpu.mxfp8_native:
            recipe = "bf16"
        peak = self.gpu.peak_flops("fp8" if recipe == "fp8_block" else recipe)
        return peak * self.efficiency.matmul[recipe]

    def stream(self, size_bytes: float) -> float:
        """One pass over memory at the speed of a copy; bytes read and written."""
        return size_bytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory["copy"])

    def elementwise(self, size_bytes: float) -> float:
        share = self.software.elementwise or self.efficiency.memory["copy"]
        return size_bytes / (self.gpu.memory_bytes_per_s * share)

    def gather(self, size_bytes: float) -> float:
        """Rows moved to and from the experts' order."""
        share = self.software.permutation or self.efficiency.memory["gather"]
        return size_bytes / (self.gpu.memory_bytes_per_s * share)

    def matmul(self, m: float, n: float, k: float, recipe: str) -> float:
        size = 2 if recipe == "bf16" else 1
        return max(2.0 * m * n * k / self.flops(recipe), self.stream(size * (m * k + k * n) + 2 * m * n))

    def wgrad(self, m: float, n: float, k: float, recipe: str) -> float:
        """Gradient of a [n, k] weight over m rows, added to fp32: the addition's traffic is not hidden."""
        size = 2 if recipe == "bf16" else 1
        compute = max(2.0 * m * n * k / self.flops(recipe), self.stream(size * m * (n + k)))
        return compute + self.stream(8 * n * k)

    def grouped(self, rows: float, groups: int, n: float, k: float, recipe: str, which: str) -> float:
        """A product over `groups` experts: forward, dgrad or wgrad, `rows` in all, each group's last tile padded.

        One expert alone is a dense product.
        """
        if groups == 1:
            return self.wgrad(rows, n, k, recipe) if which == "wgrad" else self.matmul(rows, n, k, recipe)
        size = 2 if recipe == "bf16" else 1
        padded = rows + groups * _TILE / 2
        compute = 2.0 * padded * n * k / self._grouped_flops(recipe, which)
        weights = groups * n * k
        if which == "wgrad":
            return max(compute, self.stream(size * rows * (n + k))) + self.stream(8 * weights)
        return max(compute, self.stream(size * (rows * k + weights) + 2 * rows * n))

    def _grouped_flops(self, recipe: str, which: str) -> float:
        shares = self.efficiency.grouped.shares
        if (own := f"{recipe}_{which}") in shares:
            return self.gpu.peak_flops("fp8" if recipe == "fp8_block" else recipe) * shares[own]
        return self.flops(recipe) * shares[which] / self.software.grouped_slowdown.get(self.gpu.architecture, 1.0)

    def attention(self, flops: float, *, backward: bool = False) -> float:
        """flops: of the forward pass; backward has 5 products where forward has 2 (scores are computed again)."""
        speed = self.gpu.peak_flops("bf16") * self.efficiency.attention["backward" if backward else "forward"]
        return flops * (2.5 if backward else 1.0) / speed


@dataclass
class Passes:
    """Seconds of one layer's forward, backward (of inputs) and weight gradients, by component."""

    forward: Parts = field(default_factory=Parts)
    backward: Parts = field(default_factory=Parts)
    weight: Parts = field(default_factory=Parts)

    def add(self, part: str, forward: float, backward: float, weight: float = 0.0) -> None:
        self.forward[part] += forward
        self.backward[part] += backward
        self.weight[part] += weight

    def merge(self, other: Passes) -> None:
        self.forward.merge(other.forward)
        self.backward.merge(other.backward)
        self.weight.merge(other.weight)

    def linear(self, machine: Machine, part: str, m: float, n: float, k: float, recipe: str) -> None:
        """A dense projection [m, k] -> [m, n], with quantization of its input and of its output's gradient."""
        self.add(part, machine.matmul(m, n, k, recipe), machine.matmul(m, k, n, recipe), machine.wgrad(m, n, k, recipe))
        if recipe != "bf16":  # read bf16, write both orientations
            self.add("quantization", machine.elementwise(4 * m * k), machine.elementwise(4 * m * n))


def attention_passes(
    machine: Machine, card: ModelCard, layer: int, tokens: float, sequence: int, recipe: str, tensor: int
) -> Passes:
    """Attention of one layer with its norm and residual. tokens: of the micro-batch on a context rank; sequence: whole.

    Projections are cut over `tensor` ranks, norms and residuals over the sequence as sequence parallelism does.
    """
    passes, width = Passes(), card.hidden_size
    heads, kv_heads = card.num_heads / tensor, card.num_kv_heads / tensor
    mla = card.mla
    if mla is None:
        passes.linear(machine, "attention_projections", tokens, (heads + 2 * kv_heads) * card.head_dim, width, recipe)
        passes.linear(machine, "attention_projections", tokens, width, heads * card.head_dim, recipe)
        rotated = tokens * (heads + kv_heads) * card.head_dim * (2 if card.qk_norm != "none" else 1)
    else:
        query = heads * card.head_dim
        if mla.q_lora_rank is None:
            passes.linear(machine, "attention_projections", tokens, query, width, recipe)
        else:
            passes.linear(machine, "attention_projections", tokens / tensor, mla.q_lora_rank, width, recipe)
            passes.linear(machine, "mla_up_projections", tokens, query, mla.q_lora_rank, recipe)
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        passes.linear(machine, "attention_projections", tokens / tensor, latent, width, recipe)
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        passes.linear(machine, "mla_up_projections", tokens, up, mla.kv_lora_rank, recipe)
        passes.linear(machine, "attention_projections", tokens, width, heads * mla.v_head_dim, recipe)
        # the query's and the key's two parts are put together: each is written once more
        rotated = tokens * 2 * 2 * heads * card.head_dim
    passes.add("elementwise", machine.elementwise(4 * rotated), machine.elementwise(4 * rotated))
    flops = tokens / tensor * attention_core_flops_per_token(card, sequence, card.window(layer))
    passes.add("attention_core", machine.attention(flops), machine.attention(flops, backward=True))
    _norm(machine, passes, tokens / tensor * width)
    return passes


def dense_passes(machine: Machine, width: int, ffn: float, tokens: float, recipe: str, part: str) -> Passes:
    """A SwiGLU MLP of `ffn` columns on this rank (a dense layer's, or shared experts)."""
    passes = Passes()
    passes.linear(machine, part, tokens, 2 * ffn, width, recipe)
    passes.linear(machine, part, tokens, width, ffn, recipe)
    passes.add("elementwise", machine.elementwise(6 * tokens * ffn), machine.elementwise(12 * tokens * ffn))
    return passes


def moe_passes(
    machine: Machine,
    card: ModelCard,
    tokens: float,
    recipe: str,
    experts: int,
    expert_tensor: int,
    load: float,
    moves: int,
) -> Passes:
    """Router, permutation and routed experts of one layer, on the fullest rank.

    tokens: of one rank, sequence-parallel; experts: on this rank; load: the fullest rank's tokens over the mean. moves:
    how often rows are put in another order on their way to the experts, and as often on their way back.
    """
    passes, moe, width = Passes(), card.moe, card.hidden_size
    ffn = moe.expert_ffn_size / expert_tensor
    rows = tokens * moe.topk * expert_tensor * load
    passes.add(
        "router",
        machine.matmul(tokens, moe.num_experts, width, "bf16") + machine.elementwise(24 * tokens * moe.num_experts),
        machine.matmul(tokens, width, moe.num_experts, "bf16") + machine.elementwise(24 * tokens * moe.num_experts),
        machine.wgrad(tokens, moe.num_experts, width, "bf16"),
    )
    # each reads and writes all rows, but for the last, which adds them up; the gradients' moves are the same
    move = machine.gather((2 * moves - 1) * 4 * rows * width + 2 * (rows + tokens) * width)
    passes.add("permutation", move, move)
    for n, k in ((2 * ffn, width), (width, ffn)):
        passes.add(
            "routed_experts",
            machine.grouped(rows, experts, n, k, recipe, "forward"),
            machine.grouped(rows, experts, k, n, recipe, "dgrad"),
            machine.grouped(rows, experts, n, k, recipe, "wgrad"),
        )
        if recipe != "bf16" and recipe not in machine.efficiency.grouped.with_quantization:
            passes.add("quantization", machine.elementwise(4 * rows * k), machine.elementwise(4 * rows * n))
    # SwiGLU with the routing weight, in one operation: reads both halves, writes one
    each = 6 * rows * ffn * (machine.software.clamp_passes if moe.activation == "clamped_swiglu" else 1.0)
    passes.add("expert_activation", machine.elementwise(each), machine.elementwise(2 * each))
    return passes


def norm_passes(machine: Machine, elements: float) -> Passes:
    """The norm before an MLP, and its residual."""
    passes = Passes()
    _norm(machine, passes, elements)
    return passes


def head_passes(machine: Machine, card: ModelCard, tokens: float, vocabulary: float) -> Passes:
    """Output head and loss over `vocabulary` columns on this rank: bf16 products, logits read and written in fp32."""
    passes = Passes()
    passes.linear(machine, "head", tokens, vocabulary, card.hidden_size, "bf16")
    logits = tokens * vocabulary
    passes.add("loss", machine.elementwise(14 * logits), machine.elementwise(6 * logits))
    _norm(machine, passes, tokens * card.hidden_size)
    return passes


def optimizer_seconds(
    machine: Machine, parameters: float, grad_bytes: int, main_bytes: int, moment_bytes: int
) -> float:
    """Adam: main parameters and both moments read and written, gradients read for norm and update, weights written."""
    each = 2 * main_bytes + 4 * moment_bytes + 2 * grad_bytes + (2 if main_bytes == 4 else 0)
    return machine.stream(parameters * each)


def _norm(machine: Machine, passes: Passes, elements: float) -> None:
    """RMSNorm (read, write) and residual addition (two reads, one write); backward reads twice as much."""
    passes.add("norm", machine.elementwise(10 * elements), machine.elementwise(14 * elements))
