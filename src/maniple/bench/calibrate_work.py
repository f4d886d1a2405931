"""What `maniple plan calibrate` measures: operations of a training step, called as the engine calls them.

Each has the work that `plan/operators.py` counts for it, so that a plan with what was measured takes as long as the
measurement did. Tensors are made when an operation's turn comes, and let go after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from maniple.bench import operands as tensors
from maniple.bench import quantizing
from maniple.bench.contender import Absent, Contender
from maniple.bench.operands import BOUNDS
from maniple.bench.ours import float8, format_of, ours
from maniple.bench.shapes import Shape, of_model
from maniple.hardware.calibration import PASSES, RECIPES, Group
from maniple.hardware.efficiency import load_software
from maniple.kernels import linear, permute, quantize, registry
from maniple.kernels.adamw import Shard, adamw_
from maniple.kernels.linear import reference as linear_reference
from maniple.kernels.linear import scaled_mm
from maniple.kernels.linear.grouped import Grouped
from maniple.kernels.swiglu import swiglu
from maniple.models import ModelCard, load_card
from maniple.models.flops import attention_core_flops_per_token
from maniple.plan import operators

SEED = 1234
_HOST_LAYERS, _HOST_BATCHES = 8, 4  # layers, micro-batches
_OPS = {"forward": "forward", "dgrad": "dgrad", "wgrad": "wgrad_accumulate"}


class CannotMeasureError(Exception):
    """Why an operation has no time here, in one line."""


@dataclass(frozen=True)
class Ready:
    """Something to time. by: the implementation. error: relative, of its result, and the bound; None: not compared.
    close: lets go of what was made, once it has been timed."""

    call: Callable[[], object]
    by: str
    error: Callable[[], float] | None = None
    bound: float = 0.0
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Work:
    """One operation of one size. work: as in `Measurement`. added: fp32 gradients, whose traffic is planned apart."""

    group: Group
    name: str
    sizes: str
    work: float
    make: Callable[[], Ready]
    added: int = 0


@dataclass(frozen=True)
class Sizes:
    """How much is measured: of a GPU what keeps it busy for a millisecond or more, of a CPU next to nothing."""

    product: int
    elements: int
    tokens: int
    rows: int
    sequence: int
    width: int
    launches: int
    experts: tuple[tuple[str, int], ...]  # model, expert-parallel ranks
    tiny: bool = False


GPU = Sizes(8192, 2**27, 8192, 65_536, 4096, 7168, 4000, (("qwen3-30b-a3b", 1), ("deepseek-v3", 8)))
QUICK = Sizes(8192, 2**26, 8192, 65_536, 4096, 7168, 4000, (("qwen3-30b-a3b", 1),))
CPU = Sizes(128, 2**12, 64, 256, 64, 128, 20, (("qwen3-30b-a3b", 1),), tiny=True)


def all_of(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Copies first: what is added to fp32 gradients is counted at their speed."""
    yield from _memory(sizes, device)
    yield from _dense(sizes, device)
    for model, ranks in sizes.experts:
        card = _card(model, sizes)
        yield from _grouped(of_model(card, rows=sizes.rows, expert_parallel_size=ranks, seed=SEED)[0], device)
    yield from _quantization(sizes, device)
    yield from _attention("", _card("qwen3-30b-a3b", sizes), sizes, device)
    yield from _attention("latent_", _card("deepseek-v3", sizes), sizes, device)
    yield _launches(sizes, device)
    yield _host(device)


def _multiplied(device: torch.device) -> list[str]:
    """Recipes with products of their own: mxfp8 takes those of bf16 where it is emulated."""
    return [recipe for recipe in RECIPES if recipe != "mxfp8" or format_of(recipe, device, None) != "bf16"]


def _card(model: str, sizes: Sizes) -> ModelCard:
    card = load_card(model)
    return card.tiny() if sizes.tiny else card


def _normal(device: torch.device, *sizes: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)


# --- what takes as long as its bytes ----------------------------------------------------------------------------------


