"""What a layer, the MTP block and the loss of Megatron-LM with TE keep and need, on the planner's tapes.

`Shape` says what a rank sees of them. All functions return bytes of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maniple.plan.tape import Held, Tape


@dataclass(frozen=True)
class Shape:
    """Of one rank. length: tokens of a sequence on its context rank; local: those that sequence parallelism leaves."""

    facts: dict[str, Any]
    sequences: int
    length: int
    whole: int  # tokens a sequence, over all context ranks
    width: int
    heads: int
    kv_heads: int
    dim: int
    tensor: int
    expert_tensor: int
    experts: int
    ffn: int
    shared: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def local(self) -> int:
        return self.tokens // self.tensor

    @property
    def hidden(self) -> int:
        return self.local * self.width * 2

    @property
    def gated(self) -> int:
        return 2 if self.facts.get("swiglu") else 1


def layer(z: Shape) -> Held:
    """A layer with experts; of their rows as many as come where tokens choose all experts alike."""
    facts, hidden = z.facts, z.hidden
    dropped = z.local * z.width if facts.get("hidden_dropout", 0.1) else 0  # one byte an element
    statistics = z.local * (4 if facts.get("rms_norm") else 8)
    tape = Tape(given=hidden)
    tape.op("norms", ["x"], {"n1": hidden}, ["x"], extra=statistics)
    (_latent if "mla" in facts else _grouped)(tape, z)
    tape.op("attention", ["o"], {"attn": hidden}, ["o"])
    tape.op("residual", ["x", "attn"], {"h": hidden}, extra=dropped, passes="x")
    tape.op("norms", ["h"], {"n2": hidden}, ["h"], extra=statistics)
    rows = z.local * facts.get("topk", 1) * z.expert_tensor
    one = rows * z.ffn // z.expert_tensor * 2
    tape.op("router", ["n2"], {"probs": z.local * z.experts * 4}, ["n2"])
    tape.op("exchange", ["n2"], {"rows": rows * z.width * 2})
    tape.op("experts", ["rows"], {"fc1": z.gated * one}, ["rows"])
    if facts.get("fused_activation"):  # gate, product and the router's weight in one operation
        tape.op("experts", ["fc1", "probs"], {"weighed": one}, ["fc1"], moves=["fc1"])
    else:
        tape.op("experts", ["fc1"], {"act": one}, ["fc1"])
        tape.op("experts", ["act", "probs"], {"weighed": one}, ["act"], moves=["act"])
    tape.op("experts", ["weighed"], {"out": rows * z.width * 2}, ["weighed"])
    tape.op("exchange", ["out"], {"mlp": hidden})
    if z.shared:
        inner = z.tokens * z.shared // z.tensor * 2
        tape.op("shared", ["n2"], {"shared1": z.gated * inner}, ["n2"])
        tape.op("shared", ["shared1"], {"shared2": inner}, ["shared1"])
        tape.op("shared", ["shared2"], {"both": hidden}, ["shared2"])
        tape.op("shared", ["mlp", "both"], {"all": hidden}, passes="mlp")
    tape.op("residual", ["h", "all" if z.shared else "mlp"], {"y": hidden}, extra=dropped, passes="h")
    return tape.run("y")


def _grouped(tape: Tape, z: Shape) -> None:
    one = z.tokens * z.dim * 2
    # without fused gradients the weight's own is there, before it is added to the fp32 sum
    weight = 0 if z.facts.get("fused_gradients") else z.width * (z.heads + 2 * z.kv_heads) * z.dim * 2
    tape.op("attention", ["n1"], {"qkv": (z.heads + 2 * z.kv_heads) * one}, ["n1"], backward=weight)
    if z.facts.get("rope"):  # queries and keys are copies, values a part of `qkv`
        tape.op("attention", ["qkv"], {"q": z.heads * one}, forward=2 * z.heads * one, backward=2 * z.heads * one)
        tape.op("attention", ["qkv"], {"k": z.kv_heads * one})
        _core(tape, z, ["q", "k", "qkv"], z.heads * one)
    else:
        _core(tape, z, ["qkv"], z.heads * one)


def _core(tape: Tape, z: Shape, reads: list[str], result: int) -> None:
    if z.facts.get("attention") == "unfused":
        scores = z.sequences * z.heads * z.length * z.whole
        # softmax in bf16; with dropout its mask and what is left are there too
        extra = 2 * scores + (3 * scores if z.facts.get("attention_dropout", 0.1) else 0)
        how = {"extra": extra, "forward": 2 * scores, "backward": 4 * scores}
    else:
        how = {"extra": z.tokens * z.heads * 4}
    tape.op("attention", reads, {"o": result}, reads if reads == ["qkv"] else [*reads, "o"], **how)


def _latent(tape: Tape, z: Shape) -> None:
    """Every rank projects its own tokens down; up, and attention, are cut by heads and see all tokens."""
    mla, tokens, heads = z.facts["mla"], z.tokens, z.heads
    wide = mla["nope"] + mla["rope"]
    for name, rank, outside in (("q", mla["q_rank"], wide), ("kv", mla["kv_rank"], mla["nope"] + mla["value"])):
        tape.op("attention", ["n1"], {f"{name}c": z.local * rank * 2}, ["n1"])
        tape.op("attention", [f"{name}c"], {f"{name}n": z.local * rank * 2}, [f"{name}c"], extra=z.local * 4)
        tape.op("attention", [f"{name}n"], {f"{name}0": tokens * heads * outside * 2}, [f"{name}n"])
    tape.op("attention", ["q0"], {"q": tokens * heads * wide * 2})
    tape.op("attention", ["kv0"], {"k": tokens * heads * wide * 2})
    tape.op("attention", ["kv0"], {"v": tokens * heads * mla["value"] * 2})
    _core(tape, z, ["q", "k", "v"], tokens * heads * mla["value"] * 2)


def mtp_start(z: Shape) -> Held:
    """From the hidden state to what the MTP layer is given: the embedding, two norms, the projection."""
    tape = Tape(given=z.hidden)
    tape.op("mtp", ["x"], {"e": z.hidden}, moves=[])
    tape.op("mtp", ["e"], {"en": z.hidden}, ["e"], extra=z.local * 4)
    tape.op("mtp", ["x"], {"hn": z.hidden}, ["x"], extra=z.local * 4)
    tape.op("mtp", ["en", "hn"], {"both": 2 * z.hidden})
    tape.op("mtp", ["both"], {"y": z.hidden}, ["both"], forward=z.tensor * z.hidden, backward=2 * z.tensor * z.hidden)
    return tape.run("y")


def loss(z: Shape, vocabulary: int) -> Held:
    """Of a head with so many words on this rank.

    Megatron-LM's own loss turns logits into an fp32 copy, which becomes their softmax. `native`, compiled, makes the
    exponentials beside that copy. Transformer Engine's writes the gradient over the logits.
    """
    logits, kind = z.tokens * vocabulary * 2, z.facts.get("loss")
    # with sequence parallelism the gradient of the whole input is made, then scattered
    how = {"backward": z.tokens * z.width * 2 if z.tensor > 1 else 0}
    tape = Tape(given=z.hidden)
    if kind == "te":
        tape.op("head", ["x"], {"logits": logits}, ["x"], **how)
        tape.op("head", ["logits"], {"loss": z.tokens * 4}, ["logits"])
        held = tape.run("loss")
        return Held(held.kept, held.forward, held.backward - logits, held.result)  # no second tensor for the gradient
    tape.op("head", ["x"], {"logits": logits}, ["x"], **how)
    tape.op("head", ["logits"], {"loss": z.tokens * 4}, extra=2 * logits, forward=2 * logits if kind == "native" else 0)
    return tape.run("loss")
