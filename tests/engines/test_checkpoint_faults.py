"""What goes wrong while checkpoints are written and read: slow and full disks, kills, damage, strangers' files."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks
from tests.engines.test_checkpoint_files import _Evil

from maniple.engines.megatron.checkpoint import files
from maniple.errors import UserError
from maniple.metrics import read_metrics

pytestmark = pytest.mark.timeout(1800)
LIMIT = 100_000  # bytes a file, on the "full" disk


def trainer_of(folder: Path, name: str, **sections: dict[str, Any]):
    """A trainer of a job with experts over the ranks, before its first step."""
    import torch.distributed as dist
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, trainer

    job = jobs.make_job(
        folder,
        name,
        parallel={"expert_parallel_size": dist.get_world_size(), "distributed_optimizer": True},
        train={"steps": 3, **sections.pop("train", {})},
        **sections,
    )
    device = parallel.pick_device(job)
    parallel.start(job, device)
    return trainer.Trainer(job, jobs.tiny_card("deepseek-v3", num_layers=2), device)


def tensors_of(it) -> dict[str, torch.Tensor]:
    """Every weight, buffer, main weight and moment of a rank, themselves."""
    from maniple.engines.megatron.model import unwrap

    found = {}
    for chunk in map(unwrap, it.chunks):
        found |= {name: t for name, t in chunk.state_dict().items() if isinstance(t, torch.Tensor)}
    for number, part in enumerate(getattr(it.optimizer, "chained_optimizers", [it.optimizer])):
        for index, (weight, state) in enumerate(part.optimizer.state.items()):
            found |= {f"{number}.{index}.{key}": tensor for key, tensor in {"main": weight, **state}.items()}
    return found


def save(it, step: int) -> None:
    it.saver.save(it.chunks, it.optimizer, it.scheduler, step=step, samples=4 * step)


def load(it, path: Path) -> None:
    from maniple.engines.megatron.checkpoint import reader

    reader.load(path, it.chunks, it.optimizer, it.scheduler, card=it.card, job=it.job)


def refusal(work, *args: Any, **options: Any) -> str:
    said = "not refused"
    try:
        work(*args, **options)
    except UserError as error:
        said = str(error)
    assert "\n" not in said
    return said


# --- in one process ---------------------------------------------------------------------------------------------------


def alone(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.checkpoint import reader

    it = trainer_of(folder, "alone")
    it.run()
    report: dict[str, Any] = {"slow": _slow_disk(it), "nan": _nothing_is_left_unwritten(it)}
    saved = it.job.run_dir / "checkpoints" / "step_00000007"
    report["stranger"] = _strangers(it, saved, folder)
    report["stored as"] = _stored_as_another_type(it, saved)
    report["tensors"] = _other_tensors(it, saved)
    parallel.stop_groups()
    (folder / "no-folder").mkdir()
    (folder / "no-folder" / "checkpoints").touch()
    report["no folder"] = refusal(trainer_of(folder, "no-folder", checkpoint={"save_at_end": True}).run)
    parallel.stop_groups()
    for place in PLACES:
        it = trainer_of(folder, place, checkpoint={"resume": "auto", "save_at_end": True, "keep": 2})
        report[place] = it.progress.step
        it.run()
        parallel.stop_groups()
    assert reader.choose(folder / "nothing", "auto", verify=True) is None
    return report


def _slow_disk(it) -> dict[str, Any]:
    """Training goes on while a disk does not: the step waits for the copy alone, a reader sees nothing."""
    from maniple.engines.megatron.checkpoint import writer as checkpoint_writer

    go, write = threading.Event(), checkpoint_writer.DigestingFile.save

    def slow(file, data) -> None:
        go.wait()
        write(file, data)

    wanted = {name: tensor.clone() for name, tensor in tensors_of(it).items()}
    checkpoint_writer.DigestingFile.save = slow
    save(it, 7)
    with torch.no_grad():
        for tensor in tensors_of(it).values():
            tensor.fill_(7)
    report = {"seen": files.all_of(it.job.run_dir), "done": it.saver.wait(timeout=0.2), "last": it.saver.last}
    go.set()
    report["failure"] = it.saver.wait()
    checkpoint_writer.DigestingFile.save = write
    load(it, it.saver.last)
    got = tensors_of(it)
    report["wrong"] = [name for name in wanted if not wanted[name].equal(got[name])]
    return report


def _nothing_is_left_unwritten(it) -> dict[str, Any]:
    before = {name: tensor.clone() for name, tensor in tensors_of(it).items()}
    with torch.no_grad():
        for name, tensor in tensors_of(it).items():
            tensor.fill_(0 if name.endswith(".step") else torch.nan)
    load(it, it.saver.last)
    after = tensors_of(it)
    return {"tensors": len(after), "wrong": [name for name in before if not before[name].equal(after[name])]}


def _strangers(it, saved: Path, folder: Path) -> dict[str, str]:
    """By kind of file: what loading says where a stranger has put in what runs when it is unpickled."""
    bomb, report = folder / "ran", {}
    whole = {path.name: path.read_bytes() for path in saved.iterdir()}
    index = pickle.loads(whole[".metadata"])
    for kind in ("decoder.final_layernorm.weight", "rng.torch", "common_state", "_extra_state"):
        (place,) = [p for key, p in index.storage_data.items() if kind in key.fqn and "optimizer" not in key.fqn][:1]
        data = bytearray(whole[place.relative_path])
        evil = pickle.dumps(_Evil(bomb))
        assert len(evil) < place.length
        data[place.offset : place.offset + place.length] = evil.ljust(place.length, b".")
        (saved / place.relative_path).write_bytes(data)
        _digest_again(saved)
        report[kind] = refusal(load, it, saved)
        assert not bomb.exists()
        (saved / place.relative_path).write_bytes(whole[place.relative_path])
    _digest_again(saved)
    load(it, saved)
    return report


def _stored_as_another_type(it, saved: Path) -> dict[str, str]:
    """What loading says where a tensor is stored as a type that is not the index's."""
    whole, report = {path.name: path.read_bytes() for path in saved.iterdir()}, {}
    for dtype in (torch.float64, torch.int32, torch.bool):
        index, stored = pickle.loads(whole[".metadata"]), io.BytesIO()
        key = next(key for key in index.storage_data if key.fqn == "decoder.final_layernorm.weight")
        place = index.storage_data[key]
        torch.save(torch.ones(index.state_dict_metadata[key.fqn].size, dtype=dtype), stored)
        data = whole[place.relative_path]
        place.offset, place.length = len(data), len(stored.getvalue())
        (saved / place.relative_path).write_bytes(data + stored.getvalue())
        (saved / ".metadata").write_bytes(pickle.dumps(index))
        _digest_again(saved)
        report[str(dtype)] = refusal(load, it, saved)
        (saved / place.relative_path).write_bytes(data)
    (saved / ".metadata").write_bytes(whole[".metadata"])
    _digest_again(saved)
    load(it, saved)
    return report


