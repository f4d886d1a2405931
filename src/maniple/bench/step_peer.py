"""transformers' training step, for `whole_step`: `grouped_mm` experts, SDPA, fused AdamW, everything in bf16.

All in bf16, moments too, is the fastest that a user can do with it: an update reads and writes 14 bytes a parameter,
where fp32 main parameters, moments and gradients take 30. A ratio to it is so much harder to reach.
"""

from __future__ import annotations

from typing import Any

import torch

from maniple.bench.whole_step import PEER, Plan, batches
from maniple.metrics import expert_balance
from maniple.models.huggingface import config_of


class Peer:
    """Its model of the plan's card with random weights. checkpointing: layers are recomputed in the backward pass."""

    name, recipe = PEER, "bf16"

    def __init__(self, plan: Plan, *, checkpointing: bool = False) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.plan = plan
        recomputed = ", layers recomputed since they did not fit" if checkpointing else ""
        self.note = f"transformers {transformers.__version__}: bf16 weights, gradients and moments{recomputed}"
        fields = config_of(plan.card)
        torch.manual_seed(plan.seed)
        with torch.device(plan.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**fields),
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                experts_implementation="grouped_mm",
            ).train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.batches = batches(plan)

    def step(self) -> torch.Tensor:
        loss = torch.zeros((), device=self.plan.device)
        for _ in range(self.plan.micro_batches):
            tokens, labels = (x.to(self.plan.device, non_blocking=True) for x in next(self.batches))
            found = self.model(input_ids=tokens, shift_labels=labels, labels=labels, use_cache=False).loss
            (found / self.plan.micro_batches).backward()
            loss += found.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss / self.plan.micro_batches

    @torch.no_grad()
    def facts(self) -> dict[str, Any]:
        """`imbalance`, of one micro-batch: how unevenly experts are loaded changes what products take."""
        counts: list[torch.Tensor] = []

        def count(module, inputs, output) -> None:
            counts.append(torch.bincount(output[2].flatten(), minlength=self.plan.card.moe.num_experts))

        routers = [module for module in self.model.modules() if type(module).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(count) for router in routers]
        self.model(input_ids=next(self.batches)[0].to(self.plan.device), logits_to_keep=1, use_cache=False)
        for hook in hooks:
            hook.remove()
        return {"imbalance": expert_balance(torch.stack(counts)).overall if counts else None}

    def close(self) -> None:
        del self.model, self.optimizer, self.batches
