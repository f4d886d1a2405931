"""What the kernels are to reach beside their peers, and whether rows of a run show it. No torch.

A bar counts what the registry selects for a call, if it is a kernel: the reference and alternatives do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from maniple.bench.rows import Row, by_shape

TORCH, DEEP_GEMM = "torch._grouped_mm", "DeepGEMM"
OUR_BF16, OUR_FUSED = "our bf16", "our bf16 fused"
TRANSFORMERS, LIGER = "transformers", "Liger"
DEEPSEEK, QWEN = "deepseek-v3", "qwen3-30b-a3b"


@dataclass(frozen=True)
class Bar:
    """`ops` of `recipe` are to be `wanted` times as fast as the fastest of `peers`; without any, `wanted` of the floor.

    models: the bar is for these alone; None: for every shape that `besides` does not name. of: what is compared, times
    or the peak memory.
    """

    recipe: str
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    wanted: float
    models: tuple[str, ...] | None = None
    besides: tuple[str, ...] = ()
    of: Literal["time", "memory"] = "time"

    def is_for(self, model: str) -> bool:
        return model in self.models if self.models is not None else model not in self.besides


BARS = (
    Bar("bf16", ("forward", "dgrad"), (TORCH, DEEP_GEMM), 1.00),
    Bar("bf16", ("wgrad",), (TORCH,), 1.02, (DEEPSEEK,)),
    Bar("bf16", ("wgrad",), (TORCH,), 1.10, (QWEN,)),
    Bar("fp8_block", ("forward", "dgrad"), (DEEP_GEMM,), 0.95),
    Bar("fp8_block", ("wgrad",), (OUR_BF16,), 1.25),
    Bar("mxfp8", ("forward", "dgrad", "wgrad"), (OUR_BF16,), 0.85),
    Bar("fp8_block", ("quantize_rows", "quantize_weight"), (), 0.80),
    Bar("mxfp8", ("quantize_rows", "quantize_weight"), (), 0.80),
    Bar("fp8_block", ("expert_mlp",), (OUR_BF16, OUR_FUSED), 1.30, (DEEPSEEK,)),
    Bar("fp8_block", ("expert_mlp",), (OUR_BF16, OUR_FUSED), 1.15, (QWEN,)),
)
# the layer whole: forward and backward
STEP = ("layer_step",)
LAYER_BARS = (
    Bar("bf16", STEP, (TRANSFORMERS,), 2.10, (QWEN,)),
    Bar("bf16", STEP, (LIGER,), 1.60, (QWEN,)),
    Bar("bf16", STEP, (TRANSFORMERS,), 1.50, besides=(QWEN,)),
    Bar("bf16", STEP, (TRANSFORMERS, LIGER), 1.00, (QWEN,), of="memory"),
    Bar("bf16", STEP, (TRANSFORMERS,), 1.00, besides=(QWEN,), of="memory"),
    Bar("fp8_block", STEP, (OUR_BF16,), 1.20, (DEEPSEEK,)),
)


@dataclass(frozen=True)
class Verdict:
    """measured: the ratio, or the share of the floor; None if there is none, and `remark` says why."""

    bar: Bar
    op: str
    shape: str
    measured: float | None
    remark: str = ""

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "reached" if self.measured >= self.bar.wanted else "missed"

    def __str__(self) -> str:
        of = f"x {' or '.join(self.bar.peers)}" if self.bar.peers else "of the floor"
        of += "'s peak memory over ours" if self.bar.of == "memory" else ""
        found = "" if self.measured is None else f"{self.measured:.3f}, "
        remark = f" ({self.remark})" if self.remark else ""
        what = f"{self.bar.recipe} {self.op} {self.shape}"
        return f"{self.word:12} {what}: {found}wanted {self.bar.wanted:.2f} {of}{remark}"


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One for each bar, op and shape of which there are rows."""
    return [
        verdict
        for shape in by_shape(rows)
        for bar in (*BARS, *LAYER_BARS)
        if bar.is_for(shape[0]["model"])
        for op in bar.ops
        for verdict in _judge(bar, op, shape)
    ]


def _judge(bar: Bar, op: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    contest = [row for row in rows if row["op"] == op and row["recipe"] == bar.recipe]
    if not contest:
        return
    name = f"{contest[0]['model']} {contest[0]['matrix']}"
    name += f" {contest[0]['tokens']:,} tokens" if "tokens" in contest[0] else ""
    selected = next((row for row in contest if row["role"] == "selected"), None)
    if selected is None or selected["milliseconds"] is None:
        yield Verdict(bar, op, name, None, selected["not_run"] if selected else "nothing of ours takes these operands")
        return
    if selected["hardware"]["device"] == "cpu" or "reference" in selected["implementation"]:
        yield Verdict(bar, op, name, None, "the reference is no kernel")
        return
    if not bar.peers:
        remark = "" if selected["floor_share"] is not None else "there is no floor"
        yield Verdict(bar, op, name, selected["floor_share"], remark)
        return
    measured = selected["peak_ratios" if bar.of == "memory" else "ratios"]
    ratios = {peer: measured[peer] for peer in bar.peers if peer in measured}
    reasons = {row["implementation"]: row["not_run"] for row in contest}
    missing = "; ".join(
        f"{peer}: {reasons.get(peer) or 'not measured beside it'}" for peer in bar.peers if peer not in ratios
    )
    yield Verdict(bar, op, name, min(ratios.values(), default=None), missing)
