"""Choosing and loading a checkpoint: Megatron-Core's distributed format, checked before anything is changed.

Any layout reads any other's: tensors are stored whole, in parts that say where they belong. What is in the files is in
`checkpoint/state.py`, how they are written in `checkpoint/writer.py`, what makes a folder whole in
`checkpoint/files.py`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.api import CheckpointException
from torch.overrides import TorchFunctionMode

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint import state as checkpoint_state
from maniple.engines.megatron.checkpoint.index import Tensor
from maniple.errors import UserError
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")
_EMBEDDING = "embedding.word_embeddings.weight"
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
    candidates, wrong = _from_rank_0(lambda: files.find(run_dir, wanted))
    for error in wrong:
        _warn(error)
    for folder, manifest in candidates:
        try:
            _verify(folder, manifest, digests=verify)
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


def _verify(folder: Path, manifest: dict[str, Any], *, digests: bool) -> None:
    share = slice(dist.get_rank(), None, dist.get_world_size())
    _agree(lambda: files.check_index(folder, manifest))
    if digests:
        _agree(lambda: files.check_digests(folder, manifest, share))


def load(folder: Path, chunks, optimizer, scheduler, *, card: ModelCard, job: TrainConfig) -> Restored:
    """Fills model, optimizer, schedule and random states. Collective.

    Any layout and number of processes can read a checkpoint. Random states come back exactly where both are the same;
    elsewhere the streams of this job's own seed go on. The schedule stands at the checkpoint's update, with this
    job's own rates and length. Raises UserError, before anything is changed, for a checkpoint of another architecture,
    precision or vocabulary, and for missing, extra or unwritten tensors.
    """
    manifest = _agree(lambda: files.read_manifest(folder))
    _check_alike(folder, manifest, card, job)
    index = _agree(lambda: files.check_index(folder, manifest))
    # random states are of a device too: their sizes tell
    state, rest = checkpoint_state.collect(chunks, optimizer, is_loading=True, rng=True)
    rows = {row.key: tuple(row.global_shape) for row in state["rng"].values()}
    same_layout = manifest["world_size"] == dist.get_world_size() and all(
        manifest["job"].get("parallel", {}).get(key) == getattr(job.parallel, key) for key in _LAYOUT
    )
    if not same_layout or any(key not in index.tensors or index.tensors[key].shape != rows[key] for key in rows):
        del state["rng"]
        log.info("random states start from train.seed: the layout is not that of %s", folder)
    # places where a module may keep more than tensors; none of ours does, and torch (default_planner.py, `load_bytes`)
    # unpickles such objects with weights_only=False
    objects, state = extract_matching_values(state, lambda part: isinstance(part, ShardedObject))
    if any(part.data is not None for part in nested_values(objects)):
        raise AssertionError("only tensors are loaded")
    wanted, _, factories = load_preprocess(state)
    everywhere = determine_global_metadata(wanted)[1]
    _check_tensors(folder, index.tensors, [part for rank in everywhere for part in rank], job)
    validate_sharding_integrity(everywhere)
    loaded = apply_factory_merges(_agree(lambda: _read(folder, wanted)), factories)
    merge(loaded, dict_list_map_inplace(lambda part: part.data, objects))
    checkpoint_state.restore(loaded, chunks, optimizer, rest, updates=manifest["updates"])
    scheduler.step(increment=manifest["updates"] - scheduler.num_steps)
    return Restored(manifest["step"], manifest["samples"], manifest["extra"])


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads tensors into the places that `wanted` has for them."""
    try:
        with _NoCasts():
            return TorchDistLoadShardedStrategy().load(wanted, folder)
    except (CheckpointException, CheckpointingException, OSError) as error:
        failures = getattr(error, "failures", {}).values()
        cause = next((failure[0] for failure in failures), error)
        raise files.damaged(folder, _in_short(cause)) from error


class _NoCasts(TorchFunctionMode):
    """Refuses to fill a tensor from one of another type, which torch does silently: what is stored as another type than
    the index says was not stored by a save."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and args[0].dtype != args[1].dtype:
            there, wanted = (str(tensor.dtype).removeprefix("torch.") for tensor in (args[1], args[0]))
            raise TypeError(f"a tensor is stored as {there} where its index says {wanted}")
        return func(*args, **(kwargs or {}))


def _in_short(cause: BaseException) -> str:
    """The first sentence of what torch says; of a stranger's pickle not its advice to load it without restraint."""
    if isinstance(cause, pickle.UnpicklingError):
        return "a tensor cannot be read: it holds something else than numbers"
    return " ".join(str(cause).split()).partition(". ")[0][:200] or type(cause).__name__


def _check_alike(folder: Path, manifest: dict[str, Any], card: ModelCard, job: TrainConfig) -> None:
    ours, theirs = card.model_dump(mode="json"), manifest["card"]
    different = sorted(key for key in ours if key not in ("name", "published") and ours[key] != theirs.get(key))
    if different:
        raise UserError(
            f"checkpoint {folder} is of another model ({theirs.get('name')}): {', '.join(different)} differ"
        )
    mine = job.precision.dtype
    saved = manifest["job"].get("precision", {}).get("dtype", mine)
    if saved != mine:
        raise UserError(
            f"checkpoint {folder} was saved with precision.dtype {saved}, this job has {mine}: set "
            f"precision.dtype={saved}"
        )


def _check_tensors(folder: Path, there: dict[str, Tensor], wanted: list[ShardedTensor], job: TrainConfig) -> None:
    """Raises UserError unless the checkpoint has just the tensors that all ranks together want."""
    ours = {part.key: part for part in wanted}
    if _EMBEDDING in ours and _EMBEDDING in there:
        rows, padded = there[_EMBEDDING].shape[0], ours[_EMBEDDING].global_shape[0]
        if rows != padded:  # upstream would fill up with zeros, which take part in the softmax
            divides = rows % job.parallel.tensor_parallel_size == 0
            raise UserError(
                f"checkpoint {folder} has a vocabulary padded to {rows}, this job pads it to {padded}: set "
                + (f"model.vocab_size_multiple={rows}" if divides else "a tensor_parallel_size that divides it")
            )
    missing = set(ours) - set(there)
    extra = {key for key in set(there) - set(ours) if not key.startswith(checkpoint_state.RNG)}
    other = {
        key
        for key in set(there) & set(ours)
        if there[key].shape != tuple(ours[key].global_shape)
        or there[key].dtype != str(ours[key].dtype).removeprefix("torch.")
    }
    for what, keys in (("it lacks", missing), ("it also has", extra), ("of another shape or type:", other)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise UserError(f"checkpoint {folder} does not fit this model: {what} {min(keys)}{more}")


def _from_rank_0[T](find: Callable[[], T]) -> T:
    """What rank 0 finds, or the UserError it finds, on every rank: ranks must not read a folder at different moments
    and differ."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except UserError as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


def _agree[T](work: Callable[[], T]) -> T:
    """Each rank's own result; if a rank finds a UserError, the first rank's is raised on all."""
    result, error = None, None
    try:
        result = work()
    except UserError as found:
        error = found
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for first in errors:
        if first is not None:
            raise first
    return result  # type: ignore[return-value]


def _warn(error: UserError) -> None:
    if dist.get_rank() == 0:
        log.warning("%s", error)
