"""Model cards: architecture facts as YAML, with exact parameter counts (`counting`) and model FLOPs (`flops`).

Imports neither torch nor transformers, so that the command line can list models at once.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import yaml

from maniple.errors import UserError
from maniple.models.card import MLA, ModelCard, MoE, Published, Rope, Router, Yarn

__all__ = ["MLA", "MoE", "ModelCard", "Published", "Rope", "Router", "Yarn", "list_cards", "load_card"]

_CARDS = files(__package__) / "cards"


def list_cards() -> list[str]:
    """Names that `load_card` takes, in alphabetical order."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _CARDS.iterdir() if entry.name.endswith(".yaml"))


@cache
def load_card(name: str) -> ModelCard:
    """The card of that name (cards are immutable: `with_overrides` and `tiny` make new ones).

    Raises UserError, with the nearest name there is, if no card has that name.
    """
    names = list_cards()
    if name not in names:
        near = get_close_matches(name.lower().replace("_", "-"), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}"
        raise UserError(f"no model card is named {name!r}: {hint}")
    return ModelCard.model_validate(yaml.safe_load((_CARDS / f"{name}.yaml").read_text(encoding="utf-8")))
