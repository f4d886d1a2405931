"""Checkpoints of a run: Megatron-Core's distributed format in a folder that appears whole or not at all.

`RUN/checkpoints/step_00000100/` holds the tensors (`dist_checkpointing`) and `maniple.json`, which says what they are:
step, samples consumed, model card, versions. A folder is written under a `.partial` name and renamed when all ranks
are done, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

import maniple
from maniple.config.schema import TrainConfig
from maniple.engines.megatron import optimizer_state
from maniple.engines.megatron.model import unwrap
from maniple.errors import UserError
from maniple.models.card import ModelCard

FORMAT = 1
_PREFIX = "step_"
_MANIFEST = "maniple.json"
_RNG = "rng"
_MANIFEST_TYPES = {"step": int, "samples": int, "world_size": int, "card": dict, "job": dict}
# What torch's `.metadata` (a pickle) is made of, beside `torch.dtype`s: no name here does anything when called.
_METADATA_NAMES = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its home in newer Pythons
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


def save(run_dir: Path, chunks, optimizer, scheduler, *, step: int, samples: int, card: ModelCard, job: TrainConfig):
    """Writes one checkpoint and returns its folder. Collective: every rank calls it.

    Raises UserError, leaving nothing of it behind, where it cannot be written (a full disk).
    """
    final = run_dir / "checkpoints" / f"{_PREFIX}{step:08d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state, _ = _state(chunks, optimizer, is_loading=False)
    state["updates"] = scheduler.num_steps
    _collect_results_in_this_process()
    try:
        dist_checkpointing.save(state, str(partial))
    except (OSError, CheckpointException) as error:
        free = shutil.disk_usage(run_dir).free
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it would fill the disk for nothing
        raise UserError(
            f"checkpoint {final} cannot be written ({free / 1e9:.3f} GB are free there): make room, and go on with "
            "--resume auto"
        ) from error
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


def _collect_results_in_this_process() -> None:
    """Megatron-Core (filesystem_async.py, `get_write_results_queue`) starts a process on each rank to hold the queue by
    which a writer reports. Its synchronous writer is this very process: a plain queue does, and a job that is killed
    leaves no process behind."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def find(run_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint folder that `resume` means: None, a folder, or the newest whole one of this run for `auto`.

    Raises UserError if there is none at the folder, or if it is damaged.
    """
    if wanted is None:
        return None
    if wanted != "auto":
        folder = Path(wanted)
        if not (folder / _MANIFEST).is_file():
            raise UserError(f"no checkpoint at {folder}: a checkpoint is a folder that holds {_MANIFEST}")
    else:
        whole = sorted(p.parent for p in (run_dir / "checkpoints").glob(f"{_PREFIX}*[0-9]/{_MANIFEST}"))
        if not whole:
            return None
        folder = whole[-1]
    read_manifest(folder)
    check_files(folder)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checkpoint's description. Raises UserError if it is damaged or of another format."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        known = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"its {_MANIFEST} cannot be read ({error})") from error
    if known != FORMAT:
        raise UserError(f"checkpoint {folder} has format {known}, this version reads {FORMAT}")
    wrong = [key for key, kind in _MANIFEST_TYPES.items() if type(manifest.get(key)) is not kind]
    if wrong:
        raise _damaged(folder, f"its {_MANIFEST} has no proper {', '.join(wrong)}")
    return manifest


def check_files(folder: Path) -> None:
    """Raises UserError if a file that the checkpoint's index names is missing or cut short.

    Reads the index, which torch will unpickle, without running anything that a stranger may have put into it.
    """
    try:
        with open(folder / ".metadata", "rb") as file:
            pieces = list(_IndexReader(file).load().storage_data.values())
        ends: dict[str, int] = {}
        for piece in pieces:
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise _damaged(folder, f"its .metadata cannot be read ({str(error) or type(error).__name__})") from error
    for name, end in sorted(ends.items()):
        file_there = os.path.basename(name) == name and (folder / name).is_file()
        if not file_there or (folder / name).stat().st_size < end:
            raise _damaged(folder, f"{name} is {'cut short' if file_there else 'missing'}")


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _METADATA_NAMES.get(module, ())
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {why}; resume from another, or copy it again")


def load(folder: Path, chunks, optimizer, scheduler, *, card: ModelCard, job: TrainConfig) -> tuple[int, int]:
    """Fills model, optimizer, schedule and random states; returns (step, samples). Collective.

    Any layout and number of processes can read a checkpoint; random states come back where the number of processes is
    the same. The schedule goes on at the step of the checkpoint, with this job's own rates and length. Raises UserError
    for a checkpoint of another architecture, precision or kind of optimizer.
    """
    manifest = read_manifest(folder)
    _check_alike(folder, manifest, card, job)
    same_world = manifest["world_size"] == dist.get_world_size()
    state, optimizer_rest = _state(chunks, optimizer, is_loading=True, rng=same_world)
    loaded, absent, extra = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    if wrong := (set(absent) | set(extra)) - ({_RNG} if not same_world else set()):
        raise UserError(f"checkpoint {folder} does not fit this model: {len(wrong)} tensors differ, e.g. {min(wrong)}")
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    updates = loaded["updates"]
    optimizer_state.load(optimizer, loaded["optimizer"], optimizer_rest, updates)
    scheduler.step(increment=updates - scheduler.num_steps)
    if same_world:
        _set_rng(loaded[_RNG])
    return manifest["step"], manifest["samples"]


def _check_alike(folder: Path, manifest: dict[str, Any], card: ModelCard, job: TrainConfig) -> None:
    ours, theirs = card.model_dump(mode="json"), manifest["card"]
    different = sorted(key for key in ours if key not in ("name", "published") and ours[key] != theirs.get(key))
    if different:
        raise UserError(
            f"checkpoint {folder} is of another model ({theirs.get('name')}): {', '.join(different)} differ"
        )
    for path in ("precision.dtype", "parallel.distributed_optimizer", "model.vocab_size_multiple"):
        section, key = path.split(".")
        mine = job.model_dump(mode="json")[section][key]
        saved = manifest["job"].get(section, {}).get(key, mine)
        if saved != mine:
            raise UserError(
                f"checkpoint {folder} was saved with {path} {saved}, this job has {mine}: set {path}={saved}"
            )


def _state(chunks, optimizer, *, is_loading: bool, rng: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is saved or loaded, what of the optimizer's state is not)."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # moments as whole tensors under the parameters' names: a job of another layout can read them
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)
    }
    model_state = {"model": state["model0"]} if len(chunks) == 1 else dict(state)
    state["optimizer"], rest = optimizer_state.sharded(optimizer, model_state, metadata, is_loading=is_loading)
    if rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state[_RNG] = ShardedObject(_RNG, _get_rng(), (world,), (rank,), replica_id=0)
    return state, rest


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
