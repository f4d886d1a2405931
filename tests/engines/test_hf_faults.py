"""Conversions against bad input and bad luck: one line, exit code 2, and no folder that looks like a result."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import hf_models
from tests.engines.hf_models import INDEX, contents, set_config

from maniple import cli
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface import from_hf as forth
from maniple.engines.megatron.huggingface import journal
from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.to_hf import to_hf
from maniple.errors import UserError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SimpleNamespace:
    """Models, and the checkpoint that the first of them becomes."""
    folder = tmp_path_factory.mktemp("models")
    hf_models.write(folder / "qwen3")
    hf_models.write(folder / "qwen3-one-file", shards=1)
    hf_models.write(folder / "deepseek", "deepseek-v3", shards=1)
    from_hf(folder / "qwen3", folder / "weights")
    return SimpleNamespace(
        qwen3=folder / "qwen3", one=folder / "qwen3-one-file", deepseek=folder / "deepseek", weights=folder / "weights"
    )


@pytest.fixture
def source(models, tmp_path) -> Path:
    return shutil.copytree(models.qwen3, tmp_path / "source")


@pytest.fixture
def weights(models, tmp_path) -> Path:
    return shutil.copytree(models.weights, tmp_path / "weights")


@pytest.fixture
def refusal(capsys, tmp_path):
    """The one line that a command ends with; OUT is not there."""

    def run(*words) -> str:
        assert cli.main(list(map(str, words))) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("maniple: error: ") and err.count("\n") == 1 and len(err) < 700, err
        assert not (tmp_path / "out").exists()
        return err

    return run


def change(path: Path, **tensors) -> None:
    """Other tensors in a file; None: none of that name."""
    kept = load_file(path) | tensors
    save_file({name: each for name, each in kept.items() if each is not None}, path)


def place_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def move_in_index(folder: Path, **places) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= places
    path.write_text(json.dumps(index))


# --- sources that are not whole ---------------------------------------------------------------------------------------


def cut(size):
    return lambda folder: os.truncate(folder / SECOND, size((folder / SECOND).stat().st_size))


def overwrite(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def other(name, make):
    """The tensor, changed."""
    return lambda folder: change(path := place_of(folder, name), **{name: make(load_file(path)[name])})


def without(name):
    return lambda folder: change(place_of(folder, name), **{name: None})


def with_(name, tensor):
    def edit(folder):
        change(folder / FIRST, **{name: tensor})
        move_in_index(folder, **{name: FIRST})

    return edit


def only_pickles(folder):
    for path in (folder / FIRST, folder / SECOND, folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def both_in_one(folder):
    change(folder / FIRST, **load_file(folder / SECOND))


def no_prefix(folder):
    for path in (folder / FIRST, folder / SECOND):
        save_file({name.removeprefix("model."): each for name, each in load_file(path).items()}, path)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {name: f.name for f in (folder / FIRST, folder / SECOND) for name in load_file(f)}})
    )


def swapped_files(folder):
    (folder / FIRST).rename(folder / "x")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "x").rename(folder / SECOND)


def nan(tensor):
    tensor[1] = torch.nan
    return tensor


def infinite(tensor):
    tensor[-1] = -torch.inf
    return tensor


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / SECOND).unlink(), f"lacks {SECOND} of its 2 files of weights"),
        (cut(lambda size: 0), f"{SECOND} cannot be read ("),
        (cut(lambda size: 7), f"{SECOND} cannot be read ("),
        (cut(lambda size: 300), "it is cut short or damaged; fetch it anew"),
        (cut(lambda size: size // 2), "it is cut short or damaged; fetch it anew"),
        (cut(lambda size: size - 1), "it is cut short or damaged; fetch it anew"),
        (overwrite(SECOND, b"\xff" * 4096), f"{SECOND} cannot be read ("),
        (overwrite(SECOND, (1 << 40).to_bytes(8, "little") + b"{}"), f"{SECOND} cannot be read ("),
        (overwrite(SECOND, b"\x10" + b"\0" * 7 + b'{"a": [1, 2, 3]}'), f"{SECOND} cannot be read ("),
        (overwrite(INDEX, b"{"), f"{INDEX} is no index of weights"),
        (overwrite(INDEX, b"[" * 100_000), f"{INDEX} is no index of weights"),
        (overwrite(INDEX, b"\xff\xfe"), f"{INDEX} is no index of weights"),
        (overwrite(INDEX, b'{"weight_map": {}}'), "it has no weight_map"),
        (overwrite(INDEX, b'{"weight_map": {"a": 1}}'), "it has no weight_map"),
        (overwrite(INDEX, b'{"weight_map": {"a": "../a.safetensors"}}'), "which is not one of its folder"),
        (overwrite(INDEX, b'{"weight_map": {"a": "/etc/passwd"}}'), "which is not one of its folder"),
        (overwrite(INDEX, b'{"weight_map": {"a": "\\u001b[31m/x\\n"}}'), "which is not one of its folder"),
        (lambda folder: os.truncate(folder / INDEX, (1 << 28) + 1), "it is too large"),
        (lambda folder: move_in_index(folder, **{UP: "config.json"}), "config.json cannot be read ("),
        (lambda folder: move_in_index(folder, **{"x.weight": FIRST}), f"says that x.weight is in {FIRST}, which does"),
        (swapped_files, "which does not hold it"),
        (both_in_one, f"is in {FIRST} and in {SECOND}"),
        (only_pickles, "it has pytorch_model.bin: pickled weights are not read"),
        (overwrite("model.safetensors", b""), "two sets of weights: move one away"),
        (overwrite("adapter_config.json", b"{}"), "merge that into them first"),
        (no_prefix, "lacks model.embed_tokens.weight and "),
        (no_prefix, "it has embed_tokens.weight and "),
        (with_("model.layers.0.mlp.shared_expert.up_proj.weight", torch.ones(2)), "shared_expert.up_proj.weight, which"),
        (with_("model.layers.2.input_layernorm.weight", torch.ones(64)), ": config.json counts 2 layers"),
        (with_("model.layers." + "9" * 5000 + ".x", torch.ones(2)), "'model.layers.999999"),
        (with_("\x1b[31m\nx", torch.ones(2)), "'\\x1b[31m\\nx'..., which"),
        (other(UP, lambda t: t.T.contiguous()), f"{UP} has shape [64, 48], and [48, 64] by config.json"),
        (other(NORM, lambda t: t[:, None].clone()), f"{NORM} has shape [64, 1], and [64] by config.json"),
        (other(UP, lambda t: t.long()), f"{UP} is stored as I64, not as F32 or F16 or BF16"),
        (other(UP, lambda t: t.double()), f"{UP} is stored as F64, not as F32 or F16 or BF16"),
        (other(UP, nan), f"{UP}: there are values that are not finite"),
        (other(NORM, infinite), f"{NORM}: there are values that are not finite"),
    ],
)  # fmt: skip
def test_damaged_source(damage, says, source, refusal, tmp_path):
    damage(source)
    assert says in refusal("convert", "from-hf", source, "--to", tmp_path / "out")
    with pytest.raises(UserError, match="no checkpoint at"):
        files.read_manifest(tmp_path / "out.partial")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, 'model_type = "llama"; supported: '),
        ({"model_type": "deepseek_v32"}, "sparse (DSA); supported: "),
        ({"model_type": "glm_moe_dsa"}, "sparse (DSA); supported: "),
        ({"model_type": "minimax"}, "lightning attention"),
        ({"model_type": ["qwen3_moe"]}, "model_type = "),
        ({"vision_config": {"depth": 1}}, "more than text"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "architectures = "),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight and "),
        ({"num_hidden_layers": 1}, ": config.json counts 1 layers"),
        ({"hidden_size": 128}, "model.embed_tokens.weight has shape [256, 64], and [256, 128] by config.json"),
        ({"num_experts": 16}, "lacks model.layers.0.mlp.experts.8.gate_proj.weight and "),
        ({"num_experts": 4}, "and [4, 64] by config.json"),
        ({"vocab_size": 255}, "and [255, 64] by config.json"),
        ({"num_attention_heads": 8}, "q_proj.weight has shape [64, 64], and [128, 64] by config.json"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not the same as model.embed_tokens.weight"),
        ({"attention_bias": True}, "lacks model.layers.0.self_attn.q_proj.bias and "),
        ({"torch_dtype": "float16"}, 'dtype "float16": choose --dtype fp32'),
        ({"torch_dtype": ["bfloat16"]}, "choose --dtype fp32"),
        ({"torch_dtype": None}, "choose --dtype fp32"),
        ({"quantization_config": {"quant_method": "awq"}}, '"awq"'),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, '"gptq"'),
    ],
)
def test_config_of_another_model(changes, says, source, refusal, tmp_path):
    set_config(source, **changes)
    assert says in refusal("convert", "from-hf", source, "--to", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_layers_beyond_the_files_and_mtp(models, refusal, tmp_path):
    bare = shutil.copytree(models.deepseek, tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")}, bare / "model.safetensors")
    assert "; --mtp drop converts the model without" in refusal("convert", "from-hf", bare, "--to", tmp_path / "out")
    from_hf(bare, tmp_path / "dropped", drop_mtp=True)
    set_config(bare, num_nextn_predict_layers=0)
    from_hf(bare, tmp_path / "none")
    kinds = [json.loads((tmp_path / name / "maniple.json").read_text())["card"] for name in ("dropped", "none")]
    assert [kind["num_mtp_layers"] for kind in kinds] == [0, 0]

    set_config(whole := shutil.copytree(models.deepseek, tmp_path / "whole"), num_nextn_predict_layers=0)
    for option in ("keep", "drop"):
        said = refusal("convert", "from-hf", whole, "--to", tmp_path / "out", "--mtp", option)
        assert "config.json counts 3 layers, with those of MTP" in said

    name = "model.layers.3.embed_tokens.weight"
    change(models_file := whole / "model.safetensors", **{name: tensors[name] * 2})
    set_config(whole, num_nextn_predict_layers=1)
    said = refusal("convert", "from-hf", whole, "--to", tmp_path / "out")
    assert f"{name} is not the same as model.embed_tokens.weight" in said and "--mtp drop converts it" in said
    from_hf(whole, tmp_path / "dropped-too", drop_mtp=True)
    assert contents(tmp_path / "dropped-too").keys() == contents(tmp_path / "dropped").keys()
    assert models_file.exists()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_are_none(models, refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    for folder, says in {
        "empty": "config.json does not exist",
        "file": "cannot be read",
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
    assert found["maniple.json"]["card"].pop("name") == "0123abc" and same["maniple.json"]["card"].pop("name")
    for each in (found, same):
        del each["card.yaml"], each["maniple.json"]["files"]["card.yaml"]
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
    assert card and len(card) <= 200 and card.isascii() and "/" not in card
    files.check_digests(out, files.read_whole(out))
    import shlex

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
