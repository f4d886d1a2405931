"""The tensors of a layer, what must come of them, and how far a result is off.

The oracle goes from expert to expert in plain torch and fp32, each expert's part by autograd; routing and activation
are the reference's. It follows the choice of whoever is checked, since one who routes in bf16 chooses otherwise where
two experts are nearly equal; that the choice is right as far as its logits can tell is checked by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from maniple.bench.layer_shapes import LayerShape
from maniple.bench.operands import BOUNDS
from maniple.errors import UserError
from maniple.kernels.routing import RouterSpec, router_logits
from maniple.kernels.routing import reference as routing_reference
from maniple.kernels.swiglu import reference as swiglu_reference
from maniple.moe.experts import ExpertActivation

GPT_OSS = ExpertActivation(alpha=1.702, limit=7.0, up_offset=1.0)
# Of the outputs, and of the gradients of x and of the experts: three products and an activation in a row.
LAYER_BOUNDS = {recipe: 4 * bound for recipe, bound in BOUNDS.items()}
# Gradients that are sums over all tokens, or differences of a token's K results, and so keep more of their errors.
SIDE, SIDE_FACTOR = ("router", "router_bias", "b13", "b2", "probs"), 5.0
# How much a logit that was left out may exceed a chosen one, over the token's largest: two roundings to bf16, and of
# fp32 logits the order of a sum.
CHOICE_BOUNDS = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


class Leaves:
    """Tensors that collect gradients, by name. Each gradient is let go as soon as it is there, as DDP does once it has
    added one to its buffer, so that no one's gradients count as memory of the layer; unless `keep`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.keep = False
        self.grads: dict[str, torch.Tensor] = {}
        self.tensors = dict(tensors)
        for name, tensor in tensors.items():
            tensor.register_post_accumulate_grad_hook(partial(self._take, name))

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if self.keep:
            added = getattr(tensor, "grad_added_to_main_grad", False)
            self.grads[name] = tensor.main_grad if added else tensor.grad
        tensor.grad_added_to_main_grad = False
        tensor.grad = None


class LayerOperands:
    """x and the output's gradient: bf16 `[T, D]`. Parameters: bf16, `w13` and `w2` with an fp32 `main_grad`."""

    def __init__(self, shape: LayerShape, device: torch.device, seed: int) -> None:
        t, d, f, e = shape.tokens, shape.hidden, shape.ffn, shape.experts
        _must_fit(shape, device)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            made = torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)
            return made.mul_(scale)

        self.device = device
        self.x_TD, self.grad_TD = normal(t, d), normal(t, d)
        parameters = {
            "router": normal(e, d, scale=d**-0.5),
            "w13": normal(e, 2 * f, d, scale=d**-0.5),
            "w2": normal(e, d, f, scale=f**-0.5),
        }
        if shape.skew:  # what all tokens have in common prefers some experts
            self.x_TD += shape.skew * normal(d)
        if shape.clamped:
            parameters |= {"router_bias": normal(e, scale=0.2), "b13": normal(e, 2 * f), "b2": normal(e, d)}
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in parameters.items()}
        for name in ("w13", "w2"):
            self.parameters[name].main_grad = torch.zeros(parameters[name].shape, device=device)
        self.leaves = Leaves({"x": self.x_TD.requires_grad_(), **self.parameters})
        self.activation = GPT_OSS if shape.clamped else ExpertActivation()
        # of one expert alone the renormalised weight would be 1, and the router would learn nothing
        normed = not shape.clamped and shape.topk > 1
        self.spec = RouterSpec(e, shape.topk, score_before_topk=not shape.clamped, renormalize=normed)
        with torch.no_grad():
            self.logits_TE = router_logits(self.x_TD, self["router"], self.get("router_bias"))
            routing = routing_reference.route(self.logits_TE, self.spec)
        self.ids_TK, self.probs_TK = routing.ids_TK, routing.probs_TK
        self.shape = LayerShape(**(vars(shape) | {"sizes": tuple(routing.counts().tolist())}))
        self._expected: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        return self.parameters[name]

    def get(self, name: str) -> torch.nn.Parameter | None:
        return self.parameters.get(name)

    def misrouted(self, ids_TK: torch.Tensor) -> float:
        """By how much the best logit that was left out exceeds the worst that was chosen, over the token's largest
        logit in size; the maximum over tokens."""
        chosen_T = self.logits_TE.gather(1, ids_TK).amin(1)
        left_T = self.logits_TE.scatter(1, ids_TK, -torch.inf).amax(1)
        return float(((left_T - chosen_T) / self.logits_TE.abs().amax(1)).amax().clamp(min=0))

    def expected(self, ids_TK: torch.Tensor) -> dict[str, torch.Tensor]:
        """fp32: `out`, and the gradients by name; `x_experts` is x's without what comes through the router."""
        if self._expected is None or not torch.equal(self._expected[0], ids_TK):
            self._expected = None  # two would take much memory
            self._expected = ids_TK.clone(), oracle(self, ids_TK)
        return self._expected[1]

    def forget(self) -> None:
        """Lets go of what was expected."""
        self._expected = None


