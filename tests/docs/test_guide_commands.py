"""The guide keeps its word: every command of README.md and docs/ runs as written, page by page.

Each page has a folder with the files that the guide speaks of. What cannot run here is in `not_run.py` with the reason,
and is checked as far as it goes without starting.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.guide import PAGES, ROOT, SOURCE, Command, all_commands, blocks, commands, name_of
from tests.docs.not_run import NOT_RUN

from maniple import cli
from maniple.config.check import check, resolve_card
from maniple.config.load import load

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


@pytest.mark.parametrize("command", NOT_RUN)
def test_a_command_that_is_not_run_would_start(command, monkeypatch):
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    NOT_RUN[command][1](command, monkeypatch)


def test_every_exception_is_in_the_guide_and_says_why():
    shown = {command.text for page in PAGES for command in commands(page)}
    assert not set(NOT_RUN) - shown
    assert all(reason for reason, _ in NOT_RUN.values())


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
