"""How long one GPU takes for each operation of a layer: a roofline with attained speeds.

An operation takes as long as its multiplications at the attained matrix speed, or its bytes at the attained memory
bandwidth, whichever is longer. Attained speeds are `hardware/efficiencies.yaml`; nothing is fitted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from maniple.hardware.card import GPU
from maniple.hardware.efficiency import Efficiency, Software
from maniple.models.card import ModelCard
from maniple.models.flops import attention_core_flops_per_token

_TILE = 128  # rows of a matrix tile: what a group's last tile is padded to
ADDED_BYTES = 8  # of an fp32 gradient that is read, added to and written
QUANTIZED_BYTES = 4  # of an element: 2 read, 1 written in each orientation
SWIGLU_BYTES = 6, 12  # of a column of the result, forward and backward: both halves read, one written
NORM_BYTES = 10, 14  # of an element: RMSNorm (read, write) and residual addition (two reads, one write)
# of the link to host memory, both directions busy: 47.2 of PCIe Gen5's 64 GB/s on one H200 (55.2 one way alone)
HOST_SHARE = 0.74
SINK_BYTES = 4, 20  # of an element of attention's result: scaled; multiplied with its gradient in fp32, and summed up
BACKWARD_PRODUCTS = 2.5  # attention: 5 in backward, where scores are computed again, for 2 in forward


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
        """Attained FLOP/s of large dense products."""
        recipe = self._multiplied(recipe)
        peak = self.gpu.peak_flops("fp8" if recipe == "fp8_block" else recipe)
        return peak * self.efficiency.matmul[recipe]

    def stream(self, size_bytes: float) -> float:
        """One pass over memory at the speed of a copy; bytes read and written."""
        return size_bytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory["copy"])

    def elementwise(self, size_bytes: float) -> float:
        share = self.software.elementwise or self.efficiency.memory.first("elementwise", "copy")
        return size_bytes / (self.gpu.memory_bytes_per_s * share)

    def quantize(self, elements: float, recipe: str) -> float:
        """bf16 numbers become 8-bit ones in both orientations: read once, written twice."""
        name = f"quantize_{recipe}"
        if name not in self.efficiency.memory.shares:
            return self.elementwise(QUANTIZED_BYTES * elements)
        return QUANTIZED_BYTES * elements / (self.gpu.memory_bytes_per_s * self.efficiency.memory[name])

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
        return compute + self.stream(ADDED_BYTES * n * k)

    def grouped(self, rows: float, groups: int, n: float, k: float, recipe: str, which: str) -> float:
        """A product over `groups` experts: forward, dgrad or wgrad, `rows` in all, each group's last tile padded.

        One expert alone is a dense product.
        """
        if groups == 1:
            return self.wgrad(rows, n, k, recipe) if which == "wgrad" else self.matmul(rows, n, k, recipe)
        size = 2 if recipe == "bf16" else 1
        compute = grouped_flops(rows, groups, n, k) / self._grouped_flops(recipe, which)
        weights = groups * n * k
        if which == "wgrad":
            return max(compute, self.stream(size * rows * (n + k))) + self.stream(ADDED_BYTES * weights)
        return max(compute, self.stream(size * (rows * k + weights) + 2 * rows * n))

    def _grouped_flops(self, recipe: str, which: str) -> float:
        shares, recipe = self.efficiency.grouped.shares, self._multiplied(recipe)
        if (own := f"{recipe}_{which}") in shares:
            return self.gpu.peak_flops("fp8" if recipe == "fp8_block" else recipe) * shares[own]
        return self.flops(recipe) * shares[which] / self.software.grouped_slowdown.get(self.gpu.architecture, 1.0)

    def _multiplied(self, recipe: str) -> str:
        """mxfp8 without hardware for it is emulated in bf16."""
        return "bf16" if recipe == "mxfp8" and not self.gpu.mxfp8_native else recipe

    def attention(self, flops: float, *, backward: bool = False, latent: bool = False, kind: str = "") -> float:
        """flops: of the forward pass. latent: MLA, whose queries and values are of two sizes. kind: of kernel, `flash`
        or `bias`, as `efficiencies.yaml` names shares; "": the fastest, which knows causal attention alone."""
        which = "backward" if backward else "forward"
        kinds, sizes = ([f"{kind}_", ""] if kind else [""]), (["latent_", ""] if latent else [""])
        share = self.efficiency.attention.first(*[f"{size}{each}{which}" for each in kinds for size in sizes])
        return flops * (BACKWARD_PRODUCTS if backward else 1.0) / (self.gpu.peak_flops("bf16") * share)


@dataclass
class Passes:
    """Seconds of one layer's forward, backward (of inputs) and weight gradients, by component.

    operations: how many there are in forward.
    """

    forward: Parts = field(default_factory=Parts)
    backward: Parts = field(default_factory=Parts)
    weight: Parts = field(default_factory=Parts)
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, part: str, forward: float, backward: float, weight: float = 0.0) -> None:
        self.operations[part] += forward > 0
        self.forward[part] += forward
        self.backward[part] += backward
        self.weight[part] += weight

    def merge(self, other: Passes) -> None:
        self.forward.merge(other.forward)
        self.backward.merge(other.backward)
        self.weight.merge(other.weight)
        self.operations.update(other.operations)

    def linear(self, machine: Machine, part: str, m: float, n: float, k: float, recipe: str) -> None:
        """A dense projection [m, k] -> [m, n], with quantization of its input and of its output's gradient."""
        self.add(part, machine.matmul(m, n, k, recipe), machine.matmul(m, k, n, recipe), machine.wgrad(m, n, k, recipe))
        if recipe != "bf16":
            self.add("quantization", machine.quantize(m * k, recipe), machine.quantize(m * n, recipe))


