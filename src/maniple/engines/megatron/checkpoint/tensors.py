"""Reading a checkpoint's tensors into the places that a job has for them, checked before anything is changed.

Any layout reads any other's: tensors are stored whole, in parts that say where they belong.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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
from maniple.engines.megatron.checkpoint.agreement import agree
from maniple.engines.megatron.checkpoint.index import Index, Tensor
from maniple.errors import UserError

EMBEDDING = "embedding.word_embeddings.weight"
_CASTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # one may be read where the other is wanted
State = dict[str, Any]


def read(
    folder: Path,
    index: Index,
    state: State,
    job: TrainConfig,
    *,
    ignored: Callable[[str], bool],
    casts: Callable[[str], bool] = lambda key: False,
) -> State:
    """What `state` has places for, from a checkpoint whose index is `index`. Collective.

    ignored: whether a stored tensor of that name may be left unread; any other that has no place is refused. casts:
    whether a tensor of that name may be stored as bf16 where fp32 is wanted and the other way round; it comes back as
    it is stored, in host memory. Raises UserError, before anything is changed, for a tensor that is missing, of another
    shape or type, or one too many, and for another padded vocabulary.
    """
    # places where a module may keep more than tensors; none of ours does, and torch (default_planner.py, `load_bytes`)
    # unpickles such objects with weights_only=False
    objects, state = extract_matching_values(state, lambda part: isinstance(part, ShardedObject))
    if any(part.data is not None for part in nested_values(objects)):
        raise AssertionError("only tensors are loaded")
    wanted, _, factories = load_preprocess(state)
    for part in nested_values(wanted):
        if casts(part.key):
            _read_as_stored(part, index.tensors)
    everywhere = determine_global_metadata(wanted)[1]
    _check(folder, index.tensors, [part for rank in everywhere for part in rank], job, ignored)
    validate_sharding_integrity(everywhere)
    loaded = apply_factory_merges(agree(lambda: _read(folder, wanted)), factories)
    merge(loaded, dict_list_map_inplace(lambda part: part.data, objects))
    return loaded


def _read_as_stored(part: ShardedTensor, there: dict[str, Tensor]) -> None:
    stored = _CASTS.get(there[part.key].dtype) if part.key in there else None
    if stored is not None and part.dtype in _CASTS.values() and part.dtype != stored:
        part.data, part.dtype = torch.empty(part.data.shape, dtype=stored, device="cpu"), stored


def _read(folder: Path, wanted: State) -> State:
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


def _check(
    folder: Path,
    there: dict[str, Tensor],
    wanted: list[ShardedTensor],
    job: TrainConfig,
    ignored: Callable[[str], bool],
) -> None:
    """Raises UserError unless the checkpoint has just the tensors that all ranks together want."""
    ours = {part.key: part for part in wanted}
    if EMBEDDING in ours and EMBEDDING in there:
        rows, padded = there[EMBEDDING].shape[0], ours[EMBEDDING].global_shape[0]
        if rows != padded:  # upstream would fill up with zeros, which take part in the softmax
            divides = rows % job.parallel.tensor_parallel_size == 0
            raise UserError(
                f"checkpoint {folder} has a vocabulary padded to {rows}, this job pads it to {padded}: set "
                + (f"model.vocab_size_multiple={rows}" if divides else "a tensor_parallel_size that divides it")
            )
    missing = set(ours) - set(there)
    extra = {key for key in set(there) - set(ours) if not ignored(key)}
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
