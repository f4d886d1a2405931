"""RMSNorm for the engine: torch's own, with the attributes that Megatron-Core's sequence parallelism reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """`x * weight / sqrt(mean(x^2) + eps)` over the last dimension (Zhang and Sennrich, 2019); fp32 inside.

    Built with Megatron-Core's `LayerNormBuilder` signature. The weight is kept in `config.params_dtype`.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device() if not config.use_cpu_initialization else None
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # under sequence parallelism each TP rank sees part of the tokens, so the gradient is summed over TP
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class FullWidthRMSNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads at once (MiniMax-M2), where Megatron-Core calls it with `[S, B, H, D]`.

    Raises ValueError under tensor parallelism, where a rank holds only some of the heads.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, *, num_heads: int) -> None:
        if config.tensor_model_parallel_size > 1:
            raise ValueError("qk_norm full_width needs all heads on a rank: set parallel.tensor_parallel_size=1")
        super().__init__(config, hidden_size * num_heads, eps)

    def forward(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_SBHD.flatten(-2)).view(x_SBHD.shape)
