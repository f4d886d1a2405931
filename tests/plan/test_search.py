"""The search for a layout: the same answer as costing every layout, quick at every size, and a job that trains."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.plan.layouts import legal_layouts

from maniple import cli
from maniple.config.check import check, parse_layout, resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.hardware.calibration import Calibration, Measurement
from maniple.hardware.card import Fabric
from maniple.hardware.units import binary_size
from maniple.plan import search_report, search_space
from maniple.plan.imbalance import Imbalance
from maniple.plan.report import memory_plan
from maniple.plan.search import _Costing, search
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_context import search_contexts
from maniple.plan.time import make_job


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def _job(model: str, *sets: str):
    config = load(None, [f"model.card={model}", "data.sequence_length=4096", *sets]).config
    return config, resolve_card(config)


def _gpu(name: str, memory_gb: float | None = None):
    gpu = load_gpu(name)
    return gpu if memory_gb is None else gpu.model_copy(update={"memory_gb": memory_gb})


def _slow_host(gpu):
    """The GPU of a machine whose host needs 30 microseconds for each of a layer's kernels."""
    host = Measurement(
        group="launch",
        name="host",
        what="made up",
        work=1.0,
        milliseconds=0.03,
        milliseconds_p20=0.03,
        milliseconds_p80=0.03,
        rounds=1,
    )
    about = {"format": 1, "gpu": gpu.name, "card": gpu.name, "date": "", "command": "", "versions": {}, "sources": {}}
    return gpu.model_copy(update={"calibration": Calibration(**about, measured=(host,))})


