"""Choosing and loading the checkpoint that a run goes on from: Megatron-Core's distributed format.

What is in the files is in `checkpoint/state.py`, how they are written in `checkpoint/writer.py`, how tensors are read
in `checkpoint/tensors.py`, what makes a folder whole in `checkpoint/files.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import agreement, files, optimizer_state, tensors
from maniple.engines.megatron.checkpoint import state as checkpoint_state
from maniple.engines.megatron.checkpoint.agreement import agree, from_rank_0
from maniple.engines.megatron.checkpoint.saved_card import check_same
from maniple.errors import UserError
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")
# What cuts the job; random states belong to a rank of one cut.
_LAYOUT = (
    *("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size", "pipeline_layout"),
    *("context_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"),
)


@dataclass(frozen=True)
class Restored:
    """Where a run goes on. extra: what the saver was given."""

    step: int
    samples: int
    extra: dict[str, Any]


def choose(run_dir: Path, wanted: str | None, *, verify: bool) -> Path | None:
    """The checkpoint that `resume` means, the same on every rank: none, a folder, or for `auto` this run's newest whole
    one. Collective.

    verify: every file is read and compared with its digest, each rank a share. A damaged checkpoint is a warning and
    the one before it is taken for `auto`; UserError for a folder, or if all are damaged.
    """
    if wanted is None:
        return None
    candidates, wrong = from_rank_0(lambda: files.find(run_dir, wanted))
    for error in wrong:
        _warn(error)
    for folder, manifest in candidates:
        if files.holds_weights_alone(manifest):  # of `auto` alone: it is not the run's own, but put there
            _warn(files.weights_alone(folder))
            continue
        try:
            agreement.verify(folder, manifest, digests=verify)
            return folder
        except UserError as error:
            if wanted != "auto":
                raise
            wrong.append(error)
            _warn(error)
    if wrong:
        raise UserError(
            f"all {len(wrong)} checkpoints of {run_dir} are damaged or of another format: move its checkpoints folder "
            "away to start anew, or name another to resume"
        )
    return None


def load(folder: Path, chunks, optimizer, scheduler, *, card: ModelCard, job: TrainConfig) -> Restored:
    """Fills model, optimizer, schedule and random states. Collective.

    Any layout and number of processes can read a checkpoint. Random states come back exactly where both are the same;
    elsewhere the streams of this job's own seed go on. The schedule stands at the checkpoint's update, with this
    job's own rates and length. Raises UserError, before anything is changed, for a checkpoint of another architecture,
    precision or vocabulary, one of weights alone, and for missing, extra or unwritten tensors.
    """
    manifest = agree(lambda: files.read_manifest(folder))
    files.refuse_weights_alone(folder, manifest)
    _check_alike(folder, manifest, card, job)
    index = agree(lambda: files.check_index(folder, manifest))
    # random states are of a device too: their sizes tell
    state, rest = checkpoint_state.collect(chunks, optimizer, is_loading=True, rng=True)
    rows = {row.key: tuple(row.global_shape) for row in state["rng"].values()}
    same_layout = manifest["world_size"] == dist.get_world_size() and all(
        manifest["job"].get("parallel", {}).get(key) == getattr(job.parallel, key) for key in _LAYOUT
    )
    if not same_layout or any(key not in index.tensors or index.tensors[key].shape != rows[key] for key in rows):
        del state["rng"]
        log.info("random states start from train.seed: the layout is not that of %s", folder)
    loaded = tensors.read(
        folder,
        index,
        state,
        job,
        ignored=lambda key: key.startswith(checkpoint_state.RNG),
        casts=lambda key: key.startswith(optimizer_state.MOMENTS),
    )
    checkpoint_state.restore(loaded, chunks, optimizer, rest, updates=manifest["updates"])
    scheduler.step(increment=manifest["updates"] - scheduler.num_steps)
    return Restored(manifest["step"], manifest["samples"], manifest["extra"])


def _check_alike(folder: Path, manifest: dict[str, Any], card: ModelCard, job: TrainConfig) -> None:
    check_same(folder, manifest, card)
    mine = job.precision.dtype
    saved = manifest["job"].get("precision", {}).get("dtype", mine)
    if saved != mine:
        raise UserError(
            f"checkpoint {folder} was saved with precision.dtype {saved}, this job has {mine}: set "
            f"precision.dtype={saved}"
        )
    before = manifest["job"].get("optimizer", {})
    mine, saved = job.optimizer.main_params_dtype, before.get("main_params_dtype", "fp32")
    if saved != mine:
        raise UserError(
            f"checkpoint {folder} was saved with optimizer.main_params_dtype {saved}, this job has {mine}: set "
            f"optimizer.main_params_dtype={saved}, or begin with its weights alone (checkpoint.init_from)"
        )
    mine, saved = job.optimizer.moments_dtype, before.get("moments_dtype", "fp32")
    if saved != mine:
        how = "rounded to bf16" if mine == "bf16" else "read as fp32, which changes none"
        log.info("moments are stored as %s and %s (optimizer.moments_dtype)", saved, how)


def _warn(error: UserError) -> None:
    if dist.get_rank() == 0:
        log.warning("%s", error)
