"""What would help a job that does not fit, and how much."""

from __future__ import annotations

from typing import Any

from maniple.config.schema import RecomputeConfig
from maniple.errors import UserError
from maniple.hardware.units import binary_size
from maniple.plan.imbalance import Imbalance
from maniple.plan.report import MemoryPlan, memory_plan

_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "recompute.granularity=full": {"recompute": RecomputeConfig(granularity="full").model_dump()},
    "optimizer.offload_fraction=1": {"optimizer": {"offload_fraction": 1.0}},
}


def advice(plan: MemoryPlan, imbalance: Imbalance | None = None, schedule: str | None = None) -> str | None:
    """One line: bytes that each of two keys would free on the tightest rank, whether both are enough, and who looks for
    another layout. None for a job that fits."""
    if plan.fits:
        return None
    said: list[str] = []
    alone = False
    changes: dict[str, dict[str, Any]] = {}
    for key, change in _CHANGES.items():
        changed = _changed(plan, change, imbalance, schedule)
        if changed is not None and (freed := plan.tightest.total - changed.tightest.total) > 0:
            enough = ", which is enough" if changed.fits else ""
            said.append(f"{key} would free {binary_size(freed)}{enough}")
            changes |= change
            alone = alone or changed.fits
    both = _changed(plan, changes, imbalance, schedule) if len(said) == 2 and not alone else None
    if both is not None:
        said.append("both together " + ("would fit" if both.fits else "would not fit either"))
    gpus, model = plan.placement.world_size, plan.config.model.card or plan.card.name
    where = f" --fabric {plan.gpu.fabric}" if plan.gpu.fabric else ""
    said.append(f"`maniple plan search {model} --gpus {gpus} --gpu {plan.gpu.name}{where}` looks for another layout")
    return "what may help: " + "; ".join(said)


def _changed(plan: MemoryPlan, change: dict, imbalance: Imbalance | None, schedule: str | None) -> MemoryPlan | None:
    """The plan with these keys; None for a job that cannot run so."""
    sections = {name: getattr(plan.config, name).model_copy(update=keys) for name, keys in change.items()}
    config = plan.config.model_copy(update=sections)
    try:
        return memory_plan(config, plan.card, plan.gpu, plan.placement.world_size, imbalance, schedule)
    except UserError:
        return None
