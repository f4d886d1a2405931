"""What one transformer layer, the MTP block's beginning and the head keep and need of one micro-batch."""

from __future__ import annotations

from dataclasses import replace

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard
from maniple.plan.memory_attention import attention, norm
from maniple.plan.memory_moe import dense, moe_layer
from maniple.plan.profile import Profile
from maniple.plan.shapes import Shapes
from maniple.plan.tape import Held, Tape

_LOSS_CHUNK = 512 << 20  # bytes of logits at once with `train.loss: fused` (kernels/cross_entropy)
_LOSS_STEP = 128  # tokens


def layer(config: TrainConfig, card: ModelCard, number: int, z: Shapes, profile: Profile) -> Held:
    """Layer `number` of the model, from 0 (MTP depth d: `num_layers + d`), its own recomputation left out."""
    modules = config.recompute.modules if config.recompute.granularity == "selective" else []
    tape = Tape(
        given=z.L * z.D * z.b,
        sums_in_place=profile.sums_in_place,
        forgets=_forgotten(modules),
        quantized=kept_element(config, card, number, profile),
    )
    norm(tape, "norms", "x", "n1", z.L, z.D, z)
    attention(tape, card, number, z, profile, again="core_attn" in modules)
    hidden = z.L * z.D * z.b
    tape.op("residual", ["x", "attn"], {"h": hidden}, passes="x")
    norm(tape, "norms", "h", "n2", z.L, z.D, z)
    if card.is_moe_layer(number):
        _again(tape, "moe" in modules, lambda inner: moe_layer(inner, config, card, z, profile, modules))
    else:
        _again(tape, "mlp" in modules, lambda inner: dense(inner, "dense_mlp", "n2", "mlp", z.dense_ffn, z))
    tape.op("residual", ["h", "mlp"], {"y": hidden}, passes="h")
    return tape.run("y")


def kept_element(config: TrainConfig, card: ModelCard, number: int, profile: Profile) -> int:
    """Bytes an element of what the layer's products keep of their inputs; 0: the inputs themselves. Without
    block-scaled instructions mxfp8 is emulated, with bf16 numbers that are rounded as it rounds."""
    recipe = config.precision.recipe_of(number, card.num_layers)
    return 0 if recipe == "bf16" else 2 if recipe == "mxfp8" and not profile.native_mxfp8 else 1


def _forgotten(modules: list[str]) -> dict[str, tuple[str, ...]]:
    """Tensors that `recompute.modules` does not keep, and what is computed again together with each."""
    forgets: dict[str, tuple[str, ...]] = {}
    if "norm" in modules:
        forgets |= {"n1": (), "n2": ()}
    if "mla_up_proj" in modules:
        forgets |= {"q": ("k", "v"), "k": ("q", "v"), "v": ("q", "k")}
    if "permute" in modules:
        forgets |= {"rows": (), "rows.turned": ("rows",)}
    if "moe_act" in modules:
        forgets |= {"act": (), "act.turned": ("act",)}
    return forgets


def _again(tape: Tape, recomputed: bool, build) -> None:
    """Adds what `build` makes of `n2` up to `mlp`; recomputed: as one operation that keeps `n2` alone."""
    if not recomputed:
        build(tape)
        return
    inner = Tape(sums_in_place=tape.sums_in_place, quantized=tape.quantized)
    inner.sizes["n2"] = tape.sizes["n2"]
    build(inner)
    held = inner.run("mlp")
    own = tape.sizes["n2"]
    tape.op(
        "recomputed",
        ["n2"],
        {"mlp": held.result},
        ["n2"],
        forward=max(0, held.forward - held.result),
        backward=max(0, max(held.forward, held.backward) - held.result - own),
    )


def recomputed(held: Held) -> Held:
    """A layer of which only the input is kept: backward first makes all of it again."""
    again = max(held.forward, held.backward)
    return replace(held, kept={"residual": held.result}, backward=again + held.result)


def mtp_start(card: ModelCard, z: Shapes) -> Held:
    """From the hidden state to the input of an MTP layer: the next token's embedding, both norms, the projection."""
    one = z.L * z.D * z.b
    tape = Tape(given=one)
    tape.op("mtp", ["x"], {"e": one}, moves=[], backward=z.V * z.D * z.b)
    norm(tape, "mtp", "e", "en", z.L, z.D, z)
    norm(tape, "mtp", "x", "hn", z.L, z.D, z)
    tape.op("mtp", ["en", "hn"], {"both": 2 * one})
    whole = z.T * z.D * z.b
    gathered = 2 * whole if z.tensor > 1 else 0
    tape.op("mtp", ["both"], {"y": whole}, ["both"], backward=z.linear(2 * z.D, z.D // z.tensor) + gathered)
    return tape.run("y")


def final_norm(z: Shapes) -> Held:
    tape = Tape(given=z.L * z.D * z.b)
    norm(tape, "norms", "x", "y", z.L, z.D, z)
    return tape.run("y")


def head(config: TrainConfig, card: ModelCard, z: Shapes, profile: Profile) -> Held:
    """Output head and loss of normalised hidden states."""
    tape = Tape(given=z.L * z.D * z.b, sums_in_place=profile.sums_in_place)
    whole = z.T * z.D * z.b if z.tensor > 1 else 0
    losses = z.T * 4
    if config.train.loss == "logits":
        logits = z.T * z.V * z.b
        tape.op("head", ["x"], {"logits": logits}, ["x"], backward=whole + z.linear(z.D, z.V))
        tape.op("head", ["logits"], {"loss": losses}, extra=z.T * z.V * 4)
        return tape.run("loss")
    keeps = config.train.loss == "fused_kept"
    most = z.T if keeps else max(1, _LOSS_CHUNK // (z.V * z.b) // _LOSS_STEP) * _LOSS_STEP
    chunk, part = min(z.T, most) * z.V, z.V * z.D * 4
    # a tied head's gradient is not added to the weight's fp32 sum, since the embedding has a part in it: it has its own
    own = part if card.tied_embeddings else 0
    if profile.oracles:  # exponentials, products and gradient in fp32 before they are rounded
        forward = chunk * (z.b + 8)
        sum_of_others = own if chunk < z.T * z.V else 0  # chunks before
        backward = max(chunk * (z.b * 2 + 8), chunk * (z.b * (2 if keeps else 1) + 4) + part) + sum_of_others
    else:
        forward = chunk * z.b
        backward = forward + own  # the gradient takes the logits' place
    if own and z.b < 4:
        backward = max(backward, own + z.V * z.D * z.b)
    kept = chunk * z.b if keeps else 0
    tape.op(
        "head",
        ["x"],
        {"loss": losses},
        ["x"],
        extra=3 * z.T * 4 + kept,
        forward=whole + forward - kept,
        backward=2 * whole + backward - kept,
    )
    return tape.run("loss")