SMALL = {
    "qwen": ("qwen3-30b-a3b", "{num_layers: 7}", 4, _gpu("h200-sxm", 40), ["train.global_batch_size=16"]),
    "deepseek, MTP": (
        *(
            "deepseek-v3",
            "{num_layers: 4, moe: {num_experts: 16, num_dense_layers: 1, router: {num_groups: 4}}}",
            4,
            _gpu("mi355x", 260),
        ),
        ["train.global_batch_size=8", "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
    ),
    "gpt-oss, windows, fp8": (
        *("gpt-oss-20b", "{num_layers: 6}", 4, _gpu("h200-sxm", 40)),
        ["train.global_batch_size=8", "precision.recipe=fp8_block", "precision.bf16_last_layers=1"],
    ),
    "overlapped": (
        *("qwen3-30b-a3b", "{num_layers: 8, moe: {num_experts: 32}}", 4, _gpu("h200-sxm", 30)),
        ["train.global_batch_size=16", "moe.overlap_exchange=true"],
    ),
    "context-parallel": (
        *("mixtral-8x7b", "{num_layers: 4}", 4, _gpu("h200-sxm", 80)),
        ["train.global_batch_size=8", "parallel.context_parallel_size=2"],
    ),
    "pods": (
        *("qwen3-30b-a3b", "{num_layers: 7, moe: {num_experts: 16}}", 4),
        _gpu("h200-sxm", 30).model_copy(update={"gpus_per_node": 2, "fabric": Fabric(pod_gpus=2, taper=0.2)}),
        ["train.global_batch_size=16"],
    ),
    "pods, long steps": (
        *("gpt-oss-20b", "{num_layers: 7, moe: {num_experts: 16}}", 4),
        _gpu("h200-sxm", 38).model_copy(update={"gpus_per_node": 2, "fabric": Fabric(pod_gpus=2, taper=0.5)}),
        ["train.global_batch_size=128"],
    ),
    "pods of two nodes, MTP": (
        *("glm-4.5-air", "{num_layers: 4, moe: {num_experts: 16}}", 8),
        _gpu("h200-sxm", 30).model_copy(update={"gpus_per_node": 2, "fabric": Fabric(pod_gpus=4, taper=0.1)}),
        ["train.global_batch_size=32"],
    ),
    "slow host": (
        *("qwen3-30b-a3b", "{num_layers: 7, moe: {num_experts: 16}}", 4, _slow_host(_gpu("h200-sxm", 26))),
        ["train.global_batch_size=16"],
    ),
    "experts cut": (
        *("mixtral-8x7b", "{num_layers: 2, moe: {num_experts: 3}}", 4, _gpu("h200-sxm", 20)),
        ["train.global_batch_size=8"],
    ),
}


@pytest.fixture(scope="module", params=SMALL)
def every(request):
    """(case, all legal layouts, costed in full)."""
    model, overrides, world, gpu, sets = SMALL[request.param]
    config, card = _job(model, f"model.overrides={overrides}", *sets)
    costing = _Costing(config, card, gpu, world, Imbalance())
    legal = legal_layouts(config, card, gpu, world, ())
    layouts = [(replace(layout, recompute=kind), where) for layout, where, kinds in legal for kind in kinds]
    return config, card, gpu, world, [(where, costing.full(layout)) for layout, where in layouts]


def test_it_finds_what_costing_all_finds(every):
    config, card, gpu, world, costed = every
    found = search(config, card, gpu, world, ceilings=(1.0, 0.7, 0.4), refine=False, refine_rows=False, program=False)

    def fastest(share, but=None):
        fits = [one for _, one in costed if one.memory.total <= round(share * gpu.memory_bytes)]
        return min((one.time.seconds for one in fits if one.layout.shape != but), default=None)

    assert (max(one.layout.expert_tensor for _, one in costed) > 1) != card.moe.linear_bias  # biases are not cut
    assert found.best.time.seconds == fastest(1.0)
    assert found.second.time.seconds == fastest(1.0, found.best.layout.shape)
    assert [one.time.seconds for one in found.pareto] == sorted(
        {seconds for share in (1.0, 0.7, 0.4) if (seconds := fastest(share)) is not None}
    )
    assert all(one.memory.total <= gpu.memory_bytes for one in found.pareto)
    assert found.looked_at == found.costed + sum(found.pruned.values())
    assert found.costed < len(costed) / 4  # else nothing was pruned


@pytest.mark.parametrize("fabric", ["16:0.25", "8:0.1", "32:0.5"])
def test_it_finds_the_fastest_of_long_steps_between_pods(fabric):
    """Where the rank that has most to do waits for the other in the first groups of micro-batches, then no more."""
    sizes = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2", "parallel.expert_parallel_size=8"]
    sets = [*sizes, "train.micro_batch_size=1", "train.global_batch_size=2048", "data.sequence_length=8192"]
    config, card = _job("glm-4.5-air", *sets)
    held = [text.partition("=")[0] for text in sets[:4]] + ["parallel.expert_tensor_parallel_size"]
    gpu = load_gpu("h200-sxm").model_copy(update={"fabric": Fabric.parse(fabric)})
    costing = _Costing(config, card, gpu, 64, Imbalance())
    layouts = [
        replace(layout, recompute=kind)
        for layout, _, kinds in legal_layouts(config, card, gpu, 64, held)
        for kind in kinds
    ]
    fits = [layout for layout in layouts if costing.memory(layout).total <= gpu.memory_bytes]
    fastest = min(costing.full(layout).time.seconds for layout in fits)
    plain = {"ceilings": (), "refine": False, "program": False, "overlap": False}
    assert search(config, card, gpu, 64, held=held, **plain).best.time.seconds == fastest


def test_bounds_are_below_what_they_bound_and_close(every):
    config, card, gpu, world, costed = every
    first = costed[0][1]
    job = make_job(first.config, card, gpu, world)
    bounds = Bounds(config, card, gpu, job, _Costing(config, card, gpu, world, Imbalance()).profile, Imbalance())
    nearness = []
    for where, one in costed:
        seconds, size = bounds.seconds(one.layout, where), bounds.memory(one.layout, where)
        assert seconds <= one.time.seconds * (1 + 1e-9), one.layout
        assert size <= one.memory.total, one.layout
        nearness.append(seconds / one.time.seconds)
    assert sorted(nearness)[len(nearness) // 2] > (0.6 if config.moe.overlap_exchange else 0.9)


def test_the_smallest_is_found_where_nothing_fits(every):
    config, card, gpu, world, costed = every
    found = search(config, card, gpu.model_copy(update={"memory_gb": 1}), world)
    assert found.best is None
    assert found.pareto == ()
    assert found.nearest.memory.total == min(one.memory.total for _, one in costed)
    said = search_report.explanation(found)[0]
    assert said.startswith("does not fit: the smallest of ")
    assert said.endswith(" are missing")


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "fits"),
    [
        ("deepseek-v3", 8, "h200-sxm", False),
        ("qwen3-30b-a3b", 1024, "mi355x", True),
        ("mixtral-8x7b", 256, "h200-sxm", True),
        ("deepseek-v3", 1024, "mi355x", True),
        ("minimax-m2", 64, "mi355x", True),
    ],
)
def test_plans_of_the_grid_are_quick_and_legal(model, gpus, gpu, fits):
    config, card = _job(model, f"train.global_batch_size={8 * gpus}")
    started = time.process_time()
    found = search(config, card, load_gpu(gpu), gpus)
    assert time.process_time() - started < 20
    assert (found.best is not None) == fits
    for one in [*found.pareto, *([found.second] if found.second else [])]:
        check(one.config, card, gpus, gpus_per_node=8)
        assert one.memory.total <= load_gpu(gpu).memory_bytes
    said = search_report.explanation(found)
    if fits:  # within the error band of what there is
        assert any(line.startswith("by the error band") for line in said) == (
            found.best.memory.total > 0.97 * load_gpu(gpu).memory_bytes
        )
    sizes = [(one.tgs, one.memory.total) for one in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    json.dumps(search_report.as_json(found))


def test_fewer_layers_are_computed_again_as_far_as_they_fit():
    config, card = _job("qwen3-30b-a3b", "train.global_batch_size=64", "parallel.tensor_parallel_size=2")
    gpu, held = _gpu("h200-sxm", 130), ["parallel.tensor_parallel_size"]
    plain, found = (
        search(config, card, gpu, 8, held=held, ceilings=(0.8,), refine=refine, refine_rows=refine, program=False)
        for refine in (False, True)
    )
    assert found.best.time.seconds < 0.99 * plain.best.time.seconds
    # so do the rows beneath, as far as they fit below their share
    (_, before), (_, row) = plain.pareto, found.pareto
    assert row.layout.shape == before.layout.shape
    assert row.time.seconds < 0.99 * before.time.seconds
    assert before.memory.total < row.memory.total <= 0.8 * gpu.memory_bytes
    check(found.best.config, card, 8)
    costing = _Costing(config, card, gpu, 8, Imbalance())
    layout, layers = found.best.layout, found.best.config.recompute.layers
    assert all(rank.total <= gpu.memory_bytes for rank in costing.ranks(layout))
    spared = 0
    for rank in range(layout.pipeline):
        mine = [layer for stage in found.best.where.of_rank(rank) for layer in stage.layers if layer in layers]
        if not mine:
            spared += 1
            continue
        fewer = tuple(layer for layer in layers if layer != mine[-1])
        one_less = replace(layout, recompute=search_space.Recompute("full", None, (), fewer))
        assert costing.ranks(one_less)[rank].total > gpu.memory_bytes
    assert spared < layout.pipeline


def test_the_guides_example_is_what_the_search_says(capsys):
    guide = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(best: .*)\n(stages .*)\n```\n\nThat is .* on 8 H200, (.*) s without", guide)
    assert cli.main(["plan", "search", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--gpus-from", "8"]) == 0
    said = capsys.readouterr().out
    assert f"{shown[1]}\n{shown[2]}\n" in said
    assert f"without programs: {shown[3]} s a step" in said


def test_a_loss_that_never_holds_the_logits_is_named_where_it_frees_much():
    """What the line says is what the plan says with it."""
    held = "context", "tensor", "pipeline"
    job = "qwen3-30b-a3b", "model.overrides={num_layers: 4}", "train.global_batch_size=8", "data.sequence_length=131072"
    found = search(*_job(*job), _gpu("h200-sxm", 20), 8, held=[f"parallel.{key}_parallel_size" for key in held])
    assert found.best is None
    (line,) = (line for line in search_report.explanation(found) if "train.loss=fused" in line)
    train = found.nearest.config.train.model_copy(update={"loss": "fused"})
    fused = found.nearest.config.model_copy(update={"train": train})
    total = memory_plan(fused, found.card, found.gpu, 8, found.bounds.imbalance).tightest.total
    assert f"would free {binary_size(found.nearest.memory.total - total)} of these" in line
    assert ("which is enough" in line) == (total <= found.ceiling)


def test_held_keys_stay():
    config, card = _job("qwen3-30b-a3b", "train.global_batch_size=512", "parallel.tensor_parallel_size=2")
    held = ["parallel.tensor_parallel_size", "train.micro_batch_size", "recompute.granularity"]
    found = search(config, card, load_gpu("h200-sxm"), 64, held=held)
    assert found.best.layout.tensor == 2
    assert found.best.layout.micro_batch == config.train.micro_batch_size
    assert found.best.config.recompute == config.recompute


def test_long_sequences_are_cut_until_that_is_slower():
    job = "qwen3-30b-a3b", "model.overrides={num_layers: 8}", "train.global_batch_size=8", "train.loss=fused"
    config, card = _job(*job, f"data.sequence_length={2**18}")
    gpu = _gpu("h200-sxm", 20)
    best, found = search_contexts(config, card, gpu, 16)
    seconds = {size: one.best and one.best.time.seconds for size, one in found.items()}
    assert seconds[1] is None  # does not fit
    fastest = min((time, size) for size, time in seconds.items() if time)[1]
    assert best is found[fastest]
    assert best.best.where.context == fastest > 1
    assert search_report.settings(best.best)["parallel.context_parallel_size"] == fastest
    (line,) = search_report.of_contexts(found)
    assert line.startswith("context parallelism: CP 1 does not fit (")
    assert f"CP {fastest} {seconds[fastest]:.3g} s" in line
    assert list(search_contexts(config, card, gpu, 16, held=["parallel.context_parallel_size"])[1]) == [1]


def test_context_parallelism_is_not_tried_for_nothing():
    config, card = _job("qwen3-30b-a3b", "train.global_batch_size=512")
    for gpus in (2, 64):  # states alone are too much; all fits
        assert list(search_contexts(config, card, load_gpu("h200-sxm"), gpus)[1]) == [1]


def test_a_held_layout_of_stages_says_the_chunks():
    text = "Et*12|t*12|t*12|t*12,L"
    config, card = _job("qwen3-30b-a3b", "train.global_batch_size=512", f"parallel.pipeline_layout={text!r}")
    found = search(config, card, load_gpu("mi355x"), 64, held=["parallel.pipeline_layout"], ceilings=())
    assert found.best.layout.stages == text
    assert found.best.layout.pipeline * found.best.layout.chunks == 4
    wrong, _ = _job("qwen3-30b-a3b", "train.global_batch_size=512", "parallel.pipeline_layout=Ett|ttL")
    with pytest.raises(UserError, match="holds 4 layers"):
        search(wrong, card, load_gpu("mi355x"), 64, held=["parallel.pipeline_layout"])


@pytest.mark.parametrize("number", [2, 7, 16, 33])
def test_balanced_stages_are_all_of_the_model(number):
    _, card = _job("deepseek-v3")
    stages = search_space.balanced_stages(card, number)
    assert len(stages) == number
    assert "".join(stages) == "E" + "t" * 61 + "mL"
    assert parse_layout(search_space.layout_text(stages)) == stages


def test_balanced_stages_are_the_best_there_are():
    import itertools

    weights = (2.0, 1.0, 1.0, 3.0, 0.5, 0.5, 2.5, 1.0)
    sizes = search_space._balanced(weights, 3)

    def heights(cuts):
        return [sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights)))]

    best = min(
        (max(heights(cuts)), sum(h * h for h in heights(cuts))) for cuts in itertools.combinations(range(1, 8), 2)
    )
    mine = heights(list(itertools.accumulate(sizes))[:-1])
    assert (max(mine), sum(h * h for h in mine)) == best


# --- the command ------------------------------------------------------------------------------------------------------

WORDS = ["plan", "search", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]


def test_the_winner_is_a_job_that_plans_as_it_was_found(capsys, tmp_path):
    file = tmp_path / "job.yaml"
    assert cli.main([*WORDS, "--json", "--write", str(file)]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert cli.main(["config", "show", str(file), "--json"]) == 0
    shown = capsys.readouterr().out
    assert "parallel.pipeline_parallel_size" in shown
    loaded = load(file).config
    check(loaded, resolve_card(loaded), 8)
    assert cli.main(["plan", *WORDS[2:], "--config", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["assumed"] == {}
    assert plan["fits"]
    assert plan["time"]["seconds"] == best["seconds"]
    assert max(rank["total"] for rank in plan["ranks"]) == best["memory"]
    text = file.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["train"]["global_batch_size"] == 64
    assert cli.main([*WORDS, "--write", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == text


def test_a_search_in_words(capsys):
    assert cli.main([*WORDS, "--set", "parallel.tensor_parallel_size=1", "--sequence-length", "2048"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "qwen3-30b-a3b on 8 x h200-sxm, 64 x 2,048 tokens a step"
    assert lines[1] == "assumed: train.global_batch_size=64"
    assert " costed in full; left out: " in lines[2]
    (best,) = (number for number, line in enumerate(lines) if line.startswith("best: TP 1, PP "))
    assert lines[best + 1].startswith("stages ")
    assert lines[best + 2].startswith("stages and layers by integer program: ")
    assert lines[-3].startswith("second: TP 1, PP ")
    assert lines[-2].startswith("the best takes ")
    assert lines[-1].startswith("and needs ")


def test_a_share_of_the_memory_is_all_that_layouts_get(capsys, tmp_path):
    words = ["plan", "search", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h200", "--gpus-from", "8"]
    words += ["--memory-share", "0.9"]
    file = tmp_path / "job.yaml"
    assert cli.main([*words, "--write", str(file), "--imbalance", "1.1", "--set", "train.loss=fused", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ceiling"] == round(0.9 * found["gpu_memory"])
    assert {row["gpus"] for row in found["pareto"]} == {8, 16}
    assert all(row["memory"] <= found["ceiling"] for row in [*found["pareto"], found["second"]])
    assert not any(line.startswith("by the error band") for line in found["explanation"])
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert "--memory-share 0.9 --imbalance 1.1 --set train.loss=fused`: planned" in first  # finds it again
    for share in ("0", "1.1", "nan"):
        assert cli.main([*words[:-1], share]) == 2
        assert "expected 0.01 to 1" in capsys.readouterr().err


def test_what_does_not_fit_is_said_and_not_written(capsys, tmp_path):
    words = ["plan", "search", "deepseek-v3", "--gpus", "8", "--gpu", "h200"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "does not fit: the smallest of " in out
    assert "at least 82 GPUs" in out  # 18 bytes for each of 683e9 parameters, on GPUs of 150.1e9
    assert "of a node, less than is missing" in out
    more = ["plan", "search", "deepseek-v3", "--gpus", "64", "--gpu", "h200", "--gpus-from", "64"]
    assert cli.main(more) == 0
    assert "--set optimizer.offload_fraction=1 would keep 122.07 GiB" in (out := capsys.readouterr().out)
    assert out.endswith("of a node, more than is missing: search with it\n")
    assert cli.main([*more, "--set", "optimizer.offload_fraction=1"]) == 0
    assert "best: " in capsys.readouterr().out
    assert cli.main([*words, "--write", str(tmp_path / "job.yaml")]) == 2
    assert "nothing fits" in capsys.readouterr().err
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deepseek-v4", "--gpus", "8", "--gpu", "h200"], "no model card is named 'deepseek-v4': did you mean"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h250"], "no GPU card is named 'h250': did you mean"),
        (["qwen3-30b-a3b", "--gpus", "0", "--gpu", "h200"], "--gpus 0: a job has at least one GPU"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--global-batch-size", "0"], "train.global_batch_size"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--sequence-length", "1"], "data.sequence_length"),
        (
            ["qwen3-30b-a3b", "--gpus", "97", "--gpu", "h200", "--global-batch-size", "3"],
            "train.global_batch_size 3 is not a multiple of 97",
        ),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.expert_parallel_size=256"],
            "8 processes, one a GPU, are not a multiple of 256 = expert_parallel_size 256",
        ),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.tensor_parallel_size=3"],
            "multiple of 3",
        ),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--write", "/nowhere/job.yaml"], "--write"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.main(["plan", "search", *words]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert said in err
