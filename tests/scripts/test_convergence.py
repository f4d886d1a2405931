"""benchmarks/convergence.py: what rows it makes of runs, what they show, and that it keeps what it has."""

import json
import sys
import time

import numpy as np
import pytest
import torch
from benchmarks import convergence as script
from matplotlib.figure import Figure

from maniple.bench import convergence, rows
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.models import counting


def write_run(folder, losses, validation=(), summary=True):
    """What a run leaves in its folder."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as out:
        for step, loss in enumerate(losses, 1):
            speed = {"tokens_per_second_per_gpu": 100.0 * step, "mfu": 0.1, "peak_memory_bytes": 7 + step}
            out.write(json.dumps({"step": step, "loss": loss, "data": "some text", **speed}) + "\n")
            if step in dict(validation):
                out.write(json.dumps({"step": step, "validation_loss": dict(validation)[step], "data": "x"}) + "\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps({"precision": {"bf16": "0-7"}, "seconds": 9.5}))


def row(recipe, losses, validation=2.0, wanted=None, **facts):
    found = {"benchmark": "convergence", "recipe": recipe, "losses": losses, "steps": len(losses)}
    found |= {"wanted_steps": wanted or len(losses), "seed": 1, "tokens_a_step": 8, "parameters": 3, "data": "text"}
    found |= {"validation": [[len(losses), validation]], "validation_loss": validation}
    return found | {"last_loss": convergence.last_mean(losses), "tokens_per_second_per_gpu": 1.0} | facts


# --- rows and verdicts ------------------------------------------------------------------------------------------------


def test_a_run_as_a_row(tmp_path):
    write_run(tmp_path / "run", [3.0] * 10 + [2.0] * 19 + [1.0], {10: 3.5, 30: 1.5}.items())
    found = convergence.row_of(tmp_path / "run", recipe="fp8_block", wanted_steps=40)
    assert (found["recipe"], found["steps"], found["wanted_steps"]) == ("fp8_block", 30, 40)
    assert found["last_loss"] == pytest.approx((19 * 2 + 1) / 20, abs=1e-12)
    assert found["validation"] == [[10, 3.5], [30, 1.5]]
    assert found["validation_loss"] == 1.5
    assert found["tokens_per_second_per_gpu"] == 2300  # the median of steps 16 to 30
    assert (found["peak_memory_bytes"], found["seconds"], found["data"]) == (37, 9.5, "some text")
    assert set(found["sources"]) >= {"grouped_gemm", "quantize", "routing"}
    json.dumps(found, allow_nan=False)


def test_a_run_that_was_killed_is_a_row_too(tmp_path):
    write_run(tmp_path / "run", [3.0, None], summary=False)
    found = convergence.row_of(tmp_path / "run", recipe="mxfp8", wanted_steps=40)
    assert (found["steps"], found["last_loss"], found["seconds"]) == (2, None, None)
    nothing = convergence.row_of(tmp_path / "nowhere", recipe="mxfp8", wanted_steps=40)
    assert (nothing["steps"], nothing["losses"], nothing["tokens_per_second_per_gpu"]) == (0, [], None)


def test_a_mean_needs_every_loss():
    assert convergence.last_mean([None] + [2.0] * 20) == 2.0
    assert convergence.last_mean([1.0, 3.0]) == 2.0
    assert convergence.last_mean([2.0] * 19 + [None]) is None
    assert convergence.last_mean([]) is None


def by_recipe(*found):
    return {(verdict.recipe, verdict.what.split()[0]): verdict for verdict in convergence.verdicts(found)}


def test_within_half_a_percent_on_either_side_holds():
    base = row("bf16", [9.0] * 10 + [2.0] * 20)
    found = by_recipe(base, row("fp8_block", [9.0] * 10 + [2.0099] * 20), row("mxfp8", [9.0] * 10 + [2.0101] * 20))
    assert found["fp8_block", "mean"].holds
    assert found["fp8_block", "mean"].difference == pytest.approx(0.00495, abs=1e-9)
    assert found["fp8_block", "validation"].holds
    assert not found["mxfp8", "mean"].holds
    assert found["mxfp8", "validation"].holds
    assert "+0.505% of bf16's" in str(found["mxfp8", "mean"])
    assert str(found["mxfp8", "mean"]).endswith("fails")
    lower = by_recipe(base, row("mxfp8", [9.0] * 10 + [1.98] * 20, validation=2.0101))
    assert not lower["mxfp8", "mean"].holds
    assert not lower["mxfp8", "validation"].holds


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([row("mxfp8", [2.0] * 30)], "no run in bf16"),
        ([row("bf16", [2.0] * 30), row("mxfp8", [2.0] * 30, seed=2)], "no run in bf16 from seed 2"),
        ([row("bf16", [2.0] * 30), row("mxfp8", [2.0] * 30, data="other text")], "another job"),
        ([row("bf16", [2.0] * 30), row("mxfp8", [2.0] * 12, wanted=30)], "mxfp8 came to 12 of 30 steps"),
        ([row("bf16", [2.0] * 12, wanted=30), row("mxfp8", [2.0] * 30)], "bf16 came to 12 of 30 steps"),
        ([row("bf16", [2.0] * 30), row("mxfp8", [2.0] * 29 + [None], validation=None)], "no finite loss"),
    ],
)
def test_what_shows_nothing_says_why(found, why):
    verdicts = list(convergence.verdicts(found))
    assert len(verdicts) == 2
    assert not any(verdict.holds for verdict in verdicts)
    assert all(why in str(verdict) and "not shown" in str(verdict) for verdict in verdicts)


def test_runs_of_different_lengths_are_compared_where_both_were():
    falling = [4.0 - 0.01 * step for step in range(60)]
    base = row("bf16", falling, validation=3.0)
    short = row("mxfp8", [1.01 * loss for loss in falling[:40]], wanted=60)
    base["validation"], short["validation"] = [[20, 3.5], [40, 3.2], [60, 3.0]], [[20, 3.5], [40, 3.264]]
    found = by_recipe(base, short)
    assert found["mxfp8", "mean"].difference == pytest.approx(0.01, abs=1e-12)
    assert found["mxfp8", "validation"].difference == pytest.approx(0.02, abs=1e-12)
    assert "mxfp8 came to 40 of 60 steps" in str(found["mxfp8", "mean"])


def test_several_seeds_are_judged_by_their_mean():
    base = [row("bf16", [2.0] * 30, seed=seed) for seed in (1, 2)]
    found = by_recipe(*base, *(row("mxfp8", [loss] * 30, seed=seed) for seed, loss in ((1, 1.98), (2, 2.014))))
    assert found["mxfp8", "mean"].difference == pytest.approx((-0.01 + 0.007) / 2, abs=1e-9)
    assert "-0.150% of bf16's, 2 seeds, -1.000% to +0.700%" in str(found["mxfp8", "mean"])
    assert found["mxfp8", "mean"].holds
    found = by_recipe(*base, row("mxfp8", [2.0] * 30), row("mxfp8", [2.0] * 12, seed=2, wanted=30))
    assert "not shown: mxfp8 came to 12 of 30 steps" in str(found["mxfp8", "mean"])


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_ends_where_the_verdict_does(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: (save(self, *args), figures.append(self)))
    rng = np.random.default_rng(0)
    base = [float(4 - step / 50 + noise) for step, noise in enumerate(rng.normal(0, 0.1, 60))]
    found = [row("bf16", base), row("mxfp8", [1.003 * loss for loss in base]), row("fp8_block", base[:30], wanted=60)]
    path = convergence.draw(found, tmp_path / "a" / "convergence.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    left, right = figures[0].axes
    assert [text.get_text() for text in left.get_legend().get_texts()][2].endswith(", 30 of 60 steps")
    lines = {line.get_label().split()[0]: line.get_ydata() for line in right.get_lines()}
    assert lines["mxfp8"][-1] == pytest.approx(0.3, abs=1e-9)
    assert 100 * by_recipe(*found)["mxfp8", "mean"].difference == pytest.approx(lines["mxfp8"][-1], abs=1e-9)
    assert len(lines["fp8_block"]) == 30
    np.testing.assert_allclose(lines["fp8_block"], 0, atol=1e-12)


def test_the_picture_of_several_seeds_has_their_mean(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: figures.append(self))
    losses = {"bf16": (2.0, 3.0), "mxfp8": (2.02, 3.0)}
    runs = [row(recipe, [loss] * 60, seed=seed) for recipe, both in losses.items() for seed, loss in enumerate(both)]
    convergence.draw(runs, tmp_path / "a.png")
    left, right = figures[0].axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "bf16  2.5000, 2 seeds",
        "mxfp8  2.5100, 2 seeds",
    ]
    labelled = {line.get_label().split()[0]: line.get_ydata() for line in right.get_lines()}
    np.testing.assert_allclose(labelled["mxfp8"], 0.5, atol=1e-9)
    assert sorted(float(line.get_ydata()[-1]) for line in right.get_lines()[1:]) == pytest.approx([0, 0.5, 1])


def test_losses_that_are_no_numbers_are_gaps(tmp_path):
    shares = convergence.differences([row("bf16", [2.0] * 60), row("mxfp8", [2.0] * 59 + [None])])
    assert np.isnan(shares["mxfp8"][0]).tolist() == [False] * 59 + [True]
    assert convergence.draw([row("mxfp8", [2.0, None])], tmp_path / "one.png") is not None
    assert convergence.draw([row("mxfp8", [])], tmp_path / "none.png") is None


# --- the script -------------------------------------------------------------------------------------------------------


def test_the_job_is_of_the_size_and_shape_that_it_says():
    job = load(script.JOB).config
    card = resolve_card(job)
    count = counting.count(card)
    assert count.total == 348_408_832
    assert job.train.steps >= 500
    sides = [card.hidden_size, card.moe.expert_ffn_size, card.vocab_size, card.num_heads * card.head_dim]
    sides += [card.num_kv_heads * card.head_dim, job.data.sequence_length]
    assert not [side for side in sides if side % 128]
    assert 0.0 < counting.count(resolve_card(load(script.JOB, script.TINY).config)).total < 1e6


@pytest.fixture
def jobs(monkeypatch):
    """Puts a job in training's place that leaves 30 steps, or as many as `ends` has for its recipe; notes commands."""
    seen, ends = [], {}

    def run(command, time_limit):
        words = dict(word.split("=", 1) for word in command if "=" in word)
        seen.append(words)
        steps, code = ends.get(words["precision.recipe"], (30, 0))
        write_run(script.Path(words["output_dir"]) / words["name"], [2.0] * steps, [(steps, 1.9)])
        if isinstance(code, BaseException):
            raise code
        return code

    monkeypatch.setattr(script, "run", run)
    return seen, ends


