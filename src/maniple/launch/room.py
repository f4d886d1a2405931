"""Whether a model can be trained in this machine's memory at all, before a process starts that would fill it."""

from __future__ import annotations

from maniple.errors import UserError
from maniple.models import counting
from maniple.models.card import ModelCard

_GIB = 2**30


def check_memory(card: ModelCard, dtype: str, nodes: int) -> None:
    """Raises UserError if a job on CPUs cannot fit whatever its layout: where the system has no memory left it ends
    some process, this or another's, without a word.

    What all nodes hold together is at least one copy of weights, gradients and Adam's two moments, and of a bf16
    model's fp32 weights: 16 or 18 bytes a parameter. Activations come on top.
    """
    import psutil

    parameters = counting.count(card).total_with_mtp
    least, there = (16 if dtype == "fp32" else 18) * parameters / nodes, psutil.virtual_memory().total
    if least > there:
        raise UserError(
            f"model {card.name} has {parameters:,} parameters, which take at least {least / _GIB:,.0f} GiB a machine "
            f"to train, and this one has {there / _GIB:,.0f}: take a smaller model (model.variant=tiny, "
            "model.overrides), or GPUs"
        )
