"""Checkpoints of a run: Megatron-Core's distributed format in a folder that appears whole or not at all.

`RUN/checkpoints/step_00000100/` holds the tensors (`dist_checkpointing`) and `maniple.json`, which says what they are:
step, samples consumed, model card, versions. A folder is written under a `.partial` name and renamed when all ranks
are done, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

import maniple
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models.card import ModelCard

FORMAT = 1
_PREFIX = "step_"
_MANIFEST = "maniple.json"


def save(run_dir: Path, chunks, optimizer, scheduler, *, step: int, samples: int, card: ModelCard, job: TrainConfig):
    """Writes one checkpoint and returns its folder. Collective: every rank calls it. OSError where the disk is full."""
    final = run_dir / "checkpoints" / f"{_PREFIX}{step:08d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(chunks, optimizer, scheduler, is_loading=False)
    dist_checkpointing.save(state, str(partial))
    if dist.get_rank() == 0:
        manifest = {
            "format": FORMAT,
            "step": step,
            "samples": samples,
            "maniple": maniple.__version__,
            "world_size": dist.get_world_size(),
            "card": card.model_dump(mode="json"),
            "job": job.model_dump(mode="json"),
        }
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
    dist.barrier()
    return final


def find(run_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint folder that `resume` means: None, a folder, or the newest whole one of this run for `auto`."""
    if wanted is None:
        return None
    if wanted != "auto":
        folder = Path(wanted)
        if not (folder / _MANIFEST).is_file():
            raise UserError(f"no checkpoint at {folder}: a checkpoint is a folder that holds {_MANIFEST}")
        return folder
    whole = sorted(p.parent for p in (run_dir / "checkpoints").glob(f"{_PREFIX}*[0-9]/{_MANIFEST}"))
    return whole[-1] if whole else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checkpoint's description. Raises UserError if it is damaged or of another format."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        known = manifest["format"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {folder} is damaged: its {_MANIFEST} cannot be read ({error})") from error
    if known != FORMAT:
        raise UserError(f"checkpoint {folder} has format {known}, this version reads {FORMAT}")
    return manifest


def load(folder: Path, chunks, optimizer, scheduler, card: ModelCard) -> tuple[int, int]:
    """Fills model, optimizer, schedule and random states; returns (step, samples). Collective.

    Raises UserError for a checkpoint of another architecture.
    """
    manifest = read_manifest(folder)
    ours, theirs = card.model_dump(mode="json"), manifest["card"]
    different = sorted(key for key in ours if key not in ("name", "published") and ours[key] != theirs.get(key))
    if different:
        raise UserError(
            f"checkpoint {folder} is of another model ({theirs.get('name')}): {', '.join(different)} differ"
        )
    state = _state(chunks, optimizer, scheduler, is_loading=True, rng=manifest["world_size"] == dist.get_world_size())
    loaded = dist_checkpointing.load(state, str(folder), strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    if "rng" in loaded:
        _set_rng(loaded["rng"])
    return manifest["step"], manifest["samples"]


def _state(chunks, optimizer, scheduler, *, is_loading: bool, rng: bool = True) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # moments as whole tensors under the parameters' names: a job of another layout can read them
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)
    }
    model_state = {"model": state["model0"]} if len(chunks) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
    state["scheduler"] = scheduler.state_dict()
    if rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["rng"] = ShardedObject("rng", _get_rng(), (world,), (rank,), replica_id=0)
    return state


def _get_rng() -> dict[str, Any]:
    """Every generator's state as tensors and plain numbers, so that loading needs no pickle."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(k) for k in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _set_rng(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