def _memory(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    count, tokens, width = sizes.elements, sizes.tokens, sizes.width
    topk, experts = (8, 256) if not sizes.tiny else (2, 4)

    def copy() -> Ready:
        source = torch.ones(count, device=device)
        target = torch.empty_like(source)
        return Ready(lambda: target.copy_(source), "torch")

    def gather() -> Ready:
        generator = torch.Generator().manual_seed(SEED)
        ids_TK = torch.rand(tokens, experts, generator=generator).topk(topk).indices.to(device)
        x_TD, order = _normal(device, tokens, width), permute.sort_by_expert(ids_TK, experts)
        return Ready(lambda: permute.unpermute(permute.permute(x_TD, order), order), _by("permute", device))

    def norm() -> Ready:
        x_TD = _normal(device, tokens, width).requires_grad_()
        weight_D = torch.ones(width, device=device, dtype=torch.bfloat16, requires_grad=True)
        residual_TD, grad_TD = (_normal(device, tokens, width) for _ in range(2))

        def both() -> object:
            out_TD = F.rms_norm(x_TD, (width,), weight_D, 1e-6)
            moved = torch.autograd.grad(out_TD, (x_TD, weight_D), grad_TD)[0]
            return residual_TD + x_TD.detach(), moved + grad_TD

        return Ready(both, "torch")

    def activation() -> Ready:
        x_S2F = _normal(device, tokens, 2 * width).requires_grad_()
        probs_S = torch.rand(tokens, device=device, requires_grad=True)
        grad_SF = _normal(device, tokens, width)
        return Ready(
            lambda: torch.autograd.grad(swiglu(x_S2F, probs_S), (x_S2F, probs_S), grad_SF), _by("swiglu", device)
        )

    moved = operators.moved_bytes(tokens, tokens * topk, width)
    yield Work("memory", "copy", f"{count:,} fp32 numbers", 8.0 * count, copy)
    yield Work("memory", "gather", f"{tokens:,} tokens of {width:,} to {topk} of {experts} experts", moved, gather)
    each = f"{tokens:,} x {width:,}, both passes"
    yield Work("memory", "elementwise", f"norm, {each}", sum(operators.NORM_BYTES) * tokens * width, norm)
    yield Work("memory", "elementwise", f"SwiGLU, {each}", sum(operators.SWIGLU_BYTES) * tokens * width, activation)
    for name, dtype in (("adamw_fp32", torch.float32), ("adamw_bf16", torch.bfloat16)):
        moved = operators.optimizer_bytes(4, dtype.itemsize, dtype.itemsize) * count
        yield Work("memory", name, f"{count:,} parameters", moved, partial(_adamw, dtype, count, device))


def _adamw(dtype: torch.dtype, count: int, device: torch.device) -> Ready:
    """A step after backward: the gradients' norm, and one pass that clips and updates. A bf16 main parameter is the
    model's own; of an fp32 one the model has a copy."""
    grad = torch.full((count,), 1e-3, device=device)
    states = [torch.zeros(count, device=device, dtype=dtype) for _ in range(3)]
    model = torch.zeros(count, device=device, dtype=torch.bfloat16) if dtype == torch.float32 else None
    main, average, squares = states
    shard = Shard(grad, main, average, squares, model)

    def update() -> None:
        (norm,) = torch._foreach_norm([grad])
        adamw_([shard], step=1, learning_rate=1e-4, grad_scale=(1.0 / norm).clamp(max=1.0))

    return Ready(update, _by("adamw", device))


def _quantization(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Rows of experts, in both orientations; where mxfp8 is emulated, rounded."""
    shape = of_model(_card("qwen3-30b-a3b", sizes), rows=sizes.rows, seed=SEED)[0]
    moved = operators.QUANTIZED_BYTES * shape.rows * shape.k
    for recipe in RECIPES[1:]:
        yield Work(
            "memory",
            f"quantize_{recipe}",
            f"{shape.rows:,} x {shape.k:,} in {shape.groups} groups",
            moved,
            partial(_quantize, recipe, shape, device),
        )


def _quantize(recipe: str, shape: Shape, device: torch.device) -> Ready:
    operands = tensors.make(shape, device, SEED)
    op = "quantize_rows" if recipe in _multiplied(device) else "emulate_rows"
    contest = next(found for found in quantizing.contests(recipe, operands) if found.op == op)
    first = contest.entrants[0]
    if isinstance(first, Absent):
        raise CannotMeasureError(first.reason)
    return Ready(first.call, first.name, lambda: contest.error(first) or 0.0, contest.bound)


# --- what takes as long as its multiplications ------------------------------------------------------------------------


def _dense(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    size = sizes.product
    for recipe in _multiplied(device):
        yield Work(
            "matmul",
            recipe,
            f"{size:,} x {size:,} x {size:,}",
            2.0 * size**3,
            partial(_product, recipe, size, device),
        )


def _product(recipe: str, size: int, device: torch.device) -> Ready:
    """The forward product of a linear layer, of operands that are quantized already."""
    x_SK, w_NK = (_normal(device, size, size).mul_(scale) for scale in (1.0, size**-0.5))
    if recipe == "bf16":
        return _compared(lambda: F.linear(x_SK, w_NK), "torch", x_SK, w_NK, recipe)
    dtype = float8(recipe, device)
    name, inner = linear.choose(w_NK, recipe, dtype=dtype)
    product = Grouped(recipe, inner) if inner else {"reference": linear_reference, "scaled_mm": scaled_mm}[name]
    ends_G = torch.full((1,), size, dtype=torch.int32, device=device)
    x = quantize.quantize_rows(x_SK, ends_G, recipe, dtype=dtype, columnwise=False).rowwise
    w = quantize.quantize_weight(w_NK[None], recipe, dtype=dtype, dgrad=False).forward
    return _compared(lambda: product.rows(x, w, ends_G, out_dtype=torch.bfloat16), inner or name, x_SK, w_NK, recipe)


def _compared(call: Callable[[], torch.Tensor], by: str, x_SK, w_NK, recipe: str) -> Ready:
    part = slice(0, tensors.PART)

    def error() -> float:
        wanted = x_SK[part].float() @ w_NK[part].float().t()
        return ((call()[part, part].float() - wanted).norm() / wanted.norm()).item()

    return Ready(call, by, error, BOUNDS[recipe])


def _grouped(shape: Shape, device: torch.device) -> Iterator[Work]:
    work = operators.grouped_flops(shape.rows, shape.groups, shape.n, shape.k)
    weights = shape.groups * shape.n * shape.k
    sizes = f"{shape.model}: {shape.rows:,} rows, {shape.groups} x {shape.n:,} x {shape.k:,}"
    for recipe in _multiplied(device):
        for which in PASSES:
            yield Work(
                "grouped",
                f"{recipe}_{which}",
                sizes,
                work,
                partial(_expert_product, recipe, which, shape, device),
                weights if which == "wgrad" else 0,
            )


def _expert_product(recipe: str, which: str, shape: Shape, device: torch.device) -> Ready:
    """What the registry selects; weight gradients are added to fp32."""
    op, operands = _OPS[which], tensors.make(shape, device, SEED)
    refused = []
    for entrant in ours(op, recipe, operands, None):
        if isinstance(entrant, Contender):
            break
        refused.append(f"{entrant.name} {entrant.reason}")
    else:
        raise CannotMeasureError("; ".join(refused))
    call = entrant.call

    def error() -> float:
        operands.main_grad_GNK.zero_()
        return operands.error(op, call())

    return Ready(call, entrant.name, error, BOUNDS[recipe])


def _attention(prefix: str, card: ModelCard, sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Causal, one sequence, by SDPA in the engine's layout; backward of queries, keys and values."""
    length, heads = sizes.sequence, card.num_heads
    groups, value = (heads, card.mla.v_head_dim) if card.mla else (card.num_kv_heads, card.head_dim)
    flops = length * attention_core_flops_per_token(card, length, None)

    def attend() -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
        of = ((heads, card.head_dim), (groups, card.head_dim), (groups, value))
        leaves = [_normal(device, length, 1, *size).requires_grad_() for size in of]

        def forward() -> torch.Tensor:
            q, k, v = (leaf.permute(1, 2, 0, 3) for leaf in leaves)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)

        return leaves, forward

    def backward() -> Ready:
        leaves, forward = attend()
        out = forward()
        grad = torch.randn_like(out)
        return Ready(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), "torch")

    said = f"{length:,} tokens, {heads} heads of {card.head_dim} and {value}, {groups} of keys"
    yield Work("attention", f"{prefix}forward", said, flops, lambda: Ready(attend()[1], "torch"))
    yield Work("attention", f"{prefix}backward", said, operators.BACKWARD_PRODUCTS * flops, backward)


