"""What a checkpoint holds: the model's, the optimizer's and the random generators' state as sharded tensors.

Nothing in it is a Python object: torch unpickles objects without restraint when it loads them, tensors it does not.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from maniple.engines.megatron.checkpoint import optimizer_state
from maniple.engines.megatron.model import unwrap

RNG = "rng."  # of the tensors' names
State = dict[str, Any]


def collect(chunks, optimizer, *, is_loading: bool, rng: bool = True) -> tuple[State, State]:
    """(what is saved or loaded, what of the optimizer's state is not). Collective."""
    metadata = _metadata()
    state = weights(chunks)
    model_state = {"model": state["model0"]} if len(chunks) == 1 else dict(state)
    state["optimizer"], rest = optimizer_state.sharded(optimizer, model_state, metadata, is_loading=is_loading)
    if rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["rng"] = {
            name: ShardedTensor.from_rank_offsets(RNG + name, row[None], (0, rank, world))
            for name, row in _rng().items()
        }
    return state, rest


def weights(chunks) -> State:
    """The model's own tensors, by chunk: `model0` and so on."""
    return {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=_metadata()) for index, chunk in enumerate(chunks)
    }


def _metadata() -> State:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # moments as whole tensors under the parameters' names: a job of another layout can read them
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def restore(loaded: State, chunks, optimizer, rest: State, *, updates: int) -> None:
    """Puts what was loaded into its places; `updates` were made by the optimizer before the save."""
    restore_weights(loaded, chunks)
    optimizer_state.load(optimizer, loaded["optimizer"], rest, updates)
    if "rng" in loaded:
        _set_rng({name: row.squeeze(0).cpu() for name, row in loaded["rng"].items()})


def restore_weights(loaded: State, chunks) -> None:
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)


def start_from(loaded: State, chunks, optimizer) -> None:
    """Puts loaded weights into a model and an optimizer that has not made a step. Main weights begin as what was
    loaded, which may be more exact than the model's own bf16."""
    restore_weights(loaded, chunks)
    optimizer_state.start_from(
        optimizer,
        {
            parameter: loaded[f"model{index}"][name]
            for index, chunk in enumerate(chunks)
            for name, parameter in unwrap(chunk).named_parameters()
        },
    )


def _rng() -> dict[str, torch.Tensor]:
    """This rank's generators, each a row of one length on all ranks: int64 [625] and uint8."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(tuple, np.random.get_state())
    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": torch.tensor(words),
        "numpy": torch.tensor([*keys.tolist(), position]),
        # a normal number drawn ahead: is there one, which
        "gauss": torch.tensor([gauss is not None, gauss or 0.0, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        **{f"tracker.{name}": state for name, state in trackers.items()},
    }


def _set_rng(rows: dict[str, torch.Tensor]) -> None:
    has_python, python, has_numpy, numpy = rows["gauss"].tolist()
    random.setstate((3, tuple(rows["python"].tolist()), python if has_python else None))
    *keys, position = rows["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_numpy), numpy))
    torch.set_rng_state(rows["torch"])
    torch.cuda.set_rng_state(rows["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: rows[f"tracker.{name}"] for name in tracker.get_states()})
