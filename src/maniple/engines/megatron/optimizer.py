"""Adam over Megatron-Core's buffers (distributed or not) and the learning-rate schedule."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import adam

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_optimizer(chunks: list, job: TrainConfig) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Optimizer with main parameters and moments in the job's dtypes, and its schedule in optimizer steps.

    It is `adam.py`'s on a GPU, where either is not fp32, and where some are in host memory; else torch's AdamW in
    upstream's classes.
    """
    section, model_config = job.optimizer, chunks[0].config
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.learning_rate,
        min_lr=section.min_learning_rate,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.epsilon,
        clip_grad=section.clip_grad,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=job.parallel.distributed_optimizer,
        overlap_param_gather=job.parallel.overlap_param_gather,
    )
    overrides = get_standard_config_overrides(config)  # vectors and `*.bias` do not decay
    # the biases of stacked experts are matrices under other names
    overrides[ParamKey(name=("*.b13", "*.b2"))] = ParamGroupOverride(wd_mult=0.0)
    main, moments = _DTYPES[section.main_params_dtype], _DTYPES[section.moments_dtype]
    if main == moments == torch.float32 and not _on_gpu(chunks) and not section.offload_fraction:
        optimizer = get_megatron_optimizer(config, chunks, config_overrides=overrides, use_gloo_process_groups=False)
        for part in parts(optimizer):
            _fuse(part.optimizer)
    else:
        optimizer = adam.build(
            config, chunks, overrides, main=main, moments=moments, offload_fraction=section.offload_fraction
        )
        _scale_later(chunks, optimizer)
    steps = job.train.steps
    warmup = min(section.warmup_steps, steps - 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.learning_rate,
        min_lr=min(section.min_learning_rate, section.learning_rate),
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style=section.decay_style,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, (steps - warmup) // 5) if section.decay_style == "WSD" else None,
        lr_wsd_decay_style="linear" if section.decay_style == "WSD" else None,
    )
    scheduler.step(0)
    return optimizer, scheduler


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is made of: of dense parameters, and of experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer) -> None:
    """Makes the moments, which torch's Adam makes in its first step."""
    for part in parts(optimizer):
        if part.optimizer is not None:
            part.init_state_fn(part.optimizer, part.config)


def in_host_memory(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """The states that `optimizer.offload_fraction` keeps there."""
    ours = [part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, adam.Adam)]
    return [state[name] for one in ours for weight, state in one.state.items() for name in one.hosted(weight)]


def grad_norm(optimizer: ChainedOptimizer) -> float:
    """The norm of the prepared gradients over the whole model. Collective; the host waits once.

    As upstream's `get_grad_norm`, which without Apex or Transformer Engine waits for each gradient's norm by itself
    (megatron/core/utils.py, `local_multi_tensor_l2_norm`).
    """
    every = parts(optimizer)
    if len(every) == 1 or optimizer.grads_states_parallel_group_is_shared():  # one sum, however many this rank has
        gradients = [gradient for part in every for gradient in part.get_grads_for_grad_norm()]
        sums = [(gradients, optimizer.get_grad_stats_parallel_group())]
    else:
        sums = [(part.get_grads_for_grad_norm(), part.get_grad_stats_parallel_group()) for part in every]
    total = torch.zeros((), device=torch.cuda.current_device())
    for gradients, group in sums:
        square = torch.zeros_like(total)
        if gradients:
            square += torch.stack(torch._foreach_norm(gradients)).square().sum()
        torch.distributed.all_reduce(square, group=group)
        total += square
    norm, factor = total.sqrt(), getattr(optimizer, "scale_to_come", None)
    return float(norm if factor is None else norm * factor)


def clip(optimizer: ChainedOptimizer, norm: float) -> None:
    """Scales the prepared gradients down to a norm of `clip_grad`, where theirs is larger; ours as they are read."""
    factor = getattr(optimizer, "scale_to_come", None)
    for part in parts(optimizer):
        most = part.config.clip_grad
        scale = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
        if isinstance(part.optimizer, adam.Adam):
            part.optimizer.grad_scale = scale if factor is None else factor * scale
        elif scale < 1.0 and (gradients := [p.grad for p in part.get_parameters() if p.grad is not None]):
            torch._foreach_mul_(gradients, scale)


def _on_gpu(chunks: list) -> bool:
    return any(weight.is_cuda for chunk in chunks for weight in chunk.parameters())


def _scale_later(chunks: list, optimizer: ChainedOptimizer) -> None:
    """Upstream divides all gradients by the batch's tokens in a pass of its own (finalize_model_grads.py), over numbers
    that the host does not know, at half the speed of memory. Here the factor is kept: it multiplies the norm, and the
    gradients when Adam reads them. It is one for all chunks. Who calls upstream's `step` gets the same."""
    optimizer.scale_to_come = None

    def keep(factor: torch.Tensor) -> None:
        optimizer.scale_to_come = factor.float().reshape(())

    def step() -> tuple[bool, float, None]:
        optimizer.prepare_grads()
        norm = grad_norm(optimizer)
        clip(optimizer, norm)
        return optimizer.step_with_ready_grads(), norm, None

    for chunk in chunks:
        chunk.scale_gradients = keep
    optimizer.get_grad_norm, optimizer.step = partial(grad_norm, optimizer), step


def _fuse(optimizer: torch.optim.Optimizer | None) -> None:
    """One pass over weights, gradients and moments where torch's Adam has a kernel for it: without Apex or Transformer
    Engine upstream takes that class with its defaults (optimizer/__init__.py), a dozen passes."""
    if optimizer is None or type(optimizer) is not torch.optim.AdamW:  # None: a rank without parameters
        return
    for group in optimizer.param_groups:
        if not any(weight.is_meta for weight in group["params"]):  # as a dry run has them
            group["fused"], group["foreach"] = True, False
