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
    even, uneven = _planned(capsys, "--imbalance", "balanced"), _planned(capsys, "--imbalance", "1.5")
    assert (even["load_factor"], uneven["load_factor"]) == (1.0, 1.5)
    assert uneven["seconds"] > 1.1 * even["seconds"]


def test_the_simulated_pipeline_is_written_for_perfetto(capsys, tmp_path):
    file = tmp_path / "pipeline.json"
    assert cli.main([*QWEN, "--pipeline-trace", str(file)]) == 0
    assert f"{file}: 16 micro-batches of the pipeline" in capsys.readouterr().err
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    assert cli.main([*QWEN, "--pipeline-trace", str(tmp_path / "nowhere" / "pipeline.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
