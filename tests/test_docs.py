"""The guide keeps its word: its commands run, its job files load, its links lead somewhere, its tables are current.

Every command of README.md and docs/ is run as written, page by page, in a folder with the files that the guide speaks
of. What cannot run here is in `NOT_RUN` with the reason, and is checked as far as it goes without starting.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from maniple import cli
from maniple.config import reference
from maniple.config.check import check, resolve_card
from maniple.config.load import load
from maniple.config.schema import TrainConfig
from maniple.models.table import rows

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "maniple"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "families").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MANIPLE_LAUNCHED")
# Files that a page's commands must leave.
LEAVES = {
    "quickstart.md": [
        *("runs/tiny/summary.json", "runs/tiny/metrics.jsonl", "runs/tiny/tensorboard", "runs/tiny/curves.png"),
        *("runs/tiny/checkpoints/step_00000020/maniple.json", "runs/tiny/logs/rank_0.log", "datasets/mine.bin"),
    ],
    "planner.md": ["plan.html"],
    "data.md": ["datasets/web.bin", "datasets/web.idx", "datasets/books.idx"],
    "weights.md": [
        *("weights/qwen3/maniple.json", "weights/qwen3/card.yaml", "runs/continue/summary.json"),
        *("exported/qwen3/model.safetensors", "exported/qwen3/config.json", "exported/qwen3/tokenizer.json"),
    ],
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- reading the pages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A shell command as one line, or a Python script, and the output that the page shows (None: it shows none)."""

    text: str
    output: str | None = None
    python: bool = False


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        text = re.sub(r"\s*\\\n\s*", " ", block.text)
        if block.language in ("sh", "bash", "shell"):
            yield from (Command(line.strip()) for line in _without_comments(text))
        elif block.language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield Command(command, output or None)
        elif block.language == "python":
            yield Command(block.text, python=True)


