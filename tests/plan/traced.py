"""Jobs whose memory is planned by formula and traced by a dry run: name, keys, ranks of the world, traced ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

_BATCH = ["data.sequence_length=512", "train.micro_batch_size=2", "train.global_batch_size=64"]
_SMALL = ["model.overrides.vocab_size=4096"]  # so that layers are the fullest, and not the loss
_FULL = ["recompute.granularity=full"]
_SELECTIVE = ["recompute.granularity=selective"]


def _of(card: str, layers: int, *more: str | list[str], experts: int = 8) -> list[str]:
    words = [f"model.card={card}", f"model.overrides.num_layers={layers}", *_BATCH]
    words.append(f"parallel.expert_parallel_size={experts}")
    for each in more:
        words += [each] if isinstance(each, str) else each
    return words


_QWEN, _DEEPSEEK = "qwen3-30b-a3b", "deepseek-v3"
_TP = "parallel.tensor_parallel_size=2"
_PP = "parallel.pipeline_parallel_size=4"
_FEW = "model.overrides.moe.num_experts=16"
_CP = "parallel.context_parallel_size=2"
_TIED = "model.overrides.tied_embeddings=true"
# what two passes that run together need at once is a bound: not less, and not much more
ROUGH = {"qwen3, exchange overlapped": 0.05, "deepseek-v3, exchange overlapped": 0.05}
CASES: dict[str, tuple[list[str], int, tuple[int, ...]]] = {
    "qwen3, logits": (_of(_QWEN, 2), 8, (0,)),
    "qwen3, fused loss": (_of(_QWEN, 2, "train.loss=fused", "train.micro_batch_size=8"), 8, (0,)),
    "qwen3, logits kept": (_of(_QWEN, 2, "train.loss=fused_kept", "train.micro_batch_size=2"), 8, (0,)),
    "qwen3, layers": (_of(_QWEN, 3, _SMALL), 8, (0,)),
    "qwen3, all experts here": (_of(_QWEN, 2, _SMALL, _FEW, experts=1), 2, (1,)),
    "qwen3, rows gathered again": (
        _of(_QWEN, 2, _SMALL, _FEW, _SELECTIVE, "recompute.modules=[permute,norm]", experts=1),
        2,
        (0,),
    ),
    "qwen3, tensor-parallel": (_of(_QWEN, 2, _SMALL, _TP), 8, (0,)),
    "qwen3, expert-tensor": (
        _of(_QWEN, 2, _SMALL, _TP, "parallel.expert_tensor_parallel_size=2", experts=4),
        8,
        (3,),
    ),
    "qwen3, context": (_of(_QWEN, 2, _SMALL, "parallel.context_parallel_size=2"), 8, (0, 1)),
    "qwen3, recomputed": (_of(_QWEN, 4, _SMALL, _FULL), 8, (0,)),
    "qwen3, one recomputed": (_of(_QWEN, 3, _SMALL, _FULL, "recompute.num_layers=1"), 8, (0,)),
    "qwen3, layers by number": (_of(_QWEN, 3, _SMALL, _FULL, "recompute.layers=[0,2]"), 8, (0,)),
    "qwen3, experts recomputed": (_of(_QWEN, 3, _SMALL, _SELECTIVE, "recompute.modules=[moe]"), 8, (0,)),
    "qwen3, parts recomputed": (
        _of(_QWEN, 3, _SMALL, _SELECTIVE, "recompute.modules=[norm,moe_act,core_attn]"),
        8,
        (0,),
    ),
    "qwen3, only rows kept": (_of(_QWEN, 3, _SMALL, _SELECTIVE, "recompute.modules=[experts]"), 8, (0,)),
    "qwen3, fp8_block": (_of(_QWEN, 3, _SMALL, "precision.recipe=fp8_block"), 8, (0,)),
    "qwen3, pipeline": (_of(_QWEN, 4, _SMALL, _FEW, _PP, experts=2), 8, (2, 6)),
    "qwen3, interleaved": (
        _of(_QWEN, 8, _SMALL, _FEW, _PP, "parallel.virtual_pipeline_size=2", experts=2),
        8,
        (6,),
    ),
    "qwen3, exchange overlapped": (
        _of(
            _QWEN,
            4,
            _SMALL,
            _FEW,
            *("parallel.pipeline_parallel_size=2", "parallel.virtual_pipeline_size=2", "moe.overlap_exchange=true"),
            experts=2,
        ),
        4,
        (0, 2),
    ),
    "deepseek-v3": (_of(_DEEPSEEK, 4, _SMALL, _FEW), 8, (0,)),
    "deepseek-v3, tensor-parallel": (_of(_DEEPSEEK, 4, _SMALL, _FEW, _TP), 8, (0,)),
    "deepseek-v3, recomputed": (_of(_DEEPSEEK, 4, _SMALL, _FEW, _FULL), 8, (0,)),
    "deepseek-v3, modules": (
        _of(_DEEPSEEK, 4, _SMALL, _FEW, _SELECTIVE, "recompute.modules=[mlp,shared_experts]"),
        8,
        (0,),
    ),
    "deepseek-v3, layout": (
        _of(_DEEPSEEK, 5, _FEW, _PP, "parallel.pipeline_layout='Et|tt|t|tmL'", experts=2),
        8,
        (4, 6),
    ),
    "gpt-oss, windows and sinks": (_of("gpt-oss-20b", 2, _SMALL), 8, (0,)),
    "gpt-oss, documents": (_of("gpt-oss-20b", 2, _SMALL, "data.attend_across_documents=false"), 8, (0,)),
    "minimax-m2, tensor-parallel": (_of("minimax-m2", 2, _SMALL, _TP), 8, (0,)),
    "mixtral, fp32": (_of("mixtral-8x7b", 1, _SMALL, "precision.dtype=fp32"), 8, (0,)),
    "mixtral, one optimizer": (_of("mixtral-8x7b", 1, _SMALL, "parallel.distributed_optimizer=false"), 8, (0,)),
    "qwen3, states in host memory": (_of(_QWEN, 2, _SMALL, "optimizer.offload_fraction=1"), 8, (0,)),
    "qwen3, bf16 states": (
        _of(_QWEN, 2, _SMALL, "optimizer.main_params_dtype=bf16", "optimizer.moments_dtype=bf16"),
        8,
        (0,),
    ),
    "qwen3, one dtype of states in host memory": (
        _of(_QWEN, 2, _SMALL, "optimizer.offload_fraction=1", "optimizer.moments_dtype=bf16"),
        8,
        (0,),
    ),
    "qwen3, gradients and gathers overlapped": (
        _of(_QWEN, 3, _SMALL, "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
        8,
        (0,),
    ),
    "qwen3, exchange with itself": (_of(_QWEN, 2, _SMALL, _FEW, "moe.dispatcher=all_to_all", experts=1), 2, (0,)),
    "qwen3, expert-tensor without tensor-parallel": (
        _of(_QWEN, 2, _SMALL, _FEW, "parallel.expert_tensor_parallel_size=2", experts=2),
        8,
        (0,),
    ),
    "qwen3, buffers": (_of(_QWEN, 3, _SMALL, _FEW, "moe.buffer_factor=1.5", experts=2), 8, (0,)),
    "qwen3, pages": (
        _of(_QWEN, 3, _SMALL, _FEW, "moe.buffer_factor=2", "moe.pages_factor=1.25", experts=2),
        8,
        (0,),
    ),
    "qwen3, fp8": (_of(_QWEN, 3, _SMALL, "precision.recipe=fp8"), 8, (0,)),
    "qwen3, fp8_block but for two layers": (
        _of(
            _QWEN,
            4,
            _SMALL,
            *("precision.recipe=fp8_block", "precision.bf16_first_layers=1", "precision.bf16_last_layers=1"),
        ),
        8,
        (0,),
    ),
    "qwen3, mxfp8": (_of(_QWEN, 3, _SMALL, "precision.recipe=mxfp8"), 8, (0,)),
    "qwen3, mxfp8, few tokens": (_of(_QWEN, 3, _SMALL, _TP, "precision.recipe=mxfp8"), 8, (0,)),
    "qwen3, tied": (_of(_QWEN, 2, _TIED), 8, (0,)),
    "qwen3, tied, fused loss": (_of(_QWEN, 2, _TIED, "train.loss=fused", "train.micro_batch_size=8"), 8, (0,)),
    "qwen3, tied, pipeline": (_of(_QWEN, 4, _FEW, _TIED, _PP, experts=2), 8, (0, 6)),
    "deepseek-v3, up-projections": (
        _of(_DEEPSEEK, 4, _SMALL, _FEW, _SELECTIVE, "recompute.modules=[mla_up_proj]"),
        8,
        (0,),
    ),
    "deepseek-v3, up-projections, tensor-parallel": (
        _of(_DEEPSEEK, 4, _SMALL, _FEW, _TP, _SELECTIVE, "recompute.modules=[mla_up_proj,norm]"),
        8,
        (0,),
    ),
    "deepseek-v3, up-projections and core": (
        _of(_DEEPSEEK, 4, _SMALL, _FEW, _CP, _SELECTIVE, "recompute.modules=[mla_up_proj,core_attn]"),
        8,
        (0, 1),
    ),
    "deepseek-v3, fp8_block": (_of(_DEEPSEEK, 4, _SMALL, _FEW, "precision.recipe=fp8_block"), 8, (0,)),
    "deepseek-v3, all layers dense": (_of(_DEEPSEEK, 3, _SMALL, _FEW), 8, (0,)),
    "deepseek-v3, two depths": (_of(_DEEPSEEK, 4, _SMALL, _FEW, "model.overrides.num_mtp_layers=2"), 8, (0,)),
    "deepseek-v3, embedding": (_of(_DEEPSEEK, 4, _FEW, _FULL, "train.loss=fused", "train.micro_batch_size=1"), 8, (0,)),
    "deepseek-v3, two depths, embedding": (
        _of(
            _DEEPSEEK,
            4,
            _FEW,
            _FULL,
            *("recompute.layers=[0,1,2,3,4,5]", "train.loss=fused", "train.micro_batch_size=1"),
            "model.overrides.num_mtp_layers=2",
        ),
        8,
        (0,),
    ),
    "deepseek-v3, tied, fused loss": (
        _of(_DEEPSEEK, 4, _FEW, _TIED, "model.overrides.vocab_size=65536", "train.loss=fused"),
        8,
        (0,),
    ),
    "deepseek-v3, exchange overlapped": (
        _of(_DEEPSEEK, 4, _SMALL, _FEW, "moe.overlap_exchange=true", experts=2),
        4,
        (0,),
    ),
    "qwen3, only tokens kept": (
        _of(_QWEN, 3, _SMALL, _FEW, _SELECTIVE, "recompute.modules=[permute,experts]", experts=1),
        2,
        (0,),
    ),
    "qwen3, fp8_block, core and norms": (
        _of(_QWEN, 3, _SMALL, _SELECTIVE, "recompute.modules=[core_attn,norm]", "precision.recipe=fp8_block"),
        8,
        (0,),
    ),
    "glm-4.5-air": (_of("glm-4.5-air", 3, _SMALL, _FEW), 8, (0,)),
    "gpt-oss, documents, context": (
        _of("gpt-oss-20b", 2, _SMALL, _CP, "data.attend_across_documents=false"),
        8,
        (0, 1),
    ),
}


WORLD = 8
# one of each architecture
CARDS = (
    *("deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-4.5-air", "glm-4.5", "minimax-m2", "qwen3-30b-a3b"),
    *("gpt-oss-20b", "mixtral-8x7b"),
)


def cuts(card: str, layers: int, depths: int, biases: bool) -> dict[str, list[str]]:
    """Every kind of cut of a tiny card, by name."""
    small = [f"model.card={card}", "model.variant=tiny", "train.global_batch_size=16"]
    layout = f"Et*{layers - 1}|t{'m' * depths}L"
    pipeline = ["parallel.pipeline_parallel_size=2", f"parallel.pipeline_layout='{layout}'"]
    experts = ["parallel.expert_parallel_size=2"]
    every = {
        "experts": [*small, *experts],
        "pipeline": [*small, *pipeline, *experts, _TP],
    }
    if not biases:
        every["expert tensors"] = [*small, _TP, *experts, "parallel.expert_tensor_parallel_size=2"]
    return every


def numbers(rank: int, world_size: int) -> dict[str, dict[str, list[int]]]:
    """In a process of its own: parameters that the engine builds, by card, cut and pipeline rank."""
    from tests.engines import jobs

    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.engines.megatron import model
    from maniple.engines.megatron.dry_run.meta import stand_in
    from maniple.models import load_card

    found: dict[str, dict[str, list[int]]] = {}
    with jobs.no_process_group():
        for name in CARDS:
            tiny = load_card(name).tiny()
            found[name] = {}
            for cut, words in cuts(name, tiny.num_layers, tiny.num_mtp_layers, tiny.moe.linear_bias).items():
                job = load(None, words).config
                found[name][cut] = []
                for place in range(job.parallel.pipeline_parallel_size):
                    first = place * WORLD // job.parallel.pipeline_parallel_size
                    with stand_in(job, first, WORLD):
                        chunks = model.build_chunks(resolve_card(job), job, perform_initialization=False)
                        found[name][cut].append(sum(p.numel() for chunk in chunks for p in chunk.parameters()))
    return found


def traces(rank: int, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """In a process of its own: a dry run of each case's ranks."""
    from tests.engines import jobs

    from maniple.config.check import check, resolve_card
    from maniple.config.load import load
    from maniple.engines.megatron.dry_run import one_rank

    found: dict[str, list[dict[str, Any]]] = {}
    with jobs.no_process_group():
        for name, (words, world, ranks) in CASES.items():
            job = load(None, words).config
            card = resolve_card(job)
            check(job, card, world)
            found[name] = [dataclasses.asdict(one_rank.trace(job, card, each, world)) for each in ranks]
    return found
