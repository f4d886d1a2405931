"""The time of a step in `maniple plan`: words, JSON, the pipeline's trace."""

from __future__ import annotations

import json

import pytest

from maniple import cli

QWEN = ["plan", "qwen3-30b-a3b", "--gpus", "32", "--gpu", "h200", "--set", "parallel.expert_parallel_size=8"]
QWEN += ["--set", "parallel.pipeline_parallel_size=4"]


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def _planned(capsys, *words: str) -> dict:
    assert cli.main([*QWEN, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["time"]


def test_a_plan_says_how_long_a_step_takes(capsys):
    assert cli.main(QWEN) == 0
    out = capsys.readouterr().out
    assert "a step takes " in out
    assert "schedule 1f1b, ranks idle" in out
    assert "routed experts" in out


def test_the_time_as_json_adds_up(capsys):
    time = _planned(capsys)
    assert sum(time["components"].values()) == pytest.approx(time["seconds"])
    assert len(time["bubbles"]) == len(time["in_flight"]) == 4
    assert time["in_flight"] == [4, 3, 2, 1]


def test_an_uneven_router_takes_longer(capsys):
    sets = "--set", "train.micro_batch_size=4"
    even, uneven = (_planned(capsys, *sets, "--imbalance", load) for load in ("balanced", "1.5"))
    assert (even["load_factor"], uneven["load_factor"]) == (1.0, 1.5)
    assert uneven["seconds"] > 1.1 * even["seconds"]


def test_a_fabric_is_part_of_the_plan(capsys, tmp_path):
    """Stages are 8 GPUs apart: in pods of 8 with a hundredth of the rate between them, messages take longer."""
    plain, alike, tapered = (_planned(capsys, *words) for words in ([], ["--fabric", "8:1"], ["--fabric", "8:0.01"]))
    assert alike["seconds"] == plain["seconds"]
    assert tapered["seconds"] > plain["seconds"]
    report = tmp_path / "plan.html"
    assert cli.main([*QWEN, "--fabric", "16:0.5", "--report", str(report)]) == 0
    assert "fabric: pods of 16 GPUs, 50% of their NICs' rate between them" in capsys.readouterr().out
    assert "--fabric 16:0.5" in report.read_text(encoding="utf-8")
    large = ["plan", "deepseek-v3", "--gpus", "32", "--gpu", "h200", "--fabric", "16:0.5"]
    assert cli.main(large) == 0
    assert "maniple plan search deepseek-v3 --gpus 32 --gpu h200-sxm --fabric 16:0.5" in capsys.readouterr().out


def test_the_simulated_pipeline_is_written_for_perfetto(capsys, tmp_path):
    file = tmp_path / "pipeline.json"
    assert cli.main([*QWEN, "--pipeline-trace", str(file)]) == 0
    assert f"{file}: 16 micro-batches of the pipeline" in capsys.readouterr().err
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    for there in (file, tmp_path / "nowhere" / "pipeline.json"):  # a file stays
        assert cli.main([*QWEN, "--pipeline-trace", str(there)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert json.loads(file.read_text(encoding="utf-8"))["traceEvents"] == events


def test_no_rank_has_more_than_all_tokens(capsys):
    most, more = _planned(capsys, "--imbalance", "8"), _planned(capsys, "--imbalance", "1e30")
    assert more["load_factor"] == most["load_factor"] <= 8
    assert more["seconds"] == most["seconds"]


def test_a_model_that_is_not_the_files_is_said(capsys, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("model: {card: mixtral-8x7b}\n", encoding="utf-8")
    assert cli.main([*QWEN, "--config", str(file), "--json"]) == 0
    assert capsys.readouterr().err == f"maniple: {QWEN[1]} is planned in place of {file}'s own mixtral-8x7b\n"
    file.write_text(f"model: {{card: {QWEN[1]}}}\n", encoding="utf-8")
    assert cli.main([*QWEN, "--config", str(file), "--json"]) == 0
    assert capsys.readouterr().err == ""
