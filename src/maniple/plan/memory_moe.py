"""What an MoE layer's feed-forward part keeps and needs of one micro-batch, operation by operation."""

from __future__ import annotations

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard
from maniple.plan.memory_attention import column_parallel, emulated_weight, quantized_bytes, row_parallel
from maniple.plan.profile import Profile
from maniple.plan.shapes import Shapes
from maniple.plan.tape import Tape


def dense(tape: Tape, part: str, source: str, result: str, ffn: int, z: Shapes) -> None:
    """Megatron-Core's MLP without fusion: `silu(gate) * (up + 0)` keeps both factors and the sum's result."""
    one = z.T * ffn * z.b
    column_parallel(tape, part, source, f"{part}.gate_up", z, z.D, 2 * ffn)
    tape.op(part, [f"{part}.gate_up"], {f"{part}.silu": one}, [f"{part}.gate_up"])
    tape.op(part, [f"{part}.gate_up"], {f"{part}.up": one}, moves=[f"{part}.gate_up"])
    tape.op(
        part,
        [f"{part}.silu", f"{part}.up"],
        {f"{part}.product": one},
        [f"{part}.silu", f"{part}.up"],
    )
    row_parallel(tape, part, f"{part}.product", result, z, ffn, z.D)


def moe_layer(
    tape: Tape, config: TrainConfig, card: ModelCard, z: Shapes, profile: Profile, modules: list[str]
) -> None:
    """From `n2` to `mlp`: shared experts, router, exchange, experts and back."""
    moe, b = card.moe, z.b
    hidden = z.L * z.D * b
    if moe.shared_ffn_size:
        if "shared_experts" in modules:
            inner = Tape(sums_in_place=tape.sums_in_place, quantized=tape.quantized)
            inner.sizes["n2"] = hidden
            dense(inner, "shared_experts", "n2", "shared", z.shared_ffn, z)
            held = inner.run("shared")
            tape.op(
                "shared_experts",
                ["n2"],
                {"shared": hidden},
                ["n2"],
                forward=held.forward - hidden,
                backward=max(held.forward, held.backward) - 2 * hidden,
            )
        else:
            dense(tape, "shared_experts", "n2", "shared", z.shared_ffn, z)
    E, K = moe.num_experts, moe.topk
    wide = 0 if b == 4 else z.L * z.D * 4  # the router's products are fp32
    scores = z.L * E * 4
    statistics = scores + z.L * K * 4 * 3
    if not moe.router.score_before_topk:
        statistics += scores
    if profile.oracles and moe.router.num_groups == 1:
        statistics += z.L * E * 8  # of the sort of all experts
    tape.op(
        "router",
        ["n2"],
        {"probs": z.L * K * 4},
        ["n2"],
        extra=statistics,
        forward=wide + 2 * scores,
        backward=2 * wide + 2 * scores,
    )
    indices = 2 * z.rows * 8
    sent, came = z.sent * z.D * b, z.came * z.D * b
    parallel = config.parallel
    spread = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size > 1
    exchanged = spread or config.moe.dispatcher == "all_to_all"
    rows = z.S * z.D * b
    cut = config.moe.overlap_exchange  # a schedule that cuts layers holds what is sent on between the pieces

    def summed(tokens: int) -> int:
        """What the sum of rows needs beside its result: the oracle adds up in fp32."""
        return tokens * z.D * (4 + b) if profile.oracles else 0

    source = "came" if z.came == z.S else "gathered"
    if not exchanged:
        tape.op("exchange", ["n2"], {"rows": rows}, extra=indices, backward=summed(z.L))
    else:
        tape.op("exchange", ["n2"], {"sent": sent}, extra=indices, backward=summed(z.L))
        tape.op("exchange", ["sent"], {"came": came}, ["sent"] if cut else [])
        if source == "gathered":
            tape.op("exchange", ["came"], {"gathered": rows}, forward=rows, backward=rows)
        tape.op("exchange", [source], {"rows": rows}, [source] if cut else [], extra=2 * z.S * 8, backward=summed(z.S))
    one = z.S * z.expert_ffn * b
    if "experts" in modules:
        inner = Tape(sums_in_place=tape.sums_in_place, quantized=tape.quantized, sizes={"rows": rows})
        _experts(inner, z, rows, one)
        held = inner.run("out", held=True)
        again = max(held.forward, held.backward) - rows
        tape.op("routed_experts", ["rows"], {"out": rows}, ["rows"], forward=held.forward - rows, backward=again)
    else:
        _experts(tape, z, rows, one)
    if exchanged:
        # upstream's layer holds its input, what it sent and what came until it returns
        tape.op("exchange", ["out", "rows"], {"back": rows}, forward=summed(z.S), moves=["out"])
        if source == "gathered":
            tape.op("exchange", ["back"], {"partial": came}, forward=2 * rows, backward=rows)
        back = "partial" if source == "gathered" else "back"
        tape.op("exchange", [back], {"own": sent}, [back] if cut else [])
        tape.op("exchange", ["own", "n2", "sent", source], {"routed": hidden}, forward=summed(z.L), moves=["own"])
    else:
        tape.op("exchange", ["out", "n2", "rows"], {"routed": hidden}, forward=summed(z.L), moves=["out"])
    if moe.shared_ffn_size:
        tape.op("shared_experts", ["routed", "shared"], {"mlp": hidden}, passes="routed")
    else:
        tape.op("exchange", ["routed"], {"mlp": 0}, passes="routed")
        tape.sizes["mlp"] = 0