def test_every_recipe_is_run_on_the_same_text_from_the_same_seed(jobs, tmp_path, capsys):
    seen, _ = jobs
    out = tmp_path / "rows.jsonl"
    words = ["--tiny", "--runs", str(tmp_path / "runs"), "--out", str(out), "--seed", "5", "--time-limit", "90"]
    assert script.main(words) == 0
    assert [job["precision.recipe"] for job in seen] == ["bf16", "fp8_block", "mxfp8"]
    assert {(job["train.seed"], job["data.cache_dir"], job["train.max_minutes"]) for job in seen} == {
        ("5", str(tmp_path / "runs" / "cache"), "1.5")
    }
    found = rows.read(out)
    assert [row["recipe"] for row in found] == ["bf16", "fp8_block", "mxfp8"]
    assert [job["name"] for job in seen] == ["bf16-5", "fp8_block-5", "mxfp8-5"]
    assert {row["seed"] for row in found} == {5}
    assert found[0]["command"] == "python benchmarks/convergence.py --tiny --seed 5 --time-limit 90"
    assert all(str(tmp_path) not in json.dumps(row) for row in found)
    assert {"hardware", "versions", "seed", "date", "sources", "parameters"} <= set(found[0])
    assert (tmp_path / "runs" / "convergence.png").exists()
    assert capsys.readouterr().out.count("holds") == 1 * 4 + 2  # after the second run, and of both after the third
    with pytest.raises(UserError, match="holds such runs already"):
        script.main(words)


