"""Commands of the guide that cannot run in a test: why not, and how far each can be checked without starting it."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.guide import ROOT

from maniple import cli


def make_knows_it(command: str, patch: pytest.MonkeyPatch) -> None:
    words = [*shlex.split(command), "--dry-run", "--no-print-directory"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def pip_would_find_its_files(command: str, patch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    assert (ROOT / "pyproject.toml").is_file()
    for option, value in itertools.pairwise(words):
        # installed.txt is written by the command before it
        assert option != "-c" or value == "installed.txt" or (ROOT / value).is_file()


def the_program_is_installed(command: str, patch: pytest.MonkeyPatch) -> None:
    assert shutil.which(shlex.split(command)[0], path=str(Path(sys.executable).parent))


def the_job_would_start(command: str, patch: pytest.MonkeyPatch) -> None:
    """`maniple train` reads the job and checks it at its world size; where it would start torchrun it stops.

    Datasets of the guide are the reader's own, and not asked for.
    """
    from maniple.data import sources
    from maniple.launch import torchrun

    launches: list[torchrun.Launch] = []
    patch.chdir(ROOT)
    patch.setattr(torchrun, "run", lambda launch, module, words: launches.append(launch) or 0)
    patch.setattr(torchrun, "visible_gpus", lambda: 8)
    patch.setattr(torchrun, "_check_port", lambda port: None)
    patch.setattr(torchrun, "_check_host", lambda host, option: None)
    patch.setattr(sources, "check_files", lambda data: None)
    words = shlex.split(command)
    assert words[0] == "maniple"
    assert cli.main(words[1:]) == 0
    assert len(launches) == 1


def the_dry_run_would_start(command: str, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(ROOT)
    calls = _engine(patch, "dry_run.one_rank", "run")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert len(calls) == 1


def the_dry_run_of_all_ranks_would_start(command: str, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(ROOT)
    calls = _engine(patch, "dry_run.all_ranks", "run")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert len(calls) == 1


def the_check_would_start(command: str, patch: pytest.MonkeyPatch) -> None:
    """`maniple models check CARD` knows the card; what it then runs is run on every family by test_hf_parity.py."""
    calls: list = []
    parity = types.ModuleType("maniple.engines.megatron.huggingface.parity")
    verdict = types.SimpleNamespace(equal=True)
    for name, value in {"check": verdict, "as_rows": [], "in_words": ""}.items():
        setattr(parity, name, lambda *words, value=value, **options: calls.append(words) or value)
    for name in ("maniple.engines.megatron", "maniple.engines.megatron.huggingface"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["maniple.engines.megatron.huggingface"].parity = parity
    assert cli.main(shlex.split(command)[1:]) == 0
    assert calls[0][1] is None  # no folder


def the_calibration_would_start(command: str, patch: pytest.MonkeyPatch) -> None:
    """It measures a GPU, where torch sees one, for the file that the guide names; tests/plan runs it on a CPU."""
    import torch

    from maniple.bench import calibrate
    from maniple.commands import plan_calibrate

    written: list = []
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    patch.setattr(calibrate, "run", lambda device, card, **options: _calibration())
    patch.setattr(plan_calibrate, "check_target", lambda option, file: None)
    patch.setattr(calibrate, "write", lambda calibration, file: written.append(file.name))
    assert cli.main(shlex.split(command)[1:]) == 0
    assert written == ["calibration-h200-sxm.yaml"]


def the_plan_would_take_it(command: str, patch: pytest.MonkeyPatch) -> None:
    from maniple.bench import calibrate

    with tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        words = shlex.split(command)[1:]
        calibrate.write(_calibration(), Path(words[words.index("--calibration") + 1]))
        assert cli.main(words) == 0
        patch.chdir(ROOT)


def _calibration():
    from maniple.hardware.calibration import Calibration

    times = dict.fromkeys(("milliseconds", "milliseconds_p20", "milliseconds_p80"), 1.0)
    row = {"group": "memory", "name": "copy", "what": "made up", "work": 4e9, "rounds": 1} | times
    about = {"gpu": "NVIDIA H200", "card": "h200-sxm", "date": "2026-11-30", "command": "maniple", "versions": {}}
    return Calibration.model_validate({"format": 1, "sources": {}, "measured": [row]} | about)


def torchrun_would_start_it(command: str, patch: pytest.MonkeyPatch) -> None:
    """torchrun understands its options, and a rank of it reads and checks the job at that world size."""
    from torch.distributed.run import parse_args

    patch.chdir(ROOT)
    for name, value in {"SLURM_NNODES": "128", "SLURM_JOB_ID": "7", "HEAD_NODE": "node0"}.items():
        patch.setenv(name, value)
    words = shlex.split(os.path.expandvars(command))
    assert words[:2] == ["srun", "torchrun"]
    asked = parse_args(words[2:])
    assert asked.module
    assert asked.training_script == "maniple"
    ranks = int(asked.nnodes) * int(asked.nproc_per_node)
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name, value in started.items():
        patch.setenv(name, value)
    calls = _engine(patch, "trainer", "main")
    assert cli.main(asked.training_script_args) == 0
    assert len(calls) == 1


def _engine(patch: pytest.MonkeyPatch, module: str, function: str) -> list:
    """Puts a module in the engine's place that notes the calls of its function."""
    calls: list = []
    stub = types.ModuleType("maniple.engines.megatron")
    patch.setitem(sys.modules, stub.__name__, stub)
    for part in module.split("."):
        inner = types.ModuleType(f"{stub.__name__}.{part}")
        setattr(stub, part, inner)
        stub = inner
        patch.setitem(sys.modules, stub.__name__, stub)
    setattr(stub, function, lambda *words, **options: calls.append(words) or 0)
    return calls


