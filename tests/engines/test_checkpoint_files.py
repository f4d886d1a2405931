"""A checkpoint that is damaged, or not one, is refused in one line before anything of it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save

from maniple import cli
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint import index as checkpoint_index
from maniple.errors import UserError

MANIFEST = {
    "format": files.FORMAT,
    "step": 3,
    "samples": 6,
    "updates": 3,
    "saved": 1000.5,
    "world_size": 1,
    "versions": {"maniple": "0"},
    "card": {"name": "a-model"},
    "job": {},
    "extra": {},
}
SHARD = "__0_0.distcp"


def make(run_dir: Path, step: int = 3, **facts) -> Path:
    """A run's checkpoint of two tensors and an object."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": "text"}
    save(state, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    write_manifest(folder, step=step, **facts)
    return folder


def write_manifest(folder: Path, **facts) -> None:
    (folder / files.MANIFEST).unlink(missing_ok=True)
    listed = {p.name: {"bytes": p.stat().st_size, "sha256": files.file_digest(p)} for p in folder.iterdir()}
    files.write_manifest(folder, {**MANIFEST, "files": listed, **facts})


def read_all(folder: Path) -> None:
    """What is done with a checkpoint before it is loaded."""
    ((found, manifest),) = files.find(folder.parents[1], str(folder))[0]
    files.check_digests(found, manifest)
    files.check_index(found, manifest)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path) -> Path:
    return make(tmp_path)


def test_a_whole_one_is_read_without_torch(folder, tmp_path):
    read_all(folder)
    index = files.check_index(folder, files.read_manifest(folder))
    wanted = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert index.tensors == {
        key: checkpoint_index.Tensor(tuple(wanted[key].size), str(wanted[key].properties.dtype).split(".")[1])
        for key in ("a", "b")
    }
    code = "import sys; from maniple import cli; sys.exit(cli.main(sys.argv[1:]) or 9 * ('torch' in sys.modules))"
    for command in ("inspect", "verify"):
        done = subprocess.run([sys.executable, "-c", code, "checkpoint", command, str(folder)], capture_output=True)
        assert done.returncode == 0, done.stderr


def test_all_of_a_run(tmp_path):
    folders = [make(tmp_path, step) for step in (99999999, 100000000, 2)]
    for other in ("step_00000001.partial", "step_1", "step_0000000x"):
        (tmp_path / "checkpoints" / other).mkdir()
    assert set(files.all_of(tmp_path)) == set(folders)
    assert files.find(tmp_path / "new", "auto") == ([], [])


def test_auto_takes_the_one_saved_last_and_names_the_damaged(tmp_path):
    # 200 is of a past that the run has left by going on from 100
    old, left, new, torn = [
        make(tmp_path, step, saved=saved) for step, saved in ((100, 1.0), (200, 2.0), (150, 3.0), (160, 4.0))
    ]
    os.truncate(torn / SHARD, 100)
    found, wrong = files.find(tmp_path, "auto")
    assert [folder for folder, _ in found] == [new, left, old]
    assert [f"step_00000160 is damaged: {SHARD} is cut short" in str(error) for error in wrong] == [True]


