"""What is kept of one parameter all the time, in bytes, and which of it in host memory."""

from __future__ import annotations

from maniple.config.schema import TrainConfig

MAIN, MOMENTS = "main parameters", "moments"


def states(config: TrainConfig) -> dict[str, int]:
    """By kind: fp32 gradients; main parameters apart where they are fp32 beside bf16 ones; both moments."""
    weight = 2 if config.precision.dtype == "bf16" else 4
    apart = weight == 2 and config.optimizer.main_params_dtype == "fp32"
    return {
        "parameters": weight,
        "gradients": 4,
        MAIN: 4 if apart else 0,
        MOMENTS: 8 if config.optimizer.moments_dtype == "fp32" else 4,
    }


def hosted(config: TrainConfig) -> dict[str, float]:
    """Of main parameters and moments what `optimizer.offload_fraction` keeps in host memory.

    The engine takes whole tensors, which may be a little more. Without the distributed optimizer main
    parameters are Megatron-Core's, and stay.
    """
    kinds = (MAIN, MOMENTS) if config.parallel.distributed_optimizer else (MOMENTS,)
    kept = states(config)
    return {kind: config.optimizer.offload_fraction * kept[kind] for kind in kinds}
