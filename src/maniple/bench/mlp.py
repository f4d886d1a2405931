"""The contest of a rank's experts: fc1, SwiGLU with routing weights, fc2, forward and backward, as in a training step.

Everything is within the time: quantization, activation, gradients of the rows, of the routing weights and of both
matrices, these added to fp32. Quantized weights are kept, as between optimizer steps; emulated ones cannot be.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from maniple.bench.contender import Absent, Contender
from maniple.bench.contest import Contest
from maniple.bench.operands import BOUNDS, PART, Operands
from maniple.bench.ours import OUR_BF16, PRODUCTS, QUANTIZED, float8, format_of
from maniple.bench.shapes import Shape
from maniple.errors import UserError
from maniple.kernels import quantize, registry
from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from maniple.kernels.swiglu import quantized, swiglu
from maniple.kernels.swiglu import reference as swiglu_reference
from maniple.moe.experts import expert_mlp

OP, FUSED = "expert_mlp", "our bf16 fused"
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Experts:
    """Tensors of the MLP over those of its two matrices. `result`: the output and the rows' gradient, both `[S, D]`."""

    def __init__(self, fc1: Operands, fc2: Operands) -> None:
        d = fc1.shape.k
        self.shape = Shape(fc1.shape.model, "fc1+fc2", fc1.shape.n, d, fc1.shape.sizes)
        self.spans, self.ends_G, self.device = fc1.spans, fc1.ends_G, fc1.device
        self.rows_SD, self.grad_SD = fc1.x_SK.detach().requires_grad_(), fc2.grad_SN
        self.w13_GFD, self.w2_GDF = (torch.nn.Parameter(o.w_GNK) for o in (fc1, fc2))
        self.w13_GFD.main_grad, self.w2_GDF.main_grad = fc1.main_grad_GNK, fc2.main_grad_GNK
        generator = torch.Generator(self.device).manual_seed(0)
        self.probs_S = torch.rand(self.shape.rows, generator=generator, device=self.device).requires_grad_()

    @property
    def flops(self) -> int:
        """Three products for each of w13 `[2F, D]` and w2 `[D, F]`."""
        return 3 * (self.shape.flops + self.shape.flops // 2)

    def step(self, fc1: Product, fc2: Product) -> Callable[[], torch.Tensor]:
        return self.backward_too(lambda: fc2(swiglu(fc1(self.rows_SD, self.w13_GFD), self.probs_S), self.w2_GDF))

    def fused_step(self, fc2: Product, splits: list[int] | None) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            act_SF = grouped_gemm_swiglu(
                self.rows_SD,
                self.w13_GFD,
                self.ends_G,
                probs_S=self.probs_S,
                fuse_wgrad_accumulation=True,
                splits=splits,
            )
            return fc2(act_SF, self.w2_GDF)

        return self.backward_too(forward)

    def backward_too(self, forward: Callable[[], torch.Tensor], *, adds: bool = True) -> Callable[[], torch.Tensor]:
        """A whole step. adds: the products add to fp32 themselves; else their gradients are added after them."""
        leaves = self.rows_SD, self.probs_S, self.w13_GFD, self.w2_GDF

        def step() -> torch.Tensor:
            out_SD = forward()
            grads = torch.autograd.grad(out_SD, leaves, self.grad_SD, allow_unused=adds)  # None of what is added
            if not adds:
                for weight, grad in zip(leaves[2:], grads[2:], strict=True):
                    weight.main_grad.add_(grad)
            self.result = out_SD.detach(), grads[0]
            return out_SD

        return step

    def error(self, step: Callable[[], object]) -> float:
        """Relative error of output and rows' gradient, the larger, in the first rows of a few groups, against fp32."""
        step()
        wrong, right = [0.0, 0.0], [0.0, 0.0]
        for g, start, end in self.spans:
            part = slice(start, min(start + PART, end))
            rows = self.rows_SD[part].detach().float().requires_grad_()
            hidden = swiglu_reference.forward(rows @ self.w13_GFD[g].detach().float().t(), self.probs_S[part].detach())
            out = hidden @ self.w2_GDF[g].detach().float().t()
            (grad,) = torch.autograd.grad(out, rows, self.grad_SD[part].float())
            for index, wanted in enumerate((out.detach(), grad)):
                wrong[index] += (self.result[index][part].float() - wanted).square().sum(dtype=torch.float64).item()
                right[index] += wanted.square().sum(dtype=torch.float64).item()
        return max((w / r) ** 0.5 for w, r in zip(wrong, right, strict=True))


def contest(recipe: str, experts: Experts, kernels: str | None) -> Contest:
    """A recipe's MLP; of bf16 both ways to make it, of the others one, with bf16's both beside it."""
    entrants: list[Contender | Absent]
    baselines: list[Contender] = []
    try:
        format = format_of(recipe, experts.device, kernels)
        if recipe == "bf16":
            entrants = [*_bf16(experts, kernels), _torch(experts)]
        else:
            entrants = [_low_precision(recipe, experts, kernels)]
            first, second = _bf16(experts, None)
            baselines = [Contender(OUR_BF16, "alternative", first.call), Contender(FUSED, "alternative", second.call)]
    except UserError as error:
        format, entrants = "bf16", [Absent("ours", "selected", str(error))]
    used = ("grouped_gemm", "swiglu") if recipe == "bf16" else ("grouped_gemm", "quantize", "swiglu")
    return Contest(
        OP,
        recipe,
        experts.shape,
        entrants,
        experts.flops,
        0.0,
        format,
        used,
        lambda contender: experts.error(contender.call),
        4 * BOUNDS[recipe],  # of three products and an activation in a row
        baselines,
    )


def _bf16(experts: Experts, kernels: str | None) -> tuple[Contender, Contender]:
    splits = _splits(experts)

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, w, experts.ends_G, fuse_wgrad_accumulation=True, kernels=kernels, splits=splits)

    gemm, act = _name("grouped_gemm", "bf16", experts, kernels), _name("swiglu", "bf16", experts, None)
    fused = _name("grouped_gemm_swiglu", "bf16", experts, None)
    return (
        Contender(_joined(gemm, act), "selected", experts.step(product, product)),
        Contender(f"{fused}, fc1 and SwiGLU in one", "alternative", experts.fused_step(product, splits)),
    )