def test_what_was_run_is_kept_when_it_ends_early(jobs, tmp_path, capsys):
    _, ends = jobs
    ends["mxfp8"] = 12, 0
    words = ["--tiny", "--runs", str(tmp_path / "a"), "--out", str(tmp_path / "a.jsonl")]
    assert script.main(words) == 1
    assert "mxfp8 came to 12 of 30 steps" in capsys.readouterr().out
    ends["fp8_block"] = 7, KeyboardInterrupt()
    words = ["--tiny", "--runs", str(tmp_path / "b"), "--out", str(tmp_path / "b.jsonl")]
    with pytest.raises(KeyboardInterrupt):
        script.main(words)
    assert [(row["recipe"], row["steps"]) for row in rows.read(tmp_path / "b.jsonl")] == [
        ("bf16", 30),
        ("fp8_block", 7),
    ]
    assert (tmp_path / "b" / "convergence.png").exists()


def test_rows_are_judged_and_drawn_again(jobs, tmp_path, capsys):
    script.main(["--tiny", "--runs", str(tmp_path / "a"), "--out", str(tmp_path / "a.jsonl")])
    capsys.readouterr()
    assert script.main(["--verdicts", str(tmp_path / "a.jsonl"), "--figure", str(tmp_path / "again.png")]) == 0
    assert capsys.readouterr().out.count("holds") == 4
    assert (tmp_path / "again.png").exists()


def test_without_a_gpu_it_asks_for_the_toy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="add --tiny"):
        script.main([])


def test_a_run_that_hangs_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(script, "GRACE", 0.3)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    assert script.run([sys.executable, "-c", stubborn], 5) == -9
    assert time.monotonic() - started < 20
    assert script.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.1) == -15
    assert script.run([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3
