"""scripts/find-python.sh on machines made of fake Pythons: a folder a machine, a shell script a Python."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "find-python.sh"


class Machine:
    def __init__(self, folder):
        self.home = folder / "home"
        self.path = folder / "bin"
        for place in (self.home, self.path):
            place.mkdir()

    def python(self, name, says, where=None):
        """A Python that answers `says`, or one that fails like a pyenv shim without its version if that is None."""
        file = (where or self.path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n" + ("exit 127\n" if says is None else f'echo "{says}"\n'))
        file.chmod(0o755)
        return str(file)

    def pyenv(self, version, says, root=None):
        return self.python(f"versions/{version}/bin/python", says, root or self.home / ".pyenv")

    def find(self, **env):
        env = {"PATH": str(self.path), "HOME": str(self.home)} | env
        return subprocess.run(["/bin/sh", SCRIPT], env=env, capture_output=True, text=True, timeout=30)

    def found(self, **env):
        result = self.find(**env)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.removesuffix("\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_best_tested_version_comes_first(machine):
    machine.python("python3", "3.13")
    machine.python("python3.13", "3.13")
    wanted = machine.python("python3.12", "3.12")
    assert machine.found() == wanted


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_a_plain_python3_will_do(machine, version):
    wanted = machine.python("python3", version)
    assert machine.found() == wanted


def test_a_shim_that_fails_is_passed_over(machine):
    machine.python("python3.12", None)
    machine.python("python3", "3.9")
    wanted = machine.pyenv("3.12.7", "3.12")
    assert machine.found() == wanted


def test_pyenv_is_found_by_its_root_too(machine, tmp_path):
    wanted = machine.pyenv("3.13.0", "3.13", tmp_path / "a place")
    machine.pyenv("3.11.7", "3.11", tmp_path / "a place")
    assert machine.found(PYENV_ROOT=str(tmp_path / "a place")) == wanted


def test_a_python_without_venv_is_no_use(machine):
    machine.python("python3", "3.12 without venv")
    wanted = machine.pyenv("3.13.1", "3.13")
    assert machine.found() == wanted


def test_the_users_choice_wins(machine, tmp_path):
    machine.python("python3.12", "3.12")
    wanted = machine.python("python", "3.14", tmp_path / "opt")
    assert machine.found(PYTHON=wanted) == wanted
    named = machine.python("my-python", "3.13")
    assert machine.found(PYTHON="my-python") == named


@pytest.mark.parametrize(
    ("says", "word"), [("3.11", "is 3.11"), ("3.12 without venv", "without venv"), (None, "not a Python that runs")]
)
def test_a_choice_that_cannot_work_is_an_error_and_not_replaced(machine, says, word):
    machine.python("python3.12", "3.12")
    result = machine.find(PYTHON=machine.python("mine", says))
    assert (result.returncode, result.stdout) == (1, "")
    assert word in result.stderr
    assert "3.12, 3.13 or 3.14" in result.stderr


def test_giving_up_says_what_there_is_and_what_to_do(machine):
    machine.python("python3", "3.11")
    machine.pyenv("3.9.18", "3.9")
    machine.pyenv("3.12.0", "3.12 without venv")
    result = machine.find()
    assert (result.returncode, result.stdout) == (1, "")
    assert "python3 is Python 3.11" in result.stderr
    assert "3.12 without venv" in result.stderr
    for way in ("pyenv install 3.12", "uv python install 3.12", "conda create", "make env PYTHON=$(", "PYTHON=/where/"):
        assert way in result.stderr


def test_a_machine_without_python_and_without_home(machine):
    result = machine.find(HOME="")
    assert result.returncode == 1
    assert "none at all" in result.stderr


def test_a_real_interpreter_passes_the_probe(machine):
    assert machine.found(PYTHON=sys._base_executable) == sys._base_executable
