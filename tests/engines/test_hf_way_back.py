"""From checkpoints to Hugging Face: what is damaged is refused, and what was converted comes back bit for bit."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.engines import hf_models
from tests.engines.hf_models import INDEX, set_config

from maniple import cli
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.assembly import DigestingFile, write_last_files
from maniple.engines.megatron.huggingface import from_hf as forth
from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.stored import Stored
from maniple.engines.megatron.huggingface.to_hf import to_hf
from maniple.errors import UserError
from maniple.models.card import ModelCard

SHARED = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.fixture
def source(tmp_path) -> Path:
    """A small DeepSeek-V3: latent attention, a dense and an MoE layer, a router's bias, an MTP layer with copies."""
    hf_models.write(tmp_path / "source", "deepseek-v3", shards=1, num_layers=2)
    return tmp_path / "source"


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors in the folder's file; None: none of that name."""
    path = folder / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: each for name, each in kept.items() if each is not None}, path, metadata={"format": "pt"})


def there_and_back(source: Path, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    from_hf(source, tmp_path / "weights", **options)
    to_hf(tmp_path / "weights", tmp_path / "back")
    return tensors_of(tmp_path / "back")


# --- nothing changes on the way there and back ------------------------------------------------------------------------


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_balancing_bias_in_bf16_comes_back_so(dtype, source, tmp_path):
    bias = tensors_of(source)[BIAS].bfloat16()
    edit(source, **{BIAS: bias})
    assert_same(there_and_back(source, tmp_path, dtype=dtype), tensors_of(source))


def test_types_of_single_tensors_come_back(source, tmp_path):
    """fp32 of numbers that bf16 holds, and fp16."""
    own = tensors_of(source)
    edit(source, **{"model.norm.weight": own["model.norm.weight"].float(), "lm_head.weight": own["lm_head.weight"]})
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    edit(source, **{name: own[name].clamp(-4, 4).half().float().mul(8).round().div(8).half()})
    assert_same(there_and_back(source, tmp_path), tensors_of(source))


@pytest.mark.parametrize("left_out", [(), SHARED[:1], SHARED[1:], SHARED])
def test_copies_come_back_where_they_were(left_out, source, tmp_path):
    edit(source, **dict.fromkeys(left_out))
    assert_same(there_and_back(source, tmp_path), tensors_of(source))


@pytest.mark.parametrize("has_head", [True, False])
def test_a_tied_head_comes_back_where_it_was(has_head, tmp_path):
    source = tmp_path / "source"
    hf_models.write(source, shards=1, tied_embeddings=True)
    assert "lm_head.weight" not in tensors_of(source)
    if has_head:
        edit(source, **{"lm_head.weight": tensors_of(source)["model.embed_tokens.weight"].clone()})
    assert_same(there_and_back(source, tmp_path), tensors_of(source))


def test_rotary_frequencies_are_left_out(source, tmp_path):
    before = tensors_of(source)
    edit(source, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_same(there_and_back(source, tmp_path), before)


def test_a_config_keeps_its_fields_without_mtp_layers(source, tmp_path):
    set_config(source, eos_token_id=7, _name_or_path="mine")
    from_hf(source, tmp_path / "weights", drop_mtp=True)
    to_hf(tmp_path / "weights", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["eos_token_id"], config["_name_or_path"], config["num_nextn_predict_layers"]) == (7, "mine", 0)
    assert not [name for name in tensors_of(tmp_path / "back") if name.startswith("model.layers.2.")]


def test_files_are_those_of_safetensors(source, tmp_path):
    """Their size is bounded, numbers are aligned, everyone who may read the folder may read them."""
    from_hf(source, tmp_path / "weights")
    assert to_hf(tmp_path / "weights", tmp_path / "back", shard_bytes=50_000).files > 3
    places = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert places.keys() == tensors_of(source).keys()
    assert_same(tensors_of(tmp_path / "back"), tensors_of(source))
    for path in (tmp_path / "back").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt"}
        assert sorted(names) == sorted(name for name, place in places.items() if place == path.name)
        assert path.stat().st_size <= 60_000 or len(names) == 1
        assert path.stat().st_mode == (tmp_path / "back" / "config.json").stat().st_mode


def test_numbers_that_a_type_does_not_hold(source, tmp_path):
    """65504, fp16's largest, is rounded to 65536 by bf16, which fp16 does not hold."""
    name = "model.norm.weight"
    edit(source, **{name: torch.full((64,), 65504.0).half()})
    assert from_hf(source, tmp_path / "weights").rounded == 1
    with pytest.raises(UserError, match=f"{name} has values that are not finite as F16"):
        to_hf(tmp_path / "weights", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    to_hf(tmp_path / "weights", tmp_path / "wide", dtype="bf16")
    assert tensors_of(tmp_path / "wide")[name].eq(65536).all()


# --- checkpoints of training ------------------------------------------------------------------------------------------


def as_of_training(weights: Path, to: Path, *, cut: int = 2, changes: dict[str, torch.Tensor] | None = None) -> Path:
    """The same tensors as ranks write them: in parts along the first and the last axis, in files of two ranks, with a
    padded vocabulary, an optimizer's states, and no word of Hugging Face."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    manifest = files.read_manifest(weights)
    stored = Stored(weights, files.check_index(weights, manifest))
    to.mkdir()
    reports: list[dict[str, Any]] = []
    raws = [io.BytesIO(), io.BytesIO()]
    places: list[list] = [[], []]
    entries = {}
    tensors = {key: stored.read(key, (0,) * len(t.shape), t.shape) for key, t in stored.index.tensors.items()}
    tensors |= changes or {}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[key] = torch.cat([tensors[key], torch.full_like(tensors[key][:13], torch.nan)])
    tensors |= {f"optimizer.state.exp_avg.{key}": tensors[key].float() for key in list(tensors)[:3]}
    writers = [DigestingFile(raw) for raw in raws]
    for key, tensor in tensors.items():
        parts = [((0,) * tensor.dim(), tensor)]
        for axis in {0, tensor.dim() - 1}:
            halves = []
            for offset, part in parts:
                first = part.shape[axis] // cut
                for start, piece in ((0, part.narrow(axis, 0, first)),
                                     (first, part.narrow(axis, first, part.shape[axis] - first))):  # fmt: skip
                    moved = tuple(o + start * (i == axis) for i, o in enumerate(offset))
                    halves.append((moved, piece))
            parts = [(offset, part) for offset, part in halves if part.numel()]
        chunks = [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in parts]
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
        for number, (offset, part) in enumerate(parts):
            rank = number % 2
            start = writers[rank].tell()
            writers[rank].save(part.clone())
            places[rank].append([key, offset, number, f"__{rank}_0.distcp", start, writers[rank].tell() - start])
    for rank in range(2):
        name = f"__{rank}_0.distcp"
        (to / name).write_bytes(raws[rank].getvalue())
        entry = {"bytes": writers[rank].tell(), "sha256": writers[rank].digest.hexdigest()}
        reports.append({"files": {name: entry}, "places": places[rank]})
    kept = {key: value for key, value in manifest.items() if key not in ("files", "sha256", "holds")}
    write_last_files(to, Metadata(state_dict_metadata=entries), reports, kept | {"step": 7, "world_size": 2})
    return to


@pytest.mark.parametrize("cut", [2, 3])
def test_parts_of_several_ranks_are_put_together(cut, source, tmp_path):
    from_hf(source, tmp_path / "weights")
    trained = as_of_training(tmp_path / "weights", tmp_path / "step", cut=cut)
    to_hf(trained, tmp_path / "back", shard_bytes=100_000)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(source))
    card = ModelCard.model_validate(files.read_manifest(trained)["card"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == card.num_layers


def test_each_part_is_read_once_a_matrix(source, tmp_path, monkeypatch):
    """Experts share parts; reading them anew for each would take as many times as long."""
    from_hf(source, tmp_path / "weights")
    trained = as_of_training(tmp_path / "weights", tmp_path / "step")
    loads: list[tuple] = []
    load = Stored._load
    monkeypatch.setattr(
        Stored, "_load", lambda self, key, part, dtype: (loads.append((key, part)), load(self, key, part, dtype))[1]
    )
    to_hf(trained, tmp_path / "back")
    experts = [each for each in loads if ".experts." in each[0]]
    assert experts
    assert len(experts) == len(set(experts))


def test_values_that_are_no_weights(source, tmp_path):
    from_hf(source, tmp_path / "weights")
    norm = torch.ones(64, dtype=torch.bfloat16)
    for number, (wrong, says) in enumerate((
        (norm.long(), "is of int64, not of float32"),
        (torch.full_like(norm, torch.nan), "model.norm.weight has values that are not finite as BF16"),
        (norm[:63], "is [63], and [64] by its card"),
    )):  # fmt: skip
        changes = {"decoder.final_layernorm.weight": wrong}
        trained = as_of_training(tmp_path / "weights", tmp_path / f"step-{number}", changes=changes)
        with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
            to_hf(trained, tmp_path / "back")
        assert says in str(caught.value)
        assert not (tmp_path / "back").exists()


# --- damage -----------------------------------------------------------------------------------------------------------


def manifest_with(folder: Path, **changes: Any) -> None:
    """Signed anew."""
    manifest = json.loads((folder / "maniple.json").read_text())
    del manifest["sha256"]
    (folder / "maniple.json").unlink()
    files.write_manifest(folder, manifest | changes)


def record_with(folder: Path, text: str) -> None:
    path = folder / forth.RECORD
    path.write_text(text)
    manifest = json.loads((folder / "maniple.json").read_text())
    entry = {"bytes": path.stat().st_size, "sha256": files.file_digest(path)}
    manifest_with(folder, files=manifest["files"] | {path.name: entry})


def flip(name: str, at: int = -200):
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return damage


def card_with(**changes: Any):
    return lambda folder: manifest_with(
        folder, card=json.loads((folder / "maniple.json").read_text())["card"] | changes
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    hf_models.write(folder / "qwen3", shards=1)
    hf_models.write(folder / "mixtral", "mixtral-8x7b", shards=1)
    from_hf(folder / "qwen3", folder / "weights")
    return folder


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip("__0_0.distcp"), "__0_0.distcp is not as it was written"),
        (flip("__0_0.distcp", 5000), "__0_0.distcp is not as it was written"),
        (flip(".metadata"), "is damaged"),
        (flip("maniple.json"), "is damaged"),
        (flip("tokenizer.json", 1), "tokenizer.json is not as it was written"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / "maniple.json").unlink(), "no checkpoint at"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 100_000), "__0_0.distcp is cut short"),
        (lambda folder: (folder / "maniple.json").write_text("{}"), "is damaged"),
        (lambda folder: manifest_with(folder, format=99), "has format 99"),
        (card_with(family=""), "no config.json is known for cards of family ''"),
        (card_with(family="mistral3"), "cards of family 'mistral3'; known: "),
        (card_with(hidden_size=-1), "its model card is none"),
        (card_with(num_layers=3), "lacks decoder.layers.2.self_attention.linear_qkv.layer_norm_weight of its model"),
        (card_with(num_layers=1), "has decoder.layers.1.", ),
        (card_with(vocab_size=512), "embedding.word_embeddings.weight is [256, 64], and [512, 64] by its card"),
        (card_with(tied_embeddings=True), "has output_layer.weight, which its model has no place for"),
        (lambda folder: record_with(folder, "{"), "its huggingface.json is none"),
        (lambda folder: record_with(folder, '{"config": {}, "dtypes": {"a": "Q9"}, "copies": []}'), "huggingface.json"),
        (lambda folder: record_with(folder, "[" * 10_000), "its huggingface.json is none"),
        (lambda folder: record_with(folder, '{"config": {}, "dtypes": {}, "copies": []}'), "config.json "),
    ],
)  # fmt: skip
def test_damaged_checkpoints(damage, says, whole, tmp_path, capsys):
    folder = shutil.copytree(whole / "weights", tmp_path / "weights")
    damage(folder)
    assert cli.main(["convert", "to-hf", str(folder), "--to", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()


def test_damage_that_was_not_looked_for_is_found_by_reading(whole, tmp_path):
    folder = shutil.copytree(whole / "weights", tmp_path / "weights")
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(bytes(300) + content[300:])
    with pytest.raises(UserError, match=r"cannot be read from __0_0\.distcp") as caught:
        to_hf(folder, tmp_path / "out", verify=False)
    assert "\n" not in str(caught.value)


def test_like_a_folder_of_another_model(whole, tmp_path, capsys):
    words = ["convert", "to-hf", str(whole / "weights"), "--to", str(tmp_path / "out"), "--like"]
    for folder, says in {
        whole / "mixtral": "config.json is of another model than the checkpoint: family, ",
        whole / "missing": "config.json does not exist",
        whole / "qwen3" / "tokenizer.json": "is a file: give the folder",
    }.items():
        assert cli.main([*words, str(folder)]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert cli.main([*words, str(whole / "qwen3")]) == 0
