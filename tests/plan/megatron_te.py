"""Megatron-LM with Transformer Engine, or its own local layers, as its tests run it: the last rank's memory.

The models are GPT's with experts (LayerNorm, learned positions, a head tied to the embedding, GELU or SwiGLU experts,
dropout), Mixtral and a short DeepSeek-V3. What a layer keeps is in `megatron_te_layers.py`, on the planner's own tapes.

Constants, each of code that can be read:
- torch gives each handle of cuBLAS and stream `CUBLAS_WORKSPACE_CONFIG` = :4096:8, 32 MiB; forward passes run on one
  thread's handle and backward passes on another's (aten/src/ATen/cuda/CublasHandlePool.cpp). A schedule that runs both
  at once, on two streams, has one more.
- Transformer Engine has a workspace of 32 MiB, and grouped products four more, one a stream
  (transformer_engine/pytorch/cpp_extensions/gemm.py).
- The data loader makes an attention mask, one byte for each pair of tokens, unless it is told not to.
- Where a product itself adds a weight's gradient to the fp32 sum, autograd is given an empty tensor in its place: one
  of each shape of weights, which stays (`get_dummy_wgrad`, transformer_engine/pytorch/module/base.py; the head's
  product takes it from there, megatron/core/tensor_parallel/layers.py). `--no-gradient-accumulation-fusion` has none.
- Megatron-LM's own head gathers the sequence into a buffer that stays, in which its own attention puts its scores too
  (`get_global_memory_buffer`, in the same file and in core/transformer/dot_product_attention.py).
- A pipeline stage's chunk of the model holds on to what it was sent last, and that to its gradient
  (`set_input_tensor` in core/transformer/transformer_block.py, `retain_grad` in core/pipeline_parallel/schedules.py).

Megatron-LM's defaults, where a case names nothing: expert-tensor ranks as many as tensor ranks, experts as wide as 4 x
hidden (8 / 3 with SwiGLU, to multiples of 64), dropout 0.1, the `allgather` dispatcher, vocabulary padded to 128 x TP.
The tokenizer is GPT-2's, 50,257 words.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.plan.megatron_te_layers import Shape, layer, loss, mtp_start

from maniple import yamlfile

DATA = Path(__file__).parent / "data"
_WORDS = 50_257
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A published run: `facts` is what its configuration says; None: it is left out, for the reason in `why`.

    gpus: how many it ran on, said by `gpus_from`: a recipe of Megatron-LM's (tests/test_utils/recipes), a rule that the
    case's group follows, or `inferred`, from first_peak and fifth_peak (see `inferred_gpus`).
    """

    case: str
    gpu: str
    line: int
    allocated: float  # bytes
    peak: float
    gpus: int
    gpus_from: str
    first_peak: float  # at the end of the first step
    fifth_peak: float
    numbers: dict[str, int]
    facts: dict[str, Any] | None
    why: str


@dataclass(frozen=True)
class Planned:
    allocated: int
    peak: int


@dataclass(frozen=True)
class Parameters:
    """Of the last rank. matrices: bytes of one of each shape among those that linear layers hold."""

    dense: int
    routed: int
    matrices: int


_REASONS = {
    "muon": "Muon is no optimizer of Maniple's",
    "fsdp": "FSDP",
    "_zp_z3_": "FSDP",
    "nemotron": "Mamba layers",
    "hybrid": "Mamba layers",
    "grpo": "reinforcement learning, with generation",
    "offloading": "activations in host memory",
    "cudagraph": "CUDA graphs, which have memory of their own",
    "fp8": "float8 in Transformer Engine, whose copies are not modelled",
}


def rows() -> list[Row]:
    facts = yamlfile.read(DATA / "megatron_ci_moe.yaml", "facts").data
    found = []
    with (DATA / "megatron_ci_moe.csv").open() as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            case = row["case"]
            why = next((reason for word, reason in _REASONS.items() if word in case), "")
            numbers = {}
            if not why:
                keys = ("layers", "hidden", "heads", "seq", "experts", "mbs")
                numbers = {key: int(row[key].strip('"').split("#")[0]) for key in keys}
            allocated, peak, first, fifth = (
                float(row[key] or 0) * 2**30 for key in ("alloc_GiB", "max_GiB", "first_max_GiB", "fifth_max_GiB")
            )
            own = None if why else facts[case]
            gpus = int(row["gpus"] or 0)
            found.append(
                Row(case, row["hw"], line, allocated, peak, gpus, row["gpus_from"], first, fifth, numbers, own, why)
            )
    return found


def inferred_gpus(row: Row) -> int:
    """How many GPUs a row ran on, by the moments of the optimizer.

    They come into being in the first step, after its passes. So the peak up to the end of that step is the later peak
    without them, or what is there once they are; each number of GPUs leaves a rank another share of them. Candidates
    are the smallest world of the layout, twice as many, and so on; they differ by gigabytes.
    """
    facts = row.facts
    assert facts is not None
    tensor, pipeline = facts.get("tensor", 1), facts.get("pipeline", 1)
    smallest = pipeline * math.lcm(tensor, facts.get("expert", 1) * facts.get("expert_tensor", tensor))

    def wrong(gpus: int) -> float:
        moments = 8 * _owned(row, _parameters(row), gpus)
        return abs(max(row.fifth_peak - moments, row.allocated) - row.first_peak)

    return min((smallest << power for power in range(8)), key=wrong)