def _torch(experts: Experts) -> Contender:
    """`torch._grouped_mm` and `torch.nn.functional.silu`, weights' gradients added to fp32 in a second pass."""

    def forward() -> torch.Tensor:
        gate_up = torch._grouped_mm(experts.rows_SD, experts.w13_GFD.transpose(1, 2), offs=experts.ends_G)
        gate, up = gate_up.chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up * experts.probs_S[:, None].to(up.dtype)
        return torch._grouped_mm(hidden, experts.w2_GDF.transpose(1, 2), offs=experts.ends_G)

    return Contender(
        "torch._grouped_mm", "peer", experts.backward_too(forward, adds=False), note="activation in eager bf16"
    )


def _low_precision(recipe: str, experts: Experts, kernels: str | None) -> Contender:
    dtype, splits = float8(recipe, experts.device), _splits(experts)
    device_type, rows, f = experts.device.type, experts.rows_SD.shape[0], experts.w13_GFD.shape[1] // 2
    operands = experts.rows_SD.detach(), experts.w13_GFD.detach(), "nk", dtype, dtype
    name = registry.select(QUANTIZED, recipe, device_type, kernels, operands).name
    between = experts.rows_SD.dtype, rows, f, experts.probs_S.dtype, dtype
    act = registry.select(quantized.OP, recipe, device_type, None, between)
    caches = quantize.QuantizedWeight(recipe, dtype=dtype), quantize.QuantizedWeight(recipe, dtype=dtype)

    def forward() -> torch.Tensor:
        return expert_mlp(
            experts.rows_SD,
            experts.probs_S,
            experts.ends_G,
            experts.w13_GFD,
            experts.w2_GDF,
            recipe=recipe,
            dtype=dtype,
            caches=caches,
            kernels=kernels,
            fuse_wgrad_accumulation=True,
            splits=splits,
        )

    swiglus = _name("swiglu", "bf16", experts, None) if act.name == "reference" else act.name
    parts = name, _name("quantize", recipe, experts, None), swiglus
    keeps = name != "emulated"
    note = "quantized weights are kept" if keeps else "emulated in bf16; weights are rounded in every step"
    return Contender(_joined(*parts), "selected", experts.backward_too(forward), note=note)


def _name(op: str, recipe: str, experts: Experts, kernels: str | None) -> str:
    operands = experts.rows_SD.detach(), experts.w13_GFD.detach(), "nk"
    gemm = op in (*PRODUCTS.values(), "grouped_gemm_swiglu")
    return registry.select(op, recipe, experts.device.type, kernels, operands if gemm else ()).name


def _joined(*names: str) -> str:
    return " + ".join(dict.fromkeys(names))


def _splits(experts: Experts) -> list[int] | None:
    return list(experts.shape.sizes) if experts.device.type == "cpu" else None
