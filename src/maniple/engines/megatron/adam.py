"""AdamW whose main parameters and moments have the dtypes that the job asks for, inside Megatron-Core's optimizers.

Upstream keeps states in other dtypes than fp32 only with Transformer Engine's Adam: its factory
(optimizer/__init__.py, `_get_megatron_optimizer_based_on_param_groups`) and its config refuse without. Here the same
optimizers are constructed around `Adam`, which is one pass over each shard (`maniple.kernels.adamw`): gradient, main
parameter and moments are read, and they and the model's bf16 copy written. Gradients are read where DDP has left them
(`decoupled_grad`), and the clip coefficient is applied in that pass. States may be in host memory: `offload.py`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    _get_param_groups_and_buffers,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from maniple.engines.megatron import offload
from maniple.engines.megatron.offload import HostStates
from maniple.kernels.adamw import Shard, adamw_

MASTER, MOMENTS = "master_param", ("exp_avg", "exp_avg_sq")


class Adam(torch.optim.Optimizer):
    """AdamW by `maniple.kernels.adamw`, with the parts of torch's that Megatron-Core looks at.

    A parameter's state has `exp_avg` and `exp_avg_sq` in `moments`, `step` (fp32, in host memory), and `master_param`
    in fp32 where `masters` is set and the parameter is bf16; elsewhere the parameter is its own main parameter.
    `grad_scale` multiplies the gradients of the next step, and of no other. `places` has, by parameter, what
    `Shard.seed` and `Shard.first` are. States of the parameters that are in `host` are in host memory.
    """

    state: defaultdict[torch.Tensor, dict[str, Any]]

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, moments: torch.dtype, masters: bool):
        defaults = dict(
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        super().__init__(groups, defaults)
        self.moments, self.masters = moments, masters
        self.grad_scale: torch.Tensor | float | None = None
        self.places: dict[torch.Tensor, tuple[int, int]] = {}
        self.host = HostStates()

    def dtypes_of(self, weight: torch.Tensor) -> dict[str, torch.dtype]:
        """Of the tensors that are kept of a parameter, by name."""
        own = self.masters and weight.dtype == torch.bfloat16
        return dict.fromkeys(MOMENTS, self.moments) | ({MASTER: torch.float32} if own else {})

    def hosted(self, weight: torch.Tensor) -> list[str]:
        """Names of those that are in host memory."""
        return list(self.dtypes_of(weight)) if weight in self.host else []

    @torch.no_grad()
    def initialize_state(self, weight: torch.Tensor) -> None:
        state = self.state[weight]
        if state:
            return
        state["step"] = torch.zeros((), device="cpu")
        zeros_like = self.host.zeros_like if weight in self.host else torch.zeros_like
        for name, dtype in self.dtypes_of(weight).items():
            state[name] = zeros_like(weight.detach(), dtype=dtype)
        if MASTER in state:
            state[MASTER].copy_(weight)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        through: list[tuple[Shard, dict[str, Any]]] = []  # whose states are in host memory
        for group in self.param_groups:
            how = dict(
                learning_rate=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                epsilon=group["eps"],
                weight_decay=group["weight_decay"],
                grad_scale=self.grad_scale,
            )
            updates: dict[int, list[Shard]] = {}
            for weight in group["params"]:
                grad = getattr(weight, "decoupled_grad", None)
                grad = weight.grad if grad is None else grad
                if grad is None:
                    continue
                self.initialize_state(weight)
                state = self.state[weight]
                state["step"] += 1
                main = state.get(MASTER)
                seed, first = self.places.get(weight, (0, 0))
                shard = Shard(
                    grad,
                    weight.detach() if main is None else main,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    None if main is None else weight.detach(),
                    seed,
                    first,
                )
                if weight in self.host:
                    through.append((shard, how | {"step": int(state["step"])}))
                else:
                    updates.setdefault(int(state["step"]), []).append(shard)
            for step, shards in updates.items():
                adamw_(shards, step=step, **how)
        offload.update(through)
        self.grad_scale = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would give states the parameter's dtype: here they keep their own, and their memory."""
        own = self.state
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state = own
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            if number not in state_dict["state"]:
                continue
            self.initialize_state(weight)
            for name, value in state_dict["state"][number].items():
                if name == "step":
                    own[weight][name] = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
                elif value is not own[weight][name]:
                    own[weight][name].copy_(value)


