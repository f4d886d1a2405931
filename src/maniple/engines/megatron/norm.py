"""RMSNorm for the engine: torch's own, with the attributes that Megatron-Core's sequence parallelism reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from maniple.kernels.forgotten import active, forget


class RMSNorm(torch.nn.Module):
    """`x * weight / sqrt(mean(x^2) + eps)` over the last dimension (Zhang and Sennrich, 2019); fp32 inside.

    Built with Megatron-Core's `LayerNormBuilder` signature. The weight is kept in `config.params_dtype`. With
    `recomputed` nothing keeps the output for backward, where it is computed again from the input.
    """

    recomputed = False

    def __init__(self, config, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device() if not config.use_cpu_initialization else None
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # under sequence parallelism each TP rank sees part of the tokens, so the gradient is summed over TP
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        if self.recomputed and active():
            kept = x.detach()
            forget([out], lambda: [F.rms_norm(kept, (kept.shape[-1],), self.weight, self.eps)])
        return out


class LatentRMSNorm(RMSNorm):
    """RMSNorm of MLA's latents, whose epsilon is 1e-6 whatever the model's other norms have (DeepSeek's own code, and
    transformers' modeling_deepseek_v3.py)."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, hidden_size, 1e-6)


class FullWidthRMSNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads at once (MiniMax-M2), where Megatron-Core calls it with `[S, B, H, D]`,
    H heads of this rank.

    Under tensor parallelism the sum of squares is one over all ranks. Each rank keeps the whole weight and uses its
    heads' part: Megatron-Core sums the gradients of whatever is called `q_layernorm` or `k_layernorm` over the ranks
    (finalize_model_grads.py, `_allreduce_non_tensor_model_parallel_grads`), which makes them whole.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, *, num_heads: int) -> None:
        super().__init__(config, hidden_size * num_heads, eps)

    def forward(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        x = x_SBHD.flatten(-2)
        width, here = self.weight.shape[0], x.shape[-1]
        if here == width:
            return super().forward(x).view(x_SBHD.shape)
        squares = reduce_from_tensor_model_parallel_region(x.float().square().sum(-1, keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)  # in backward each rank's output has a part in it
        weight = self.weight[parallel_state.get_tensor_model_parallel_rank() * here :][:here]
        out = x.float() * torch.rsqrt(squares / width + self.eps) * weight.float()
        return out.to(x.dtype).view(x_SBHD.shape)
