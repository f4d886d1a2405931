"""What would help a job that does not fit, and how much."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from maniple.config.schema import RecomputeConfig
from maniple.errors import UserError
from maniple.hardware.units import binary_size
from maniple.plan.imbalance import Imbalance
from maniple.plan.report import MemoryPlan, memory_plan

_WORTH = 1e-3  # share of a GPU's memory that a change has to free to be named
_CHANGES: list[dict[str, dict[str, Any]]] = [
    {"recompute": RecomputeConfig(granularity="full").model_dump()},
    {"optimizer": {"offload_fraction": 1.0}},
    {"train": {"loss": "fused"}},
]


def advice(
    plan: MemoryPlan, imbalance: Imbalance | None = None, schedule: str | None = None, words: Sequence[str] = ()
) -> str | None:
    """One line: bytes that each of three changes would free on the tightest rank, whether all are enough, and who looks
    for another layout. None for a job that fits.

    words: options of the job's command beside model and GPUs, which the search takes too.
    """
    if plan.fits:
        return None
    said: list[str] = []
    alone = False
    changes: dict[str, dict[str, Any]] = {}
    for change in _CHANGES:
        key = _as_words(plan, change)
        changed = _changed(plan, change, imbalance, schedule)
        if not key or changed is None:
            continue
        if (freed := plan.tightest.total - changed.tightest.total) > _WORTH * plan.gpu.memory_bytes:
            enough = ", which is enough" if changed.fits else ""
            said.append(f"{key} would free {binary_size(freed)}{enough}")
            changes |= change
            alone = alone or changed.fits
    every = _changed(plan, changes, imbalance, schedule) if len(said) > 1 and not alone else None
    if every is not None:
        number = "both" if len(said) == 2 else "all"
        said.append(f"{number} together " + ("would fit" if every.fits else "would not fit either"))
    gpus, model = plan.placement.world_size, plan.config.model.card or plan.card.name
    command = shlex.join(["maniple", "plan", "search", model, "--gpus", str(gpus), "--gpu", plan.gpu.name, *words])
    said.append(f"`{command}` looks for another layout")
    return "what may help: " + "; ".join(said)


def _as_words(plan: MemoryPlan, change: dict[str, dict[str, Any]]) -> str:
    """What of a change the job does not have yet, as options of a command."""
    return " ".join(
        "--set " + shlex.quote(f"{section}.{key}={json.dumps(value).strip(chr(34)) if value != 1.0 else 1}")
        for section, keys in change.items()
        for key, value in keys.items()
        if value != _plain(getattr(getattr(plan.config, section), key))
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _changed(plan: MemoryPlan, change: dict, imbalance: Imbalance | None, schedule: str | None) -> MemoryPlan | None:
    """The plan with these keys; None for a job that cannot run so."""
    sections = {name: getattr(plan.config, name).model_copy(update=keys) for name, keys in change.items()}
    config = plan.config.model_copy(update=sections)
    try:
        return memory_plan(config, plan.card, plan.gpu, plan.placement.world_size, imbalance, schedule)
    except UserError:
        return None