def _without_comments(text: str) -> list[str]:
    lines = [re.sub(r"(^|\s+)#\s.*", "", line) for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def all_commands() -> dict[Path, list[Command]]:
    """By page; a command that several pages show is the first page's."""
    seen: set[str] = set()
    found: dict[Path, list[Command]] = {}
    for page in PAGES:
        found[page] = []
        for command in commands(page):
            if command.text not in seen:
                found[page].append(command)
                seen.add(command.text)
    return found


# --- commands that do not run here ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("command", NOT_RUN)
def test_a_command_that_is_not_run_would_start(command, monkeypatch):
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    NOT_RUN[command][1](command, monkeypatch)


def test_every_exception_is_in_the_guide_and_says_why():
    shown = {command.text for page in PAGES for command in commands(page)}
    assert not set(NOT_RUN) - shown
    assert all(reason for reason, _ in NOT_RUN.values())


# --- commands that run ------------------------------------------------------------------------------------------------

TO_RUN = {page: [command for command in found if command.text not in NOT_RUN] for page, found in all_commands().items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with released models, at toy sizes, and damaged ones."""
    from tests import released_folders

    folder = tmp_path_factory.mktemp("models")
    released_folders.write_all(folder)
    return folder


@pytest.fixture
def workplace(tmp_path, models) -> Path:
    """A folder with what the guide takes for granted: this checkout's job files, some text, a tokenizer, models."""
    from maniple.data.tokenizer import train_bpe

    for name in ("configs", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("released", "damaged"):
        (tmp_path / name).symlink_to(models / name)
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "more_text").mkdir()
    (tmp_path / "more_text" / "one.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    train_bpe(texts, 512, tmp_path / "tokenizer.json")
    return tmp_path


def write_job_files(page: Path, folder: Path) -> list[Path]:
    """Writes the page's YAML blocks that begin with `# NAME.yaml` under that name."""
    written = []
    for block in blocks(page):
        if block.language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", block.text)):
            written.append(folder / named[1])
            written[-1].write_text(block.text, encoding="utf-8")
    return written


def run(command: Command, folder: Path, environment: dict[str, str], patch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code, and what was said."""
    if command.text.startswith("maniple convert "):  # here: to import the engine takes far longer than to convert
        said = io.StringIO()
        patch.chdir(folder)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(shlex.split(command.text)[1:])
        return code, said.getvalue()
    words = [sys.executable, "-c"] if command.python else ["bash", "-o", "pipefail", "-c"]
    done = subprocess.run(
        [*words, command.text], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine half a minute passes before a process has imported Megatron-Core
@pytest.mark.parametrize("page", [page for page, found in TO_RUN.items() if found], ids=name_of)
def test_commands_run(page, workplace, monkeypatch):
    write_job_files(page, workplace)
    inherited = {k: v for k, v in os.environ.items() if k not in OF_TORCHRUN}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**inherited, "PATH": path, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for command in TO_RUN[page]:
        code, said = run(command, workplace, environment, monkeypatch)
        if command.output is not None:
            assert said == command.output
        refused = command.output is not None and "error: " in command.output
        assert code == (2 if refused else 0), f"{command.text}\n{said[-3000:]}"
    missing = [name for name in LEAVES.get(page.name, []) if not (workplace / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "yaml" for b in blocks(p))], ids=name_of)
def test_job_files_load(page, tmp_path):
    named = write_job_files(page, tmp_path)
    for number, block in enumerate(block for block in blocks(page) if block.language == "yaml"):
        path = tmp_path / f"block_{number}.yaml"
        path.write_text(block.text, encoding="utf-8")
        resolve_card(load(path).config)
    for path in named:
        job = load(path).config
        check(job, resolve_card(job), world_size=1)


# --- links and paths --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What a `#` link to a page may name: its headings as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_relative_to(ROOT), target
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}, which has no such heading"


def test_every_page_is_in_the_table_of_contents():
    linked = set(re.findall(r"\]\(([^)\s]+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= linked
    assert len(pages) + 1 == len(PAGES)


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_no_path_of_some_machine(page):
    folders = "work|root|tmp|home|Users|mnt|opt|scratch|var|usr|etc|nfs"
    assert not re.findall(rf"(?<![\w.:/])/(?:{folders})\b\S*", page.read_text(encoding="utf-8"))


# --- tables and claims ------------------------------------------------------------------------------------------------


def test_the_table_of_keys_is_the_schemas():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- reference: begin .*?-->\n(.*)\n<!-- reference: end -->", page, re.DOTALL)[1]
    how = 'python -c "from maniple.config.reference import markdown; print(markdown())"'
    assert shown.strip() == reference.markdown().strip(), f"write between the marks what this prints: {how}"


def test_every_key_has_one_meaning():
    known = dict(reference.keys(TrainConfig))
    assert not set(reference.MEANING) - set(known)
    assert all(reference.meaning(key, field) for key, field in known.items())
    with pytest.raises(ValueError, match="has 2 descriptions"):
        reference.meaning("train.seed", FieldInfo(annotation=int, description="said twice"))


def test_readme_lists_the_models_with_their_counts():
    found = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [
        (row["name"], f"{row['total_parameters'] / 1e9:.1f}", f"{row['active_parameters'] / 1e9:.1f}") for row in rows()
    ]
    assert found == wanted


def test_measured_numbers_are_in_the_raw_rows():
    measured = set()
    for file in (ROOT / "benchmarks" / "results").glob("*training*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            summary = row["summary"]
            measured.add(
                (
                    str(summary["world_size"]),
                    f"{row['first_loss']:.2f} → {row['last_loss']:.2f}",
                    f"{summary['tokens_per_second_per_gpu']:,.0f}",
                    f"{summary['peak_memory_bytes'] / 2**30:.1f} GiB",
                )
            )
    pattern = r"^\| [^|]+ \| (\d+) \| ([\d.]+ → [\d.]+) \| ([\d,]+) \| ([\d.]+ GiB) \|$"
    claimed = re.findall(pattern, PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert claimed
    assert not set(claimed) - measured


def test_imports_go_the_way_the_architecture_says():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (order,) = re.findall(r"^    (cli → .*)$", page, re.MULTILINE)
    levels = [level.split(", ") for level in order.split(" → ")]
    rank = {package: number for number, level in enumerate(levels) for package in level} | {"__main__": -1}
    leaves = {"config", "models", "hardware", "yamlfile", "explain", "errors", "__init__"}
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages == set(rank) | leaves
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for other in _imported(path) - leaves - {package}:
            assert package not in leaves, f"{path}: {package} is a leaf and imports {other}"
            assert rank[package] < rank[other], f"{path}: {package} imports {other}"


def _imported(path: Path) -> set[str]:
    """First-level packages of ours that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "maniple":
            names += [f"maniple.{alias.name}" for alias in node.names if (SOURCE / alias.name).is_dir()]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("maniple.")}


def test_every_redirect_of_the_cpu_device_is_explained():
    tree = ast.parse((SOURCE / "engines" / "megatron" / "cpu.py").read_text(encoding="utf-8"))
    tables = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "_REDIRECTS"]
    (table,) = tables
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [key.value for key in table.keys if f"`{key.value}`" not in page]