@pytest.mark.parametrize("name", [SHARD, ".metadata", "maniple.json"])
def test_one_flipped_bit_anywhere_is_found_and_named(folder, name):
    whole = (folder / name).read_bytes()
    for place in {0, len(whole) - 1, *range(7, len(whole), max(1, len(whole) // 40))}:
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << place % 8
        (folder / name).write_bytes(spoiled)
        assert name in refusal(folder), place
    (folder / name).write_bytes(whole)
    read_all(folder)


def test_missing_short_and_long_files(folder):
    with open(folder / SHARD, "ab") as file:
        file.write(b"x")
    assert f"is damaged: {SHARD} is too long" in refusal(folder)
    os.truncate(folder / SHARD, 1000)
    assert f"is damaged: {SHARD} is cut short" in refusal(folder)
    (folder / SHARD).unlink()
    assert f"is damaged: {SHARD} is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "its maniple.json cannot be read"),
        ("[1]", "its maniple.json cannot be read"),
        ("{}", "its maniple.json cannot be read"),
        ("[" * 100_000, "its maniple.json cannot be read"),
        (json.dumps(MANIFEST | {"format": 1}), "has format 1, this version reads 2"),
        (json.dumps(MANIFEST | {"format": 99}), "has format 99"),
        (json.dumps(MANIFEST | {"files": {}}), "its maniple.json is not as it was written"),
    ],
)
def test_a_bad_manifest(folder, text, says):
    (folder / "maniple.json").write_text(text)
    assert says in refusal(folder)


def test_a_manifest_of_other_contents(folder):
    write_manifest(folder, step="../x", card=None)
    assert "no proper step, card" in refusal(folder)
    entry = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    for name in ("../outside", "/etc/passwd", ""):
        write_manifest(folder, files={".metadata": entry, name: entry})
        assert f"names the file {name!r}, which is not one of its folder" in refusal(folder)
    write_manifest(folder, files={SHARD: entry})
    assert "does not know .metadata" in refusal(folder)


def _sealed(folder: Path, **facts) -> str:
    """What a checkpoint is refused with whose maniple.json says this and fits its own digest."""
    write_manifest(folder, **facts)
    return refusal(folder).partition(" is damaged: its maniple.json ")[2].partition(";")[0]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        *(({key: -1}, f"has no proper {key}") for key in ("step", "samples", "updates", "world_size", "saved")),
        *(({key: 10**30}, f"has no proper {key}") for key in ("step", "samples", "updates", "world_size", "saved")),
        ({"step": True, "samples": 1.0}, "has no proper step, samples"),
        ({"saved": 1e300}, "has no proper saved"),
        ({"saved": float("nan")}, "cannot be read (it has NaN for a number)"),
        ({"extra": {"x": float("-inf")}}, "cannot be read (it has -Infinity for a number)"),
        ({"card": {"name": {}}}, "has no proper card.name"),
        ({"card": {"name": "x\x1b[2J"}}, "has no proper card.name"),
        ({"versions": {"maniple": 1}}, "has no proper versions.maniple"),
        ({"job": {"parallel": []}}, "has no proper job.parallel"),
        ({"job": {"parallel": {"tensor_parallel_size": {}}}}, "has no proper job.parallel.tensor_parallel_size"),
        ({"job": {"precision": []}}, "has no proper job.precision"),
        *(({"extra": {"guard": it}}, "has no proper extra.guard") for it in (None, [], "x")),
        ({"extra": {"guard": {"losses": ["x"], "left_out": [[1]]}}}, "has no proper extra.guard.losses.0, extra.guard"),
        *(({"extra": {"data": it}}, "has no proper extra.data") for it in (3, [1])),
        ({"extra": {"data": {"train": [1]}}}, "has no proper extra.data.train.0"),
        ({"files": {".metadata": {"bytes": 1.5, "sha256": "0" * 64}}}, "has no proper files..metadata.bytes"),
        ({"files": {".metadata": {"bytes": 1, "sha256": "zz"}}}, "has no proper files..metadata.sha256"),
        ({"surprise": 1}, "has no proper surprise"),
        ({"sequence": -1, "job_id": 3}, "has no proper sequence, job_id"),
    ],
)
def test_a_manifest_that_says_what_cannot_be(folder, facts, says):
    assert _sealed(folder, **facts).startswith(says)


def test_a_manifest_may_say_more_of_its_origin_and_the_job(folder):
    write_manifest(
        folder, sequence=3, job_id="a", lineage="a", job={"new": 1, "parallel": {"new": [2]}}, extra={"x": 1}
    )
    read_all(folder)


def test_a_manifest_of_strange_names_depth_or_size(folder):
    entry = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    for name in ("a" * 300, "a\nb", "a\0b", "\ud800"):
        write_manifest(folder, files={".metadata": entry, name: entry})
        assert refusal(folder)
    deep: list = []
    for _ in range(100):
        deep = [deep]
    assert _sealed(folder, extra={"x": deep}) == "cannot be read (it is nested too deep)"
    write_manifest(folder)
    os.truncate(folder / "maniple.json", 1 << 36)
    assert "its maniple.json cannot be read (it is larger than 64 MiB)" in refusal(folder)


