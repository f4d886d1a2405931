"""The optimizer's part of a checkpoint: fp32 weights and moments by parameter name, the same whatever the layout.

Beside tensors, Megatron-Core saves the parameter groups of rank 0's optimizers. How many optimizers and groups there
are depends on expert-parallel size and pipeline stage, so that such a checkpoint would load only where every rank is
built as rank 0 was. Here groups are always the running job's own, and the step comes from its schedule.

Every kind of optimizer reads what another has saved: main weights have the distributed optimizer's names, and none are
stored where the model's own are those (the distributed optimizer, alone of all, would store them again). Moments are
stored in their own dtype; what is stored as bf16 can be read as fp32, and the other way round.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from maniple.engines.megatron.adam import Adam, StatesOptimizer
from maniple.engines.megatron.optimizer import parts

State = dict[Any, Any]
# upstream's names of main weights begin so: the distributed optimizer's, the others'
_MAIN, _OTHERS_MAIN = "optimizer.state.param.", "optimizer.state.fp32_param."
MOMENTS = "optimizer.state.exp_avg"  # of the moments, so


def sharded(
    optimizer: MegatronOptimizer, model_state: State, metadata: State, *, is_loading: bool
) -> tuple[State, State]:
    """(what a checkpoint holds: sharded tensors; the rest, for `load`). model_state: the model's own sharded state."""
    if is_loading:
        _allocate(optimizer)
    state = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
    tensors, rest = extract_matching_values(state, lambda value: isinstance(value, ShardedBase))
    for part in nested_values(tensors):
        if part.key.startswith(_OTHERS_MAIN):
            part.key = _MAIN + part.key.removeprefix(_OTHERS_MAIN)
    weights = (part for part in nested_values(model_state) if isinstance(part, ShardedBase))
    twice = {_MAIN + part.key for part in weights if getattr(part.data, "dtype", None) == _dtype_of_main(optimizer)}
    _, tensors = extract_matching_values(tensors, lambda part: part.key in twice)
    for part in nested_values(tensors):
        if part.key.startswith(MOMENTS):
            _cast(part, _dtype_of_moments(optimizer))
    return tensors, dict_list_map_inplace(_unwrapped, rest)


def load(optimizer: MegatronOptimizer, tensors: State, rest: State, step: int) -> None:
    """Fills the optimizer with the loaded tensors, `step` updates after its start."""
    every = parts(optimizer)
    for index, part in enumerate(every):
        own = rest if len(every) == 1 else rest[index]
        if isinstance(part, DistributedOptimizer):
            for group in own["optimizer"]["param_groups"]:
                group["step"] = float(step)
            # with torch's Adam a tensor, which is not among those loaded: upstream looks for it all the same
            # (distrib_optimizer.py, `_set_main_param_and_optimizer_states`), and leaves alone what is no tensor
            part._set_main_param_and_optimizer_states = partial(_set_all_but_step, part)
        else:
            inner: State = own.get("optimizer") or own
            inner.setdefault("state", {})["common_step"] = torch.tensor(float(step))
    optimizer.load_state_dict(merge(rest, tensors))
    for part in every:
        if isinstance(part, DistributedOptimizer):
            del part._set_main_param_and_optimizer_states
        if isinstance(part, DistributedOptimizer) and not isinstance(part.optimizer, Adam):
            for weight, state in part.optimizer.state.items():
                # upstream gave all of them one tensor, which each would count up; the fused kernel wants it beside them
                state["step"] = state["step"].to(weight.device, copy=True)


def start_from(optimizer: MegatronOptimizer, weights: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    """Sets the main weights that the optimizer has beside the model's own bf16 ones. weights: whole on this rank, by
    the model's parameter."""
    for part in parts(optimizer):
        if isinstance(part, StatesOptimizer):
            kept = [(p, main) for p in part.model_param_group_index_map if (main := part.main_of(p)) is not None]
            groups: Any = [[p for p, _ in kept]], [[main for _, main in kept]]
        elif isinstance(part, DistributedOptimizer):
            groups = part.model_float16_groups, part.shard_fp32_from_float16_groups
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            groups = part.float16_groups, part.fp32_from_float16_groups
        else:
            continue  # the model's own are fp32, and are what it steps
        for parameters, mains in zip(*groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                weight = weights[parameter].reshape(-1)
                if isinstance(part, DistributedOptimizer):
                    own = part._get_model_param_range_map(parameter)["param"]
                    weight = weight[own.start : own.end]
                main.data.copy_(weight.view(main.shape))


def _dtype_of_main(optimizer: MegatronOptimizer) -> torch.dtype:
    """Of the model's weights that are their own main weights."""
    part = parts(optimizer)[0]
    return part.config.main_params_dtype if isinstance(part, StatesOptimizer) else torch.float32


def _dtype_of_moments(optimizer: MegatronOptimizer) -> torch.dtype:
    inner = parts(optimizer)[0].optimizer
    return inner.moments if isinstance(inner, Adam) else torch.float32


def _cast(part: ShardedBase, dtype: torch.dtype) -> None:
    """Upstream gathers everything in fp32; what was bf16 is so again, without a rounding."""
    part.data = part.data.to(dtype)
    if hasattr(part, "dtype"):
        part.dtype = dtype


def _unwrapped(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


def _set_all_but_step(part: DistributedOptimizer, model_param: torch.Tensor, tensors: State) -> None:
    # what is None is left alone; main weights that are the model's own were loaded with it
    type(part)._set_main_param_and_optimizer_states(part, model_param, {"step": None, "param": None, **tensors})


def _allocate(optimizer: MegatronOptimizer) -> None:
    """Adam makes its state in its first step, but upstream (distrib_optimizer.py, `state_dict`) reads a step from it
    even to say what is to be loaded."""
    for part in parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            part.init_state_fn(part.optimizer, part.config)
            for weight, state in part.optimizer.state.items():
                state.setdefault("step", torch.zeros((), device=weight.device))
