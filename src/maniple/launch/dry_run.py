"""`maniple train --dry-run`: what is asked of it, and a word about what it does, since it takes a while."""

from __future__ import annotations

import sys

from maniple.config.check import check
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models.card import ModelCard


def run(
    job: TrainConfig,
    card: ModelCard,
    *,
    nproc: int | None,
    rank: int | None,
    all_ranks: bool,
    world_size: int | None,
    as_json: bool,
) -> int:
    """Runs one rank, or every distinct one, without a GPU; returns the exit code. Raises UserError for options that
    make no sense together and for a job that cannot run on `world_size` ranks."""
    if nproc is not None:
        raise UserError(
            f"--nproc {nproc} starts processes, and a dry run starts none: give --world-size, the number of ranks of "
            "the job it stands for"
        )
    if world_size is None:
        raise UserError("--dry-run needs --world-size: the number of ranks of the job it stands for")
    check(job, card, world_size)
    if not 0 <= (rank or 0) < world_size:
        raise UserError(f"--rank {rank}: expected 0 to {world_size - 1} for --world-size {world_size}")
    if all_ranks:
        if rank is not None:
            raise UserError("--all-ranks runs every distinct rank: leave --rank out")
        _say(f"dry run of every distinct rank of {world_size:,}: loading Megatron-Core, then a step of each")
        from maniple.engines.megatron.dry_run import all_ranks as every

        return every.run(job, card, world_size, as_json=as_json)
    _say(
        f"dry run of rank {rank or 0} of {world_size:,}: loading Megatron-Core, then one step; with many layers and "
        "micro-batches it takes minutes"
    )
    from maniple.engines.megatron.dry_run import one_rank

    return one_rank.run(job, card, rank or 0, world_size, as_json=as_json)


def _say(line: str) -> None:
    print(f"maniple: {line}", file=sys.stderr, flush=True)
