"""Megatron-LM with Transformer Engine, or its own local layers, as its tests run it: the last rank's memory.

The models are GPT's with experts: LayerNorm, learned positions, a head tied to the embedding, GELU or SwiGLU experts,
dropout. They have no model card, so their layers stand here, on the planner's own tapes.

Constants, each of code that can be read:
- torch gives each handle of cuBLAS and stream `CUBLAS_WORKSPACE_CONFIG` = :4096:8, 32 MiB; forward passes run on one
  thread's handle and backward passes on another's (aten/src/ATen/cuda/CublasHandlePool.cpp). A schedule that runs both
  at once, on two streams, has one more.
- Transformer Engine has a workspace of 32 MiB, and grouped products four more, one a stream
  (transformer_engine/pytorch/cpp_extensions/gemm.py).
- The data loader makes an attention mask, one byte for each pair of tokens.

Megatron-LM's defaults, where a case names nothing: expert-tensor ranks as many as tensor ranks, experts as wide as 4 x
hidden (8 / 3 with SwiGLU, to multiples of 64), dropout 0.1, the `allgather` dispatcher,
 vocabulary padded to 128 x TP. The tokenizer is GPT-2's, 50,257 words.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maniple import yamlfile
from maniple.plan.tape import Held, Tape

DATA = Path(__file__).parent / "data"
_WORDS = 50_257
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A published run: `facts` is what its configuration says; None: it is left out, for the reason in `why`."""

    case: str
    gpu: str
    line: int
    allocated: float  # bytes
    peak: float
    numbers: dict[str, int]
    facts: dict[str, Any] | None
    why: str


@dataclass(frozen=True)
class Planned:
    allocated: int
    peak: int


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
    "mixtral/": "the number of its GPUs is not published",
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
                numbers = {key: int(row[key]) for key in ("layers", "hidden", "heads", "seq", "experts", "mbs")}
            sizes = (float(row[key]) * 2**30 for key in ("alloc_GiB", "max_GiB"))
            found.append(Row(case, row["hw"], line, *sizes, numbers, None if why else facts[case], why))
    return found


