"""Our MoE layer as it takes part: what the registry selects, and what else could run; where its time goes.

The layer is that of training: fp32 logits, routing, dispatch on one rank, experts with the routing weights, combine.
The matrices' gradients are written to fp32 buffers by the products, as a step's first micro-batch does in the engine,
unless a variant says otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from maniple.bench.contender import Absent, Role
from maniple.bench.layer import Layer
from maniple.bench.layer_operands import LayerOperands
from maniple.bench.ours import QUANTIZED, float8
from maniple.errors import UserError
from maniple.kernels import quantize, registry
from maniple.kernels.forgotten import forgetting
from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from maniple.kernels.permute import permute_probs, sort_by_expert
from maniple.kernels.routing import route, router_logits
from maniple.moe.dispatch import LocalDispatcher
from maniple.moe.experts import expert_mlp

Mark = Callable[[str], None]
Variants = Literal["selected", "few", "all"]
_COUNT: dict[Variants, int | None] = {"selected": 1, "few": 5, "all": None}


@dataclass(frozen=True)
class Variant:
    """Implementations by name, None for what the registry selects. fc1: of its product with SwiGLU, where it is not
    that of `products`. gathers: fc1 reads x through the permutation, without a copy of the rows. lets_go: backward lets
    that copy go once fc1's matrix has its gradient (`LocalDispatcher.lets_go`). gradients: of the matrices, written to
    fp32 buffers or added there, or bf16 tensors."""

    recipe: str = "bf16"
    routing: str | None = None
    permute: str | None = None
    products: str | None = None
    fc1: str | None = None
    gathers: bool = False
    lets_go: bool = False
    gradients: Literal["written", "added", "bf16"] = "written"


def ours(recipe: str, o: LayerOperands, variants: Variants = "all") -> Iterator[Layer | Absent]:
    """The selected layer of a recipe first, then what else can run, each name once.

    variants: "selected": that alone. "few": also routing and permutation by what is not selected, gradients that are
    added, and in bf16, also with rows that are let go. "all": also the other ways to compute the experts.
    """
    seen: set[str] = set()
    for variant in itertools.islice(_variants(recipe, o.device), _COUNT[variants]):
        made = _made(variant, "alternative" if seen else "selected", o)
        if made.name not in seen:
            yield made
        seen.add(made.name)


def _variants(recipe: str, device: torch.device) -> Iterator[Variant]:
    selected = base = Variant(recipe)
    yield selected
    if device.type == "cuda":
        names = {registry.select(op, "bf16", device.type).name for op in ("routing", "permute")}
        other = "reference" if names == {"triton"} else "triton"
        turned = replace(selected, routing=other, permute=other)
        base = turned if other == "triton" else selected  # the rest has the kernels
        yield turned
    if recipe != "bf16":
        return
    yield replace(base, gradients="added")
    yield replace(base, gradients="bf16")
    yield replace(base, gradients="bf16", lets_go=True)
    yield replace(base, gathers=True)
    if device.type == "cuda":
        yield replace(base, fc1="hopper_fused")
        yield replace(base, products="triton")
        yield replace(base, products="triton", gathers=True)


def _made(variant: Variant, role: Role, o: LayerOperands) -> Layer | Absent:
    try:
        parts = parts_of(variant, o)
    except UserError as refusal:
        return Absent(_name(variant, {}), role, str(refusal))
    caches = None
    if variant.recipe != "bf16" and parts["products"] != "emulated":
        dtype = float8(variant.recipe, o.device)
        first, second = (quantize.QuantizedWeight(variant.recipe, dtype=dtype) for _ in range(2))
        caches = first, second
    notes = [f"{op} {name}" for op, name in parts.items() if op != "products"]
    if variant.recipe != "bf16":
        notes.append("quantized weights are kept" if caches else "emulated in bf16; weights are rounded in every step")
    notes.append("gradients in bf16" if variant.gradients == "bf16" else f"gradients {variant.gradients} in fp32")

    def forward(mark: Mark | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        for name in ("w13", "w2"):
            o[name].overwrite_main_grad = variant.gradients == "written"
        with forgetting() if variant.lets_go else contextlib.nullcontext():
            return layer(o, variant, caches, mark)

    return Layer(_name(variant, parts), role, forward, o.leaves, note=", ".join(notes), stages=True)


def parts_of(variant: Variant, o: LayerOperands) -> dict[str, str]:
    """The implementation of each operation. Raises UserError for one that cannot run."""
    device, rows, w13, w2 = o.device.type, o.x_TD.detach(), o["w13"].detach(), o["w2"].detach()
    parts = {}
    if variant.recipe == "bf16":
        hidden = rows.new_empty(8, w2.shape[2])
        first = (rows, w13, "nk", variant.gathers, "stacked")
        name = registry.select("grouped_gemm_swiglu", "bf16", device, variant.fc1 or variant.products, first).name
        parts["products"] = registry.select("grouped_gemm", "bf16", device, variant.products, (hidden, w2, "nk")).name
        if name != parts["products"]:
            parts["fc1"] = name
    else:
        dtype = float8(variant.recipe, o.device)
        names = {
            registry.select(QUANTIZED, variant.recipe, device, None, (w.dtype, *w.shape[1:], dtype, dtype)).name
            for w in (w13, w2)
        }
        parts["products"] = " and ".join(sorted(names))
        parts["quantize"] = registry.select("quantize", variant.recipe, device).name
    parts["swiglu"] = registry.select("swiglu", "bf16", device).name
    parts["routing"] = registry.select("routing", "bf16", device, variant.routing).name
    parts["permute"] = registry.select("permute", "bf16", device, variant.permute).name
    return parts


def _name(variant: Variant, parts: dict[str, str]) -> str:
    """The products' implementation, and how the variant differs from what is selected."""
    words = [parts.get("products", variant.products or "ours")]
    if variant.routing:
        words.append(f"{variant.routing} routing and permutation")
    if variant.fc1:
        words.append(f"fc1 {variant.fc1}")
    if variant.gathers:
        words.append("rows gathered by fc1")
    if variant.lets_go:
        words.append("rows let go")
    if variant.gradients != "written":
        words.append("gradients added" if variant.gradients == "added" else "bf16 gradients")
    return ", ".join(words)


