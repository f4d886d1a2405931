"""Seconds of each pipeline stage's passes over one micro-batch: operators, exchanges, and what kernels cost besides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from maniple.config.schema import TrainConfig
from maniple.hardware.efficiency import Software
from maniple.models.card import ModelCard
from maniple.plan import operators
from maniple.plan.exchange import Network
from maniple.plan.imbalance import Imbalance
from maniple.plan.operators import Machine, Parts, Passes
from maniple.plan.shapes import padded_vocabulary
from maniple.plan.simulator import StageCost
from maniple.plan.stages import Placement, Stage

# what a recompute module runs again, by component; `full` is everything
_MODULES = {
    "core_attn": ("attention_core",),
    "mla_up_proj": ("mla_up_projections",),
    "norm": ("norm",),
    "layernorm": ("norm",),  # Megatron-Core's name
    "moe_act": ("expert_activation",),
    "permute": ("permutation",),
    "mlp": ("dense_mlp",),
    "shared_experts": ("shared_experts",),
    "experts": ("routed_experts", "expert_activation"),
    "moe": ("router", "permutation", "routed_experts", "expert_activation", "shared_experts", "exchange"),
}
MODULES = tuple(_MODULES)
_EXPERTS = ("permutation", "routed_experts", "expert_activation", "exchange")  # what graphs of attention leave out
# what is replayed from graphs, without launches by the host: nothing, layers but for exchange and experts, or all
Graphs = Literal["none", "attention", "full"]


@dataclass(frozen=True)
class Job:
    """All that a stage's time depends on."""

    config: TrainConfig
    card: ModelCard
    place: Placement
    machine: Machine
    network: Network
    software: Software
    imbalance: Imbalance
    graphs: Graphs = "none"
    modules: tuple[str, ...] = ()  # recomputed besides those of the config, from MODULES
    cache: dict = field(default_factory=dict, compare=False)

    @property
    def tokens(self) -> float:
        """Of a micro-batch on a context-parallel rank."""
        return self.config.train.micro_batch_size * self.config.data.sequence_length / self.place.context

    @property
    def boundary_bytes(self) -> float:
        """What a stage sends the next: bf16 hidden states, cut over TP."""
        return 2.0 * self.tokens / self.place.tensor * self.card.hidden_size