def _experts(tape: Tape, z: Shapes, rows: int, one: int) -> None:
    """From `rows` to `out`. one: bytes of `[S, F]`. With pages, what is kept is as much as comes, not the buffers."""
    if not tape.quantized:
        keeps, back = _in_pages(z, {"rows": rows, "gate_up": 2 * one})
        both = {"gate_up": 2 * one, "act": one}
        tape.op(
            "routed_experts",
            ["rows"],
            both | keeps,
            list(keeps) or ["rows", "gate_up"],
            extra=z.S * 4,
            backward=2 * one + back,
            weight_first=True,
        )
        keeps, back = _in_pages(z, {"act": one})
        tape.op(
            "routed_experts",
            ["act"],
            {"out": rows} | keeps,
            list(keeps) or ["act"],
            backward=back,
            weight_first=True,
        )
        return
    width, q = z.expert_ffn, tape.quantized
    padded = z.S + (z.local_experts - 1) * 128 if q == 1 else z.S  # each group's rows to whole blocks
    tape.op(
        "routed_experts",
        ["rows"],
        {"rows.turned": round(quantized_bytes(padded, z.D, q) * z.paged)},
        moves=[],
        forward=quantized_bytes(z.S, z.D, q),
    )
    weight = emulated_weight(z.local_experts * width * z.D, q)
    grad = quantized_bytes(z.S, 2 * width, q) + quantized_bytes(padded, 2 * width, q) + 2 * weight
    tape.op(
        "routed_experts",
        ["rows"],
        {"gate_up": 2 * one},
        ["rows.turned"],
        forward=quantized_bytes(z.S, z.D, q) + 2 * weight,
        backward=grad,
    )
    keeps, back = _in_pages(z, {"gate_up": 2 * one})
    tape.op(
        "routed_experts", ["gate_up"], {"act": one} | keeps, list(keeps) or ["gate_up"], extra=z.S * 4, backward=back
    )
    tape.op(
        "routed_experts",
        ["act"],
        {"act.turned": round(quantized_bytes(padded, width, q) * z.paged)},
        moves=[],
        forward=quantized_bytes(z.S, width, q),
    )
    grad = quantized_bytes(z.S, z.D, q) + quantized_bytes(padded, z.D, q) + weight
    made = quantized_bytes(z.S, width, q) + weight
    tape.op("routed_experts", ["act"], {"out": rows}, ["act.turned"], forward=made, backward=grad)


def _in_pages(z: Shapes, sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """(copies that are kept in the place of these tensors, bytes that they take when they are brought back)."""
    if z.paged == 1.0:
        return {}, 0
    return {f"{name}.pages": round(size * z.paged) for name, size in sizes.items()}, sum(sizes.values())
