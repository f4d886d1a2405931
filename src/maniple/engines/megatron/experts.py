"""The experts of one rank as stacked matrices, in the slot where Megatron-Core builds its grouped MLP.

G experts on this rank, F intermediate size on this expert-tensor rank, D hidden, S slots of the expert-sorted buffer.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from maniple.kernels import registry
from maniple.kernels.grouped_gemm.low_precision import OP
from maniple.kernels.quantize import QuantizedWeight
from maniple.moe.experts import ExpertActivation, expert_mlp

_EXTRA = "_extra_state"


class GroupedExperts(MegatronModule):
    """`w13` `[G, 2F, D]` (gate rows, then up rows) and `w2` `[G, D, F]`, with biases where the model has them.

    Built with Megatron-Core's `ExpertsBuilder` signature; checkpoints use the keys and global shapes of its
    SequentialMLP, so that each loads the other's. Raises ValueError for delayed weight gradients.
    """

    def __init__(self, num_local_experts: int, config, *, pg_collection=None, name: str | None = None) -> None:
        super().__init__(config=config)
        if config.delay_wgrad_compute:
            raise ValueError("Maniple's experts do not delay their weight gradients: set delay_wgrad_compute=False")
        self.num_local_experts = num_local_experts
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.expt_tp
        self.expert_dp_group = pg_collection.expt_dp
        etp = self.etp_group.size()
        if config.moe_ffn_hidden_size % etp:
            raise ValueError(f"expert intermediate size {config.moe_ffn_hidden_size} does not divide by ETP {etp}")
        g, f, d = num_local_experts, config.moe_ffn_hidden_size // etp, config.hidden_size
        self.activation = _activation(config)
        self.kernels = config.maniple_moe.kernels if hasattr(config, "maniple_moe") else "auto"
        self.recipe, self.float8 = "bf16", torch.float8_e4m3fn
        self.caches: tuple[QuantizedWeight, QuantizedWeight] | None = None
        modules = getattr(config, "maniple_recompute_modules", ())
        self.recompute: Literal["none", "activation", "all"] = (
            "all" if "experts" in modules else "activation" if "moe_act" in modules else "none"
        )
        self.ran: str | None = None  # the recipe of the last forward pass
        self.w13 = self._parameter((g, 2 * f, d), partition_dim=1)
        self.w2 = self._parameter((g, d, f), partition_dim=2)
        self.b13 = self._parameter((g, 2 * f), partition_dim=1) if config.add_bias_linear else None
        self.b2 = self._parameter((g, d), partition_dim=None) if config.add_bias_linear else None
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()), torch.no_grad():
                for expert in range(g):
                    config.init_method(self.w13[expert])
                    config.output_layer_init_method(self.w2[expert])
                for bias in (self.b13, self.b2):
                    if bias is not None:
                        bias.zero_()

    def _parameter(self, shape: tuple[int, ...], partition_dim: int | None) -> torch.nn.Parameter:
        data = torch.empty(shape, dtype=self.config.params_dtype, device=torch.cuda.current_device())
        parameter = torch.nn.Parameter(data)
        # False: DDP reduces the gradient over the expert-data-parallel ranks. They are the data-parallel ones only
        # where experts are cut like all else (upstream looks at EP alone: with EP 1 and ETP below TP, ranks drift)
        p = self.config
        parameter.allreduce = (
            p.expert_model_parallel_size == 1 and p.expert_tensor_parallel_size == p.tensor_model_parallel_size
        )
        set_tensor_model_parallel_attributes(
            tensor=parameter, is_parallel=partition_dim is not None, dim=partition_dim or 0, stride=1
        )
        return parameter

    def quantize(self, recipe: str, dtype: torch.dtype) -> None:
        """Lets the products run in a recipe other than bf16. dtype: the float8 of rows and weights."""
        self.recipe, self.float8 = recipe, dtype
        self.caches = QuantizedWeight(recipe, dtype=dtype), QuantizedWeight(recipe, dtype=dtype)

    def choose(self) -> list[str]:
        """The implementations of both products in a recipe other than bf16. Raises UserError if there is none."""
        names = []
        for weight in (self.w13, self.w2):
            operands = weight.dtype, *weight.shape[1:], self.float8, self.float8
            names.append(registry.select(OP, self.recipe, weight.device.type, self.kernels, operands).name)
        return names

    def forward(self, rows_SD, ends_G, probs_S, *, splits_G: list[int] | None = None):
        """`[S, D]` rows sorted by local expert -> (`[S, D]` outputs times their routing weight, None)."""
        self.ran = self.recipe
        out_SD = expert_mlp(
            rows_SD,
            probs_S,
            ends_G,
            self.w13,
            self.w2,
            b13_GF=self.b13,
            b2_GD=self.b2 if self.etp_group.rank() == 0 else None,  # ranks are summed: add the bias once
            activation=self.activation,
            recipe=self.recipe,
            dtype=self.float8,
            caches=self.caches,
            kernels=self.kernels,
            fuse_wgrad_accumulation=hasattr(self.w13, "main_grad"),
            splits=splits_G,
            recompute=self.recompute if self.training else "none",
        )
        return out_SD, None

    def backward_dw(self) -> None:
        """Weight gradients are computed in backward itself: nothing is left to do."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Keys and global shapes of SequentialMLP: `experts.linear_fc1.weight` is `[E, 2F, D]`, cut on axis 0 by EP."""
        axis = len(sharded_offsets)
        ep_offset = (axis, self.ep_group.rank(), self.ep_group.size())
        etp_rank, etp = self.etp_group.rank(), self.etp_group.size()
        replica = (0, 0, self.expert_dp_group.rank())

        def sharded(key: str, tensor: torch.Tensor, *offsets, replica_id=replica) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{key}",
                tensor,
                *sharded_offsets,
                ep_offset,
                *offsets,
                replica_id=replica_id,
                prepend_axis_num=axis,
            )

        def gated(key: str, tensor: torch.nn.Parameter):
            if etp == 1:
                return sharded(key, tensor)

            # gate and up are cut each by itself; upstream's own factory cuts the first axis, which is the experts' here
            @torch.no_grad()
            def halves(name: str, both: torch.Tensor, replica_id, _) -> list[ShardedTensor]:
                return [
                    replace(
                        sharded(key, half, (axis + 1, number * etp + etp_rank, 2 * etp), replica_id=replica_id),
                        key=name,
                    )
                    for number, half in enumerate(both.chunk(2, dim=1))
                ]

            def joined(parts: list[torch.Tensor]) -> torch.Tensor:
                return torch.cat(parts, dim=1)

            return ShardedTensorFactory(f"{prefix}experts.{key}", tensor, halves, joined, replica)

        state = {
            f"{prefix}w13": gated("linear_fc1.weight", self.w13),
            f"{prefix}w2": sharded("linear_fc2.weight", self.w2, *([(axis + 2, etp_rank, etp)] if etp > 1 else [])),
        }
        if self.b13 is not None:
            state[f"{prefix}b13"] = gated("linear_fc1.bias", self.b13)
            state[f"{prefix}b2"] = sharded("linear_fc2.bias", self.b2, replica_id=(0, etp_rank, replica[2]))
        # each of SequentialMLP's linear layers has an extra state, empty without fp8, and asks for it when it loads
        for linear, expert in itertools.product(("linear_fc1", "linear_fc2"), range(self.num_local_experts)):
            number = self.ep_group.rank() * self.num_local_experts + expert
            state[f"{prefix}{linear}.{expert}.{_EXTRA}"] = make_sharded_object_for_checkpoint(
                None,
                f"{prefix}experts.{linear}.{_EXTRA}",
                (*sharded_offsets, (axis, number, self.ep_group.size() * self.num_local_experts)),
                (0, etp_rank, replica[2]),
            )
        return state

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(_EXTRA)]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _activation(config) -> ExpertActivation:
    if (card := getattr(config, "maniple_card", None)) is not None:
        return ExpertActivation.from_card(card.moe)
    # Megatron-LM's own arguments: plain SwiGLU, or the clamped form that its glu options describe
    import torch.nn.functional as F

    if not config.gated_linear_unit or config.activation_func is not F.silu:
        raise ValueError("Maniple's experts are SwiGLU: pass --swiglu")
    return ExpertActivation(limit=config.activation_func_clamp_value, up_offset=config.glu_linear_offset)