def _launches(sizes: Sizes, device: torch.device) -> Work:
    def chain() -> Ready:
        x = torch.zeros(4096, device=device)

        def run() -> None:
            for _ in range(sizes.launches):
                x.add_(1.0)

        return Ready(run, "torch")

    return Work("launch", "kernel", f"{sizes.launches:,} small ones in a row", float(sizes.launches), chain)


def _host(device: torch.device) -> Work:
    """A step of the engine that is so small that the GPU waits for the host all the time."""
    card = load_card("qwen3-30b-a3b").tiny().model_copy(update={"num_layers": _HOST_LAYERS})

    def step() -> Ready:
        if device.type != "cuda":
            raise CannotMeasureError("a CPU computes by itself what it would ask a GPU for")
        from maniple.bench.step_ours import Ours
        from maniple.bench.whole_step import Plan

        plan = Plan(card, 64, 1, _HOST_BATCHES, warm_up=0, steps=0, device=device, seed=SEED, command="")
        engine = Ours(plan, "bf16")
        return Ready(engine.step, "the engine", close=engine.close)

    passes = _HOST_LAYERS * _HOST_BATCHES
    kernels = passes * sum(load_software("maniple").launches["moe"])
    return Work("launch", "host", f"a step of {passes} passes of small MoE layers", float(kernels), step)


def _by(op: str, device: torch.device) -> str:
    return registry.select(op, "bf16", device.type).name
