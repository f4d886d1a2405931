"""What attention keeps and needs of one micro-batch, operation by operation, as `engines/megatron` builds it."""

from __future__ import annotations

from maniple.models.card import ModelCard
from maniple.plan.profile import Profile
from maniple.plan.shapes import Shapes
from maniple.plan.tape import Tape

_SINK_DIMS = 8  # `engines/megatron/attention.py` pads a head by as many for its sink
_MOST_FLASH = 192  # head size
_ALIGNED = 16  # and makes the keys of a bias a multiple of as many


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


def attention(tape: Tape, card: ModelCard, layer: int, z: Shapes, profile: Profile, *, again: bool) -> None:
    """Adds attention of the tensor `n1` (normalised input) up to `attn` (projected). again: the core is recomputed."""
    if card.mla is not None:
        _latent(tape, card, z)
    else:
        _grouped(tape, card, z)
    _core(tape, card, layer, z, profile, again)
    row_parallel(tape, "attention", "o", "attn", z, z.heads * _value_dim(card), z.D)


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
    weight = emulated_weight(inside * outside, tape.quantized)
    return [[name]], both + weight, quantized_bytes(rows, inside, tape.quantized) + weight


def emulated_weight(elements: int, each: int) -> int:
    """Bytes of a weight as mxfp8 rounds it, in bf16: made anew for each product that is emulated, and not kept."""
    return 2 * elements if each == 2 else 0


def quantized_bytes(rows: int, width: int, each: int) -> int:
    """Values and their scales: 4 bytes for 128 of them, or 1 for 32. Two bytes a value: rounded ones, without."""
    return rows * width * each + (rows * width // 32 if each == 1 else 0)


def _core(tape: Tape, card: ModelCard, layer: int, z: Shapes, profile: Profile, again: bool) -> None:
    """From `q`, `k`, `v` (which shares the memory of `qkv` where there is one) to `o`.

    Kernels keep their operands, their result and one fp32 number a query and head. With a bias a sink makes operands of
    its own; so do grouped keys that are repeated for every head: with a bias where the profile says so, and in fp32.
    What the kernel holds inside its backward pass is the profile's `accumulates`.
    """
    width, value = card.head_dim, _value_dim(card)
    b, heads = z.b, z.heads
    held = ["k", "v"] if card.mla is not None else ["k", "qkv"]
    moves = ["q", "k", "v"]
    gathered = 0
    if z.context > 1:  # keys and values of all ranks, in one tensor
        size = z.B * z.whole * z.kv_heads * (width + value) * b
        if again:  # gathered again too
            gathered = size
        else:
            tape.op("attention", ["k", "v"], {"whole": size}, forward=2 * size // z.context + size, backward=size)
            held, moves = ["whole"], ["q", "whole"]
    kept: set[str] = set()
    extra = own = 0
    for queries, keys, biased in spans(card, layer, z, profile):
        sink_dims = _SINK_DIMS if card.attention_sinks and biased else 0
        repeated = heads > z.kv_heads and (b == 4 or (biased and profile.repeats_keys))
        query = z.B * queries * heads * (width + sink_dims)  # elements
        group = z.B * keys * (width + sink_dims + value)
        made = (group * (heads if repeated else z.kv_heads) * b) if sink_dims or repeated else 0
        made += query * b if sink_dims else 0
        inside = 0
        if profile.accumulates and b == 2:
            inside = 4 * query + (group * heads * b if heads > z.kv_heads and not repeated else 0)
        kept |= ({"q"} if not sink_dims else set()) | (set() if sink_dims or repeated else set(held))
        out = z.B * queries * heads * value * b
        extra += made + z.B * queries * heads * 4 + (out if z.context > 1 else 0)
        own = max(own, made + inside)  # gradients of operands that the call made are beside those of `moves`
    result = z.T * heads * value * b
    forward, backward = (0, own) if z.context == 1 else (2 * result, max(own, 2 * result))
    if "q" in tape.forgets:  # projected once more, before they are rotated
        backward += tape.sizes["q0"] + tape.sizes["kv0"]
    if again:  # only what goes in is kept
        every = extra + backward + 2 * gathered  # and its gradient
        forward = extra + gathered
        tape.op("attention", [*moves], {"o": result}, ["q", *held], forward=forward, backward=every, moves=moves)
    else:
        tape.op(
            "attention",
            moves,
            {"o": result},
            [*sorted(kept), *(["o"] if z.context == 1 else [])],
            extra=extra,
            forward=forward,
            backward=backward,
            moves=moves,
        )


def spans(card: ModelCard, layer: int, z: Shapes, profile: Profile) -> list[tuple[int, int, bool]]:
    """(queries, keys, whether some are hidden by a bias) of each call of attention: one, or under context parallelism
    two, of an early and a late part of the sequence. With a bias a sink is a key, and others fill up to a multiple of
    16."""
    window, sinks = card.window(layer), card.attention_sinks
    flash = profile.flash_windows and z.b == 2 and card.head_dim == _value_dim(card) <= _MOST_FLASH
    if z.context == 1:
        parts = [(0, z.whole)]
    else:
        part = z.whole // (2 * z.context)
        parts = [
            (number * part, (number + 1) * part) for number in (z.context_rank, 2 * z.context - 1 - z.context_rank)
        ]
    calls = []
    for first, end in parts:
        keys = end - (0 if window is None else max(0, first + 1 - window) // _ALIGNED * _ALIGNED)
        plain = not sinks and first == 0 and (window is None or window >= end)
        biased = z.documents or not (plain or flash)
        if biased and sinks:
            keys += _ALIGNED - keys % _ALIGNED
        calls.append((end - first, keys, biased))
    return calls


def _value_dim(card: ModelCard) -> int:
    return card.head_dim if card.mla is None else card.mla.v_head_dim