def test_another_backends_metadata_json(folder):
    for text, says in (("junk", "cannot be read"), ('{"sharded_backend": "zarr"}', "is not of the format torch_dist")):
        (folder / "metadata.json").write_text(text)
        write_manifest(folder)
        assert f"its metadata.json {says}" in refusal(folder)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (["nowhere"], "there is no such folder"),
        (["it/x"], "a checkpoint is a folder that holds maniple.json"),
        (["it/checkpoints/x"], "it holds checkpoints and is none"),
        (["it/step_00000001/x"], "it holds checkpoints and is none"),
        (["it/config.json", "it/model.safetensors"], "it is a Hugging Face model"),
        (["it/latest_checkpointed_iteration.txt"], "it is a checkpoint of Megatron-LM"),
        (["it/metadata.json", "it/.metadata"], "it is a checkpoint of Megatron-LM"),
        (["it/.metadata"], "it is a checkpoint of torch"),
        (["step_00000001.partial/x"], "it was not written to its end"),
    ],
)
def test_what_is_no_checkpoint_is_called_by_its_name(tmp_path, made, says):
    for name in made:
        if "/" in name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"^no checkpoint at .*: {says}"):
        files.find(tmp_path, str(tmp_path / made[0].partition("/")[0]))


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_strangers_index_runs_nothing(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "ran")))
    write_manifest(folder)  # he digests what he wrote
    assert "posix.mkdir, which no checkpoint holds" in refusal(folder)
    assert not (tmp_path / "ran").exists()


BUILD_ON_A_CLASS = b"\x80\x04cpathlib\nPosixPath\n(N}(X\x04\x00\x00\x00nameX\x04\x00\x00\x00evilutb0"


@pytest.mark.parametrize(
    ("pickled", "says"),
    [
        (b"}" + b")" + b"\x85" * 3000 + b"Ns.", "its tuples are nested too deep"),  # 5,000,000 overflow C's stack
        (b"}" + b"(" + b")" * 9 + b"tNs.", "its tuples are nested too deep"),
        (b"}" + b"K\x01Ns.", "is neither a name nor the place of a tensor"),
        (BUILD_ON_A_CLASS + b".", "it changes what is not a new record"),
        (b"ctorch\nSize\n)\x81.", "it makes something else than an empty record"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R.", "it calls what is not to be called"),
        (b"ccollections\nOrderedDict\n}\x85R.", "cannot be read"),
        (b"\x8e" + (1 << 62).to_bytes(8, "little") + b".", "it has the opcode 0x8e, which no index needs"),
        (b"", "cannot be read"),
        (b"N.", "cannot be read"),
    ],
)
def test_an_index_of_other_makings_changes_nothing(folder, pickled, says):
    before = dict(vars(PurePosixPath))
    (folder / ".metadata").write_bytes(pickled)
    write_manifest(folder)
    assert says in refusal(folder)
    assert dict(vars(PurePosixPath)) == before


def test_the_size_of_an_index_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_index, "_LARGEST", 1 << 10)
    with open(folder / ".metadata", "ab") as file:
        file.write(bytes(1 << 10))
    write_manifest(folder)
    assert "its .metadata cannot be read (it is larger than 0 MiB)" in refusal(folder)


