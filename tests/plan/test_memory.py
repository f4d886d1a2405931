"""What moves memory, and what does not: states by hand, invariants that public estimators broke, measured peaks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.hardware import load_gpu
from maniple.models import counting
from maniple.plan import memory, parameters
from maniple.plan.imbalance import BALANCED, Imbalance
from maniple.plan.memory_schedule import passes
from maniple.plan.profile import MANIPLE, profile_of
from maniple.plan.stages import place

ROOT = Path(__file__).parents[2]
QWEN = ["model.card=qwen3-30b-a3b", "data.sequence_length=1024", "train.global_batch_size=64"]
DEEPSEEK = ["model.card=deepseek-v3", "data.sequence_length=1024", "train.global_batch_size=64"]
PARTS = ("attention", "norms", "dense_mlp", "router", "routed_experts", "shared_experts")


def plan(words: list[str], world: int = 8, profile=MANIPLE, imbalance: Imbalance = BALANCED, file: Path | None = None):
    job = load(file, words).config
    return memory.of_job(job, resolve_card(job), world, profile, imbalance=imbalance)


def ep(size: int) -> str:
    return f"parallel.expert_parallel_size={size}"


def test_all_ranks_together_hold_the_model():
    job = load(
        None, [*DEEPSEEK, "parallel.pipeline_parallel_size=2", "parallel.pipeline_layout='Et*30|t*31,mL'"]
    ).config
    card = resolve_card(job)
    where = place(job, card, 2)
    held: Counter[str] = Counter()
    for rank in range(2):
        held.update(parameters.of_rank(job, card, where, rank).by_component)
    counted = counting.count(card)
    layers = [*counted.layers, *counted.mtp_layers]
    for part in PARTS:
        assert held[part] == sum(layer[part] for layer in layers) + (card.hidden_size if part == "norms" else 0)
    assert held["embedding"] == 2 * counted.embedding  # MTP's own on the last rank
    assert held["head"] == counted.head
    assert held["mtp"] == sum(layer["mtp_norms"] + layer["mtp_projection"] for layer in counted.mtp_layers)


def test_experts_are_cut_by_expert_and_expert_tensor_ranks_and_not_by_tensor_ranks():
    """As one estimator did: megatron-lm issue 4050."""
    base = [*QWEN, "parallel.tensor_parallel_size=2"]
    whole = plan([*base, ep(1)])[0].parameters.experts["routed_experts"]
    assert whole == 48 * 128 * 3 * 2048 * 768
    assert plan([*base, ep(4)])[0].parameters.experts["routed_experts"] == whole // 4
    both = plan([*base, ep(4), "parallel.expert_tensor_parallel_size=2"])[0]
    assert both.parameters.experts["routed_experts"] == whole // 8
    alone = plan([*QWEN, ep(1)])[0].parameters.dense["attention"]
    norms = 48 * 2 * 128
    assert plan([*base, ep(1)])[0].parameters.dense["attention"] == (alone - norms) // 2 + norms


def test_states_are_cut_each_over_its_own_ranks():
    rank = plan([*QWEN, ep(8), "parallel.tensor_parallel_size=2"], 32)[0]
    dense, experts = sum(rank.parameters.dense.values()), sum(rank.parameters.experts.values())
    assert rank.states["parameters"] == 2 * (dense + experts)
    assert rank.states["gradients"] == 4 * (dense + experts)
    own = dense // 16 + experts // 4  # data-parallel 16; the same experts are on 4 ranks
    assert rank.states["main parameters"] == pytest.approx(4 * own, abs=16)
    assert rank.states["moments"] == pytest.approx(8 * own, abs=16)
    whole = plan([*QWEN, ep(8), "parallel.tensor_parallel_size=2", "parallel.distributed_optimizer=false"], 32)[0]
    assert whole.states["moments"] == 8 * (dense + experts)


def test_dtypes_of_the_states():
    small = ["model.variant=tiny", *QWEN]
    each = plan([*small, "precision.dtype=fp32"], 1)[0]
    assert each.states["main parameters"] == 0
    assert each.states["parameters"] == each.states["gradients"] == 4 * each.parameters.total
    words = ["optimizer.main_params_dtype=bf16", "optimizer.moments_dtype=bf16"]
    half = plan([*small, *words], 1)[0]
    assert half.states["main parameters"] == 0
    assert half.states["moments"] == 4 * half.parameters.total


def test_states_in_host_memory_leave_the_device():
    base = [*QWEN, ep(8)]
    usual, away = plan(base)[0], plan([*base, "optimizer.offload_fraction=0.25"])[0]
    for kind in ("main parameters", "moments"):
        assert away.host[kind] == pytest.approx(usual.states[kind] / 4, abs=1)
        assert away.host[kind] + away.states[kind] == usual.states[kind]
    assert (usual.host_bytes, usual.peak - away.peak) == (0, away.host_bytes)
    # Megatron-Core's own main parameters stay
    whole = plan([*base, "optimizer.offload_fraction=1", "parallel.distributed_optimizer=false"])[0]
    assert (whole.states["main parameters"], whole.states["moments"]) == (4 * whole.parameters.total, 0)
    # where hardly anything is kept for backward, the update is the fullest moment
    few = ["data.sequence_length=2", "model.overrides.vocab_size=4096", "optimizer.offload_fraction=1"]
    (rank,) = plan([*QWEN, "model.overrides.num_layers=2", *few], 1)
    assert rank.moment == "update of states in host memory"
    assert rank.peak == rank.state_bytes + sum(rank.held.values()) + 12 * 3 * 2**23


def routed(words: list[str], **how) -> int:
    """What experts and exchange of one micro-batch keep, without what routing alone needs."""
    return sum(plan(words, **how)[0].activations[part] for part in ("routed_experts", "exchange"))


def test_routed_activations_do_not_shrink_with_expert_parallelism_and_grow_with_topk():
    """Balanced, a rank computes as many rows whatever the experts are spread over."""
    some = ["model.overrides.num_layers=2", "moe.dispatcher=all_to_all"]
    usual = routed([*QWEN, *some, ep(1)])
    assert routed([*QWEN, *some, ep(8)]) == pytest.approx(usual, rel=1e-9)
    twice = routed([*QWEN, *some, ep(8), "model.overrides.moe.topk=16"])
    assert twice == pytest.approx(2 * usual, rel=0.01)


def test_an_uneven_load_costs_the_fullest_rank():
    words = [*QWEN, "model.overrides.num_layers=2", ep(8)]
    even, more = (routed(words, imbalance=each) for each in (BALANCED, Imbalance("factor", 1.5)))
    assert more == pytest.approx(1.5 * even, rel=0.02)
    worst = routed(words, imbalance=Imbalance("factor", 1e6))
    assert worst == pytest.approx(8 * even, rel=0.05)  # all ranks' tokens, 8 experts each, and 16 are here


def test_buffers_of_a_stated_size_are_full_and_pages_hold_what_comes():
    words = [*QWEN, "model.overrides.num_layers=2", ep(8)]
    even, twice = routed(words), routed([*words, "moe.buffer_factor=2"])
    assert twice == pytest.approx(2 * even, rel=0.02)
    paged = routed([*words, "moe.buffer_factor=2", "moe.pages_factor=1"])
    assert paged == pytest.approx(even, rel=0.02)


def test_recomputation_keeps_less_and_by_number():
    base = [*QWEN, ep(8)]
    none, full = plan(base)[0], plan([*base, "recompute.granularity=full"])[0]
    hidden = 1024 * 2048 * 2
    assert full.activations["residual"] == 48 * hidden
    assert sum(full.activations.values()) - full.activations["head"] < 0.1 * sum(none.activations.values())
    assert full.peak < none.peak
    peaks = [
        plan([*base, "recompute.granularity=full", f"recompute.layers={list(range(n))}"])[0].peak for n in (12, 24, 36)
    ]
    assert none.peak > peaks[0] > peaks[1] > peaks[2] > full.peak
    assert peaks[0] - peaks[1] == pytest.approx(peaks[1] - peaks[2], rel=1e-6)
    first = plan([*base, "recompute.granularity=full", "recompute.num_layers=12"])[0]
    assert first.peak == peaks[0]  # the first twelve
    for module in ("core_attn", "moe"):
        fewer = plan([*base, "recompute.granularity=selective", f"recompute.modules=[{module}]"])[0]
        assert full.peak < fewer.peak < none.peak, module


def test_tensor_and_context_parallelism_cut_what_they_cut():
    base = [*QWEN, ep(8), "train.loss=fused"]
    usual = plan(base)[0]
    cut = plan([*base, "parallel.tensor_parallel_size=2"])[0]
    assert sum(cut.activations.values()) == pytest.approx(sum(usual.activations.values()) / 2, rel=0.02)
    latent = ["model.card=deepseek-v2-lite", *QWEN[1:], ep(8), "train.loss=fused"]
    whole, half = (plan(words)[0] for words in (latent, [*latent, "parallel.context_parallel_size=2"]))
    assert half.activations["dense_mlp"] == whole.activations["dense_mlp"] // 2
    assert half.activations["routed_experts"] == pytest.approx(whole.activations["routed_experts"] / 2, rel=1e-3)


def test_attention_with_a_bias_repeats_grouped_keys_where_torch_has_no_kernel_for_them():
    """Documents kept apart, GPT-OSS: 1,040 keys (a sink, and others up to a multiple of 16) of 72 and values of 64."""
    words = ["model.card=gpt-oss-20b", *QWEN[1:], ep(8), "data.attend_across_documents=false"]
    hopper, other = (plan(words, profile=profile_of(load_gpu(gpu)))[0].activations for gpu in ("h200-sxm", "mi355x"))
    assert other["attention"] - hopper["attention"] == 24 * 1040 * (64 - 8) * (72 + 64) * 2
    fewer = plan(words[:-1], profile=profile_of(load_gpu("h200-sxm")))[0]  # windows and sinks need no bias
    assert "attention masks" not in fewer.held


def in_flight(pipeline: int, rank: int, micro_batches: int, virtual: int | None = None) -> int:
    words = [*QWEN, f"parallel.pipeline_parallel_size={pipeline}", f"train.global_batch_size={micro_batches}"]
    job = load(None, words + ([] if virtual is None else [f"parallel.virtual_pipeline_size={virtual}"])).config
    now = most = 0
    order = passes(place(job, resolve_card(job), pipeline), rank)
    for each in order:
        now += 1 if each.forward else -1
        most = max(most, now)
    assert now == 0  # whatever is begun is ended
    return most


@pytest.mark.parametrize("rank", range(4))
def test_micro_batches_in_flight(rank):
    assert in_flight(4, rank, 16) == 4 - rank
    assert in_flight(4, rank, 2) == min(4 - rank, 2)
    assert in_flight(4, rank, 16, virtual=2) == 2 * (3 - rank) + 4 + 1  # Narayanan et al., 2021


def test_quantized_weights_are_two_copies_where_chips_multiply_them():
    base = ["model.card=qwen3-30b-a3b", "model.overrides.num_layers=4", *QWEN[1:], ep(8)]
    assert "quantized weights" not in plan(base)[0].held
    rank = plan([*base, "precision.recipe=fp8_block"])[0]
    matrices = rank.parameters.dense["attention"] + rank.parameters.experts["routed_experts"]
    assert rank.held["quantized weights"] == pytest.approx(2 * matrices, rel=1e-4)
    fewer = plan([*base, "precision.recipe=fp8_block", "precision.bf16_first_layers=2"])[0]
    assert fewer.held["quantized weights"] == rank.held["quantized weights"] // 2


def test_the_loss_of_logits_is_the_fullest_moment_of_a_large_vocabulary():
    words = ["model.card=qwen3-30b-a3b", "model.overrides.num_layers=1", "train.micro_batch_size=8", *QWEN[1:], ep(8)]
    rank = plan(words)[0]
    assert rank.moment.endswith("loss")
    assert rank.peak - plan([*words, "train.loss=fused"])[0].peak > 8 * 1024 * 151936 * 4 / 2


def test_a_lone_micro_batch_has_nothing_to_run_beside():
    words = [*QWEN, ep(8), "train.global_batch_size=8"]
    alone, plain = (plan([*words, *more])[0].peak for more in (["moe.overlap_exchange=true"], []))
    assert plain < alone < 1.2 * plain  # a schedule that cuts the exchange out keeps both of its sides


PEAKS = [
    json.loads(line)
    for name in ("h200-peaks", "h200-peaks-two-ranks")
    for line in (ROOT / "benchmarks" / "results" / f"2026-11-30-{name}.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row["what"])
def test_measured_peaks(row):
    """`max_memory_allocated` of three steps on one H200, by what was switched: micro-batch, recompute, loss, recipe,
    dtypes of the optimizer's states, sequence length, MLA, windows and sinks, documents; layouts, of two processes on
    one GPU, each rank's.

    Where routing was free, the plan is of the load that the fullest rank had, and its peak is compared.
    """
    load = row.get("busiest_rank_load")
    imbalance = BALANCED if load is None else Imbalance("factor", load)
    file = Path(__file__).parent / "data" / "h200_peaks.yaml"
    # one job was told to do without cuDNN's attention
    profile = replace(MANIPLE, repeats_keys="CUDNN_SDPA_DEPRIORITIZED" in row["command"])
    ranks = plan(row["words"], row["world_size"], profile, imbalance, file)
    planned = [rank.peak for rank in ranks]
    measured = [row["peak_memory_bytes"]] if load else row.get("peak_memory_bytes_by_rank", [row["peak_memory_bytes"]])
    planned *= len(measured) // len(planned)  # of a layout without pipeline, one for all ranks
    errors = [plan / peak - 1 for plan, peak in zip(planned, measured, strict=True)]
    print(f"{row['what']}: {[f'{peak / 2**30:.2f}' for peak in planned]} GiB planned, {[f'{e:+.2%}' for e in errors]}")
    assert max(map(abs, errors)) < 0.01


def test_plans_are_for_the_kernels_that_gpus_run():
    """Not for the oracles, which need more while they run: see `Profile.oracles`."""
    from maniple.kernels import cross_entropy, permute, registry, routing  # noqa: F401 (they register what there is)

    best: dict[str, str] = {}
    for each in registry.describe():  # the best first
        if "cuda" in each["devices"] or each["devices"] == sorted(registry.ANY_DEVICE):
            best.setdefault(each["op"], each["name"])
    for op in ("permute", "cross_entropy", "routing"):
        assert (best[op] == "reference") == MANIPLE.oracles