def attention_passes(
    machine: Machine,
    card: ModelCard,
    layer: int,
    tokens: float,
    sequence: int,
    recipe: str,
    tensor: int,
    documents: bool = False,
) -> Passes:
    """Attention of one layer with its norm and residual. tokens: of the micro-batch on a context rank; sequence: whole;
    documents: kept apart.

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
    window, kind = card.window(layer), ""
    flops = tokens / tensor * attention_core_flops_per_token(card, sequence, window)
    if machine.software.torch_attention and documents:  # a bias, with which no score is left out
        flops, kind = 2 * tokens / tensor * attention_core_flops_per_token(card, sequence, None), "bias"
    elif machine.software.torch_attention and (card.attention_sinks or window is not None):
        kind = "flash"
        if window is not None:  # whole blocks of keys
            flops = tokens / tensor * attention_core_flops_per_token(card, sequence, window + _TILE)
        if card.attention_sinks:
            results = tokens * heads * card.head_dim
            passes.add("attention_core", *[machine.elementwise(size * results) for size in SINK_BYTES])
    latent = mla is not None
    core = [machine.attention(flops, backward=backward, latent=latent, kind=kind) for backward in (False, True)]
    passes.add("attention_core", *core)
    _norm(machine, passes, tokens / tensor * width)
    return passes


def dense_passes(machine: Machine, width: int, ffn: float, tokens: float, recipe: str, part: str) -> Passes:
    """A SwiGLU MLP of `ffn` columns on this rank (a dense layer's, or shared experts)."""
    passes = Passes()
    passes.linear(machine, part, tokens, 2 * ffn, width, recipe)
    passes.linear(machine, part, tokens, width, ffn, recipe)
    passes.add("elementwise", *[machine.elementwise(size * tokens * ffn) for size in SWIGLU_BYTES])
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
    move = machine.gather(moved_bytes(tokens, rows, width, moves))  # the gradients' are the same
    passes.add("permutation", move, move)
    for n, k in ((2 * ffn, width), (width, ffn)):
        passes.add(
            "routed_experts",
            machine.grouped(rows, experts, n, k, recipe, "forward"),
            machine.grouped(rows, experts, k, n, recipe, "dgrad"),
            machine.grouped(rows, experts, n, k, recipe, "wgrad"),
        )
        if recipe != "bf16" and recipe not in machine.efficiency.grouped.with_quantization:
            passes.add("quantization", machine.quantize(rows * k, recipe), machine.quantize(rows * n, recipe))
    # SwiGLU with the routing weight, in one operation
    each = rows * ffn * (machine.software.clamp_passes if moe.activation == "clamped_swiglu" else 1.0)
    passes.add("expert_activation", *[machine.elementwise(size * each) for size in SWIGLU_BYTES])
    return passes


def norm_passes(machine: Machine, elements: float) -> Passes:
    """The norm before an MLP, and its residual."""
    passes = Passes()
    _norm(machine, passes, elements)
    return passes


def head_passes(machine: Machine, card: ModelCard, tokens: float, vocabulary: float, loss: str) -> Passes:
    """Output head and loss (`train.loss`) over `vocabulary` columns on this rank: bf16 products; "logits" also reads
    and writes them in fp32, "fused" makes them a second time."""
    passes = Passes()
    passes.linear(machine, "head", tokens, vocabulary, card.hidden_size, "bf16")
    logits = tokens * vocabulary
    forward, backward = (14, 6) if loss == "logits" else (2, 4)  # bytes: read; read and written
    passes.add("loss", machine.elementwise(forward * logits), machine.elementwise(backward * logits))
    if loss == "fused":
        passes.add("head", 0.0, machine.matmul(tokens, vocabulary, card.hidden_size, "bf16"))
    _norm(machine, passes, tokens * card.hidden_size)
    return passes


def optimizer_seconds(
    machine: Machine, parameters: float, grad_bytes: int, main_bytes: int, moment_bytes: int
) -> float:
    """Adam, with the gradients' norm. States in bf16 are rounded at random, which is work too."""
    kind = "adamw_fp32" if main_bytes == moment_bytes == 4 else "adamw_bf16"
    speed = machine.gpu.memory_bytes_per_s * machine.efficiency.memory.first(kind, "copy")
    return parameters * optimizer_bytes(grad_bytes, main_bytes, moment_bytes) / speed


def host_seconds(machine: Machine, size_bytes: float) -> float:
    """So many bytes of states come from host memory and, at the same time, go back."""
    return size_bytes / (machine.gpu.host_bytes_per_s * HOST_SHARE)


def optimizer_bytes(grad_bytes: int, main_bytes: int, moment_bytes: int) -> int:
    """Of a parameter: main one and moments read and written, gradient read for norm and update, weight written."""
    return 2 * main_bytes + 4 * moment_bytes + 2 * grad_bytes + (2 if main_bytes == 4 else 0)


def moved_bytes(tokens: float, rows: float, width: int, moves: int = 1) -> float:
    """Of rows on their way to the experts and back, `moves` times put in another order on each: every move reads and
    writes all rows, but for the last, which adds them up."""
    return (2 * moves - 1) * 4 * rows * width + 2 * (rows + tokens) * width


def grouped_flops(rows: float, groups: int, n: float, k: float) -> float:
    """Multiplications and additions of one product over experts, each group's last tile padded (half full)."""
    return 2.0 * (rows + groups * _TILE / 2) * n * k


def _norm(machine: Machine, passes: Passes, elements: float) -> None:
    passes.add("norm", *[machine.elementwise(size * elements) for size in NORM_BYTES])
