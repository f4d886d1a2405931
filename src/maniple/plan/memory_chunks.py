"""The pieces of a rank's model chunks, with what each keeps and needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard
from maniple.plan import memory_layers, parameters
from maniple.plan.profile import Profile
from maniple.plan.shapes import Shapes
from maniple.plan.stages import Stage
from maniple.plan.tape import Held


class Layers:
    """The layers of one job, each kind computed once."""

    def __init__(self, config: TrainConfig, card: ModelCard, z: Shapes, profile: Profile) -> None:
        self.config, self.card, self.z, self.profile = config, card, z, profile
        self._known: dict[tuple, Held] = {}

    def held(self, number: int) -> Held:
        """Of layer `number` if it is not recomputed whole."""
        card, recipe = self.card, self.config.precision.recipe_of(number, self.card.num_layers)
        kind = (card.is_moe_layer(number), card.window(number), recipe)
        if kind not in self._known:
            self._known[kind] = memory_layers.layer(self.config, card, number, self.z, self.profile)
        return self._known[kind]


@dataclass(frozen=True)
class Piece:
    """A part of a model chunk. waits: bytes of a weight's gradient that its backward leaves for another use of the same
    weight to add to; takes: of such that it adds to and hands on. weight: one that other pieces may use too, and whose
    gradient is `gradient` bytes of what its backward needs, until `_shared` has said who waits for whom."""

    name: str
    held: Held
    waits: int = 0
    takes: int = 0
    is_layer: bool = False
    weight: str = ""
    gradient: int = 0


@dataclass(frozen=True)
class Chunk:
    """The pieces of one model chunk, in order, and the size of the tensor that it receives from another stage."""

    pieces: tuple[Piece, ...]
    given: int

    def kept(self) -> Counter[str]:
        parts: Counter[str] = Counter({"received": self.given}) if self.given else Counter()
        for piece in self.pieces:
            parts.update(piece.held.kept)
        return parts


def chunk_of(layers: Layers, stage: Stage) -> Chunk:
    config, card, z, profile = layers.config, layers.card, layers.z, layers.profile
    one = z.L * z.D * z.b
    table = z.V * z.D * z.b
    pieces: list[Piece] = []
    if stage.embedding:
        whole = z.T * z.D * z.b if z.tensor > 1 else 0
        held = Held({"embedding": one}, one + whole, one + whole + table, one)
        pieces.append(Piece("embedding", held, weight="embedding", gradient=table))
    for index, number in enumerate(stage.layers):
        held = layers.held(number)
        if _is_recomputed(config, number, index):
            held = memory_layers.recomputed(held)
        pieces.append(Piece(f"layer {number}", held, is_layer=True))
    if parameters.has_final_norm(card, stage):
        pieces.append(Piece("final norm", memory_layers.final_norm(z)))
    for depth in stage.mtp:
        pieces += _mtp(layers, stage, depth)
    if stage.mtp:
        every = (1 + len(stage.mtp)) * one
        pieces.append(Piece("MTP result", Held({"mtp": every}, every, every, every)))
    if stage.head:
        pieces += _heads(config, card, z, profile)
    given = 0 if stage.embedding else one
    if stage.head and card.num_mtp_layers and not stage.mtp:  # the hidden states of all depths
        given *= 1 + card.num_mtp_layers
    return Chunk(tuple(_shared(pieces, 2 * one, profile)), given)


def _mtp(layers: Layers, stage: Stage, depth: int) -> list[Piece]:
    config, card, z = layers.config, layers.card, layers.z
    number, one = card.num_layers + depth, z.L * z.D * z.b
    start = memory_layers.mtp_start(card, z)
    held = layers.held(number)
    last = memory_layers.final_norm(z)
    if number in config.recompute.layers:
        held = memory_layers.recomputed(held)
    table = z.V * z.D * z.b
    recompute = config.recompute
    if recompute.granularity == "full" and not recompute.layers and recompute.num_layers is None:
        # upstream recomputes the block from the projection on; not with a number of layers
        inner = start.kept_bytes + held.kept_bytes + last.kept_bytes
        most = max(start.backward, start.kept_bytes + max(held.forward, held.backward), inner)
        # with the gradients of the hidden states of every depth
        both = Held({"mtp": 2 * one}, most, most + 4 * one, one)
        return [Piece(f"MTP {depth}", both, weight="embedding", gradient=table)]
    return [
        Piece(f"MTP {depth} start", start, weight="embedding", gradient=table),
        Piece(f"layer {number}", held, is_layer=True),
        Piece(f"MTP {depth} norm", last),
    ]


def _heads(config: TrainConfig, card: ModelCard, z: Shapes, profile: Profile) -> list[Piece]:
    """One use of the head for each MTP depth, and the last for the loss. The fused loss adds the gradient of a weight
    that is the head's alone to its fp32 sum at once."""
    head = memory_layers.head(config, card, z, profile)
    tied = card.tied_embeddings
    gradient = z.linear(z.D, z.V) if config.train.loss == "logits" or tied else 0
    names = [*(f"MTP {depth} loss" for depth in range(card.num_mtp_layers)), "loss"]
    return [Piece(name, head, weight="embedding" if tied else "head", gradient=gradient) for name in names]


def _shared(pieces: list[Piece], beside: int, profile: Profile) -> list[Piece]:
    """Gradients of one weight with several uses wait for each other, from the last use on to the first, and are added
    up there. beside: bytes of gradients of hidden states that are there while two are added."""
    out = list(pieces)
    for weight in {piece.weight for piece in pieces if piece.gradient}:
        uses = [index for index, piece in enumerate(pieces) if piece.weight == weight and piece.gradient]
        for index in uses if len(uses) > 1 else []:
            piece, size = pieces[index], pieces[index].gradient
            held = piece.held
            if index != uses[-1]:
                summed = size if profile.sums_in_place else 2 * size
                held = replace(held, backward=max(held.backward, summed + beside))
            waits, takes = size if index == uses[-1] else 0, size if index == uses[0] else 0
            out[index] = replace(piece, held=held, waits=waits, takes=takes)
    return out


def _is_recomputed(config: TrainConfig, number: int, index: int) -> bool:
    """index: of the layer in its chunk."""
    recompute = config.recompute
    if recompute.granularity != "full":
        return False
    if recompute.layers:
        return number in recompute.layers
    return recompute.num_layers is None or index < recompute.num_layers
