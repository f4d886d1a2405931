"""What attention keeps and needs of one micro-batch, operation by operation, as `engines/megatron` builds it."""

from __future__ import annotations

from maniple.models.card import ModelCard
from maniple.plan.shapes import Shapes
from maniple.plan.tape import Tape

_SINK_DIMS = 8  # `engines/megatron/attention.py` pads a head by as many for its sink
_MOST_FLASH = 256  # head size


def column_parallel(tape: Tape, part: str, source: str, result: str, z: Shapes, inside: int, outside: int) -> None:
    """A product whose columns are cut: gathers the sequence, and scatters the gradient of the whole."""
    whole = z.T * inside * z.b if z.tensor > 1 else 0
    kept, backward, forward = _product(tape, source, z.T, inside, outside, z)
    tape.op(
        part,
        [source],
        {result: z.T * outside * z.b},
        *kept,
        forward=forward + (whole if tape.quantized else 0),
        backward=whole + backward,
    )


def row_parallel(tape: Tape, part: str, source: str, result: str, z: Shapes, inside: int, outside: int) -> None:
    """A product whose rows are cut: each rank's part of the sum is scattered, and the gradient gathered."""
    whole = z.T * outside * z.b if z.tensor > 1 else 0
    kept, backward, forward = _product(tape, source, z.T, inside, outside, z)
    tape.op(
        part,
        [source],
        {result: z.L * outside * z.b},
        *kept,
        forward=whole + forward,
        backward=whole + backward,
    )


def norm(tape: Tape, part: str, source: str, result: str, rows: int, width: int, z: Shapes) -> None:
    """RMSNorm keeps its input and one fp32 number a row."""
    tape.op(part, [source], {result: rows * width * z.b}, [source], extra=rows * 4)


def attention(tape: Tape, card: ModelCard, layer: int, z: Shapes, *, again: bool) -> None:
    """Adds attention of the tensor `n1` (normalised input) up to `attn` (projected). again: the core is recomputed."""
    if card.mla is not None:
        _latent(tape, card, z)
        width, value = card.head_dim, card.mla.v_head_dim
    else:
        _grouped(tape, card, z)
        width = value = card.head_dim
    _core(tape, card, layer, z, width, value, again)
    row_parallel(tape, "attention", "o", "attn", z, z.heads * value, z.D)


def _grouped(tape: Tape, card: ModelCard, z: Shapes) -> None:
    dim, heads, groups = card.head_dim, z.heads, z.kv_heads
    column_parallel(tape, "attention", "n1", "qkv", z, z.D, (heads + 2 * groups) * dim)
    q, k = z.T * heads * dim * z.b, z.T * groups * dim * z.b
    source = "qkv"
    if heads > groups > 1:  # the heads of one group are beside their key and value: to lie together they are copied
        tape.op("attention", ["qkv"], {"q0": q})
        source = "q0"
    gathered = card.qk_norm == "full_width" and z.tensor > 1
    if card.qk_norm == "none":
        query, key = source, "qkv"
    elif gathered:  # computed from parts, in fp32
        tape.op("attention", [source], {"qn": q}, extra=3 * z.T * heads * dim * 4)
        tape.op("attention", ["qkv"], {"kn": k}, extra=3 * z.T * groups * dim * 4)
        query, key = "qn", "kn"
    else:
        each = card.qk_norm == "per_head"
        tape.op("attention", [source], {"qn": q}, [source], extra=z.T * (heads if each else 1) * 4)
        tape.op("attention", ["qkv"], {"kn": k}, ["qkv"], extra=z.T * (groups if each else 1) * 4)
        query, key = "qn", "kn"
    rotated = 2 * z.length * int(dim * card.rope.partial) * z.b  # cosine and sine, in the job's type
    tape.op("attention", [query], {"q": q}, extra=rotated, forward=2 * q, backward=2 * q)
    tape.op("attention", [key], {"k": k}, extra=rotated, forward=2 * k, backward=2 * k)
    tape.op("attention", ["qkv"], {"v": 0})


def _latent(tape: Tape, card: ModelCard, z: Shapes) -> None:
    mla = card.mla
    assert mla is not None
    heads, nope, rope, value = z.heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
    wide = nope + rope
    source = "n1"
    if mla.q_lora_rank is not None:
        _gathered(tape, "n1", "qc", mla.q_lora_rank, z)
        norm(tape, "attention", "qc", "qcn", z.L, mla.q_lora_rank, z)
        source = "qcn"
    latent = mla.kv_lora_rank + rope
    _gathered(tape, "n1", "kvc", latent, z)
    norm(tape, "attention", "kvc", "kvn", z.L, mla.kv_lora_rank, z)
    inside = mla.q_lora_rank or z.D
    column_parallel(tape, "attention", source, "q0", z, inside, heads * wide)
    column_parallel(tape, "attention", "kvn", "kv0", z, mla.kv_lora_rank, heads * (nope + value))
    rotated = 2 * z.length * rope * z.b
    part = z.T * heads * rope * z.b
    q, k, v = z.T * heads * wide * z.b, z.T * heads * wide * z.b, z.T * heads * value * z.b
    tape.op("attention", ["q0"], {"q": q}, extra=rotated, forward=2 * part, backward=2 * part)
    tape.op("attention", ["kv0", "kvc"], {"k": k}, extra=rotated, forward=part, backward=part, moves=["kv0"])
    tape.op("attention", ["kv0"], {"v": v})