def layer(
    o: LayerOperands,
    variant: Variant,
    caches: tuple[quantize.QuantizedWeight, quantize.QuantizedWeight] | None = None,
    mark: Mark | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, D]` and the chosen ids `[T, K]`. `mark` is told each stage as it ends, in backward too."""
    mark = mark or _nothing
    logits_TE = _seen(router_logits(o.x_TD, o["router"], o.get("router_bias")), mark, "routing")
    mark("router")
    routing = route(logits_TE, o.spec, kernels=variant.routing)
    mark("routing")
    # views are made where they are used, since backward goes by the order in which nodes were made
    x_TD = _seen(o.x_TD, mark, "dispatch")
    dispatcher = LocalDispatcher(o.shape.experts, kernels=variant.permute)
    dispatcher.lets_go = variant.lets_go
    if variant.gathers:
        handle = sort_by_expert(routing.ids_TK, o.shape.experts, kernels=variant.permute)
        rows_SD, ends_G = x_TD, handle.ends_E
        probs_S = permute_probs(routing.probs_TK, handle, kernels=variant.permute)
    else:
        rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
        rows, probs = dispatcher.token_dispatch(rows, probs, handle)
        rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
        rows_SD = _seen(rows_SD, mark, "experts")
    probs_S = _seen(probs_S, mark, "experts")
    mark("dispatch")
    mlp = _own_mlp if variant.gathers or variant.fc1 else _mlp
    rows_SD = _seen(mlp(o, variant, rows_SD, probs_S, ends_G, caches, handle), mark, "combine")
    mark("experts")
    rows = dispatcher.combine_preprocess(rows_SD, handle)
    rows = dispatcher.token_combine(rows, handle)
    out_TD = dispatcher.combine_postprocess(rows, handle)
    mark("combine")
    return out_TD, routing.ids_TK


def _mlp(o, variant, rows_SD, probs_S, ends_G, caches, handle) -> torch.Tensor:
    return expert_mlp(
        rows_SD,
        probs_S,
        ends_G,
        o["w13"],
        o["w2"],
        b13_GF=o.get("b13"),
        b2_GD=o.get("b2"),
        activation=o.activation,
        recipe=variant.recipe,
        dtype=float8(variant.recipe, o.device),
        caches=caches,
        kernels=variant.products,
        fuse_wgrad_accumulation=variant.gradients != "bf16",
        splits=_splits(o),
    )


def _own_mlp(o, variant, rows_SD, probs_S, ends_G, caches, handle) -> torch.Tensor:
    """What `expert_mlp` does in bf16, with a kernel for fc1 of its own or with rows that fc1 gathers."""
    act, topk = o.activation, o.shape.topk
    gathered = {"source_S": handle.order_S // topk, "slots_TK": handle.position_TK} if variant.gathers else {}
    shared = {"fuse_wgrad_accumulation": variant.gradients != "bf16", "splits": _splits(o)}
    hidden_SF = grouped_gemm_swiglu(
        rows_SD,
        o["w13"],
        ends_G,
        bias_G2F=o.get("b13"),
        probs_S=probs_S,
        alpha=act.alpha,
        limit=act.limit,
        up_offset=act.up_offset,
        kernels=variant.fc1 or variant.products,
        **gathered,
        **shared,
    )
    scale_S = probs_S if "b2" in o.parameters else None
    return grouped_gemm(
        hidden_SF, o["w2"], ends_G, bias_GN=o.get("b2"), bias_scale_S=scale_S, kernels=variant.products, **shared
    )


def _seen(tensor: torch.Tensor, mark: Mark, stage: str) -> torch.Tensor:
    """The tensor; when its gradient has come, that stage of backward has ended."""
    if mark is _nothing or not torch.is_grad_enabled():
        return tensor
    tensor = tensor.view_as(tensor)
    tensor.register_hook(lambda grad: mark(f"{stage} backward"))
    return tensor


def _nothing(stage: str) -> None:
    pass


def _splits(o: LayerOperands) -> list[int] | None:
    return list(o.shape.sizes) if o.device.type == "cpu" else None
