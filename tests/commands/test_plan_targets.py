"""Files that commands under `maniple plan` write: what cannot be written is refused before any work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile

import pytest

from maniple import cli
from maniple.config import load

QWEN = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--set", "parallel.expert_parallel_size=8"]
SEARCH = ["plan", "search", *QWEN[1:6]]
WRITERS = [
    ([*QWEN, "--report"], "--report"),
    ([*QWEN, "--pipeline-trace"], "--pipeline-trace"),
    ([*SEARCH, "--write"], "--write"),
    (["plan", "calibrate", "--device", "cpu", "--out"], "--out"),
]


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    """Whoever reads the job, or measures, has begun."""
    from maniple.bench import calibrate

    def work(*_, **__):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(load, "load", work)
    monkeypatch.setattr(calibrate, "run", work)


def refused(capsys, words: list[str]) -> str:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("words", "option"), WRITERS)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/new", "there is no folder"),
        ("file/new", "there is no folder"),
        ("folder", "it is a folder: give a file's name"),
        ("file", "it exists already"),
        ("to_nowhere", "it exists already"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_first(words, option, name, said, capsys, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "to_nowhere").symlink_to("gone")
    before = sorted(tmp_path.iterdir())
    err = refused(capsys, [*words, str(tmp_path / name)])
    assert f"{option} {tmp_path / name}: " in err
    assert said in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("words", "option"), WRITERS)
def test_a_folder_that_takes_no_file_is_refused_first(words, option, capsys, tmp_path, monkeypatch):
    """As a mount that is read-only; root has every right."""

    def read_only(flags, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile._os, "open", read_only)
    said = refused(capsys, [*words, str(tmp_path / "new")])
    assert f"{option} {tmp_path / 'new'}: it cannot be written: Read-only file system" in said


@pytest.mark.parametrize("other", ["a.html", "./a.html", "folder/../a.html", "link/a.html"])
def test_two_spellings_of_one_file_are_refused_first(other, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(".")
    err = refused(capsys, [*QWEN, "--report", "a.html", "--pipeline-trace", other])
    assert f"--report and --pipeline-trace are both {tmp_path / 'a.html'}: give one another name" in err


def test_the_longest_name_is_written(tmp_path):
    from maniple.plan.whole_file import write_new

    write_new("--report", tmp_path / ("n" * 255), "text")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["text"]


def test_a_target_is_refused_before_torch_is_loaded(tmp_path):
    words = ["plan", "calibrate", "--out", str(tmp_path / "nowhere" / "new")]
    code = (
        f"import sys; from maniple import cli; code = cli.main({words}); sys.exit(10 * ('torch' in sys.modules) + code)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2
