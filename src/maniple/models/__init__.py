"""Model cards: architecture facts as YAML, with exact parameter counts (`counting`) and model FLOPs (`flops`).

Imports neither torch nor transformers, so that the command line can list models at once.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from maniple import yamlfile
from maniple.errors import UserError
from maniple.explain import explained
from maniple.models.card import MLA, ModelCard, MoE, Published, Rope, Router, Yarn

__all__ = ["MLA", "MoE", "ModelCard", "Published", "Rope", "Router", "Yarn", "list_cards", "load_card"]

_CARDS = Path(__file__).parent / "cards"


def list_cards() -> list[str]:
    """Names of the cards that come with Maniple, in alphabetical order."""
    return sorted(file.stem for file in _CARDS.glob("*.yaml"))


def load_card(name: str) -> ModelCard:
    """A card by its name, or by the path of its YAML file: a name that has a `/`, or ends in `.yaml` or `.yml`.

    Cards are immutable: `with_overrides` and `tiny` make new ones. Raises UserError, in one line: with the nearest name
    there is if no card has that name, or what is wrong with the file.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        file = Path(name)
        if file.suffix not in (".yaml", ".yml") and not file.exists():  # a name on a hub
            near = _near(file.name)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(list_cards())}"
            raise UserError(f"no model card is named {name!r}, and there is no such file: {hint}")
        return _read(file)
    names = list_cards()
    if name not in names:
        near = _near(name)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}"
        raise UserError(f"no model card is named {name!r}: {hint}")
    return _shipped(name)


def _near(name: str) -> list[str]:
    return get_close_matches(name.lower().replace("_", "-"), list_cards(), n=1, cutoff=0.5)


@cache
def _shipped(name: str) -> ModelCard:
    return _read(_CARDS / f"{name}.yaml")


def _read(path: Path) -> ModelCard:
    data = yamlfile.read(path, "model card").data
    if not isinstance(data, dict):
        raise UserError(f"{path}: a model card is a mapping of keys, such as num_layers: 24")
    try:
        return ModelCard.model_validate(data, strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error)}") from None