def _gathered(tape: Tape, source: str, result: str, width: int, z: Shapes) -> None:
    """A product whose columns are cut, and gathered again: the whole of them is on every rank."""
    whole = z.T * z.D * z.b if z.tensor > 1 else 0
    kept, backward, forward = _product(tape, source, z.T, z.D, width // z.tensor, z)
    tape.op("attention", [source], {result: z.T * width * z.b}, *kept, forward=forward, backward=whole + backward)


def _product(tape: Tape, source: str, rows: int, inside: int, outside: int, z: Shapes) -> tuple[list, int, int]:
    """(what is kept, as arguments of `Tape.op`; bytes that backward needs; bytes that forward needs). In a
    low-precision recipe the input's transposed form is kept, and the weight's gradient is added to its fp32 sum."""
    if not tape.quantized:
        return [[source]], z.linear(inside, outside), 0
    name = f"{source}.turned{len(tape.ops)}"
    tape.op("quantized", [source], {name: quantized_bytes(rows, inside, tape.quantized)}, moves=[])
    both = 2 * quantized_bytes(rows, outside, tape.quantized)
    return [[name]], both, quantized_bytes(rows, inside, tape.quantized)


def quantized_bytes(rows: int, width: int, each: int) -> int:
    """Values and their scales: 4 bytes for 128 of them, or 1 for 32."""
    return rows * width * each + rows * width // 32


def _core(tape: Tape, card: ModelCard, layer: int, z: Shapes, width: int, value: int, again: bool) -> None:
    """From `q`, `k`, `v` (which shares the memory of `qkv` where there is one) to `o`.

    Flash and memory-efficient attention keep their operands, their result and one number a query and head. Where torch
    has no kernel for a call it keeps all scores, in fp32, and fp32 copies of the operands, keys and values repeated for
    every head: grouped keys with a mask, in fp32 or of two sizes (`engines/megatron/dry_run/fused.py`).
    """
    b, heads = z.b, z.heads
    held = ["k", "v"] if card.mla is not None else ["k", "qkv"]
    moves = ["q", "k", "v"]
    if z.context > 1:  # keys and values of all ranks, in one tensor
        size = z.B * z.whole * z.kv_heads * (width + value) * b
        tape.op("attention", ["k", "v"], {"whole": size}, forward=2 * size // z.context + size, backward=size)
        held, moves = ["whole"], ["q", "whole"]
    grouped = heads != z.kv_heads
    kept: set[str] = set()
    extra = forward = backward = scored = 0
    for queries, keys, masked in spans(card, layer, z):
        out = z.B * queries * heads * value * b
        if grouped and (masked or b == 4 or width != value):
            wide = width + (_SINK_DIMS if card.attention_sinks else 0)
            scores = z.B * heads * queries * keys * 4
            copies = z.B * heads * 4 * (queries * wide + keys * (wide + value))
            extra += scores + copies
            forward, backward = max(forward, scores), max(backward, 2 * scores)
            scored += 1
        else:
            kept |= {"q", *held}
            extra += z.B * queries * heads * 4 + (out if z.context > 1 else 0)
    result = z.T * heads * value * b
    if "q" in tape.forgets:  # projected once more, before they are rotated
        backward += tape.sizes["q0"] + tape.sizes["kv0"]
    if again:  # only what goes in is kept
        every = extra + backward
        tape.op("attention", [*moves], {"o": result}, ["q", *held, "o"], forward=extra, backward=every, moves=moves)
    else:
        plain = not scored and z.context == 1
        tape.op(
            "attention",
            moves,
            {"o": result},
            [*sorted(kept), *(["o"] if plain else [])],
            extra=extra,
            forward=forward if plain else max(forward, 2 * result),
            backward=backward if plain else max(backward, 2 * result),
            moves=moves,
        )


def spans(card: ModelCard, layer: int, z: Shapes) -> list[tuple[int, int, bool]]:
    """(queries, keys, whether some are hidden by a mask) of each call of attention: one, or under context parallelism
    two, of an early and a late part of the sequence."""
    window, sink = card.window(layer), 1 if card.attention_sinks else 0
    if z.context == 1:
        parts = [(0, z.whole)]
    else:
        part = z.whole // (2 * z.context)
        parts = [
            (number * part, (number + 1) * part) for number in (z.context_rank, 2 * z.context - 1 - z.context_rank)
        ]
    calls = []
    for first, end in parts:
        start = 0 if window is None else max(0, first + 1 - window)
        masked = bool(sink) or first > 0 or (window is not None and window < end)
        calls.append((end - first, end - start + sink, masked))
    return calls
