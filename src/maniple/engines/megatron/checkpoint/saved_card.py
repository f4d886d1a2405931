"""The model card of a checkpoint. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maniple.engines.megatron.checkpoint import files
from maniple.errors import UserError
from maniple.models.card import ModelCard


def saved_card(folder: Path, manifest: dict[str, Any]) -> ModelCard:
    """With today's defaults for fields that a card did not have when it was saved. Raises UserError."""
    try:
        return ModelCard.model_validate(manifest["card"])
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])[:80]
        raise files.damaged(folder, f"its model card is none: {field!a} is not as it should be") from None


def check_same(folder: Path, manifest: dict[str, Any], card: ModelCard) -> None:
    """Raises UserError if the checkpoint's model is not this one, field by field; a name does not count."""
    ours, theirs = card.model_dump(mode="json"), saved_card(folder, manifest).model_dump(mode="json")
    different = sorted(key for key in ours if key not in ("name", "published") and ours[key] != theirs[key])
    if different:
        raise UserError(f"checkpoint {folder} is of another model ({theirs['name']}): {', '.join(different)} differ")