class StatesOptimizer(DistributedOptimizer):
    """Upstream's distributed optimizer around `Adam`, in the way that it has for precision-aware ones."""

    def main_of(self, model_param: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the fp32 main parameter; None where the model's own is that."""
        return self.optimizer.state[self._shard_of(model_param)].get(MASTER)

    def _shard_of(self, model_param: torch.Tensor) -> torch.Tensor:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Upstream's (distrib_optimizer.py) asks for methods of Transformer Engine's Adam, and for a main parameter
        beside the model's."""
        shard = self._shard_of(model_param)
        state = self.optimizer.state[shard]
        return {"param": state.get(MASTER, shard), **{name: state[name] for name in MOMENTS}}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(model_param)
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                own[name].copy_(value)

    @torch.no_grad()
    def _copy_model_params_to_main_params(self, state_dict=None) -> None:
        for model_param in self.model_param_group_index_map:
            if (main := self.main_of(model_param)) is not None:
                main.copy_(self._shard_of(model_param))


def build(
    config: OptimizerConfig,
    chunks: list,
    overrides: dict,
    *,
    moments: torch.dtype,
    main: torch.dtype,
    offload_fraction: float = 0.0,
) -> ChainedOptimizer:
    """As upstream's `get_megatron_optimizer`, with states in these dtypes: of dense parameters, and of experts' where
    they have data-parallel ranks of their own. main: of a bf16 model's main parameters; bf16 needs
    `config.use_distributed_optimizer`. All states are allocated, this share of their bytes in host memory; without the
    distributed optimizer main parameters are none of them. Raises ValueError for bf16 ones without it."""
    if main == torch.bfloat16 and not config.use_distributed_optimizer:
        raise ValueError("bf16 main parameters need the distributed optimizer")
    if config.use_distributed_optimizer:
        # set here: `OptimizerConfig.__post_init__` would ask for Transformer Engine
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
        config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype = main, moments, moments
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(None, chunks, use_gloo_process_groups=False)
    every: list[MegatronOptimizer] = []
    for experts, buffers, reduced_over, cut_over in (
        (False, "buffers", "intra_dp_cp_group", "mp_group"),
        (True, "expert_parallel_buffers", "intra_expt_dp_group", "expt_tp_pp_with_egtp_remat_group"),
    ):
        param_groups, per_chunk = _get_param_groups_and_buffers(
            chunks,
            model_chunk_offset=0,
            config=config,
            config_overrides=overrides,
            filter_fn=lambda group, experts=experts: group["is_expert_parallel"] == experts,
            buffer_name=buffers,
        )
        if not param_groups and experts:
            continue
        adam = Adam(param_groups, config, moments, main == torch.float32 and config.use_distributed_optimizer)
        part: MegatronOptimizer
        if config.use_distributed_optimizer:
            part = StatesOptimizer(
                adam,
                config,
                None,
                _initialize,
                model_chunks=chunks,
                per_model_buffers=per_chunk,
                data_parallel_group=groups[reduced_over],
                data_parallel_group_gloo=None,
                data_parallel_group_idx=groups[cut_over].rank(),
                distributed_optimizer_instance_id=0,
            )
            part.grad_stats_parallel_group = groups["intra_dist_opt_group"]
        else:
            part = (
                Float16OptimizerWithFloat16Params(adam, config, None, _initialize)
                if config.bf16
                else FP32Optimizer(adam, config, _initialize)
            )
            part.grad_stats_parallel_group = groups[cut_over]
        collection = ProcessGroupCollection.use_mpu_process_groups()
        part.tp_group, part.expert_tp_group = collection.tp, getattr(collection, "expt_tp", collection.tp)
        adam.places = dict(_places(part, chunks))
        every.append(part)
    adams = [part.optimizer for part in every]
    sizes = {
        weight: weight.numel() * sum(dtype.itemsize for dtype in adam.dtypes_of(weight).values())
        for adam in adams
        for group in adam.param_groups
        for weight in group["params"]
    }
    host = HostStates(offload_fraction, sizes)
    for adam in adams:
        adam.host = host
        _initialize(adam)
    for chunk in chunks:
        chunk.overlap_param_gather_with_optimizer_step = False
    return ChainedOptimizer(every)


def _initialize(adam: Adam, config: OptimizerConfig | None = None) -> None:
    for group in adam.param_groups:
        for weight in group["params"]:
            adam.initialize_state(weight)


def _places(part: MegatronOptimizer, chunks: list) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
    """(parameter that Adam steps, (seed, number of its first element)). Replicas of a parameter have the same, so that
    they stay equal; those of an embedding that several stages hold have other names."""
    own = {weight for group in part.optimizer.param_groups for weight in group["params"]}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            shared = getattr(parameter, "shared_embedding", False)
            seed = zlib.crc32(b"embedding" if shared else f"{index}:{name}".encode())
            if isinstance(part, StatesOptimizer):
                if parameter in part.model_param_group_index_map:
                    first = part._get_model_param_range_map(parameter)["param"].start
                    yield part._shard_of(parameter), (seed, first)
            else:
                main = getattr(parameter, "main_param", parameter)
                if main in own:
                    yield main, (seed, 0)
