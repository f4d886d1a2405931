"""One layout on more and more GPUs: what grows, what bends, and the command."""

from __future__ import annotations

import json

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
    assert scaling.bend([strong[0], strong[-1]]).startswith("strong scaling ends behind 32 GPUs: ")
    assert scaling.rows(strong)[-1][3:] == ["-"] * 7


def test_a_job_that_is_wrong_at_the_first_size_is_refused(job):
    config, card, gpu = job
    with pytest.raises(UserError, match="world size 6"):
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
