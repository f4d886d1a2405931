"""A short continuation of a prompt by the model that has just been trained, at any layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.context import gather
from maniple.engines.megatron.model import settle


@torch.no_grad()
def generate(chunks, prompt: list[int], length: int, vocab_size: int, job: TrainConfig, device, *, temperature=0.8):
    """`prompt` and `length` more token ids, drawn at `temperature` with the job's seed; the same on every rank.

    Each token runs all before it anew (there is no cache): it is for a look, not for serving.
    """
    longest, group = job.data.sequence_length, parallel_state.get_context_parallel_group()
    # a few sizes only, which tensor- and context-parallel sizes divide
    multiple = math.lcm(64, group.size() * math.lcm(2, job.parallel.tensor_parallel_size))
    tokens = list(prompt[:longest]) or [0]
    settle(chunks)
    generator = torch.Generator().manual_seed(job.train.seed)
    for chunk in chunks:
        chunk.eval()
    for _ in range(length):
        context = tokens[-longest:]
        size = min(longest, -(-len(context) // multiple) * multiple)
        # padding comes after the context, where a causal model cannot look
        ids_BS = torch.tensor([context + [0] * (size - len(context))], device=device)
        positions_BS = torch.arange(size, device=device)[None]

        def forward(_, model, ids_BS=ids_BS, positions_BS=positions_BS):
            logits_BSV = model(input_ids=ids_BS, position_ids=positions_BS, attention_mask=None)
            return logits_BSV, lambda output, non_loss_data=True: output

        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None if len(chunks) == 1 else [None] * len(chunks),
            model=chunks,
            num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
            seq_length=size,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        chosen = torch.zeros(1, dtype=torch.int64, device=device)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            logits_SBV = gather(outputs[0].transpose(0, 1), group)
            logits_V = tensor_parallel.gather_from_tensor_model_parallel_region(logits_SBV[len(context) - 1, 0])
            weights_V = torch.softmax(logits_V[:vocab_size].float().cpu() / temperature, dim=-1)
            chosen[0] = torch.multinomial(weights_V, 1, generator=generator).item()
        # the last rank of the world is in the last stage; its draw is everyone's
        dist.broadcast(chosen, src=dist.get_world_size() - 1)
        tokens.append(int(chosen.item()))
    for chunk in chunks:
        chunk.train()
    return tokens
