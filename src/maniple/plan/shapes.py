"""What one rank computes of one micro-batch: tokens, widths and element sizes after every cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard
from maniple.plan.stages import Placement


@dataclass(frozen=True)
class Shapes:
    """T: tokens of this context-parallel rank; L: those of them that are here outside of products that are cut over
    TP (sequence parallelism); S: rows of the experts. Widths are this rank's own; `b` is bytes an element."""

    b: int
    B: int  # sequences
    length: int  # tokens of one sequence that are here: a part under context parallelism
    whole: int  # tokens of one whole sequence
    T: int
    L: int
    D: int
    V: int
    heads: int
    kv_heads: int
    dense_ffn: int
    shared_ffn: int
    expert_ffn: int
    local_experts: int
    rows: int  # chosen (token, expert) pairs of this rank's tokens
    sent: int  # rows of the buffer that is sent
    came: int  # and of the one that comes to this rank
    S: int
    paged: float  # of S, the share that is kept in pages for backward; 1: all of S is, as it is
    tensor: int
    context: int
    context_rank: int
    documents: bool = False  # kept apart

    def linear(self, inside: int, outside: int) -> int:
        """Bytes of the gradient of a weight `[outside, inside]`, in the weight's type."""
        return inside * outside * self.b


def padded_vocabulary(card: ModelCard, config: TrainConfig) -> int:
    """Rows of the embedding over all tensor-parallel ranks: a multiple of `model.vocab_size_multiple` and of TP."""
    multiple = math.lcm(config.model.vocab_size_multiple, config.parallel.tensor_parallel_size)
    return -(-card.vocab_size // multiple) * multiple


def shapes(
    config: TrainConfig, card: ModelCard, place: Placement, *, context_rank: int = 1, load: float = 1.0
) -> Shapes:
    """load: rows that come to this rank over those of an even load, at most what all ranks' tokens can send it; with
    `moe.buffer_factor` buffers are as large as that says, whatever the load.

    context_rank: among context-parallel ranks, whose masks differ; the first needs least, all others as much.
    """
    B = config.train.micro_batch_size
    length = config.data.sequence_length // place.context
    T = B * length
    L = T // place.tensor
    rows = L * card.moe.topk
    local = card.moe.num_experts // place.expert
    most = L * min(card.moe.topk, local)  # from one rank to one other
    sent, came, paged = rows, min(round(rows * load), place.expert * most), 1.0
    if config.moe.buffer_factor is not None:
        sent = came = place.expert * min(most, math.ceil(config.moe.buffer_factor * math.ceil(rows / place.expert)))
        if config.moe.pages_factor is not None:
            paged = min(1.0, config.moe.pages_factor * rows / came)
    return Shapes(
        b=2 if config.precision.dtype == "bf16" else 4,
        B=B,
        length=length,
        whole=config.data.sequence_length,
        T=T,
        L=L,
        D=card.hidden_size,
        V=padded_vocabulary(card, config) // place.tensor,
        heads=card.num_heads // place.tensor,
        kv_heads=card.num_kv_heads // place.tensor,
        dense_ffn=card.dense_ffn_size // place.tensor,
        shared_ffn=card.moe.shared_ffn_size // place.tensor,
        expert_ffn=card.moe.expert_ffn_size // place.expert_tensor,
        local_experts=local,
        rows=rows,
        sent=sent,
        came=came,
        S=came * place.expert_tensor,
        paged=paged,
        tensor=place.tensor,
        context=place.context,
        context_rank=min(context_rank, place.context - 1),
        documents=not config.data.attend_across_documents,
    )
