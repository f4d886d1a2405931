"""One layout on more and more GPUs: what grows, what bends, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from maniple import cli
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.hardware import load_gpu
from maniple.plan import memory, scaling
from maniple.plan.time import estimate

SETS = ["parallel.pipeline_parallel_size=4", "parallel.expert_parallel_size=8", "data.sequence_length=4096"]


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def job():
    config = load(None, ["model.card=qwen3-30b-a3b", "train.global_batch_size=128", *SETS]).config
    return config, resolve_card(config), load_gpu("h200-sxm")


def test_sizes_double():
    assert scaling.sizes(256, 4096) == [256, 512, 1024, 2048, 4096]
    assert scaling.sizes(24, 100) == [24, 48, 96]
    assert scaling.sizes(8, 8) == [8]


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_every_point_is_a_plan_of_its_own(job, kind):
    config, card, gpu = job
    points = scaling.scale(config, card, gpu, [32, 64, 128], kind)
    assert [point.global_batch_size for point in points] == ([128, 256, 512] if kind == "weak" else [128] * 3)
    assert points[0].efficiency == 1.0
    for point in points:
        train = config.train.model_copy(update={"global_batch_size": point.global_batch_size})
        same = config.model_copy(update={"train": train})
        assert point.seconds == estimate(same, card, gpu, point.gpus).seconds
        assert point.memory == memory.tightest(memory.of_job(same, card, point.gpus)).total
        speed = point.global_batch_size * 4096 / point.seconds / point.gpus
        assert point.efficiency == pytest.approx(speed / points[0].tokens_per_second_per_gpu)


def test_where_it_bends(job):
    config, card, gpu = job
    weak = scaling.scale(config, card, gpu, [32, 64, 128], "weak")
    assert scaling.bend(weak).startswith("weak scaling does not bend up to 128 GPUs: ")
    strong = scaling.scale(config, card, gpu, [32, 64, 128, 256, 4096], "strong")
    bends = next(point for point in strong if point.efficiency < scaling.BEND)
    assert bends.gpus > 32
    assert scaling.bend(strong).startswith(f"strong scaling bends at {bends.gpus:,} GPUs: ")
    assert strong[-1].seconds is None
    assert "train.global_batch_size 128 is not a multiple of 1024" in strong[-1].why
    assert scaling.bend([strong[0], strong[-1]]).startswith("strong scaling stops after 32 GPUs: ")
    assert scaling.rows(strong)[-1][3:] == ["-"] * 7
    said = scaling.bend(strong)
    assert "; the pipeline's bubble grew most: " in said
    assert f"ranks idle up to {bends.bubble:.0%}, against {strong[0].bubble:.0%}" in said
    assert said.endswith(f"; it stops after 256 GPUs: {strong[-1].why}")


FLAT = ["parallel.expert_parallel_size=8", "train.global_batch_size=64", "data.sequence_length=512"]


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize(
    ("sets", "part"),  # from a node of 8 GPUs to two
    [
        ([], "gradient_reduction"),
        (["parallel.distributed_optimizer=false"], "gradient_reduction"),
        (["parallel.overlap_grad_reduce=true", "data.sequence_length=4096"], "parameter_gathering"),
        (["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"], None),
        (["parallel.tensor_parallel_size=2"], "gradient_reduction"),
        (["parallel.pipeline_parallel_size=2", "parallel.expert_parallel_size=4"], None),
        (
            [
                *("parallel.pipeline_parallel_size=2", "parallel.virtual_pipeline_size=2"),
                *("parallel.expert_parallel_size=4", "moe.overlap_exchange=true"),
            ],
            None,
        ),
    ],
)
def test_the_part_that_grew_most_is_named_in_milliseconds(kind, sets, part):
    config = load(None, ["model.card=qwen3-30b-a3b", *FLAT, *sets]).config
    first, last = points = scaling.scale(config, resolve_card(config), load_gpu("h200-sxm"), [8, 16], kind)
    more = scaling.grown(first, last)
    tokens = 1 if kind == "weak" else 1 / 2
    assert sum(first.parts.values()) == pytest.approx(first.seconds)
    assert sum(more.values()) == pytest.approx(last.seconds - tokens * first.seconds)
    grew = next(iter(more))
    said = scaling.bend(points)
    if more[grew] < 1e-4:
        assert part is None
        assert "no part of the step grew by a tenth of a millisecond" in said
        return
    assert part in (None, grew)
    now, then = last.parts[grew], tokens * first.parts.get(grew, 0.0)
    assert " grew most: " in said
    assert f"{scaling.milliseconds(now)} of a step's {scaling.milliseconds(last.seconds)} ms" in said
    assert f"where {scaling.milliseconds(then)} ms would keep the speed" in said


def point(gpus: int, parts: dict[str, float] | None, *, fits: bool = True) -> scaling.Point:
    """A made one of weak scaling, a sequence a GPU; efficiency is that of a first step of a second. None: no run."""
    if parts is None:
        return scaling.Point("weak", gpus, gpus, why="the batch ends")
    seconds = sum(parts.values())
    idle = parts.get("bubble", 0.0) / seconds
    return scaling.Point("weak", gpus, gpus, 1, seconds, 1 / seconds, 1 / seconds, idle, 0, fits, parts=parts)


FIRST = point(8, {"routed_experts": 1.0})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("bubble", "the pipeline's bubble"),
        ("gradient_reduction", "gradient reduction"),
        ("parameter_gathering", "parameter gathering"),
        ("optimizer", "optimizer"),
        ("exchange", "exchange"),
        ("gaps", "gaps between kernels"),
    ],
)
def test_every_part_can_be_what_grew(part, words):
    idle = "; ranks idle up to 20%, against 0%" if part == "bubble" else ""
    assert scaling.bend([FIRST, point(16, {"routed_experts": 1.0, part: 0.25})]) == (
        f"weak scaling bends at 16 GPUs: 80.0% of the speed a GPU at 8; {words} grew most: 250 of a step's 1,250 ms, "
        f"where 0.0 ms would keep the speed{idle}"
    )


def test_no_line_is_without_a_reason():
    same = point(16, {"routed_experts": 1.0})
    assert scaling.bend([FIRST, same]) == (
        "weak scaling does not bend up to 16 GPUs: 100.0% of the speed a GPU; no part of the step grew by a tenth of a "
        "millisecond"
    )
    assert scaling.bend([FIRST]) == "weak scaling: 8 GPUs are the only size"
    assert scaling.bend([FIRST, same, point(32, None)]) == "weak scaling stops after 16 GPUs: the batch ends"
    large = point(8, {"routed_experts": 1.0}, fits=False)
    assert scaling.bend([large, same]).endswith("; it fits from 16 GPUs on")
    assert scaling.bend([large]).endswith("; it fits none of them")
    nearly = scaling.bend([FIRST, point(16, {"routed_experts": 1.0, "optimizer": 0.112})])
    assert "bends at 16 GPUs: 89.9% of the speed" in nearly  # not 90 %


def test_a_job_that_is_wrong_at_the_first_size_is_refused(job):
    config, card, gpu = job
    with pytest.raises(UserError, match="6 processes"):
        scaling.scale(config, card, gpu, [6, 12], "weak")


WORDS = ["plan", "scale", "qwen3-30b-a3b", "--gpu", "h200", "--from", "32", "--to", "64"]


def test_the_command_takes_the_best_layout_or_the_jobs_own(capsys, tmp_path):
    assert cli.main([*WORDS, "--set", "parallel.tensor_parallel_size=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-30b-a3b on 32 to 64 x h200-sxm: TP 2, PP ")
    assert out.count("\nweak ") == 3  # two rows and the last line
    file = tmp_path / "job.yaml"
    file.write_text("parallel: {expert_parallel_size: 8}\ntrain: {global_batch_size: 64}\n", encoding="utf-8")
    assert cli.main([*WORDS, "--config", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [point["global_batch_size"] for point in said["weak"]] == [64, 128]
    assert [point["gpus"] for point in said["strong"]] == [32, 64]
    assert len(said["bends"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deepseek-v3", "--gpu", "mi355x", "--from", "256", "--to", "128"], "--to 128 is less than --from 256"),
        (["deepseek-v3", "--gpu", "mi355x", "--from", "0", "--to", "128"], "--from 0: a job has at least one GPU"),
        (["deepseek-v3", "--gpu", "mi355x", "--from", "8", "--to", "16"], "no layout of deepseek-v3 fits 8 x mi355x"),
        (["deepseek-v3", "--gpu", "mi35", "--from", "8"], "--to"),
        (["qwen", "--gpu", "mi355x", "--from", "8", "--to", "16"], "no model card is named 'qwen'"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.main(["plan", "scale", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_size_that_may_or_may_not_fit_says_so():
    point = scaling.Point("weak", 8, 64, 8, 2.34, 14015.0, 1.0, 0.15, 2**37, True, True)
    doubts = [(True, True), (False, True), (True, False), (False, False)]
    said = [scaling.rows([replace(point, fits=fits, certain=sure)])[0][-1] for fits, sure in doubts]
    assert said == ["yes", "no", "perhaps", "perhaps"]