@dataclass(frozen=True)
class StageTime:
    """One stage's passes by component; recompute is what backward runs again, apart from backward itself."""

    passes: Passes
    recompute: Parts

    @property
    def total(self) -> Parts:
        out = Parts()
        for parts in (self.passes.forward, self.passes.backward, self.passes.weight):
            out.merge(parts)
        out["recompute"] += self.recompute.total
        return out

    def cost(self, job: Job) -> StageCost:
        place = job.place
        send = job.network.send_seconds(job.boundary_bytes, place.world_size // place.pipeline, place.world_size)
        return StageCost(
            forward=self.passes.forward.total,
            backward=self.passes.backward.total + self.recompute.total,
            weight=self.passes.weight.total,
            exchange_forward=self.passes.forward["exchange"],
            exchange_backward=self.passes.backward["exchange"],
            send_forward=send,
            send_backward=send,
            hidden=job.software.hidden,
        )


def stage_time(job: Job, stage: Stage) -> StageTime:
    out = StageTime(Passes(), Parts())
    for place, layer in enumerate(stage.layers):
        _add(out, job, layer, _recomputed(job, layer, place))
    for depth in stage.mtp:
        layer = job.card.num_layers + depth
        _add(out, job, layer, _recomputed(job, layer, None))
        again = Passes()
        again.linear(
            job.machine, "mtp", job.tokens, job.card.hidden_size / job.place.tensor, 2 * job.card.hidden_size, "bf16"
        )
        out.passes.merge(again)
        out.passes.merge(_head(job))
    if stage.embedding:
        size = job.tokens / job.place.tensor * job.card.hidden_size
        lookup = Passes()
        lookup.add("embedding", job.machine.elementwise(4 * size), job.machine.elementwise(10 * size))
        out.passes.merge(lookup)
    if stage.head:
        out.passes.merge(_head(job))
    return out


def layer_passes(job: Job, layer: int) -> Passes:
    """One layer, with its exchanges, and what its kernels cost beside their work."""
    card, place = job.card, job.place
    recipe = job.config.precision.recipe_of(layer, card.num_layers)
    key = (card.is_moe_layer(layer), card.window(layer), recipe)
    if key in job.cache:
        return job.cache[key]
    machine, tokens, tensor, width = job.machine, job.tokens, place.tensor, card.hidden_size
    local = tokens / tensor
    sequence, documents = job.config.data.sequence_length, not job.config.data.attend_across_documents
    parts = [
        operators.attention_passes(machine, card, layer, tokens, sequence, recipe, tensor, documents),
        operators.norm_passes(machine, local * width),
    ]
    comm = Passes()
    gathers = 2  # attention: sequence gathered before, reduced and scattered behind
    if card.is_moe_layer(layer):
        moe = card.moe
        load = job.imbalance.factor(moe.num_experts, place.expert)
        experts = moe.num_experts // place.expert
        # a plain all-to-all wants rows in the order of ranks, and then of experts
        moves = 2 if place.expert > 1 and job.software.dispatch == "all_to_all" else 1
        parts.append(operators.moe_passes(machine, card, local, recipe, experts, place.expert_tensor, load, moves))
        if moe.shared_ffn_size:
            shared = moe.shared_ffn_size / tensor
            parts.append(operators.dense_passes(machine, width, shared, tokens, recipe, "shared_experts"))
            gathers += 2
        _exchange(job, comm, local, load)
    else:
        ffn = card.dense_ffn_size / tensor
        parts.append(operators.dense_passes(machine, width, ffn, tokens, recipe, "dense_mlp"))
        gathers += 2
    each = job.network.ring_seconds(2 * tokens * width, tensor, 1)
    # backward gathers the input once more, for the weights' gradients
    comm.add("tensor_parallel", gathers * each, (gathers + gathers // 2) * each)
    if place.context > 1:
        value = card.mla.v_head_dim if card.mla else card.head_dim
        pairs = card.num_kv_heads / tensor * (card.head_dim + value)
        around = job.network.ring_seconds(2 * tokens * place.context * pairs, place.context, tensor)
        comm.add("context_parallel", around, 2 * around)
    passes = Passes()
    for part in (*parts, comm):
        passes.merge(part)
    forward, backward = _launched(job, key[0])
    busy = passes.backward.total + passes.weight.total
    passes.merge(Passes(_gaps(job, forward, passes.forward.total), _gaps(job, backward, busy)))  # are no operations
    job.cache[key] = passes
    return passes


def _exchange(job: Job, comm: Passes, tokens: float, load: float) -> None:
    place, card = job.place, job.card
    size = 2.0 * card.hidden_size
    way = job.network.exchange_seconds(
        tokens, size, card.moe, place.expert, place.expert_tensor, job.software.dispatch, load
    )
    comm.add("exchange", 2 * way, 2 * way)  # to the experts and back; gradients likewise
    if place.expert_tensor > 1:
        rows = 2 * tokens * card.moe.topk * place.expert_tensor * card.hidden_size
        comm.add("exchange", *[2 * job.network.ring_seconds(rows, place.expert_tensor, 1)] * 2)


def _gaps(job: Job, kernels: float, busy: float) -> Parts:
    """What so many kernels cost beside their work, ramps and tails; and how long they wait for a host that needs longer
    for them than the GPU, which is busy for so many seconds."""
    gaps = kernels * job.software.gap_microseconds * 1e-6
    host = kernels * job.software.host_microseconds * 1e-6
    return Parts(gaps=gaps, host=max(0.0, host - busy - gaps))


def _launched(job: Job, moe: bool) -> tuple[int, int]:
    """Kernels that the host launches for a layer, forward and backward; what graphs replay is not among them."""
    if job.graphs == "full" or (job.graphs == "attention" and not moe):
        return 0, 0
    return job.software.launches["experts" if job.graphs == "attention" else "moe" if moe else "dense"]


def _recomputed(job: Job, layer: int, place: int | None) -> bool:
    """Whether backward runs the layer's forward again, whole. place: which of its stage's layers it is; None: an MTP
    layer, which a number of layers does not reach."""
    recompute = job.config.recompute
    if recompute.granularity != "full":
        return False
    if recompute.layers:
        return layer in recompute.layers
    return recompute.num_layers is None or (place is not None and place < recompute.num_layers)


def _add(out: StageTime, job: Job, layer: int, recomputed: bool) -> None:
    passes = layer_passes(job, layer)
    out.passes.merge(passes)
    if recomputed:
        out.recompute.merge(passes.forward)
        return
    again = dict.fromkeys(part for name in (*job.config.recompute.modules, *job.modules) for part in _MODULES[name])
    if not again:
        return
    parts = Parts({part: passes.forward[part] for part in again})
    out.recompute.merge(parts)
    out.recompute.merge(_gaps(job, _launched_again(job, passes, layer, again), parts.total))


def _launched_again(job: Job, passes: Passes, layer: int, again: Collection[str]) -> float:
    """Kernels that the host launches for parts of a layer which backward runs again.

    Kernels are known of whole layers only: it is as large a share of the layer's forward ones as these parts have of
    its operations. (Of experts and exchange they are known too, 30 of 60, and Qwen3's `moe` has half the operations.)
    """
    launched = {
        part: number
        for part, number in passes.operations.items()
        if (part in _EXPERTS if job.graphs == "attention" else part != "quantization")  # kernels are those of bf16
    }
    mine = sum(number for part, number in launched.items() if part in again)
    return _launched(job, job.card.is_moe_layer(layer))[0] * mine / sum(launched.values()) if mine else 0.0


def _head(job: Job) -> Passes:
    vocabulary = padded_vocabulary(job.card, job.config) / job.place.tensor
    return operators.head_passes(job.machine, job.card, job.tokens, vocabulary, job.config.train.loss)
