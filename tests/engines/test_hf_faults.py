"""Conversions against bad input and bad luck: one line, exit code 2, and no folder that looks like a result."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import hf_models
from tests.engines.hf_models import INDEX, contents, set_config

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface.from_hf import from_hf
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
    """Whole ones, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("models")
    hf_models.write(folder / "qwen3")
    hf_models.write(folder / "deepseek", "deepseek-v3", shards=1)
    return SimpleNamespace(qwen3=folder / "qwen3", deepseek=folder / "deepseek")


@pytest.fixture
def source(models, tmp_path) -> Path:
    return shutil.copytree(models.qwen3, tmp_path / "source")


@pytest.fixture
def refusal(capsys, tmp_path):
    return partial(hf_models.refused, capsys, out=tmp_path / "out")


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
        (with_("model.layers.0.mlp.shared_expert.gate.weight", torch.ones(2)), "mlp.shared_expert.gate.weight, which"),
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
    assert f"{name} is not the same as model.embed_tokens.weight" in said
    assert "--mtp drop converts it" in said
    from_hf(whole, tmp_path / "dropped-too", drop_mtp=True)
    assert contents(tmp_path / "dropped-too").keys() == contents(tmp_path / "dropped").keys()
    assert models_file.exists()


def test_mxfp4_of_what_is_no_stack_of_experts(tmp_path, refusal):
    hf_models.write(tmp_path / "hf", "gpt-oss-20b", shards=1)
    set_config(tmp_path / "hf", quantization_config={"quant_method": "mxfp4"})
    blocks, scales = torch.zeros(256, 2, 16, dtype=torch.uint8), torch.zeros(256, 2, dtype=torch.uint8)
    packed = {"lm_head.weight": None, "lm_head.weight_blocks": blocks, "lm_head.weight_scales": scales}
    change(tmp_path / "hf" / "model.safetensors", **packed)
    said = refusal("convert", "from-hf", tmp_path / "hf", "--to", tmp_path / "out")
    assert "lm_head.weight is in MXFP4 but no stack of matrices" in said
