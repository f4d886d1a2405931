"""The model card of a checkpoint. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maniple.engines.megatron.checkpoint import files
from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.models.huggingface import forward_differences

CARD = "card.yaml"  # beside converted weights
_NAMED = 5  # fields, at most


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


def check_forward(
    folder: Path, manifest: dict[str, Any], card: ModelCard, *, but: frozenset[str] = frozenset()
) -> bool:
    """Whether MTP layers of the checkpoint are to be left out, which this model has not.

    Raises UserError if the model computes another forward pass; `but`: fields that are not looked at.
    """
    theirs = saved_card(folder, manifest)
    different = [field for field in forward_differences(card, theirs) if field not in but]
    without_mtp = "num_mtp_layers" in different and card.num_mtp_layers == 0
    if without_mtp:
        different.remove("num_mtp_layers")
    elif different == ["num_mtp_layers"]:
        raise UserError(
            f"checkpoint {folder} has {theirs.num_mtp_layers} MTP layers and this job {card.num_mtp_layers}: set "
            f"model.overrides.num_mtp_layers={theirs.num_mtp_layers}" + (", or 0" if theirs.num_mtp_layers else "")
        )
    if different:
        more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
        hint = f"; set model.card={folder / CARD}" if CARD in manifest["files"] else ""
        raise UserError(
            f"checkpoint {folder} is of another model ({theirs.name}) than {card.name}: "
            f"{', '.join(different[:_NAMED])}{more} differ{hint}"
        )
    return without_mtp
