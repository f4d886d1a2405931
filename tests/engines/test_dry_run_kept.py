"""What a dry run says is kept for backward, by layer and module: it adds up, and it is what a real pass keeps."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the process that does the work

TOKENS = 2 * 64
SELECTIVE: dict[str, list[str]] = {
    "none": [],
    "norm": ["norm"],
    "moe_act": ["moe_act"],
    "permute": ["permute"],
    "permute, norm": ["permute", "norm"],
    "experts": ["experts"],
    "mla_up_proj": ["mla_up_proj"],
    "core_attn": ["core_attn"],
}


def dry_runs(rank: int, world_size: int) -> dict[str, Any]:
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import kept, one_rank
    from maniple.models import load_card

    card = load_card("deepseek-v3").tiny().with_overrides({"num_layers": 2})
    assert card.mla is not None

    def job(modules: list[str], **parallel: Any):
        words = {"granularity": "selective", "modules": modules} if modules else {}
        return jobs.make_job(
            Path("unused"),
            "job",
            precision={"dtype": "bf16"},
            data={"sequence_length": 64},
            recompute=words,
            parallel={"distributed_optimizer": True, **parallel},
        )

    with jobs.no_process_group():
        found: dict[str, Any] = {name: one_rank.trace(job(words), card, 0, 1) for name, words in SELECTIVE.items()}
        found["full"] = one_rank.trace(
            job([]).model_copy(update={"recompute": job(["norm"]).recompute.__class__(granularity="full")}), card, 0, 1
        )
        stages = {"pipeline_parallel_size": 2, "pipeline_layout": "Ett|mL"}
        found["last stage"] = one_rank.trace(job([], **stages), card, 1, 2)
        both = {"main_params_dtype": "bf16", "moments_dtype": "bf16"}
        small = job([])
        small = small.model_copy(update={"optimizer": small.optimizer.model_copy(update=both)})
        found["bf16 states"] = one_rank.trace(small, card, 0, 1)
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(kept.table(found["none"].kept, TOKENS))
    return {"runs": found, "table": console.export_text(), "mla": card.mla, "card": card}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_ranks(dry_runs, 1, timeout=300)[0]


def by_module(run, layer: int | None) -> dict[str, int]:
    return {part.module: part.bytes for part in run.kept if part.layer == layer}


def test_expert_layers_keep_what_the_shapes_say(report):
    """bf16 rows, gate and up, activation of the routed experts, to the allocator's unit."""
    card, parts = report["card"], by_module(report["runs"]["none"], 1)
    rows, f = TOKENS * card.moe.topk, card.moe.expert_ffn_size
    assert parts["mlp.experts"] == pytest.approx(rows * 6 * f, abs=512)
    assert rows * 2 * card.hidden_size <= parts["mlp"] <= rows * (2 * card.hidden_size + 32) + TOKENS * 16 + 8192
    assert parts["input_layernorm"] == pytest.approx(TOKENS * (2 * card.hidden_size + 4), abs=1024)


def test_every_layer_is_named_once_and_the_sum_is_below_the_peak(report):
    for run in report["runs"].values():
        names = [(part.layer, part.module) for part in run.kept]
        assert len(set(names)) == len(names)
        assert sum(part.bytes for part in run.kept) < run.activation_bytes
        assert all(part.bytes == sum(part.operations.values()) for part in run.kept)
    numbers = {part.layer for part in report["runs"]["none"].kept}
    assert numbers == {None, 0, 1, 2}  # MTP last


def test_what_is_there_at_the_peak_is_all_of_it_by_module(report):
    for name, run in report["runs"].items():
        states = run.parameter_bytes + run.gradient_bytes + run.optimizer_bytes
        assert run.peak_bytes == max(run.peaks.values())
        assert run.peaks[run.phase] == run.peak_bytes, name
        assert {"forward", "backward"} <= set(run.peaks)
        assert states + sum(run.at_peak.values()) == pytest.approx(run.peak_bytes, abs=512 * 100)
        assert list(run.at_peak.values()) == sorted(run.at_peak.values(), reverse=True)
    parts = report["runs"]["none"].at_peak
    assert parts["mlp.experts"] > report["runs"]["moe_act"].at_peak["mlp.experts"]


def test_the_last_stage_has_its_own_layers(report):
    assert {part.layer for part in report["runs"]["last stage"].kept} == {None, 2}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("norm", "input_layernorm"),
        ("norm", "pre_mlp_layernorm"),
        ("moe_act", "mlp.experts"),
        ("permute", "mlp"),
        ("experts", "mlp.experts"),
        ("mla_up_proj", "self_attention"),
    ],
)
def test_each_switch_takes_from_its_own_module(report, name, module):
    before, after = (by_module(report["runs"][run], 1) for run in ("none", name))
    assert after.get(module, 0) < before[module]
    assert {key for key in before if after.get(key, 0) > before[key]} == set()


def test_switches_take_what_they_say(report):
    card, runs = report["card"], report["runs"]
    rows, f = TOKENS * card.moe.topk, card.moe.expert_ffn_size

    def saved(name: str) -> int:
        return sum(by_module(runs["none"], 1).values()) - sum(by_module(runs[name], 1).values())

    assert saved("moe_act") == pytest.approx(rows * 2 * f, abs=1024)
    assert saved("experts") == pytest.approx(rows * 6 * f, abs=1024)
    assert saved("permute") == pytest.approx(rows * 2 * card.hidden_size, abs=1024)
    assert saved("permute, norm") == saved("permute") + saved("norm")
    assert saved("norm") == pytest.approx(2 * TOKENS * 2 * card.hidden_size, abs=1024)
    mla = report["mla"]
    heads = card.num_heads * (2 * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) + mla.v_head_dim)
    assert saved("mla_up_proj") == pytest.approx(TOKENS * 2 * heads, rel=0.25)
    assert sum(by_module(runs["full"], 1).values()) < 0.4 * sum(by_module(runs["none"], 1).values())


def test_states_in_bf16_are_counted(report):
    usual, small = report["runs"]["none"], report["runs"]["bf16 states"]
    assert usual.optimizer_bytes == pytest.approx(12 * usual.parameters, rel=0.05)
    assert small.optimizer_bytes == pytest.approx(4 * small.parameters, rel=0.05)


def test_the_table_joins_layers_that_keep_alike(report):
    text = report["table"]
    assert "1-2" in text
    assert text.count("mlp.experts") == text.count("mlp.router") in (1, 2)
    assert f"{TOKENS} tokens" in text


def test_it_is_written_as_json(report):
    import dataclasses

    rows = json.loads(json.dumps([dataclasses.asdict(part) for part in report["runs"]["none"].kept]))
    assert {"layer", "module", "bytes", "operations"} == set(rows[0])
