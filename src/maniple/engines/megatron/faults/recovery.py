"""Which checkpoint a run begins with: what the job names, or its own newest when its processes were started anew."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import files as checkpoint_files
from maniple.engines.megatron.checkpoint import reader
from maniple.metrics.records import write_json

_BEGUN = "begun.json"  # in the run's folder: which start of the job this is, restarts not counted


def starting_point(job: TrainConfig, device: torch.device, *, restarted: bool) -> Path | None:
    """The checkpoint to begin with, the same on every rank; None: from the start. Collective.

    restarted: this process takes the place of one that was there before. If any does, the run goes on from its own
    newest checkpoint, and from what the job names if it has not saved any. A checkpoint that an earlier job of the same
    name left is not its own.
    Call with the run's lock held: what an earlier job noted is removed.
    """
    flag = torch.tensor(int(restarted), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # a node that has come new does not know
    if flag.item():
        if (found := newest_of_this_job(job)) is not None:
            return found
    elif dist.get_rank() == 0:
        (job.run_dir / _BEGUN).unlink(missing_ok=True)  # an earlier job's
    return reader.choose(job.run_dir, job.checkpoint.resume, verify=job.checkpoint.verify_on_load)


def newest_of_this_job(job: TrainConfig) -> Path | None:
    """The newest whole checkpoint that this job has written since it began; the same on every rank. Collective."""
    begun = [_begun(job.run_dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(begun, src=0)
    if begun[0] is None:
        return None
    found = reader.choose(job.run_dir, "auto", verify=job.checkpoint.verify_on_load)
    if found is None or checkpoint_files.read_manifest(found).get("job_id") != begun[0].job_id:
        return None
    return found


def begin(job: TrainConfig, *, resumed: Path | None) -> checkpoint_files.Origin | None:
    """Rank 0 notes that the job begins now, unless it has begun before, and gets what its checkpoints are known by;
    other ranks get None. Call when the run's folder is there and this job's alone."""
    if dist.get_rank() != 0:
        return None
    if (begun := _begun(job.run_dir)) is None:
        begun = checkpoint_files.Origin.of_a_start(job.run_dir, resumed)
        note = {"job_id": begun.job_id, "lineage": begun.lineage, "time": time.time(), "from": resumed}
        write_json(job.run_dir / _BEGUN, note)
    return begun


def earlier_run(run_dir: Path) -> str | None:
    """What a start from nothing in this run's folder would overwrite, in one line; None if nothing."""
    whole, _ = checkpoint_files.newest_first(checkpoint_files.all_of(run_dir))
    if not whole:
        return None
    last = max(manifest["step"] for _, manifest in whole)
    return (
        f"{run_dir} holds an earlier run up to step {last}; starting anew overwrites its checkpoints as it passes "
        "them; --resume auto goes on from it"
    )


def _begun(run_dir: Path) -> checkpoint_files.Origin | None:
    try:
        noted = json.loads((run_dir / _BEGUN).read_text(encoding="utf-8"))
        return checkpoint_files.Origin(str(noted["job_id"]), str(noted["lineage"]))
    except (OSError, ValueError, KeyError, TypeError):  # it had not come so far
        return None
