"""The command line: exit codes, one line for each mistake, JSON on standard output, and no heavy import."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

import maniple
from maniple import cli
from maniple.models import counting, load_card

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs" / "demo.yaml")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(maniple.__file__).parents[1])}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def engine(monkeypatch):
    """An engine that notes what it is asked to do."""
    calls = []
    package = types.ModuleType("maniple.engines.megatron")
    dry_run = types.ModuleType("maniple.engines.megatron.dry_run")
    for parent, name, function, code in (
        (package, "trainer", "main", 5),
        (dry_run, "one_rank", "run", 6),
        (dry_run, "all_ranks", "run", 7),
    ):
        module = types.ModuleType(f"{parent.__name__}.{name}")
        setattr(module, function, lambda *words, _code=code, **options: calls.append((words, options)) or _code)
        setattr(parent, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in (package, dry_run):
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
    return calls


def program(*words, **options):
    command = [sys.executable, "-m", "maniple", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **options)


def mistake(capsys, *words):
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    return err


def test_the_program_and_its_exit_code():
    done = program("train", "gone.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "maniple: error: gone.yaml: no such file; give the path of a job file (YAML)\n"


def test_help_imports_nothing_heavy():
    heavy = {"torch", "transformers", "matplotlib", "megatron", "numpy", "pydantic"}
    code = (
        "import sys; from maniple import cli; code = cli.main(['--help'])\n"
        f"print(sorted({heavy} & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stderr == "[] 0\n"
    for command in ("train", "models", "data", "config"):
        assert command in done.stdout


def test_flags_have_no_type_in_the_help(capsys):
    for words in (["train"], ["bench", "grouped-gemm"], ["models"], ["checkpoint"], ["checkpoint", "inspect"], []):
        assert cli.main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--help" in said
        assert "bool" not in said


def test_mistakes_are_told_before_torch_is_imported():
    jobs = [
        ["--nproc", "0"],
        ["--nproc", "3"],
        ["--nproc", "2", "train.global_batch_size=9"],
        ["--nproc", "2", "--master-addr", "host.invalid"],
        ["--nproc", "2", "--resume", "/nothing"],
        ["--nproc", "2", "data.source=megatron", "data.train=[gone]", "data.tokenizer=gone"],
        ["--dry-run", "--world-size", "3"],
    ]
    code = (
        "import sys; from maniple import cli; from maniple.launch import torchrun; torchrun._UNKNOWN_SECONDS = 0.1\n"
        "torchrun.run = None\n"
        f"codes = [cli.main(['train', {DEMO!r}, *words]) for words in {jobs!r}]\n"
        "print('torch' in sys.modules, codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stdout == f"False {[2] * len(jobs)}\n"
    for said, what in zip(
        done.stderr.splitlines(),
        (
            "at least one process",
            "multiple of 2",
            "global_batch_size 9",
            "--master-addr host.invalid",
            "/nothing",
            "gone",
            "of 2",
        ),
        strict=True,
    ):
        assert what in said


def test_without_a_driver_gpus_are_counted_without_torch(monkeypatch):
    from maniple.launch import torchrun

    asked = []
    cuda = types.SimpleNamespace(device_count=lambda: asked.append(1) or 3)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torchrun, "_DEVICES", ("/no/such/device*",))
    assert (torchrun.visible_gpus(), asked) == (0, [])
    monkeypatch.setattr(torchrun, "_DEVICES", ("/no/such/device*", "/dev/nul*"))
    assert (torchrun.visible_gpus(), asked) == (3, [1])


def test_a_job_that_failed_says_from_where_it_goes_on(monkeypatch, capsys, tmp_path):
    from maniple.engines.megatron.checkpoint import files
    from maniple.launch import torchrun

    folder = tmp_path / "it" / "checkpoints" / "step_00000020"

    def fails(*_):
        folder.mkdir(parents=True)
        return 137

    started, saved = time.time(), [0.0]
    manifest = {"step": 20}
    monkeypatch.setattr(
        files, "newest_first", lambda folders: ([(f, manifest | {"saved": saved[0]}) for f in folders], [])
    )
    monkeypatch.setattr(torchrun, "run", fails)
    words = ["train", DEMO, "--nproc", "2", "train.device=cpu", "--name", "it", f"output_dir={tmp_path}"]
    for when, resume, hint in (
        (started + 1e6, [], "maniple: go on with --resume auto (step 20)\n"),
        (started - 1e6, [], ""),  # another job's
        (started - 1e6, ["--resume", "auto"], "maniple: go on with --resume auto (step 20)\n"),
    ):
        saved[0] = when
        assert cli.main([*words, *resume]) == 137
        assert capsys.readouterr().err == hint
        folder.rmdir()
        folder.parent.rmdir()


def test_models_and_config_need_no_torch():
    code = (
        "import sys; from maniple import cli\n"
        f"codes = [cli.main(words) for words in (['models'], ['config', 'show', {DEMO!r}])]\n"
        "print('torch' in sys.modules, codes, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stderr == "False [0, 0]\n"


def test_version_and_no_arguments(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"maniple {maniple.__version__}\n"
    assert cli.main([]) == 0
    assert "Usage: maniple" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["train"], "Missing argument 'CONFIG' (see maniple train --help)"),
        (["train", DEMO, "--foo"], "No such option: --foo"),
        (["train", DEMO, "--nproc", "x"], "Invalid value for '--nproc'"),
        (["train", DEMO, "--nproc", "0", "train.device=cpu"], "--nproc 0"),
        (["train", DEMO, "--nproc", "3", "train.device=cpu"], "3 processes, one a GPU, are not a multiple of 2"),
        (["train", DEMO, "train.device=cpu"], "1 processes, one a GPU, are not a multiple of 2"),
        (["train", DEMO, "train.stepz=3"], "command line: unknown key 'train.stepz'; did you mean 'train.steps'?"),
        (["train", DEMO, "--set", "train.steps=x"], "train.steps: expected a whole number, got 'x'"),
        (["train", DEMO, "--name", "a/b"], "name: expected letters, digits"),
        (["train", DEMO, "model.card=deepseek-v9"], "did you mean"),
        (["train", "configs"], "configs: "),
        (["train", DEMO, "--dry-run"], "--dry-run needs --world-size"),
        (
            ["train", DEMO, "--dry-run", "--nproc", "2"],
            "--nproc 2 starts processes, and a dry run starts none: give --w",
        ),
        (["train", DEMO, "--dry-run", "--nproc", "2", "--world-size", "2"], "a dry run starts none"),
        (
            ["train", DEMO, "train.device=cpu", "--nproc", "2", "--name", "x", f"output_dir={DEMO}"],
            f"{DEMO} is no folder",
        ),
        (["train", DEMO, "--dry-run", "--world-size", "2", "--rank", "2"], "--rank 2: expected 0 to 1"),
        (["train", DEMO, "--dry-run", "--world-size", "3"], "3 processes, one a GPU, are not a multiple of 2"),
        (["train", DEMO, "--rank", "0"], "belong to --dry-run"),
        (["train", DEMO, "--all-ranks"], "belong to --dry-run"),
        (["train", DEMO, "--dry-run", "--all-ranks"], "--dry-run needs --world-size"),
        (["train", DEMO, "--dry-run", "--all-ranks", "--rank", "0", "--world-size", "2"], "leave --rank out"),
        (["train", DEMO, "--nproc", "2", "--nnodes", "2", "train.device=cpu"], "--nnodes 2 needs --master-addr"),
        (["models", "mixtral"], "mixtral-8x7b"),
        (["config"], "Missing command"),
        (["config", "show", "nothing.yaml"], "nothing.yaml: no such file"),
        (["config", "show", "--set", "a=1"], "unknown key 'a'"),
        (["data", "prepare"], "Missing argument 'INPUT...'"),
        (["data", "prepare", "x"], "Missing option '--output'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, words, says):
    assert says in mistake(capsys, *words)


def test_ctrl_c_and_a_crash(monkeypatch, engine, capsys):
    def interrupted(*words, **options):
        raise KeyboardInterrupt

    dry_run = ["train", DEMO, "--dry-run", "--world-size", "2"]
    monkeypatch.setattr(sys.modules["maniple.engines.megatron.dry_run.one_rank"], "run", interrupted)
    assert cli.main(dry_run) == 130
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("maniple: dry run of rank 0 of 2: ")  # what takes long says so first, and nothing else

    def broken(*words, **options):
        raise RuntimeError("boom")

    monkeypatch.setattr(sys.modules["maniple.engines.megatron.dry_run.one_rank"], "run", broken)
    with pytest.raises(RuntimeError, match="boom"):
        cli.main(dry_run)


def test_dry_run_is_in_this_process(engine):
    words = ["train", DEMO, "--dry-run", "--world-size", "4", "--rank", "3", "train.steps=77"]
    words += ["train.global_batch_size=32", "--json"]
    assert cli.main(words) == 6
    ((config, card, rank, world_size), options) = engine[0]
    assert (config.train.steps, card.hidden_size, rank, world_size, options) == (77, 192, 3, 4, {"as_json": True})


def test_all_ranks_of_a_dry_run(engine):
    words = ["--world-size", "4", "--json", "train.global_batch_size=32"]
    assert cli.main(["train", DEMO, "--dry-run", "--all-ranks", *words]) == 7
    (((job, _, world_size), options),) = engine
    assert (job.name, world_size, options) == ("demo", 4, {"as_json": True})


def test_a_rank_of_torchrun_trains_in_this_process(engine, monkeypatch, capsys):
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    words = ["train", DEMO, "--set", "train.steps=77", "train.seed=5", "--name", "007", "--resume", "auto"]
    assert cli.main(words) == 5
    ((config, card), _) = engine[0]
    assert (config.train.steps, config.train.seed, config.name, config.checkpoint.resume) == (77, 5, "007", "auto")
    assert card.moe.num_experts == 8
    assert "--nproc starts torchrun" in mistake(capsys, "train", DEMO, "--nproc", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 processes" in mistake(capsys, "train", DEMO)
    for name, value, says in [
        ("RANK", "abc", "RANK is 'abc', not a number"),
        ("LOCAL_RANK", "", "LOCAL_RANK is '', not a number"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE is '-2', not a number"),
        ("WORLD_SIZE", "1", "RANK 1 and LOCAL_RANK 1 must be below WORLD_SIZE 1"),
        ("MASTER_PORT", "x", "MASTER_PORT is 'x', not a number"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000, more than 65535"),
        ("MASTER_PORT", "", "RANK is set and MASTER_PORT not"),
    ]:
        with monkeypatch.context() as environment:
            environment.setenv("WORLD_SIZE", "2")
            environment.setenv(name, value)
            assert says in mistake(capsys, "train", DEMO)


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    from maniple.launch import torchrun

    monkeypatch.setattr(torchrun, "run", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: pytest.fail("torch was asked"))
    half, cut = tmp_path / "step_00000007.partial", tmp_path / "step_00000007"
    half.mkdir()
    cut.mkdir()
    (cut / "maniple.json").write_text('{"format": 2')
    for folder, says in [
        (tmp_path / "nothing", "no checkpoint at {}: there is no such folder"),
        (tmp_path, "no checkpoint at {}: it holds checkpoints and is none: none is whole"),
        (half, "no checkpoint at {}: it was not written to its end"),
        (cut, "checkpoint {} is damaged: its maniple.json cannot be read"),
    ]:
        for words in (["--resume", str(folder)], [f"checkpoint.resume={folder}"]):
            assert says.format(folder) in mistake(capsys, "train", DEMO, *words)


def test_a_model_that_fits_no_memory_is_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    import psutil

    from maniple.launch import torchrun

    monkeypatch.setattr(torchrun, "run", lambda *_: 0)
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: 0)
    memory = types.SimpleNamespace(total=24 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    job = tmp_path / "job.yaml"
    job.write_text("extends: laptop\nmodel: {card: deepseek-v3}\n")
    parameters = counting.count(load_card("deepseek-v3")).total_with_mtp
    for device in ("cpu", "auto"):
        said = mistake(capsys, "train", str(job), f"train.device={device}")
        assert f"deepseek-v3 has {parameters:,} parameters, which take at least 1" in said
        assert "GiB a machine to train, and this one has 24: take a smaller model (model.variant=tiny, " in said
    for dtype, size in (("fp32", 16), ("bf16", 18)):
        memory.total = size * parameters
        assert cli.main(["train", str(job), f"precision.dtype={dtype}"]) == 0
        memory.total -= 1
        assert "take at least" in mistake(capsys, "train", str(job), f"precision.dtype={dtype}")
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: 1)
    assert cli.main(["train", str(job)]) == 0  # a GPU's memory is another matter


def test_gpus_decide_how_many_processes_start(monkeypatch, capsys):
    from maniple.launch import torchrun

    started = []
    monkeypatch.setattr(torchrun, "run", lambda launch, module, words: started.append((launch, module, words)) or 0)
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: 4)
    assert cli.main(["train", DEMO, "train.global_batch_size=32", "--name", "x"]) == 0
    launch, module, words = started.pop()
    assert (launch.nproc, launch.world_size, module) == (4, 4, "maniple")
    assert words == ["train", "--set=train.global_batch_size=32", '--set=name="x"', "--", DEMO]
    many = mistake(capsys, "train", DEMO, "--nproc", "6", "train.global_batch_size=24")
    assert "--nproc 6 and 4 visible GPUs" in many
    assert cli.main(["train", DEMO, "--nproc", "8", "train.device=cpu", "train.micro_batch_size=1"]) == 0
    assert started.pop()[0].nproc == 8
    monkeypatch.setattr(torchrun, "visible_gpus", lambda: 0)
    assert "torch sees no GPU" in mistake(capsys, "train", DEMO, "--nproc", "2", "train.device=gpu")
    assert cli.main(["train", DEMO, "--nproc", "2"]) == 0


def test_models_as_json_and_as_a_table(capsys):
    assert cli.main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in rows}
    assert by_name["mixtral-8x7b"]["total_parameters"] == 46_702_792_704
    assert by_name["mixtral-8x7b"]["active_parameters"] == 12_879_925_248
    assert cli.main(["models"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [row["name"] for row in rows]
    assert cli.main(["models", "deepseek-v3"]) == 0
    card = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert card["active_parameters"].strip() == f"{by_name['deepseek-v3']['active_parameters']:,}"
    # as YAML has it, to be pasted
    facts = {
        key: yaml.safe_load(card[f"card.{key}"]) for key in ("vocab_size", "qkv_bias", "sliding_window", "norm_eps")
    }
    assert facts == {"vocab_size": 129280, "qkv_bias": False, "sliding_window": None, "norm_eps": 1e-6}
    assert cli.main(["models", "deepseek-v3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"]["hidden_size"] == 7168


def test_config_show_refuses_a_model_that_cannot_be(capsys):
    said = mistake(capsys, "config", "show", DEMO, "model.overrides.moe.topk=200")
    assert "moe.topk 200 is more than moe.num_experts 8" in said


def test_config_show_as_json(capsys):
    assert cli.main(["config", "show", DEMO, "train.steps=3", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["train.steps"] == {"value": 3, "from": "cli", "source": ""}
    assert values["parallel.expert_parallel_size"]["value"] == 2
    assert values["parallel.expert_parallel_size"]["source"].startswith(f"{DEMO}:")


def test_data_prepare_hands_its_options_over(monkeypatch, capsys):
    calls = []
    module = types.ModuleType("maniple.data.prepare")
    module.prepare = lambda *words, **options: (
        calls.append((words, options)) or types.SimpleNamespace(documents=1000, tokens=2000, seconds=1.0)
    )
    monkeypatch.setitem(sys.modules, "maniple.data.prepare", module)
    words = "data prepare a.jsonl b --output out/x --tokenizer t.json --key body --workers 3 --no-append-eod --resume"
    assert cli.main(words.split()) == 0
    ((inputs, output, tokenizer), options) = calls[0]
    assert (inputs, output, tokenizer) == ([Path("a.jsonl"), Path("b")], Path("out/x"), Path("t.json"))
    assert options == {"key": "body", "workers": 3, "append_eod": False, "resume": True, "overwrite": False}
    assert "1,000 documents, 2,000 tokens" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_crash():
    command = f"'{sys.executable}' -m maniple config show --json | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_ctrl_c_before_the_command_line_is_there(monkeypatch):
    from maniple import __main__

    class Interrupts:
        def find_spec(self, name, *_):
            if name == "maniple.cli":
                raise KeyboardInterrupt

    monkeypatch.delattr(maniple, "cli")
    monkeypatch.delitem(sys.modules, "maniple.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    assert __main__.main() == 130
