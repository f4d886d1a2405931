"""Where conversions read and write: folders that are none, permissions, links, full disks, and memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import shlex
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engines import hf_models
from tests.engines.hf_models import INDEX, contents

from maniple import cli
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface import from_hf as forth
from maniple.engines.megatron.huggingface import journal
from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.to_hf import to_hf

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SimpleNamespace:
    """A model, and the checkpoint that it becomes."""
    folder = tmp_path_factory.mktemp("models")
    hf_models.write(folder / "qwen3")
    from_hf(folder / "qwen3", folder / "weights")
    return SimpleNamespace(qwen3=folder / "qwen3", weights=folder / "weights")


@pytest.fixture
def source(models, tmp_path) -> Path:
    return shutil.copytree(models.qwen3, tmp_path / "source")


@pytest.fixture
def weights(models, tmp_path) -> Path:
    return shutil.copytree(models.weights, tmp_path / "weights")


@pytest.fixture
def refusal(capsys, tmp_path):
    return partial(hf_models.refused, capsys, out=tmp_path / "out")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_are_none(models, refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    for folder, says in {
        "empty": "config.json does not exist",
        "file": "is a file: give the folder",
        "missing": "config.json does not exist",
        "n" * 300: "File name too long",
    }.items():
        assert says in refusal("convert", "from-hf", tmp_path / folder, "--to", out)
    for folder, says in {
        "empty": "holds maniple.json",
        "file": "there is no such folder",
        "missing": "no such folder",
        "n" * 300: "File name too long",
    }.items():
        assert says in refusal("convert", "to-hf", tmp_path / folder, "--to", out)
    assert "it is a Hugging Face model" in refusal("convert", "to-hf", models.qwen3, "--to", out)
    assert "config.json does not exist" in refusal("convert", "from-hf", models.weights, "--to", out)


def test_places_that_cannot_be_out(models, source, weights, refusal, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "mine.txt").write_text("mine")
    (tmp_path / "y.partial").symlink_to(tmp_path / "there")
    before = contents(source)
    monkeypatch.chdir(tmp_path)
    for out, says in {
        "file": "file exists: name another folder",
        "there": "there exists: name another folder",
        "dangling": "dangling exists: name another folder",
        ".": "exists: name another folder",
        "/": "exists: name another folder",
        "file/x": "cannot be written (Not a directory)",
        "n" * 250: "cannot be written (File name too long)",
        "new/..": "no name for a folder",
        "x": "x.partial is no unfinished conversion, and in the way",
        "y": "y.partial is no unfinished conversion, and in the way",
        "source/deep/out": "lies in source",
        "weights/out": "lies in weights",
    }.items():
        if out != "weights/out":
            assert says in refusal("convert", "from-hf", "source", "--to", out)
        if out != "source/deep/out":
            assert says in refusal("convert", "to-hf", "weights", "--to", out)
    os.rename("source", "z.partial")
    assert "lies in z.partial" in refusal("convert", "from-hf", "z.partial", "--to", "z")
    assert contents(tmp_path / "z.partial") == before
    assert (tmp_path / "x.partial" / "mine.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path / "there")) == []


@contextmanager
def as_a_stranger():
    """Permissions count: the superuser may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_may_not_be_read_or_written(models, refusal, tmp_path):
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_mode & 0o007 != 0o007 and place.owner() == tmp_path.owner():
            place.chmod(place.stat().st_mode | 0o055)
    out = tmp_path / "open" / "out"
    out.parent.mkdir(mode=0o777)
    out.parent.chmod(0o777)
    for name, says in {
        SECOND: f"{SECOND} cannot be read",
        INDEX: f"{INDEX} cannot be read: Permission denied",
        "config.json": "config.json cannot be read: Permission denied",
        "tokenizer.json": "tokenizer.json cannot be read: Permission denied",
        "": "cannot be read",
    }.items():
        source = shutil.copytree(models.qwen3, tmp_path / f"source-{name}")
        (source / name).chmod(0)
        with as_a_stranger():
            assert says in refusal("convert", "from-hf", source, "--to", out)
        (source / name).chmod(0o755)
    weights = shutil.copytree(models.weights, tmp_path / "weights")
    for name in ("maniple.json", "__0_0.distcp", "huggingface.json", ".metadata"):
        (weights / name).chmod(0)
        with as_a_stranger():
            assert f"{name} cannot be read" in (said := refusal("convert", "to-hf", weights, "--to", out))
            assert "Permission denied" in said
        (weights / name).chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    for place in (closed / "out", closed / "deep" / "out"):
        with as_a_stranger():
            assert "cannot be written (Permission denied)" in refusal("convert", "from-hf", source, "--to", place)
            assert "cannot be written (Permission denied)" in refusal("convert", "to-hf", weights, "--to", place)


