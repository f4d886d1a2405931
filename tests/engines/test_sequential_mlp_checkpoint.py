"""Checkpoints of upstream's own MoE model, with its experts one by one, load into ours and back, and mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

# dense layer, sigmoid router with bias, shared expert, biases of q, k and v; softmax router, norms of q and k; neither
MODELS = ("glm-4.5", "qwen3-30b-a3b", "mixtral-8x7b")


def exchange(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """In one process, or in two expert-parallel ones that only save ours: what became of outputs and tensors."""
    return {name: _exchange(name, world_size, folder / name) for name in MODELS}


def _exchange(name: str, world_size: int, folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from tests.engines import jobs

    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.checkpoint import writer as checkpoint_writer

    checkpoint_writer._collect_results_in_this_process()  # this test's processes may not start others
    folder.mkdir(exist_ok=True)
    card = jobs.tiny_card(name, num_mtp_layers=0)  # upstream's MTP layer has no such norm keys
    job = jobs.make_job(folder, "job", parallel={"expert_parallel_size": world_size})
    parallel.start(job, parallel.pick_device(job))

    def save(model, place: str) -> None:
        (folder / place).mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(_sharded(model), str(folder / place))

    def load(model, place: str) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        state = dist_checkpointing.load(_sharded(model), str(folder / place), strict=StrictHandling.RAISE_ALL)
        model.load_state_dict(state, strict=True)

    report: dict[str, Any] = {}
    try:
        if world_size > 1:
            save(_ours(card, job, seed=3), "ours-ep2")
            return report
        theirs, ours = _theirs(card, job, seed=1), _ours(card, job, seed=2)
        save(theirs, "theirs")
        load(ours, "theirs")
        report["theirs in ours"] = _compare(ours, theirs, card)
        ours = _ours(card, job, seed=2)
        save(ours, "ours")
        load(theirs, "ours")
        report["ours in theirs"] = _compare(theirs, ours, card)
        load(theirs, "ours-ep2")
        load(ours, "ours-ep2")
        report["ours of two in both"] = _compare(ours, theirs, card)
        report["kinds"] = sorted({type(module).__name__ for module in theirs.modules()})
    finally:
        parallel.stop_groups()
    return report


def _sharded(model) -> dict[str, Any]:
    from megatron.core import parallel_state

    return model.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )


def _ours(card, job, seed: int):
    from maniple.engines.megatron import model

    return _drawn(model.build_chunks(card, job)[0], seed)


def _theirs(card, job, seed: int):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from maniple.engines.megatron.transformer import transformer_config

    config = transformer_config(card, job)
    config.moe_grouped_gemm = False
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=card.vocab_size,
        max_sequence_length=job.data.sequence_length,
        position_embedding_type="rope",
        rotary_percent=card.rope.partial,
        rotary_base=card.rope.base,
        share_embeddings_and_output_weights=card.tied_embeddings,
    )
    return _drawn(model, seed)


@torch.no_grad()
def _drawn(model, seed: int):
    """Every weight at unit scale, norms, biases and the balancing bias too."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(seed + 100 * parallel_state.get_expert_model_parallel_rank())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "loss_sums" not in name and "inv_freq" not in name:
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator) + ("norm" in name))
    return model


@torch.no_grad()
def _compare(got, wanted, card) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    def tensors(model) -> dict[tuple, torch.Tensor]:
        state = _sharded(model)
        apply_factories(state)
        whole: dict[str, torch.Tensor] = {}
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                place = tuple(slice(o, o + n) for o, n in zip(part.global_offset, _local(part), strict=True))
                whole.setdefault(part.key, torch.full(part.global_shape, float("nan")))[place] = part.data
        return whole

    a, b = tensors(got), tensors(wanted)
    ids_BS = torch.randint(0, card.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    positions_BS = torch.arange(24).expand(2, -1)
    mask_SS = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    out, reference = (model.eval()(ids_BS, positions_BS, mask_SS) for model in (got, wanted))
    return {
        "keys": sorted(set(a) ^ set(b)),
        "tensors": len(a),
        "different": [key for key in a if key in b and not torch.equal(a[key], b[key])],
        "error": float((out - reference).abs().max() / reference.abs().max()),
    }


def _local(part) -> tuple[int, ...]:
    """A shard's shape with the axes that its tensor lacks."""
    return (1,) * part.prepend_axis_num + tuple(part.local_shape)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(exchange, 2, folder, timeout=400)
    return run_ranks(exchange, 1, folder, timeout=400)[0]


@pytest.mark.parametrize("way", ["theirs in ours", "ours in theirs", "ours of two in both"])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_the_same_bits_and_mean_the_same(reports, name, way):
    report = reports[name][way]
    assert not report["keys"]
    assert report["tensors"] > 15
    assert not report["different"]
    assert report["error"] <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_other_model_is_upstreams(reports, name):
    assert {"SequentialMLP", "MoELayer", "TopKRouter", "DotProductAttention"} <= set(reports[name]["kinds"])
    assert not {"GroupedExperts", "ManipleMoELayer", "SDPAttention"} & set(reports[name]["kinds"])