def _digest_again(saved: Path) -> None:
    manifest = files.read_manifest(saved)
    (saved / files.MANIFEST).unlink()
    for name, entry in manifest["files"].items():
        entry |= {"bytes": (saved / name).stat().st_size, "sha256": files.file_digest(saved / name)}
    files.write_manifest(saved, {key: value for key, value in manifest.items() if key != "sha256"})


def _other_tensors(it, saved: Path) -> dict[str, str]:
    """What loading says of a checkpoint that lacks a tensor, has one more, or one of another shape or type."""
    whole, report = (saved / ".metadata").read_bytes(), {}
    name = "decoder.final_layernorm.weight"

    def rename(index, new: str | None) -> None:
        entry = index.state_dict_metadata[name]
        if new is None:
            del index.state_dict_metadata[name]
            return
        index.state_dict_metadata[new] = entry
        for key, place in list(index.storage_data.items()):
            if key.fqn == name:
                index.storage_data[type(key)(new, key.offset, key.index)] = place

    def reshape(index) -> None:
        entry = index.state_dict_metadata[name]
        entry.size = torch.Size([1, *entry.size])
        entry.chunks[0].sizes, offsets = torch.Size([1, *entry.chunks[0].sizes]), torch.Size([0, 0])
        entry.chunks[0].offsets = offsets
        for key in list(index.storage_data):
            if key.fqn == name:
                index.storage_data[type(key)(name, offsets, key.index)] = index.storage_data.pop(key)

    before = {name: tensor.clone() for name, tensor in tensors_of(it).items()}
    for kind, spoil in {
        "lacks": lambda index: rename(index, None),
        "more": lambda index: rename(index, "decoder.another.weight"),
        "type": lambda index: setattr(index.state_dict_metadata[name].properties, "dtype", torch.bfloat16),
        "shape": reshape,
    }.items():
        index = pickle.loads(whole)
        spoil(index)
        (saved / ".metadata").write_bytes(pickle.dumps(index))
        _digest_again(saved)
        report[kind] = refusal(load, it, saved)
    assert not [name for name, tensor in tensors_of(it).items() if not tensor.equal(before[name])]
    return report


