"""What our layer is measured beside: transformers' block over `torch._grouped_mm`, and Liger's fused layer.

They compute from the same numbers as ours, and share the memory of the matrices where their layouts allow it. Their
gradients are bf16 tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from maniple.bench.contender import Absent
from maniple.bench.layer import Layer
from maniple.bench.layer_operands import LayerOperands, Leaves

TRANSFORMERS, LIGER = "transformers", "Liger"


def peers(o: LayerOperands, *, liger: bool) -> Iterator[Layer | Absent]:
    """Every peer; one that cannot take part as the reason."""
    builders: list[tuple[str, Callable[[LayerOperands], Layer | Absent]]] = [(TRANSFORMERS, transformers_block)]
    if liger:
        builders.append((LIGER, liger_layer))
    for name, build in builders:
        if name == LIGER and o.device.type != "cuda":
            yield Absent(name, "peer", "needs a GPU")
            continue
        try:
            yield build(o)
        except Exception as error:  # a library of another version fails in many ways
            yield Absent(name, "peer", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def transformers_block(o: LayerOperands) -> Layer:
    """The MoE block of Qwen3, or of GPT-OSS for its layer, router included, with its grouped_mm experts."""
    block, parameters, router = _gpt_oss(o) if o.shape.clamped else _qwen3(o)
    leaves = Leaves({"x": o.x_TD.detach().requires_grad_(), **parameters})
    chosen: dict[str, torch.Tensor] = {}
    router.register_forward_hook(lambda module, inputs, output: chosen.update(ids=output[2]))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out = block(leaves.tensors["x"][None])
        return (out[0] if isinstance(out, tuple) else out)[0], chosen["ids"]

    unpack = _in_our_layouts if o.shape.clamped else dict
    # gradients of biases are sums of bf16 rows by an index, whose error is the library's own affair
    unchecked = ("b13", "b2") if o.shape.clamped else ()
    note = "grouped_mm, router in bf16, gradients in bf16"
    return Layer(TRANSFORMERS, "peer", forward, leaves, unpack, torch.bfloat16, unchecked, note)


def liger_layer(o: LayerOperands) -> Layer | Absent:
    """`LigerFusedMoEFunction`, which is given the routing: no router, and no way through it for x's gradient."""
    if o.shape.clamped:
        return Absent(LIGER, "peer", "has neither biases nor the clamped activation")
    try:
        function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    except (ImportError, OSError, RuntimeError) as error:
        return Absent(LIGER, "peer", f"cannot be imported: {error}")
    ids_TK = o.ids_TK.to(torch.int32)
    leaves = {name: torch.nn.Parameter(o[name].detach()) for name in ("w13", "w2")}
    leaves |= {
        "x_experts": o.x_TD.detach().requires_grad_(),
        "probs": o.probs_TK.detach().to(torch.bfloat16).requires_grad_(),
    }

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out_TD = function.apply(leaves["x_experts"], leaves["w13"], leaves["w2"], ids_TK, leaves["probs"])
        return out_TD, o.ids_TK

    return Layer(LIGER, "peer", forward, Leaves(leaves), note="routing given: it has no router; gradients in bf16")


def _qwen3(o: LayerOperands) -> tuple[Any, dict[str, torch.Tensor], Any]:
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    shape = o.shape
    config = module.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        norm_topk_prob=o.spec.renormalize,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = module.Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = torch.nn.Parameter(o["router"].detach())
    block.experts.gate_up_proj = torch.nn.Parameter(o["w13"].detach())
    block.experts.down_proj = torch.nn.Parameter(o["w2"].detach())
    parameters = {
        "router": block.gate.weight,
        "w13": block.experts.gate_up_proj,
        "w2": block.experts.down_proj,
    }
    return block, parameters, block.gate


def _gpt_oss(o: LayerOperands) -> tuple[Any, dict[str, torch.Tensor], Any]:
    module = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    shape = o.shape
    config = module.GptOssConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        swiglu_alpha=o.activation.alpha,
        swiglu_limit=o.activation.limit,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = module.GptOssMLP(config)
    values = {
        "router": (block.router, "weight", o["router"]),
        "router_bias": (block.router, "bias", o["router_bias"]),
        "w13": (block.experts, "gate_up_proj", _interleaved(o["w13"]).transpose(1, 2).contiguous()),
        "b13": (block.experts, "gate_up_proj_bias", _interleaved(o["b13"])),
        "w2": (block.experts, "down_proj", o["w2"].transpose(1, 2).contiguous()),
        "b2": (block.experts, "down_proj_bias", o["b2"]),
    }
    parameters: dict[str, torch.Tensor] = {}
    for name, (owner, attribute, value) in values.items():
        parameters[name] = torch.nn.Parameter(value.detach())
        setattr(owner, attribute, parameters[name])
    return block, parameters, block.router


def _interleaved(stacked: torch.Tensor) -> torch.Tensor:
    """`[E, 2F, ...]` with gate and up in turn, of gate first and then up."""
    return torch.stack(stacked.detach().chunk(2, dim=1), 2).flatten(1, 2)


def _stacked(interleaved: torch.Tensor) -> torch.Tensor:
    return torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], 1)


def _in_our_layouts(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-OSS keeps its matrices transposed, and gate and up in turn."""
    turned = {name: grads[name].transpose(1, 2) for name in ("w13", "w2")}
    return grads | turned | {"w13": _stacked(turned["w13"]), "b13": _stacked(grads["b13"])}
