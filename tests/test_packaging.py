"""The wheel: whole, importable away from the checkout, and harmless to the torch that is already installed."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import metadata as installed_metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "maniple"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"


def pip(*words, **options):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", ROOT, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    (path,) = folder.glob("maniple-*.whl")
    return path


@pytest.fixture(scope="module")
def requirements(wheel):
    """What the wheel requires of everybody who installs it, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    every = [Requirement(line) for line in message.get_all("Requires-Dist")]
    return [requirement for requirement in every if "extra" not in str(requirement.marker or "")]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked by pip into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def pins():
    lines = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def run_away_from_the_checkout(code, installed, tmp_path):
    """Runs `code` with the wheel's packages first on the path, from an empty folder, without PYTHONPATH."""
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); sys.argv[0] = 'maniple'\n{code}"
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read(f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/entry_points.txt").decode()
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(SOURCE.parent).as_posix() for path in files}
    assert "maniple/py.typed" in names
    assert "maniple = maniple.__main__:main" in entry_points


def test_the_installed_wheel_imports_from_another_folder(installed, tmp_path):
    code = """
import importlib.resources, maniple
from maniple import errors, metrics
print(maniple.__file__)
print((importlib.resources.files("maniple") / "py.typed").is_file())
"""
    result = run_away_from_the_checkout(code, installed, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(installed / "maniple" / "__init__.py"), "True"]


def test_every_module_of_the_installed_wheel_imports(installed, tmp_path):
    code = """
import importlib, pkgutil, maniple
def fail(name): raise
names = [m.name for m in pkgutil.walk_packages(maniple.__path__, "maniple.", onerror=fail)]
for name in names:
    if not name.endswith("__main__"):
        module = importlib.import_module(name)
        assert module.__file__.startswith(sys.path[0]), module.__file__
print(len(names))
"""
    result = run_away_from_the_checkout(code, installed, tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 5


def test_the_installed_command_reads_the_package_data(installed, tmp_path):
    code = "import json, subprocess, maniple.cli; sys.argv[1:] = ['models', '--json']; maniple.cli.main()"
    result = run_away_from_the_checkout(code, installed, tmp_path)
    assert result.returncode == 0, result.stderr
    assert '"total_parameters"' in result.stdout


def test_torch_is_asked_for_loosely_and_nothing_names_a_gpu_vendor(requirements):
    by_name = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    assert str(by_name["torch"].specifier) == ">=2.11"
    assert by_name["torch"].marker is None
    vendor = re.compile(r"torch|triton|pytorch|nvidia|cuda|cupy|rocm|transformer-engine|apex")
    assert [name for name in by_name if vendor.match(name)] == ["torch"]
    assert all(not requirement.url and not requirement.extras for requirement in requirements)


def test_megatron_core_is_content_with_the_same_torch(requirements):
    (ours,) = (requirement for requirement in requirements if requirement.name == "megatron-core")
    assert str(ours.specifier) == "==0.19.2"
    assert installed_metadata("megatron-core")["Version"] == "0.19.2"
    every = [Requirement(line) for line in installed_metadata("megatron-core").get_all("Requires-Dist")]
    needed = [requirement for requirement in every if "extra" not in str(requirement.marker or "")]
    (torch,) = (requirement for requirement in needed if requirement.name == "torch")
    assert all(torch.specifier.contains(version) for version in ("2.11.0", "2.11.0+rocm7.2", "2.13.1+rocm8.0"))
    assert not [
        requirement.name for requirement in needed if re.match(r"triton|nvidia|transformer-engine", requirement.name)
    ]


@pytest.mark.parametrize("torch_version", ["2.11.0+rocm7.2", "2.12.1+rocm7.2"])
def test_pip_leaves_an_installed_rocm_torch_alone(wheel, tmp_path, torch_version):
    """pip's own resolver, over an environment whose torch is a ROCm build with its own Triton package."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python3*/site-packages")
    packages = pins() | {"torch": torch_version, "triton-rocm": "3.6.0"}
    del packages["triton"]
    requires = {"torch": ["triton-rocm==3.6.0"]}
    requires["megatron-core"] = installed_metadata("megatron-core").get_all("Requires-Dist")
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires.get(name, [])]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
    words = ["--python", home / "bin" / "python", "install", "--dry-run", "--no-index", wheel]
    (would,) = (line for line in pip(*words).splitlines() if line.startswith("Would install"))
    assert re.fullmatch(r"Would install maniple-[\d.]+", would)


def test_every_dependency_is_pinned_to_a_version_the_package_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    assert (pinned["torch"], pinned["triton"], pinned["megatron-core"]) == ("2.11.0", "3.6.0", "0.19.2")
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(Version(pinned[canonicalize_name(requirement.name)])), line


def test_the_constraints_are_plain_pins():
    for line in CONSTRAINTS.read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line
    assert not [name for name in pins() if name.startswith("nvidia-")]
