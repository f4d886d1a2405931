"""What the kernels are to reach beside their peers, and whether rows of a run show it. No torch.

A bar counts what the registry selects for a call, if it is a kernel: the reference and alternatives do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from maniple.bench.rows import Row, by_shape

TORCH, DEEP_GEMM = "torch._grouped_mm", "DeepGEMM"
OUR_BF16, OUR_FUSED = "our bf16", "our bf16 fused"
DEEPSEEK, QWEN = "deepseek-v3", "qwen3-30b-a3b"


@dataclass(frozen=True)
class Bar:
    """`ops` of `recipe` are to be `wanted` times as fast as the fastest of `peers`; without any, `wanted` of the floor.

    models: the bar is for these alone; None: for every shape.
    """

    recipe: str
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    wanted: float
    models: tuple[str, ...] | None = None


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
        found = "" if self.measured is None else f"{self.measured:.3f}, "
        remark = f" ({self.remark})" if self.remark else ""
        what = f"{self.bar.recipe} {self.op} {self.shape}"
        return f"{self.word:12} {what}: {found}wanted {self.bar.wanted:.2f} {of}{remark}"


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One for each bar, op and shape of which there are rows."""
    return [
        verdict
        for shape in by_shape(rows)
        for bar in BARS
        if bar.models is None or shape[0]["model"] in bar.models
        for op in bar.ops
        for verdict in _judge(bar, op, shape)
    ]


def _judge(bar: Bar, op: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    contest = [row for row in rows if row["op"] == op and row["recipe"] == bar.recipe]
    if not contest:
        return
    name = f"{contest[0]['model']} {contest[0]['matrix']}"
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
    ratios = {peer: selected["ratios"][peer] for peer in bar.peers if peer in selected["ratios"]}
    reasons = {row["implementation"]: row["not_run"] for row in contest}
    missing = "; ".join(
        f"{peer}: {reasons.get(peer) or 'not measured beside it'}" for peer in bar.peers if peer not in ratios
    )
    yield Verdict(bar, op, name, min(ratios.values(), default=None), missing)