def planned(row: Row) -> Planned:
    """Of the last rank, which reports: after a step, and at most."""
    facts, numbers = row.facts, row.numbers
    assert facts is not None
    z = _shape(row)
    pipeline, chunks, context = facts.get("pipeline", 1), facts.get("chunks", 1), facts.get("context", 1)
    layers = _layers(row)
    count = _parameters(row)
    engine = facts.get("implementation") != "local"
    workspaces = 2 + 1 + (4 if facts.get("grouped_gemm") and engine else 0) + bool(facts.get("overlap_exchange"))
    mask = z.sequences * numbers["seq"] ** 2 if facts.get("mask", True) else 0
    allocated = 6 * (count.dense + count.routed) + 12 * _owned(row, count, row.gpus) + workspaces * 32 * _MIB + mask
    if facts.get("fused_gradients"):
        allocated += count.matrices
    gathered = z.tokens * z.width * 2 if z.tensor > 1 else 0
    scores = 0 if engine else z.sequences * z.heads * z.length * z.whole * 2
    allocated += max(gathered, scores)
    if pipeline > 1:
        allocated += 2 * chunks * z.hidden
    if facts.get("dispatcher", "allgather") == "allgather":
        # each layer's dispatcher holds on to what it gathered of all ranks' choices: a flag and a weight an expert
        tokens = z.sequences * numbers["seq"] // context // z.tensor * facts.get("expert", 1) * z.expert_tensor
        allocated += layers * tokens * z.experts * (1 + 4)

    one = layer(z)
    head = loss(z, _vocabulary(row))
    waiting = (chunks - 1) * pipeline * (layers // chunks)  # layers of passes whose backward has not begun
    # with what the first layer is given, and the last norm's result
    kept = (layers // chunks + waiting) * one.kept_bytes + 2 * z.hidden
    if facts.get("mtp"):
        start = mtp_start(z)
        kept += start.kept_bytes + one.kept_bytes + 2 * z.hidden + head.kept_bytes
    working = max(kept + head.forward, kept + head.backward, kept - one.kept_bytes + one.backward)
    return Planned(allocated, allocated + working)


def _shape(row: Row) -> Shape:
    facts, numbers = row.facts, row.numbers
    assert facts is not None
    tensor, width = facts.get("tensor", 1), numbers["hidden"]
    gated = bool(facts.get("swiglu"))
    return Shape(
        facts=facts,
        sequences=numbers["mbs"],
        length=numbers["seq"] // facts.get("context", 1),
        whole=numbers["seq"],
        width=width,
        heads=numbers["heads"] // tensor,
        kv_heads=facts.get("kv_heads", numbers["heads"]) // tensor,
        dim=width // numbers["heads"],
        tensor=tensor,
        expert_tensor=facts.get("expert_tensor", tensor),
        experts=numbers["experts"],
        ffn=facts.get("expert_ffn", int(4 * width * 2 / 3) // 64 * 64 if gated else 4 * width),
        shared=facts.get("shared_ffn", 0),
    )


def _layers(row: Row) -> int:
    """Of the last rank, without MTP."""
    assert row.facts is not None
    return row.facts.get("last_layers", row.numbers["layers"] // row.facts.get("pipeline", 1))


def _vocabulary(row: Row) -> int:
    """Of one rank."""
    assert row.facts is not None
    multiple = row.facts.get("vocabulary_multiple", 128)
    return math.ceil(row.facts.get("words", _WORDS) / (multiple * row.facts.get("tensor", 1))) * multiple


def _parameters(row: Row) -> Parameters:
    facts, z, layers = row.facts, _shape(row), _layers(row)
    assert facts is not None
    table = _vocabulary(row) * z.width
    mtp, norms = facts.get("mtp", 0), 2 if facts.get("rms_norm") else 4
    if "mla" in facts:
        mla = facts["mla"]
        down = [z.width * mla["q_rank"], z.width * (mla["kv_rank"] + mla["rope"])]
        up = [mla["q_rank"] * (mla["nope"] + mla["rope"]), mla["kv_rank"] * (mla["nope"] + mla["value"])]
        attention = [*down, *(z.heads * each for each in up), z.heads * mla["value"] * z.width]
        own_norms = mla["q_rank"] + mla["kv_rank"]
    else:
        attention = [z.width * (z.heads + 2 * z.kv_heads) * z.dim, z.heads * z.dim * z.width]
        own_norms = 0
    shared = [z.gated * z.width * z.shared // z.tensor, z.width * z.shared // z.tensor]
    expert = [each * z.width * z.ffn // z.expert_tensor for each in (z.gated, 1)]
    projection = 2 * z.width * z.width // z.tensor
    dense = (layers + mtp) * (sum(attention) + own_norms + norms * z.width + z.experts * z.width + sum(shared))
    # the head, and beside MTP the embedding too; a final norm, and with MTP three more
    dense += (1 + bool(mtp)) * table + norms // 2 * z.width + mtp * (projection + 3 * z.width)
    if facts.get("pipeline", 1) == 1 and not facts.get("rope"):
        dense += row.numbers["seq"] * z.width  # positions
    routed = (layers + mtp) * z.experts // facts.get("expert", 1) * sum(expert)
    matrices = sum(attention) + sum(shared) + sum(expert) + mtp * projection + table
    return Parameters(dense, routed, 2 * matrices)


def _owned(row: Row, count: Parameters, gpus: int) -> int:
    """Parameters whose main copy and moments the rank holds, in a world of `gpus`."""
    facts, z = row.facts, _shape(row)
    assert facts is not None
    if not facts.get("distributed_optimizer"):
        return count.dense + count.routed
    pipeline, instances = facts.get("pipeline", 1), facts.get("optimizer_instances", 1)
    replicas = gpus // (z.tensor * pipeline) // instances
    expert_replicas = gpus // (facts.get("expert", 1) * z.expert_tensor * pipeline) // instances
    return count.dense // replicas + count.routed // expert_replicas
