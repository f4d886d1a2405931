"""A checkpoint that is damaged, or not one, is refused in one line before anything of it is loaded."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException

from maniple.engines.megatron import checkpoint
from maniple.errors import UserError

MANIFEST = {"format": checkpoint.FORMAT, "step": 3, "samples": 6, "world_size": 1, "card": {}, "job": {}}
SHARD = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run's checkpoint of one tensor."""
    folder = tmp_path / "checkpoints" / "step_00000003"
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": "text"}
    save(state, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    (folder / "maniple.json").write_text(json.dumps(MANIFEST))
    return folder


def refusal(folder: Path, wanted: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.find(folder.parents[1], wanted or str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_one_is_found(folder, tmp_path):
    assert checkpoint.find(tmp_path, str(folder)) == folder
    assert checkpoint.find(tmp_path, "auto") == folder
    assert checkpoint.find(tmp_path / "new", "auto") is None
    assert checkpoint.find(tmp_path, None) is None


def test_none_there(folder):
    assert "no checkpoint at" in refusal(folder, str(folder.parent))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "its maniple.json cannot be read"),
        ("[1]", "its maniple.json cannot be read"),
        ("{}", "its maniple.json cannot be read"),
        (json.dumps(MANIFEST | {"format": 99}), "has format 99"),
        (json.dumps(MANIFEST | {"step": "../x", "card": None}), "no proper step, card"),
    ],
)
def test_a_bad_manifest(folder, text, says):
    (folder / "maniple.json").write_text(text)
    assert says in refusal(folder)
    assert says in refusal(folder, "auto")


def test_missing_and_short_files(folder):
    os.truncate(folder / SHARD, 1000)
    assert f"is damaged: {SHARD} is cut short" in refusal(folder)
    (folder / SHARD).unlink()
    assert f"is damaged: {SHARD} is missing" in refusal(folder, "auto")
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-20])
    assert "its .metadata cannot be read" in refusal(folder)
    (folder / ".metadata").unlink()
    assert "its .metadata cannot be read" in refusal(folder)


def test_a_path_out_of_the_folder(folder):
    outside = "../shardfile"
    assert len(outside) == len(SHARD)  # as the pickle says its length
    (folder / SHARD).rename(folder / outside)
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(SHARD.encode(), outside.encode()))
    assert f"{outside} is missing" in refusal(folder)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_strangers_index_runs_nothing(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "ran")))
    assert "posix.mkdir, which no checkpoint holds" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_nothing_of_the_new_one(folder, tmp_path, monkeypatch):
    def full(state, path, **options):
        (Path(path) / SHARD).write_bytes(b"half")
        raise CheckpointException("write", {0: (RuntimeError("unexpected pos"), None)})

    monkeypatch.setattr(checkpoint, "_state", lambda *words, **options: ({}, {}))
    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", full)
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint.dist, "barrier", lambda: None)
    with pytest.raises(UserError, match=r"step_00000004 cannot be written .* make room") as caught:
        checkpoint.save(tmp_path, [], None, SimpleNamespace(num_steps=4), step=4, samples=8, card=None, job=None)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [folder.name]
    assert checkpoint.find(tmp_path, "auto") == folder