QWEN3 = "configs/qwen3_30b_a3b_8.yaml --nproc 8"
V3 = "configs/deepseek_v3_1024.yaml"
CORPUS = "'data.train=[corpus/text]' data.tokenizer=tokenizer/tokenizer.json"
CHECKED = (
    *("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "glm-4.5-air", "minimax-m2", "gpt-oss-20b"),
    "mixtral-8x7b",
)
NOT_RUN: dict[str, tuple[str, Callable[[str, pytest.MonkeyPatch], None]]] = {
    "make demo": ("trains for minutes; .ci/run does some steps of it", make_knows_it),
    "make test": ("would run this test again", make_knows_it),
    "maniple train configs/h200_qwen3_1b.yaml --nproc 1": ("needs a GPU", the_job_would_start),
    f"maniple train {QWEN3} {CORPUS}": ("needs 8 GPUs", the_job_would_start),
    f"maniple train {V3} --nproc 8 --nnodes 128 --node-rank 0 --master-addr node0 {CORPUS}": (
        "needs 128 nodes",
        the_job_would_start,
    ),
    f"maniple train {V3} --nproc 8 --nnodes 128 --rdzv-endpoint node0:29500 --rdzv-id job7 {CORPUS}": (
        "needs 128 nodes",
        the_job_would_start,
    ),
    "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 --rdzv-backend=c10d"
    f" --rdzv-endpoint=$HEAD_NODE:29500 --rdzv-id=$SLURM_JOB_ID -m maniple train {V3} {CORPUS}": (
        "needs a Slurm cluster",
        torchrun_would_start_it,
    ),
    f"maniple train {V3} --dry-run --rank 0 --world-size 1024": ("takes minutes", the_dry_run_would_start),
    f"maniple train {V3} --dry-run --all-ranks --world-size 1024": (
        "takes minutes",
        the_dry_run_of_all_ranks_would_start,
    ),
    "maniple train configs/demo.yaml --nproc 2 --name slower optimizer.learning_rate=1e-3 train.steps=200": (
        "trains for minutes",
        the_job_would_start,
    ),
    "maniple train configs/demo.yaml --nproc 1 parallel.expert_parallel_size=1 train.steps=50": (
        "for a GPU; minutes without",
        the_job_would_start,
    ),
    "maniple train configs/demo.yaml --nproc 2 --max-restarts 3 checkpoint.save_interval=50": (
        "trains for minutes; tests/faults kills and restarts a smaller one",
        the_job_would_start,
    ),
    f"maniple train {QWEN3} --nnodes 1:2 --rdzv-endpoint node0:29500 --rdzv-id job7 --max-restarts 3 {CORPUS}": (
        "needs 2 nodes of 8 GPUs",
        the_job_would_start,
    ),
    "maniple plan calibrate": ("needs a GPU", the_calibration_would_start),
    "maniple plan qwen3-30b-a3b --gpus 8 --gpu h200 --calibration calibration-h200-sxm.yaml": (
        "takes what the command before it made",
        the_plan_would_take_it,
    ),
    "pip install .": ("changes the environment; test_packaging.py installs the wheel", pip_would_find_its_files),
    "pip install -c requirements/constraints.txt .": ("changes the environment", pip_would_find_its_files),
    "pip install -c installed.txt .": ("changes the environment", pip_would_find_its_files),
    "tensorboard --logdir runs": ("serves until it is stopped", the_program_is_installed),
    **{
        f"maniple models check {card}": ("tests/engines/test_hf_parity.py runs it", the_check_would_start)
        for card in CHECKED
    },
}