def test_an_index_that_leads_out_of_the_folder(folder):
    outside = "../shardfile"
    assert len(outside) == len(SHARD)  # as the pickle says its length
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(SHARD.encode(), outside.encode()))
    write_manifest(folder)
    assert f"names the file '{outside}', which is not one of its folder" in refusal(folder)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda index: index.storage_data.popitem(), "was not written whole"),
        (lambda index: index.state_dict_metadata["a"].chunks.clear(), "a was not written whole"),
        (lambda index: index.state_dict_metadata.update(a=None), "cannot be read"),
        (lambda index: next(iter(index.storage_data.values())).__dict__.update(length=1 << 40), "speaks of more of"),
        (lambda index: next(iter(index.storage_data.values())).__dict__.update(offset=-1), "has no proper place"),
        (
            lambda index: next(iter(index.storage_data.values())).__dict__.update(transform_descriptors=["x"]),
            "in a form that this version does not read",
        ),
    ],
)
def test_an_index_that_is_not_whole(folder, spoil, says):
    index = FileSystemReader(folder).read_metadata()
    if "popitem" in spoil.__code__.co_names:  # the last entry may be the object's
        index.storage_data = {key: place for key, place in index.storage_data.items() if key.fqn != "c"}
    spoil(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    write_manifest(folder)
    assert says in refusal(folder)


def test_keep_removes_the_oldest_but_for_multiples(tmp_path):
    folders = {step: make(tmp_path, step, saved=float(step)) for step in (10, 20, 30, 40, 50)}
    assert files.prune(tmp_path, folders[50], None, 20) == []
    os.truncate(folders[30] / SHARD, 100)  # is left for its owner to look at, and does not count
    assert files.prune(tmp_path, folders[50], 1, 20) == [folders[10]]
    assert files.all_of(tmp_path) == [folders[step] for step in (20, 30, 40, 50)]
    assert files.prune(tmp_path, folders[50], 1, None) == [folders[40], folders[20]]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000030", "step_00000050"]


def test_a_clock_that_is_set_back_changes_no_order(tmp_path):
    saved = {10: 100.0, 20: 101.0, 30: 1.0, 40: 2.0, 50: 3.0}
    old = make(tmp_path, 5, saved=1000.0)  # of a version without numbers
    folders = [make(tmp_path, step, saved=saved[step], sequence=files.next_number(tmp_path)) for step in saved]
    assert [folder for folder, _ in files.find(tmp_path, "auto")[0]] == [*folders[::-1], old]
    assert files.prune(tmp_path, folders[-1], 2, None) == [*folders[2::-1], old]
    assert files.next_number(tmp_path) == 6


def test_keep_counts_one_lineage_only(tmp_path):
    others = [make(tmp_path, 1), make(tmp_path, 2, sequence=1, lineage="a")]
    own = [make(tmp_path, step, sequence=step, lineage="b") for step in (3, 4, 5)]
    assert files.prune(tmp_path, own[-1], 1, None) == [own[1], own[0]]
    assert files.all_of(tmp_path) == [*others, own[2]]


def test_a_lineage_is_of_the_run_it_goes_on_in(tmp_path):
    old, new = make(tmp_path / "run", 1), make(tmp_path / "run", 2, lineage="a")
    lineages = [files.Origin.of_a_start(tmp_path / "run", resumed).lineage for resumed in (old, new)]
    assert lineages == ["", "a"]
    for run, resumed in (("run", None), ("other", new)):
        first, second = (files.Origin.of_a_start(tmp_path / run, resumed) for _ in range(2))
        assert first.lineage == first.job_id != second.job_id


def test_what_a_killed_job_left_is_cleaned(tmp_path):
    for name in ("step_00000001", "step_00000002.partial", "step_00000003.removed", "step_00000001.replaced"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000004.replaced").mkdir()  # killed between two names: the old one is back
    (tmp_path / "checkpoints" / "notes.partial").mkdir()
    files.clean(tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["notes.partial", "step_00000001", "step_00000004"]


def test_publishing_over_another_of_the_step(tmp_path):
    old = make(tmp_path)
    partial = old.with_suffix(".partial")
    partial.mkdir()
    (partial / "new").touch()
    assert files.publish(partial) == old
    assert [path.name for path in old.parent.iterdir()] == [old.name]
    assert [path.name for path in old.iterdir()] == ["new"]


def test_links_are_removed_and_not_what_they_lead_to(tmp_path):
    folders = {step: make(tmp_path, step, saved=float(step)) for step in (1, 2, 3)}
    elsewhere = folders[1].rename(tmp_path / "elsewhere")
    folders[1].symlink_to(elsewhere)
    assert files.prune(tmp_path, folders[3], 2, None) == [folders[1]]
    (tmp_path / "checkpoints" / "step_00000008.partial").touch()
    (tmp_path / "checkpoints" / "step_00000009.partial").symlink_to(elsewhere)
    files.clean(tmp_path)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_00000002", "step_00000003"]
    assert (elsewhere / files.MANIFEST).is_file()


# --- what the system does not let one read ----------------------------------------------------------------------------


def test_a_checkpoints_folder_that_cannot_be_listed_is_no_empty_one(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")  # stands for one without permission: root has all
    with pytest.raises(UserError, match=r"checkpoints cannot be read: Too many levels of symbolic links"):
        files.find(tmp_path, "auto")


def test_auto_falls_back_from_one_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    old, new = make(tmp_path, 1), make(tmp_path, 2, saved=2000.0)
    usual = Path.is_file

    def is_file(path: Path) -> bool:
        if path.parent == new:
            raise PermissionError(13, "Permission denied")
        return usual(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    found, wrong = files.find(tmp_path, "auto")
    assert [folder for folder, _ in found] == [old]
    assert [str(error) for error in wrong] == [f"{new} cannot be read: Permission denied; mend its name or permissions"]
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 2
    done = capsys.readouterr()
    assert f"{old}: whole" in done.out
    assert "Permission denied" in done.err


# --- the commands -----------------------------------------------------------------------------------------------------


def test_inspect(folder, capsys):
    assert cli.main(["checkpoint", "inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["model"], facts["world_size"]) == (3, "a-model", 1)
    assert facts["tensors"] == {"a": {"shape": [1000], "dtype": "float32"}, "b": {"shape": [3], "dtype": "bfloat16"}}
    assert facts["components"] == {
        "other weights": {"tensors": 2, "numbers": 1003, "bytes": 4006, "dtypes": ["bfloat16", "float32"]}
    }
    assert cli.main(["checkpoint", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("a-model", "4.01 kB", "1,003"))


def test_names_are_printed_as_they_are(tmp_path, capsys):
    (tmp_path / "a [").mkdir()
    folder = make(tmp_path).rename(tmp_path / "a [" / "x] [red]")
    write_manifest(folder, card={"name": "[/red]"}, versions={"maniple": "[/b]"})
    for command in ("inspect", "verify"):
        assert cli.main(["checkpoint", command, str(folder)]) == 0
        assert "[/x] [red]" in "".join(capsys.readouterr().out.split("\n")).replace("  ", "")
    for command in ("inspect", "verify"):
        assert cli.main(["checkpoint", command, str(tmp_path / ("n" * 300))]) == 2
        assert "File name too long" in capsys.readouterr().err


def test_verify_a_folder_and_a_run(folder, tmp_path, capsys):
    other = make(tmp_path, 4)
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    assert f"{folder}: whole, 2 files" in capsys.readouterr().out
    spoiled = bytearray((folder / SHARD).read_bytes())
    spoiled[2000] ^= 1
    (folder / SHARD).write_bytes(spoiled)
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 2
    done = capsys.readouterr()
    assert f"{other}: whole" in done.out
    damage = f"checkpoint {folder} is damaged: {SHARD} is not as it was written"
    said, last = done.err.splitlines()
    assert said.startswith(damage)
    assert last == f"maniple: error: 1 of 2 checkpoints in {tmp_path}/checkpoints are not whole"
    os.truncate(other / SHARD, 5)
    assert cli.main(["checkpoint", "verify", str(tmp_path / "checkpoints")]) == 2
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == said
    assert second.startswith(f"checkpoint {other} is damaged: {SHARD} is cut short")
    assert last.endswith("2 of 2 checkpoints in " + str(tmp_path / "checkpoints") + " are not whole")
    assert cli.main(["checkpoint", "verify", str(folder)]) == 2
    (alone,) = capsys.readouterr().err.splitlines()
    assert alone.startswith(f"maniple: error: {damage}")
    assert cli.main(["checkpoint", "inspect", str(folder)]) == 0  # sizes and index are well
    assert cli.main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    assert cli.main(["checkpoint", "verify", str(tmp_path / "new")]) == 2


def test_a_run_that_is_taken_for_a_checkpoint_names_its_newest(tmp_path, capsys):
    make(tmp_path / "run", 8, saved=1000.0)
    newest = make(tmp_path / "run", 4, saved=2000.0)
    make(tmp_path / "run", 9, saved=3000.0).joinpath(SHARD).unlink()
    kept = tmp_path / "run" / "checkpoints"
    for folder in (tmp_path / "run", kept):
        assert cli.main(["checkpoint", "inspect", str(folder)]) == 2
        assert f"{folder}: it holds checkpoints and is none: take its newest, {newest}\n" in capsys.readouterr().err
    copied = kept.rename(tmp_path / "copied")
    with pytest.raises(UserError, match=f"take its newest, {copied}/step_00000004$"):
        files.find(tmp_path, str(copied))