def test_a_snapshot_of_links_is_converted(models, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(models.qwen3.iterdir()):
        shutil.copyfile(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    (tmp_path / "link").symlink_to(snapshot)
    from_hf(tmp_path / "link", tmp_path / "out")
    same = contents(models.weights)
    found = contents(tmp_path / "out")
    assert found["maniple.json"]["card"]["name"] == "0123abc"
    for each in (found, same):
        del each["card.yaml"], each["maniple.json"]["files"]["card.yaml"], each["maniple.json"]["card"]["name"]
    assert found == same


@pytest.mark.parametrize("name", ["..", "中文 模型", "n" * 240, "-x-", "$(id) 'x'"])
def test_strange_names_of_folders(name, models, tmp_path, capsys, monkeypatch):
    if name == "..":
        (tmp_path / "a" / "b").mkdir(parents=True)
        for path in models.qwen3.iterdir():
            shutil.copyfile(path, tmp_path / "a" / path.name)
        monkeypatch.chdir(tmp_path / "a" / "b")
        folder = Path("..")
    else:
        folder = shutil.copytree(models.qwen3, tmp_path / name)
    out = tmp_path / ("o" * 200 if len(name) > 100 else f"{name}-out".strip("."))
    assert cli.main(["convert", "from-hf", str(folder), "--to", str(out)]) == 0
    card = json.loads((out / "maniple.json").read_text())["card"]["name"]
    assert card
    assert len(card) <= 200
    assert card.isascii()
    assert "/" not in card
    files.check_digests(out, files.read_whole(out))
    last = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert last[-1] == f"checkpoint.init_from={out}"


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files(monkeypatch):
    """Checkpoints of several files."""
    monkeypatch.setattr(forth, "_FILE_BYTES", 100_000)


@contextmanager
def files_of_at_most(size: int):
    """A write past it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_a_full_disk(command, models, small_files, refusal, tmp_path, monkeypatch):
    """The files before the first that does not fit stay, and the same command goes on."""
    words = ["convert", command, models.qwen3 if command == "from-hf" else models.weights, "--to", tmp_path / "out"]
    convert = from_hf if command == "from-hf" else lambda a, b: to_hf(a, b, shard_bytes=100_000)
    words += [] if command == "from-hf" else ["--shard-size", "100KB"]
    convert(words[2], tmp_path / "undisturbed")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "undisturbed").iterdir())
    said = []
    for limit in (sizes[-1] - 1, 50_000, 10_000):
        with files_of_at_most(limit):
            said.append(refusal(*words))
        assert "; what is finished stays: the same command goes on" in said[-1], said[-1]
        assert not ({"maniple.json", "config.json"} & set(os.listdir(tmp_path / "out.partial")))
    assert convert(words[2], tmp_path / "out").reused > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_no_room_is_said_before_anything_is_written(command, models, refusal, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(journal.shutil, "disk_usage", lambda place: usage)
    source = models.qwen3 if command == "from-hf" else models.weights
    said = refusal("convert", command, source, "--to", tmp_path / "out")
    assert "needs 0.0 GB more, and its disk has 0.0 GB free" in said
    assert os.listdir(tmp_path / "out.partial") == ["progress.jsonl"]


# --- memory -----------------------------------------------------------------------------------------------------------


def peak(work) -> int:
    """Bytes of memory, beside files' own pages, that the work takes at most beyond what was there."""

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before, highest = now(), [0]
    work(lambda done, total: highest.append(now()))
    return max(highest) - before


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_memory_is_that_of_a_tensor(model, tmp_path):
    """90 MB of weights, of which stacked experts are 13 and 25 MB a tensor, and the largest other 8 MB."""
    experts = {"num_experts": 16, "topk": 2, "expert_ffn_size": 768}
    hf_models.write(tmp_path / "hf", model, num_layers=2, hidden_size=512, vocab_size=8192, moe=experts)
    size = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert size > 80e6
    gc.collect()
    there = peak(lambda advance: from_hf(tmp_path / "hf", tmp_path / "weights", progress=advance))
    back = peak(lambda advance: to_hf(tmp_path / "weights", tmp_path / "back", progress=advance))
    assert there < 20e6
    assert back < 45e6
    shutil.rmtree(tmp_path)
