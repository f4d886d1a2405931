"""Folders of tiny Hugging Face models, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from maniple import cli
from maniple.engines.megatron.checkpoint.index import read_index
from maniple.engines.megatron.huggingface import families
from maniple.models import load_card
from maniple.models.card import ModelCard
from maniple.models.huggingface import config_of

INDEX = "model.safetensors.index.json"


def write(folder: Path, model: str = "qwen3-30b-a3b", *, shards: int = 2, seed: int = 0, **overrides: Any) -> ModelCard:
    """A model of random bf16 weights (the router's bias in fp32) in so many files; its card."""
    card = load_card(model).tiny().with_overrides(overrides)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in families.hf_shapes(card).items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = drawn if "e_score" in name else drawn.bfloat16()
    for name, original in families.copies(card).items():
        if families.layer_of(name) is not None:
            tensors[name] = tensors[original].clone()
    folder.mkdir(parents=True)
    save(tensors, folder, shards)
    (folder / "config.json").write_text(json.dumps(config_of(card)))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    for path in folder.iterdir():
        path.chmod(0o644)
    return card


def save(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    """Every `shards`-th tensor in the same file, and an index where there are several."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def contents(folder: Path) -> dict[str, Any]:
    """What is in a folder, without what tells one try from another: when it was written, and the index's random id."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    if ".metadata" in found:
        found[".metadata"] = read_index(folder)
    if "maniple.json" in found:
        manifest = json.loads(found["maniple.json"])
        del manifest["saved"], manifest["sha256"], manifest["files"][".metadata"]
        found["maniple.json"] = manifest
    return found


def refused(capsys, *words: object, out: Path | None = None) -> str:
    """The one line that the command line ends with, and exit code 2. out: what it has not made."""
    assert cli.main([str(word) for word in words]) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert out is None or not out.exists()
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert len(err) < 700
    return err
