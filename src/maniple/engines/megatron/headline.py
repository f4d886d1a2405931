"""What a run says of itself: which model, how large, on what, how it is cut; and which kernels ran."""

from __future__ import annotations

from collections.abc import Sequence

from maniple.config.schema import TrainConfig
from maniple.models import counting
from maniple.models.card import ModelCard


def headline(
    job: TrainConfig, card: ModelCard, *, world: int, data_parallel_size: int, chunks: int, device: str, largest: int
) -> str:
    """TP x PP x CP x DP is the world, and so is ETP x EP x PP times the expert-data-parallel ranks.

    card: as it is trained. chunks: model chunks a pipeline rank. device: what one of the `world` ranks is on. largest:
    parameters of the rank that holds most.
    """
    p = job.parallel
    sizes = {"TP": p.tensor_parallel_size, "PP": p.pipeline_parallel_size}
    sizes |= {"VPP": chunks} if chunks > 1 else {}
    sizes |= {"CP": p.context_parallel_size} if p.context_parallel_size > 1 else {}
    sizes |= {"EP": p.expert_parallel_size, "ETP": p.expert_tensor_parallel_size, "DP": data_parallel_size}
    changed = " with overrides" if job.model.overrides else ""
    return (
        f"{card.name}{changed}, {counting.count(card).total_with_mtp:,} parameters, on {world} x {device}: "
        f"{' '.join(f'{name} {size}' for name, size in sizes.items())}, at most {largest:,} parameters a rank, "
        f"{job.precision.dtype}"
    )


def kernel_lines(used: Sequence[tuple[str, str, str, str]], dtype: str) -> list[str]:
    """used: (operation, recipe, device type, implementation) as `registry.used` gives them. One line where all ran the
    same way, else one an operation. dtype: of the tensors."""
    ways = {tuple(way) for _, *way in used}
    if len(used) > 1 and len(ways) == 1:
        ((recipe, kind, name),) = ways
        operations = ", ".join(op for op, *_ in used)
        return [f"kernels: all on {kind}: {name} ({dtype} tensors, recipe {recipe}): {operations}"]
    return [f"kernels: {op} on {kind}: {name} ({dtype} tensors, recipe {recipe})" for op, recipe, kind, name in used]
