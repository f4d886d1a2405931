"""What the MoE layer benchmark measures: a rank's layer of released models, and two that no model has. No torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from maniple.errors import UserError
from maniple.models.card import ModelCard


@dataclass(frozen=True)
class LayerShape:
    """A layer with all its experts on one rank.

    clamped: biases, a router with a bias that takes its softmax over the chosen, and the clamped activation (GPT-OSS);
    otherwise softmax, the chosen weights renormalised, and SwiGLU (Qwen3). skew: how far apart the experts' loads are
    drawn, 0 for those of random logits. sizes: rows of each expert, once they are known.
    """

    model: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int
    clamped: bool = False
    skew: float = 0.0
    sizes: tuple[int, ...] = ()

    @property
    def matrix(self) -> str:
        return "layer"

    @property
    def rows(self) -> int:
        return self.tokens * self.topk

    @property
    def flops(self) -> int:
        """Of a forward pass: the experts' products alone, w13 `[2F, D]` and w2 `[D, F]` by every row."""
        return 6 * self.rows * self.hidden * self.ffn

    def facts(self, multiple: int = 1) -> dict[str, Any]:
        """The shape as a row says it: that of fc1, and what a layer has besides."""
        return {
            "model": self.model,
            "matrix": self.matrix,
            "groups": self.experts,
            "n": 2 * self.ffn,
            "k": self.hidden,
            "rows": self.rows,
            "smallest_group": min(self.sizes),
            "largest_group": max(self.sizes),
            "group_multiple": multiple,
            "tokens": self.tokens,
            "topk": self.topk,
        }

    def tiny(self) -> LayerShape:
        """As few numbers as show on a CPU that everything runs."""
        experts = min(self.experts, 8)
        topk, tokens = min(self.topk, 4, experts), max(self.tokens // 256, 16)
        return replace(self, hidden=64, ffn=48, experts=experts, topk=topk, tokens=tokens)


# those that peers were measured at; of DeepSeek-V3 and Qwen3-235B the experts of one rank of eight, with the tokens
# that choose among them alone
NAMED = {
    "qwen3-30b-a3b": (
        LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8, 16_384),
        LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8, 32_768),
    ),
    "deepseek-v3": (LayerShape("deepseek-v3", 7168, 2048, 32, 8, 4_096),),
    "qwen3-235b-a22b": (LayerShape("qwen3-235b-a22b", 4096, 1536, 16, 2, 16_384),),
    "gpt-oss-20b": (LayerShape("gpt-oss-20b", 2880, 2880, 32, 4, 16_384, clamped=True),),
}
PARTS = (*NAMED, "random")


def at_random(seed: int) -> tuple[LayerShape, ...]:
    """Two shapes: hidden and ffn odd multiples of 8, tokens odd, about 65,536 rows; the second's experts are skewed."""
    draw = random.Random(seed)
    shapes = []
    for number, skew in enumerate((0.0, 1.0)):
        hidden, ffn = 8 * (2 * draw.randint(64, 255) + 1), 8 * (2 * draw.randint(24, 127) + 1)
        experts, topk = draw.randint(9, 160), draw.randint(2, 8)
        tokens = 65_536 // topk // 2 * 2 - 2 * draw.randint(0, 500) - 1
        shapes.append(LayerShape(f"random-{seed}-{number}", hidden, ffn, experts, topk, tokens, skew=skew))
    return tuple(shapes)


def of_card(card: ModelCard, *, tokens: int, expert_parallel_size: int = 1) -> LayerShape:
    """A rank's layer of a model: its sizes, and the router of `LayerShape` whatever the card's.

    Raises UserError if the experts do not divide, or there are no tokens.
    """
    experts = card.moe.num_experts
    if expert_parallel_size < 1 or experts % expert_parallel_size:
        raise UserError(
            f"--expert-parallel-size {expert_parallel_size} does not divide the {experts} experts of {card.name}"
        )
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: there is nothing to measure; give 1 or more")
    here = experts // expert_parallel_size
    return LayerShape(
        card.name,
        card.hidden_size,
        card.moe.expert_ffn_size,
        here,
        min(card.moe.topk, here),
        tokens,
        clamped=card.moe.activation != "swiglu",
    )


def of_part(part: str, seed: int) -> tuple[LayerShape, ...]:
    """The shapes of one of `PARTS`."""
    return at_random(seed) if part == "random" else NAMED[part]
