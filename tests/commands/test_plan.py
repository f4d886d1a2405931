"""`maniple plan` as a command: words, JSON, exit codes, and what is refused in one line."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import maniple
from maniple import cli
from maniple.commands import print_table

QWEN = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.expert_parallel_size=8"]
GPUS = ["--gpus", "8", "--gpu", "h200"]
SEARCH = ["search", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def planned(capsys, *words: str) -> dict:
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_in_words(capsys):
    assert cli.main(QWEN) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("qwen3-30b-a3b on 8 x h200-sxm: TP 1, PP 1, CP 1, DP 8, EP 8, ETP 1; 4 micro-batches")
    assert "assumed: data.sequence_length=4096, train.global_batch_size=32" in lines
    assert any("E 0-47 L" in line for line in lines)
    assert "routed experts" in out
    assert lines[-2].startswith("fits: ")
    assert lines[-1].startswith("error band: ")


def test_the_error_band_is_what_tests_hold_plans_to(capsys):
    plan = planned(capsys, *QWEN)
    total = plan["ranks"][0]["total"]
    least, most = plan["error_band"]
    assert total == pytest.approx(1.05 * least, rel=1e-9) == pytest.approx(0.97 * most, rel=1e-9)
    at_most = ["--set", "train.micro_batch_size=1", "--imbalance", "3.65"]  # just so
    assert cli.main([*QWEN, *at_most]) == 0
    *_, verdict, band = capsys.readouterr().out.splitlines()
    share = planned(capsys, *QWEN, *at_most)["ranks"][0]["total"] / plan["gpu_memory"]
    assert 0.97 < share <= 1.05
    assert verdict.startswith("fits: ") == (share <= 1)
    assert band.endswith("whether it fits is not certain")


def test_without_a_layout_the_best_is_named(capsys):
    words = ["plan", "deepseek-v2-lite", "--gpus", "16", "--gpu", "h200"]
    assert cli.main(words) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("no layout was given; the best is TP 1, PP ")
    assert planned(capsys, *words)["best_layout"] == last
    batch = planned(capsys, *words)["assumed"]["train.global_batch_size"]
    search = planned(capsys, "plan", "search", *words[1:], "--global-batch-size", str(batch), "--gpus-from", "16")
    seconds = float(re.search(r"([\d.]+) s for as many tokens", last)[1])
    assert seconds == pytest.approx(search["best"]["seconds"], rel=1e-3)
    given = planned(capsys, *words, "--set", "parallel.tensor_parallel_size=2")
    assert given["best_layout"] is None
    assert "none fits" in planned(capsys, "plan", "deepseek-v3", "--gpus", "8", "--gpu", "h200")["best_layout"]


def test_sizes_of_a_tiny_job_are_not_all_zero(capsys):
    assert cli.main([*QWEN[:6], "--set", "model.variant=tiny"]) == 0
    out = capsys.readouterr().out
    assert "total MiB" in out.splitlines()[2]
    (gradients,) = (line for line in out.splitlines() if line.startswith("states "))
    assert 0.1 < float(gradients.split()[-1]) < 100


def test_a_plan_as_json_adds_up(capsys):
    plan = planned(capsys, *QWEN)
    (rank,) = plan["ranks"]
    parts = [sum(rank[kind].values()) for kind in ("states", "held", "activations")]
    assert rank["peak"] == sum(parts) + rank["working"]
    assert rank["total"] == rank["peak"] + sum(rank["reserved"].values())
    assert plan["fits"] == (rank["total"] <= plan["gpu_memory"])
    assert sum(rank["parameters"].values()) * 2 == rank["states"]["parameters"]


def test_a_job_that_does_not_fit_says_where(capsys):
    plan = planned(capsys, "plan", "deepseek-v3", "--gpus", "8", "--gpu", "h200")
    assert not plan["fits"]
    assert plan["verdict"].startswith("does not fit: pipeline rank 0 of 1 needs ")
    assert "all together would not fit either" in plan["advice"]


def test_a_job_that_does_not_fit_says_what_would_help(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "4", "--gpu", "h200", "--set", "parallel.expert_parallel_size=4"]
    assert cli.main(words) == 0
    verdict, _, said = capsys.readouterr().out.splitlines()[-3:]
    assert verdict.startswith("does not fit: ")
    usual, helped = planned(capsys, *words), planned(capsys, *words, "--set", "optimizer.offload_fraction=1")
    freed = usual["ranks"][0]["total"] - helped["ranks"][0]["total"]
    assert said == usual["advice"]
    assert f"optimizer.offload_fraction=1 would free {freed / 2**30:.2f} GiB, which is enough; " in said
    search = "maniple plan search qwen3-30b-a3b --gpus 4 --gpu h200-sxm --global-batch-size 16"
    assert said.endswith(f"`{search}` looks for another layout")
    assert helped["advice"] is None
    host = helped["ranks"][0]["host"]
    assert host == {kind: usual["ranks"][0]["states"][kind] for kind in ("main parameters", "moments")}
    assert helped["host_per_node"] == 4 * sum(host.values())


def test_overrides_of_a_section_are_those_of_its_keys(capsys):
    """The command to copy says batch and sequence once, and no layout; an option beside other keys is no mistake."""
    one_each = ["parallel.expert_parallel_size=4", "train.global_batch_size=32", "optimizer.offload_fraction=0.5"]
    sections = [
        "parallel={expert_parallel_size: 4}",
        "train={global_batch_size: 32}",
        "optimizer={offload_fraction: 0.5}",
    ]
    words = ["plan", "qwen3-30b-a3b", "--gpus", "4", "--gpu", "h200", "--imbalance", "4"]
    plans = [
        planned(capsys, *words, *(word for text in sets for word in ("--set", text))) for sets in (one_each, sections)
    ]
    assert plans[0] == plans[1]
    assert plans[0]["advice"].endswith(
        "--global-batch-size 32 --imbalance 4 --set optimizer.offload_fraction=0.5` looks for another layout"
    )
    found = planned(capsys, "plan", *SEARCH, "--global-batch-size", "64", "--set", "train={micro_batch_size: 2}")
    assert found["assumed"] == {"data.sequence_length": 4096}


def test_what_is_enough_alone_is_not_asked_for_twice(capsys):
    """Full recomputation alone makes it fit."""
    words = [*QWEN, "--imbalance", "8"]
    said = planned(capsys, *words)["advice"]
    assert "recompute.granularity=full would free 112." in said
    assert "GiB, which is enough; --set optimizer.offload_fraction=1 would free " in said
    assert "both together" not in said
    assert planned(capsys, *words, "--set", "recompute.granularity=full")["fits"]


def test_a_job_file_and_its_batch_are_taken_as_they_are(capsys):
    words = ["plan", "deepseek-v3", "--gpus", "1024", "--gpu", "mi355x", "--config", "configs/deepseek_v3_1024.yaml"]
    plan = planned(capsys, *words)
    assert plan["layout"]["micro_batches"] == 128
    assert plan["assumed"] == {}
    assert plan["fits"]
    assert len(plan["ranks"]) == 16
    assert plan["ranks"][15]["chunks"] == ["60 m L"]
    recipe = planned(capsys, *words, "--set", "precision.recipe=fp8_block")
    assert recipe["ranks"][0]["held"]["quantized weights"] > 0


def test_emulated_mxfp8_keeps_no_copies(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--set", "precision.recipe=mxfp8"]
    assert "quantized weights" in planned(capsys, *words, "--gpu", "mi355x")["ranks"][0]["held"]
    assert "quantized weights" not in planned(capsys, *words, "--gpu", "h200")["ranks"][0]["held"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["deepseek-v4", "--gpus", "8", "--gpu", "h200"],
            "is named 'deepseek-v4': did you mean 'deepseek-v3' or 'deepseek-v2'?",
        ),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h250"], "no GPU card is named 'h250': did you mean"),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--trace-rank", "8"],
            "--trace-rank 8: the job's ranks are 0 to 7",
        ),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h20"], "no GPU card is named 'h20': did you mean"),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "mi3"],
            "did you mean 'mi300x' or 'mi325x' or 'mi355x'? There are h100",
        ),
        (["Qwen/Qwen3-30B-A3B", "--gpus", "8", "--gpu", "h200"], "no such file: did you mean 'qwen3-30b-a3b'?"),
        (["configs/demo.yaml", "--gpus", "8", "--gpu", "h200"], "is a job file, and MODEL a model card: give it with"),
        (["--gpus", "8", "--gpu", "h200"], "which MODEL?"),
        ([*SEARCH, "--set", "model.card=mixtral-8x7b"], "--set model.card=...: name the model as MODEL"),
        (["sarch", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"], "is named 'sarch': did you mean 'search'?"),
        (["SCALE", "--gpu", "h200", "--from", "8", "--to", "16"], "is named 'SCALE': did you mean 'scale'?"),
        (
            ["gone", "--gpus", "8", "--gpu", "h200", "--config", "configs/demo.yaml"],
            "no command of maniple plan and no model card is named 'gone'",
        ),
        (
            [*SEARCH, "--global-batch-size", "64", "--set", "train.global_batch_size=32"],
            "--global-batch-size 64 and --set train.global_batch_size=... say the same twice",
        ),
        (
            ["find", "x"],
            "is named 'find': commands are job, search, scale, calibrate, and `maniple models` lists the cards",
        ),
        (["qwen", "x"], "is named 'qwen': did you mean 'qwen3-235b-a22b' or 'qwen3-30b-a3b'?"),
        (["find", "--gpus", "8"], "is named 'find': commands are"),
        (["find", "x", *GPUS], "is named 'find': commands are"),
        (["Qwen3_30B", *GPUS], "is named 'Qwen3_30B': did you mean 'qwen3-30b-a3b'"),
        (["qwen3-30b-a3b", "8", *GPUS], "plan qwen3-30b-a3b 8: one MODEL is planned: leave '8' out"),
        (["calibrate.yaml", *GPUS], "calibrate.yaml: no such file"),
        (["", *GPUS], "MODEL is empty: name a model card"),
        (["qwen3-30b-a3b", *GPUS, "--config", ""], "'--config': it is empty: give a file's name"),
        (["qwen3-30b-a3b", *GPUS, "--calibration", ""], "'--calibration': it is empty: give a file's name"),
        (["qwen3-30b-a3b", *GPUS, "--report", ""], "'--report': it is empty: give a file's name"),
        (["qwen3-30b-a3b", *GPUS, "--pipeline-trace", ""], "'--pipeline-trace': it is empty: give a file's name"),
        ([*SEARCH, "--config", ""], "'--config': it is empty: give a file's name"),
        ([*SEARCH, "--write", ""], "'--write': it is empty: give a file's name"),
        (["scale", *SEARCH[1:2], "--config", ""], "'--config': it is empty: give a file's name"),
        (["calibrate", "--out", "", "--device", "cpu"], "'--out': it is empty: give a file's name"),
        (
            [*GPUS, "--config", "src/maniple/config/presets/pretrain.yaml"],
            "pretrain.yaml has no model.card: set it there, or name MODEL",
        ),
        (
            [*SEARCH, "--sequence-length", "64", "--set", "data={split: null, sequence_length: 32}"],
            "--sequence-length 64 and --set data.sequence_length=... say the same twice",
        ),
        (
            [*SEARCH, "--global-batch-size", "64", "--set", " train = {global_batch_size: 32}"],
            "--global-batch-size 64 and --set train.global_batch_size=... say the same twice",
        ),
        ([*SEARCH, "--set", "model={card: mixtral-8x7b}"], "--set model.card=...: name the model as MODEL"),
        ([*SEARCH, "--set", "data={sequence_length: ["], "command line: data: "),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", ""], "no GPU card is named ''"),
        (["qwen3-30b-a3b", "--gpus", "0", "--gpu", "h200"], "--gpus 0: a job has at least one GPU"),
        (["qwen3-30b-a3b", "--gpus", "-8", "--gpu", "h200"], "--gpus -8"),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.tensor_parallel_size=3"],
            "multiple of 3",
        ),
        (
            ["qwen3-30b-a3b", "--gpus", "256", "--gpu", "h200", "--set", "parallel.expert_parallel_size=256"],
            "moe.num_experts 128 is not a multiple of parallel.expert_parallel_size 256",
        ),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.experts=8"], "parallel.experts"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["qwen3-30b-a3b", "--gpus", "many", "--gpu", "h200"], "valid integer"),
        (["qwen3-30b-a3b", "--gpu", "h200"], "--gpus"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--imbalance", "factor:0.5"], "imbalance"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--fabric", "256"], "--fabric 256: expected GPUS:SHARE"),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--fabric", "12:0.5"],
            "a pod holds whole nodes, which have 8",
        ),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "words", [["a\x1b[2J.yaml", *GPUS], ["mixtral-8x7b", *GPUS, "--config", "a\x1b[2J.yaml"], ["--a\x1b[2J"]]
)
def test_control_bytes_of_names_do_not_reach_the_terminal(words, capsys):
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert "a\\x1b[2J" in err
    assert err.rstrip("\n").isprintable()


def test_an_uneven_router_needs_more(capsys):
    totals = [
        planned(capsys, *QWEN, "--imbalance", factor)["ranks"][0]["total"]
        for factor in ("balanced", "factor:1.5", "factor:2")
    ]
    assert totals[0] < totals[1] < totals[2]


@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-120b", "kimi-k2"])
def test_planning_loads_no_torch_and_is_quick(model):
    code = (
        "import sys; from maniple import cli; "
        f"code = cli.main(['plan', '{model}', '--gpus', '1024', '--gpu', 'mi355x']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert time.monotonic() - started < 20


def test_the_job_file_s_model_is_planned_where_none_is_named(capsys):
    words = ["--gpus", "2", "--gpu", "H200-SXM", "--config", "configs/h200_qwen3_1b.yaml"]
    assert planned(capsys, "plan", *words) == planned(capsys, "plan", "qwen3-30b-a3b", *words)


def test_a_sequence_beyond_the_model_s_positions_is_said(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "1", "--gpu", "h200", "--set", "data.sequence_length=65536"]
    assert cli.main(words) == 0
    assert "65,536 tokens a sequence, and qwen3-30b-a3b has 40,960 positions" in capsys.readouterr().err


def test_what_may_help_is_written_as_options_that_help(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.pipeline_parallel_size=2"]
    words += ["--set", "recompute.granularity=selective", "--set", "recompute.modules=[moe_act]"]
    before = planned(capsys, *words)
    (change,) = re.findall(r"what may help: (--set .*?) would free", before["advice"])
    change = shlex.split(change)
    assert [key.split("=")[0] for key in change[1::2]] == ["recompute.granularity", "recompute.modules"]
    assert max(rank["total"] for rank in planned(capsys, *words, *change)["ranks"]) < max(
        rank["total"] for rank in before["ranks"]
    )


def test_no_change_is_named_that_the_job_has_already(capsys):
    """A job that computes some layers again is told to do so with all; one that does, and has the rest, nothing."""
    words = ["plan", "qwen3-30b-a3b", "--gpus", "1", "--gpu", "h200", "--set", "recompute.granularity=full"]
    some = planned(capsys, *words, "--set", "recompute.layers=[0, 1]")["advice"]
    assert "--set 'recompute.layers=[]' would free" in some
    assert "granularity" not in some
    rest = ["--set", "optimizer.offload_fraction=1", "--set", "train.loss=fused"]
    every = planned(capsys, *words, *rest)["advice"]
    assert every is None or every.startswith("what may help: `maniple plan search ")


def test_an_uneven_router_that_cannot_be_so_uneven_is_said(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--imbalance", "20"]
    assert cli.main([*words, "--set", "parallel.expert_parallel_size=8"]) == 0
    assert "imbalance 20: planned at 8, since with EP 8 no rank can have more than all" in capsys.readouterr().out
    assert cli.main([*words, "--set", "parallel.expert_parallel_size=1"]) == 0
    assert "every rank has all experts" in capsys.readouterr().out


def test_a_terminal_without_our_letters_gets_others():
    """`·` between chunks, `×` between stages that are alike."""
    plan = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]
    plan += ["--set", "parallel.pipeline_parallel_size=2", "--set", "parallel.virtual_pipeline_size=2"]
    shown = "from maniple import cli; cli.main([]); print('3·2×29…')"  # as the search writes stages
    for words, said in ((["-m", "maniple", *plan], "E 0-11 | 24-35"), (["-c", shown], "3|2x29...")):
        ascii_ = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run([sys.executable, *words], env=ascii_, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert said in done.stdout.decode("ascii")


def test_every_letter_that_commands_print_has_one_in_ascii():
    """Strings of the sources, but for notes of the kernels, what only a page shows, and a tokenizer's own marks."""
    from maniple import terminal

    source = Path(maniple.__file__).parent
    not_printed = {"kernels/", "plan/what_if.py", "plan/html_report.py", "data/tokenizer.py", "terminal.py"}
    for file in source.rglob("*.py"):
        if file.relative_to(source).as_posix().startswith(tuple(not_printed)):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isascii():
                assert {letter for letter in node.value if not letter.isascii()} <= set(terminal._ASCII), file