def planned(row: Row) -> Planned:
    """Of the last rank, which reports: after a step, and at most."""
    facts, numbers = row.facts, row.numbers
    assert facts is not None
    world = 4 if row.case.endswith("_1node") else 8
    tensor, pipeline = facts.get("tensor", 1), facts.get("pipeline", 1)
    context, expert = facts.get("context", 1), facts.get("expert", 1)
    expert_tensor = facts.get("expert_tensor", tensor)
    width, layers = numbers["hidden"], numbers["layers"] // pipeline
    gated = 2 if facts.get("swiglu") else 1
    ffn = facts.get("expert_ffn", int(4 * width * 2 / 3) // 64 * 64 if gated == 2 else 4 * width)
    shared, experts = facts.get("shared_ffn", 0), numbers["experts"]
    vocabulary = math.ceil(_WORDS / (128 * tensor)) * 128  # of one rank

    table = vocabulary * width
    dense = layers * (4 * width * width // tensor + 4 * width + experts * width) + table + 2 * width
    dense += layers * (1 + gated) * width * shared // tensor
    if pipeline == 1:
        dense += numbers["seq"] * width  # positions
    routed = layers * experts // expert * (1 + gated) * width * ffn // expert_tensor
    replicas, expert_replicas = world // (tensor * pipeline), world // (expert * expert_tensor * pipeline)
    own = dense + routed
    if facts.get("distributed_optimizer"):
        instances = facts.get("optimizer_instances", 1)
        own = dense // (replicas // instances) + routed // (expert_replicas // instances)
    engine = facts.get("implementation") != "local"
    workspaces = 2 + 1 + (4 if facts.get("grouped_gemm") and engine else 0) + bool(facts.get("overlap_exchange"))
    mask = numbers["mbs"] * numbers["seq"] ** 2
    allocated = 6 * (dense + routed) + 12 * own + workspaces * 32 * _MIB + mask
    if facts.get("dispatcher", "allgather") == "allgather":
        # each layer's dispatcher holds on to what it gathered of all ranks' choices: a flag and a weight an expert
        tokens = numbers["mbs"] * numbers["seq"] // context // tensor * expert * expert_tensor
        allocated += layers * tokens * experts * (1 + 4)

    layer = _layer(row, tensor, context, expert_tensor, ffn, shared, gated)
    tokens = numbers["mbs"] * numbers["seq"] // context
    hidden = tokens // tensor * width * 2
    loss = _loss(tokens, vocabulary, hidden)
    kept = layers * layer.kept_bytes + 2 * hidden  # with what the first layer is given, and the last norm's result
    working = max(kept + loss.forward, kept + loss.backward, kept - layer.kept_bytes + layer.backward)
    return Planned(allocated, allocated + working)


def _layer(row: Row, tensor: int, context: int, expert_tensor: int, ffn: int, shared: int, gated: int) -> Held:
    facts, numbers = row.facts, row.numbers
    assert facts is not None
    width, length = numbers["hidden"], numbers["seq"] // context
    tokens = numbers["mbs"] * length
    local = tokens // tensor
    heads, dim = numbers["heads"] // tensor, width // numbers["heads"]
    hidden = local * width * 2
    dropped = local * width if facts.get("hidden_dropout", 0.1) else 0  # one byte an element
    tape = Tape(given=hidden)
    tape.op("norms", ["x"], {"n1": hidden}, ["x"], extra=local * 8)
    tape.op("attention", ["n1"], {"qkv": 3 * tokens * heads * dim * 2}, ["n1"], backward=3 * width * heads * dim * 2)
    if facts.get("attention") == "unfused":
        scores = numbers["mbs"] * heads * length * numbers["seq"]
        # softmax in bf16; with dropout its mask and what is left are there too
        extra = 2 * scores + (3 * scores if facts.get("attention_dropout", 0.1) else 0)
        how = {"extra": extra, "forward": 2 * scores, "backward": 4 * scores}
    else:
        how = {"extra": tokens * heads * 4}
    tape.op("attention", ["qkv"], {"o": tokens * heads * dim * 2}, ["qkv"], **how)
    tape.op("attention", ["o"], {"attn": hidden}, ["o"])
    tape.op("residual", ["x", "attn"], {"h": hidden}, extra=dropped, passes="x")
    tape.op("norms", ["h"], {"n2": hidden}, ["h"], extra=local * 8)
    rows = local * facts.get("topk", 1) * expert_tensor
    one = rows * ffn // expert_tensor * 2
    tape.op("router", ["n2"], {"probs": local * numbers["experts"] * 4}, ["n2"])
    tape.op("exchange", ["n2"], {"rows": rows * width * 2})
    tape.op("experts", ["rows"], {"fc1": gated * one}, ["rows"])
    tape.op("experts", ["fc1"], {"act": one}, ["fc1"])
    tape.op("experts", ["act", "probs"], {"weighed": one}, ["act"], moves=["act"])
    tape.op("experts", ["weighed"], {"out": rows * width * 2}, ["weighed"])
    tape.op("exchange", ["out"], {"mlp": hidden})
    if shared:
        inner = tokens * shared // tensor * 2
        tape.op("shared", ["n2"], {"shared1": gated * inner}, ["n2"])
        tape.op("shared", ["shared1"], {"shared2": inner}, ["shared1"])
        tape.op("shared", ["shared2"], {"both": hidden}, ["shared2"])
        tape.op("shared", ["mlp", "both"], {"all": hidden}, passes="mlp")
    tape.op("residual", ["h", "all" if shared else "mlp"], {"y": hidden}, extra=dropped, passes="h")
    return tape.run("y")


def _loss(tokens: int, vocabulary: int, hidden: int) -> Held:
    """Logits in bf16, and the fp32 copy that becomes their softmax."""
    tape = Tape(given=hidden)
    tape.op("head", ["x"], {"logits": tokens * vocabulary * 2}, ["x"])
    tape.op("head", ["logits"], {"loss": tokens * 4}, extra=tokens * vocabulary * 4)
    return tape.run("loss")