# --- in two -----------------------------------------------------------------------------------------------------------


def pair(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from maniple.engines.megatron import parallel
    from maniple.engines.megatron.checkpoint import reader

    it = trainer_of(folder, "pair")
    it.run()
    run_dir, report = it.job.run_dir, {}
    save(it, 4)
    report["whole"] = it.saver.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
    save(it, 5)
    report["full"] = it.saver.wait()
    report["left"] = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    dist.barrier()  # the next save makes a folder, which a rank that is late must not find in its list
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(it, 6)  # there is room again
    report["again"] = it.saver.wait()
    parallel.stop_groups()

    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
    always = {"save_interval": 1, "save_at_end": True, "asynchronous": False}
    report["always full"] = refusal(trainer_of(folder, "always-full", checkpoint=always).run)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    parallel.stop_groups()

    if rank == 0:
        spoiled = run_dir / "checkpoints" / "step_00000006" / "__1_0.distcp"
        data = bytearray(spoiled.read_bytes())
        data[len(data) // 2] ^= 1
        spoiled.write_bytes(data)
    dist.barrier()
    newest = run_dir / "checkpoints" / "step_00000006"
    report["damaged"] = refusal(reader.choose, run_dir, str(newest), verify=True)
    report["auto"] = reader.choose(run_dir, "auto", verify=True)
    report["auto unverified"] = reader.choose(run_dir, "auto", verify=False)
    dist.barrier()
    if rank == 0:
        (run_dir / "checkpoints" / "step_00000004" / "maniple.json").write_text("{}")
    dist.barrier()
    report["none"] = refusal(reader.choose, run_dir, "auto", verify=True)
    return report


# --- killed -----------------------------------------------------------------------------------------------------------

PLACES = ("killed-in-a-file", "killed-before-the-manifest", "killed-before-the-name", "killed-after-the-name")


def killed(rank: int, world_size: int, folder: Path, place: str) -> None:
    """Saves after each step; the second save ends by SIGKILL."""
    from maniple.engines.megatron.checkpoint import files as checkpoint_files
    from maniple.engines.megatron.checkpoint import writer as checkpoint_writer

    holder, name = {
        "killed-in-a-file": (checkpoint_writer.DigestingFile, "flush"),
        "killed-before-the-manifest": (checkpoint_files, "write_manifest"),
        "killed-before-the-name": (checkpoint_files, "publish"),
        "killed-after-the-name": (checkpoint_files, "prune"),
    }[place]
    usual = getattr(holder, name)

    def kill(*args):
        # not in the first save: its folder has its name by then, or will have
        if len(list((folder / place / "checkpoints").glob("step_*1"))) and (
            place != "killed-after-the-name" or (folder / place / "checkpoints" / "step_00000002").exists()
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args)

    setattr(holder, name, kill)
    trainer_of(folder, place, checkpoint={"save_interval": 1}).run()


# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def kills(folder) -> dict[str, list[str]]:
    """By place of the kill: what it left."""
    left = {}
    for place in PLACES:
        with pytest.raises(RuntimeError, match="exit code -9"):
            run_ranks(killed, 1, folder, place, timeout=300)
        left[place] = sorted(path.name for path in (folder / place / "checkpoints").iterdir())
    return left


@pytest.fixture(scope="module")
def one(folder, kills) -> dict[str, Any]:
    return run_ranks(alone, 1, folder, timeout=600)[0]


@pytest.fixture(scope="module")
def two(folder) -> list[dict[str, Any]]:
    return run_ranks(pair, 2, folder, timeout=600)


def test_training_goes_on_while_a_slow_disk_writes(one):
    report = one["slow"]
    assert (report["seen"], report["done"], report["last"]) == ([], None, None)
    assert report["failure"] is None
    assert report["wrong"] == []  # though every tensor was overwritten before it was written


def test_loading_writes_every_tensor(one):
    assert one["nan"]["tensors"] > 50
    assert one["nan"]["wrong"] == []


def test_a_strangers_checkpoint_runs_nothing(one):
    said = one["stranger"]
    assert "is damaged: " in said["decoder.final_layernorm.weight"]
    assert "is damaged: " in said["rng.torch"]
    # Python objects are never read
    assert said["common_state"] == said["_extra_state"] == "not refused"
    assert not [text for text in said.values() if "weights_only" in text]  # torch's advice is to load it all the same


def test_a_tensor_stored_as_another_type_is_not_cast(one):
    for dtype, said in one["stored as"].items():
        wanted = f"is damaged: a tensor is stored as {dtype.removeprefix('torch.')} where its index says float32"
        assert wanted in said
    assert len(one["stored as"]) == 3


def test_missing_extra_and_other_tensors(one):
    said = one["tensors"]
    assert said["lacks"].endswith("does not fit this model: it lacks decoder.final_layernorm.weight")
    assert said["more"].endswith("does not fit this model: it also has decoder.another.weight")
    for kind in ("type", "shape"):
        assert said[kind].endswith("of another shape or type: decoder.final_layernorm.weight")


def test_a_run_that_cannot_make_the_folder_goes_on_and_fails_at_its_end(one, folder):
    assert one["no folder"].startswith("the checkpoint of step 3 cannot be written: ")
    assert "no-folder/checkpoints" in one["no folder"]
    assert [record["step"] for record in read_metrics(folder / "no-folder" / "metrics.jsonl")] == [1, 2, 3, 3]


def test_a_full_disk_of_one_rank_leaves_the_last_good_one_and_the_run_going(two):
    for report in two:
        assert report["whole"] is None
        assert report["full"].startswith("the checkpoint of step 5 cannot be written: File too large (rank 1)")
        assert report["left"] == ["step_00000004"]
        assert report["again"] is None


def test_a_disk_that_stays_full_fails_the_job_at_its_end(two, folder):
    for report in two:
        assert report["always full"].startswith("the checkpoint of step 3 cannot be written: File too large")
    records = read_metrics(folder / "always-full" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert list((folder / "always-full" / "checkpoints").iterdir()) == []


def test_damage_is_found_by_all_ranks_and_auto_takes_the_one_before(two):
    for report in two:
        assert (
            report["damaged"]
            .split("/")[-1]
            .startswith("step_00000006 is damaged: __1_0.distcp is not as it was written")
        )
        assert report["auto"].name == "step_00000004"
        assert report["auto unverified"].name == "step_00000006"
        assert report["none"].startswith("all 2 checkpoints of ")


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_in_mid_save_leaves_the_last_good_one(kills, one, folder, place):
    newest = 2 if place == "killed-after-the-name" else 1
    halves = [] if newest == 2 else ["step_00000002.partial"]
    assert kills[place] == [f"step_{step:08d}" for step in range(1, newest + 1)] + halves
    assert one[place] == newest
    left = sorted(path.name for path in (folder / place / "checkpoints").iterdir())
    assert left == [f"step_{newest:08d}", "step_00000003"]  # the two that are kept


@pytest.mark.parametrize("is_written", [True, False])
def test_a_job_that_fails_says_that_it_waits_only_if_it_does(monkeypatch, caplog, is_written):
    from maniple.engines.megatron.checkpoint import writer

    saver, writing = writer.Saver.__new__(writer.Saver), threading.Event()
    waits: list[float | None] = []
    saver._step, saver._thread = 20, threading.Thread(target=writing.wait, args=(60,), daemon=True)
    monkeypatch.setattr(saver, "wait", lambda timeout=None: waits.append(timeout))
    monkeypatch.setattr(writer.log, "propagate", True)
    saver._thread.start()
    if is_written:
        writing.set()
        saver._thread.join()
    with caplog.at_level("INFO", logger="maniple"):
        saver.__exit__(RuntimeError, RuntimeError(), None)
    writing.set()
    assert waits == [writer._ON_ERROR_SECONDS]
    assert [record.getMessage() for record in caplog.records] == [
        "waiting at most 20 s for the checkpoint of step 20"
    ] * (not is_written)