@pytest.mark.parametrize(("width", "left_out"), [(200, []), (90, ["note"]), (40, ["note", "GiB"])])
def test_a_narrow_terminal_shows_fewer_columns_and_whole_numbers(width, left_out, capsys, monkeypatch):
    import rich.console

    made = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda **options: made(**(options | {"width": width})))
    headings, line = ["job", "seconds", "GiB", "MFU", "note"], ["x" * 24, "12.3", "123,456.7", "45.6%", "y" * 50]
    print_table(headings, [line], numbers=range(1, 4), spare=["MFU", "note", "GiB"])
    out = capsys.readouterr().out
    for heading, text in zip(headings, line, strict=True):
        assert (text in out) == (heading not in left_out)
    assert ("a wider terminal also shows: " + ", ".join(left_out) in out) == bool(left_out)


def test_a_link_to_itself_is_no_job_file(capsys, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["plan", "--gpus", "8", "--gpu", "h200", "--config", str(tmp_path / "loop")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_to_copy_is_of_the_same_job(capsys, tmp_path):
    """Its words say batch, sequence, load and all keys but the layout's; run, it looks at the same tokens."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "extends: pretrain\nmodel: {card: mixtral-8x7b}\ndata: {sequence_length: 8192}\n"
        "train: {global_batch_size: 64, steps: 100000}\n"
    )
    sets = ["data.sequence_length=4096", "parallel.overlap_param_gather=false", "parallel.tensor_parallel_size=2"]
    words = [word for text in sets for word in ("--set", text)]
    assert cli.main(["plan", "--config", str(file), "--gpus", "8", "--gpu", "h200", "--imbalance", "1.5", *words]) == 0
    command = re.search(r"`maniple (plan search .*?)`", capsys.readouterr().out)[1].split()
    for option in ("--global-batch-size 64", "--sequence-length 4096", "--imbalance 1.5"):
        assert option in " ".join(command)
    assert "parallel.overlap_param_gather=false" in command
    assert not any("tensor_parallel_size" in word for word in command)
    assert cli.main(command) == 0
    assert "mixtral-8x7b on 8 x h200-sxm, 64 x 4,096 tokens a step" in capsys.readouterr().out


def test_scaling_that_does_not_fit_gives_the_whole_command(capsys, tmp_path):
    """Run, it searches the same job: with all overrides where the search found nothing, and else without a layout's."""
    words = ["plan", "scale", "deepseek-v3", "--gpu", "h200", "--from", "8", "--to", "16"]
    options = ["--fabric", "256:0.5", "--global-batch-size", "64", "--sequence-length", "2048", "--imbalance", "1.2"]
    options += ["--set", "parallel.tensor_parallel_size=2", "--set", "train.loss=fused"]
    assert cli.main([*words, *options]) == 2
    err = capsys.readouterr().err
    assert f"`maniple plan search deepseek-v3 --gpus 8 --gpu h200 {' '.join(options)}` says what is missing" in err
    assert cli.main(["plan", "search", "deepseek-v3", "--gpus", "8", "--gpu", "h200", *options]) == 0
    assert "deepseek-v3 on 8 x h200-sxm, 64 x 2,048 tokens" in capsys.readouterr().out
    file = tmp_path / "job.yaml"
    file.write_text("extends: pretrain\nmodel: {card: qwen3-30b-a3b}\nparallel: {expert_parallel_size: 4}\n")
    words = ["plan", "scale", "--config", str(file), "--gpu", "h200", "--from", "4", "--to", "4"]
    sets = ["--set", "parallel={tensor_parallel_size: 1}", "--set", "train={steps: 9000, global_batch_size: 16}"]
    assert cli.main([*words, *sets]) == 0
    command = f"maniple plan search qwen3-30b-a3b --gpus 4 --gpu h200 --config {file} --global-batch-size 16 "
    command += "--sequence-length 4096 --set train.steps=9000"
    assert capsys.readouterr().out.endswith(f"`{command}` looks for a layout that fits\n")
    assert cli.main(command.split()[1:]) == 0


def test_a_model_whose_name_begins_with_a_dash_can_be_copied(capsys, tmp_path, monkeypatch):
    card = Path(maniple.__file__).parent / "models" / "cards" / "qwen3-30b-a3b.yaml"
    (tmp_path / "-card.yaml").write_text(card.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "job.yaml").write_text("model: {card: -card.yaml}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for named in (["--config", "job.yaml"], ["--", "-card.yaml"]):
        assert cli.main(["plan", "--gpus", "2", "--gpu", "h200", *named]) == 0
        command = re.search(r"`maniple (plan search .*?)`", capsys.readouterr().out)[1].split()
        assert command[2] == "./-card.yaml"
        assert cli.main(command) == 0
        assert "qwen3-30b-a3b on 2 x h200-sxm" in capsys.readouterr().out


def test_a_scaling_table_fits_eighty_columns(capsys, monkeypatch):
    import rich.console

    made = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda **options: made(**(options | {"width": 80})))
    assert cli.main(["plan", "scale", "gpt-oss-20b", "--gpu", "h200", "--from", "8", "--to", "16"]) == 0
    table = capsys.readouterr().out.splitlines()[2:7]
    assert table[0].split()[0] == "scaling"
    assert [line.split()[0] for line in table[1:]] == ["weak", "weak", "strong", "strong"]
    assert all(line.split()[-1] in ("yes", "no") for line in table[1:])


def test_a_search_says_what_its_best_keeps_in_host_memory(capsys):
    words = ["plan", "search", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--global-batch-size", "32"]
    words += ["--set", "optimizer.offload_fraction=1", "--set", "parallel.pipeline_parallel_size=1"]
    found = planned(capsys, *words)
    assert found["host_per_node"] > 0
    (line,) = (line for line in found["explanation"] if line.startswith("in host memory: "))
    assert f"{found['host_per_node'] / 2**30:,.2f} GiB a node" in line


def test_where_nothing_fits_a_search_that_writes_says_why_too(capsys, tmp_path):
    words = ["plan", "search", "qwen3-30b-a3b", "--gpus", "1", "--gpu", "h200", "--write", str(tmp_path / "job.yaml")]
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert "does not fit: the smallest of " in told.out
    assert told.err.splitlines()[-1].endswith("nothing fits, so there is no job to write")
    assert not list(tmp_path.iterdir())


def test_whoever_interrupts_the_report_finds_no_trace_either(monkeypatch, tmp_path):
    from maniple.plan import html_report

    def interrupted(asked, file):
        raise KeyboardInterrupt

    monkeypatch.setattr(html_report, "write", interrupted)
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--report", str(tmp_path / "a.html")]
    words += ["--pipeline-trace", str(tmp_path / "a.json"), "--set", "parallel.pipeline_parallel_size=2"]
    assert cli.main(words) == 130
    assert not list(tmp_path.iterdir())


def test_doubt_is_said_in_json_and_where_the_best_is_named(capsys):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]
    plan = planned(capsys, *words)  # without a layout it does not fit, whatever the band
    assert (plan["fits"], plan["certain"]) == (False, True)
    assert "138.98 GiB, which is not certain to fit: " in plan["best_layout"]
