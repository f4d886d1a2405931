"""Which layer computes in which recipe: set when a layer is built, asked once it has run.

A low-precision layer multiplies its attention projections, its dense MLP or shared experts, and its experts in its
recipe. Router, norms, core attention, embedding, output head and MTP's `eh_proj` are bf16 (the router fp32) always.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from maniple.engines.megatron import recompute
from maniple.engines.megatron.experts import GroupedExperts
from maniple.engines.megatron.linears import LINEARS, LowPrecisionProduct
from maniple.errors import UserError
from maniple.kernels import chips
from maniple.kernels.quantize import QuantizedWeight, bump
from maniple.kernels.quantize.formats import RECIPES

_NAMES = ("fp32", "bf16", *RECIPES)


class Layer(recompute.Layer):
    """A layer in the recipe that `config.maniple_precision` has for its number; bf16 without one."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        precision = getattr(self.config, "maniple_precision", None)
        recipe = "bf16" if precision is None else precision.recipe_of(self.number, self.config.num_layers)
        if recipe == "bf16":
            return
        dtype = float8(recipe)
        for module in self.modules():
            if isinstance(module, LINEARS):
                module._forward_impl = LowPrecisionProduct(recipe, dtype)
            elif isinstance(module, GroupedExperts):
                module.quantize(recipe, dtype)


def float8(recipe: str) -> torch.dtype:
    """Of activations and weights, as this process's GPU multiplies them: gfx942 has FNUZ numbers, but for emulation."""
    fnuz = chips.chip() == "gfx942" and not RECIPES[recipe].e8m0
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def check_kernels(chunks: list) -> None:
    """Raises UserError if what the layers of this rank multiply cannot run on its device, before anything does: also
    where a GPU has nothing for it but the oracle, which is for tests, unless the job names it (`moe.kernels`)."""
    for layer in _layers(chunks):
        for module in layer.modules():
            if (product := product_of(module)) is not None:
                _refuse_oracle(product.choose(module.weight), product.recipe, module.weight)
            elif isinstance(module, GroupedExperts) and module.recipe != "bf16":
                for weight, name in zip((module.w13, module.w2), module.choose(), strict=True):
                    if module.kernels != "reference":
                        _refuse_oracle(name, module.recipe, weight)


def _refuse_oracle(name: str, recipe: str, weight: torch.Tensor) -> None:
    if weight.is_cuda and name.endswith("reference"):
        raise UserError(
            f"precision.recipe {recipe} has no kernels for {chips.chip()} and a matrix {list(weight.shape)}: set "
            "precision.recipe=bf16, or mxfp8, which is emulated everywhere"
        )


def product_of(module: torch.nn.Module) -> LowPrecisionProduct | None:
    """What a linear layer multiplies with, unless it is upstream's."""
    product = module.__dict__.get("_forward_impl")
    return product if isinstance(product, LowPrecisionProduct) else None


def caches(chunks: list) -> Iterator[QuantizedWeight]:
    """Of all quantized weights of this rank."""
    for layer in _layers(chunks):
        for module in layer.modules():
            if (product := product_of(module)) is not None:
                yield product.cache
            elif isinstance(module, GroupedExperts):
                yield from module.caches or ()


def weights_loaded(chunks: list) -> None:
    """Frees the quantized forms of what the weights were before they were loaded."""
    bump()
    for cache in caches(chunks):
        cache.clear()


def by_layer(chunks: list) -> dict[int, str]:
    """The recipe in which each layer's products ran last, over all ranks: "fp8_block", or "bf16+fp8_block" were they
    not of one mind. MTP depth d is `num_layers + d`. Collective; after a step."""
    config = chunks[0].config
    count = config.num_layers + (config.mtp_num_layers or 0)
    flags = torch.zeros(count, len(_NAMES), dtype=torch.int32, device=next(chunks[0].parameters()).device)
    plain = "bf16" if config.bf16 else "fp32"
    for layer in _layers(chunks):
        for module in layer.modules():
            ran: str | None = None
            if (product := product_of(module)) is not None:
                ran = product.ran
            elif isinstance(module, LINEARS):
                ran = plain
            elif isinstance(module, GroupedExperts):
                ran = plain if module.ran == "bf16" else module.ran
            if ran is not None:
                flags[layer.number, _NAMES.index(ran)] = 1
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return {
        number: "+".join(name for name, flag in zip(_NAMES, row, strict=True) if flag)
        for number, row in enumerate(flags.tolist())
    }


def in_short(recipes: dict[int, str]) -> dict[str, str]:
    """`{"bf16": "0, 27", "fp8_block": "1-26"}` of recipes by layer."""
    said: dict[str, str] = {}
    for recipe in sorted(set(recipes.values())):
        said[recipe] = recompute.spans([number for number, found in recipes.items() if found == recipe])
    return said


def _layers(chunks: list) -> Iterator[Layer]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Layer):
                yield module