def oracle(o: LayerOperands, ids_TK: torch.Tensor) -> dict[str, torch.Tensor]:
    """See `LayerOperands.expected`."""
    x_TD, grad_TD, act = o.x_TD.detach(), o.grad_TD, o.activation
    router_leaves = [x_TD.float().requires_grad_(), o["router"].detach().float().requires_grad_()]
    if (bias_E := o.get("router_bias")) is not None:
        router_leaves.append(bias_E.detach().float().requires_grad_())
    probs_TK = routing_reference.route(router_logits(*router_leaves), o.spec, ids_TK=ids_TK).probs_TK
    names: list[str] = [name for name in ("w13", "w2", "b13", "b2") if name in o.parameters]
    found: dict[str, torch.Tensor] = {name: torch.zeros(o[name].shape, device=o.device) for name in names}
    found |= {"out": torch.zeros(x_TD.shape, device=o.device), "probs": torch.zeros_like(probs_TK)}
    found["x_experts"] = torch.zeros_like(found["out"])
    for g in range(o.shape.experts):
        tokens, ks = (ids_TK == g).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        weights = {name: o[name][g].detach().float().requires_grad_() for name in names}
        rows, probs = x_TD[tokens].float().requires_grad_(), probs_TK[tokens, ks].detach().requires_grad_()
        gate_up = rows @ weights["w13"].t() + weights.get("b13", 0.0)
        hidden = swiglu_reference.forward(gate_up, None, alpha=act.alpha, limit=act.limit, up_offset=act.up_offset)
        y = probs[:, None] * (hidden @ weights["w2"].t() + weights.get("b2", 0.0))
        leaves: dict[str, torch.Tensor] = {"rows": rows, "probs": probs, **weights}
        grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad_TD[tokens].float()), strict=True))
        found["out"].index_add_(0, tokens, y.detach())
        found["x_experts"].index_add_(0, tokens, grads["rows"])
        found["probs"][tokens, ks] = grads["probs"]
        for name in names:
            found[name][g] = grads[name]
    of_router = torch.autograd.grad(probs_TK, router_leaves, found["probs"])
    found["x"] = found["x_experts"] + of_router[0]
    return found | dict(zip(("router", "router_bias"), of_router[1:], strict=False))


def errors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors (Frobenius) of what was found, by name; those of `SIDE` divided by `SIDE_FACTOR`."""
    return {
        name: _relative(tensor, expected[name]) / (SIDE_FACTOR if name in SIDE else 1.0)
        for name, tensor in found.items()
    }


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"a result {list(found.shape)} where {list(wanted.shape)} was wanted")
    wrong = right = 0.0  # a part at a time: the difference of all in fp32 would take as much as the tensor again
    for f, w in zip(found.detach().split(4096), wanted.split(4096), strict=True):
        wrong += (f.float() - w).square().sum(dtype=torch.float64).item()
        right += w.square().sum(dtype=torch.float64).item()
    return (wrong / right) ** 0.5 if right else wrong


def _must_fit(shape: LayerShape, device: torch.device) -> None:
    """Raises UserError where the tensors, and what they are checked with, would not fit the GPU."""
    if device.type != "cuda":
        return
    weights = 3 * shape.experts * shape.hidden * shape.ffn
    needed = 14 * weights + 10 * shape.rows * (shape.hidden + 2 * shape.ffn)
    free = torch.cuda.mem_get_info(device)[0]
    if needed > 0.9 * free:
        raise UserError(
            f"{shape.model} with {shape.tokens:,} tokens needs {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free: "
            "end what else runs on this GPU, or leave the shape out with --only"
        )
