"""What the order of samples depends on, to be kept with a checkpoint and compared when it is resumed.

A checkpoint says how many samples were read. With other data, another seed or another sequence length that number means
other text: some of it would be read twice, some never, and nothing would show it.
"""

from __future__ import annotations

from typing import Any

from maniple.config.schema import TrainConfig
from maniple.data.indexed import content_mark, sampled_mark
from maniple.data.packing import ORDER_VERSION
from maniple.data.sources import Part, Source
from maniple.errors import UserError


def identity(config: TrainConfig, source: Source) -> dict[str, Any]:
    """JSON data that tell whether sample i is the same for two jobs.

    Datasets are known by their content (sizes, and hashes of both ends of their files and of blocks between), not by
    their path, and weights as exact fractions. What only shapes validation is left out.
    """

    def described(part: Part) -> dict[str, Any]:
        documents = f"{part.first} to {part.stop}"
        content = f"{content_mark(part.prefix)}-{sampled_mark(part.prefix)}"
        return {"content": content, "documents": documents, "weight": str(part.weight)}

    return {
        "order": ORDER_VERSION,
        "source": config.data.source,
        "seed": config.train.seed,
        "sequence_length": config.data.sequence_length,
        "tokenizer": source.tokenizer.unique_identifiers,
        "train": [described(part) for part in source.train],
    }


def difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """In words, what is not as it was; None if all is."""
    if saved == current:
        return None
    changes = []
    for key in ("order", "source", "seed", "sequence_length"):
        if saved.get(key) != current[key]:
            changes.append(f"{key} {saved.get(key)} -> {current[key]}")
    if saved.get("tokenizer") != current["tokenizer"]:
        changes.append("another tokenizer")
    if saved.get("train") != current["train"]:
        changes.append(_other_datasets(saved.get("train") or [], current["train"]))
    return ", ".join(changes) or "facts that this version does not know"


def _other_datasets(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> str:
    if len(saved) != len(current):
        return f"{len(saved)} training datasets -> {len(current)}"
    changed = [
        key for key in ("content", "documents", "weight") if [p.get(key) for p in saved] != [p[key] for p in current]
    ]
    return "training datasets of other " + " and ".join(changed)


def check_identity(saved: dict[str, Any], current: dict[str, Any], on_change: str) -> str | None:
    """A warning in one line if the data are not the checkpoint's and `on_change` is `continue`; None if they are.

    Raises UserError if they are not and `on_change` is `refuse`.
    """
    changes = difference(saved, current)
    if changes is None:
        return None
    if on_change == "continue":
        return f"the data are not the checkpoint's ({changes}): training goes on at the same sample number of the new"
    raise UserError(
        f"the data are not those that the checkpoint was trained on ({changes}): restore them, or set "
        "data.on_change=continue to go on with the new"
    )
