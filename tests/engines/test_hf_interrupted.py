"""Conversions that end in the middle and are started again: the result is that of one that was not disturbed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.engines import hf_models
from tests.engines.hf_models import contents

from maniple import cli
from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface import from_hf as forth
from maniple.engines.megatron.huggingface import journal
from maniple.engines.megatron.huggingface import to_hf as back
from maniple.engines.megatron.huggingface.journal import Journal
from maniple.errors import UserError
from maniple.launch.start import check_checkpoints
from maniple.models import load_card

SHARD = 60_000  # bytes: some seven files


def from_hf(source: Path, out: Path, **options):
    return forth.from_hf(source, out, **options)


def to_hf(source: Path, out: Path, **options):
    return back.to_hf(source, out, shard_bytes=SHARD, **options)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    monkeypatch.setattr(forth, "_FILE_BYTES", SHARD)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[Callable, Path]:
    """What each conversion reads, and beside it, as `undisturbed`, what it makes of it."""
    folder = tmp_path_factory.mktemp("models")
    hf_models.write(folder / "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forth, "_FILE_BYTES", SHARD)
        from_hf(folder / "hf", folder / "weights")
        to_hf(folder / "weights", folder / "hf-again")
    return {
        from_hf: folder / "hf",
        to_hf: folder / "weights",
        "from_hf": folder / "weights",
        "to_hf": folder / "hf-again",
    }


@pytest.fixture(params=[from_hf, to_hf], ids=["from-hf", "to-hf"])
def convert(request):
    return request.param


def in_a_process(work: Callable[[], object], kill_after: float | None = None) -> int:
    """The status of a forked process that does the work and ends; killed after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def at(share: float, act: Callable[[], None]) -> Callable[[int, int], None]:
    """A progress function that acts once, when that share of all is done."""
    acted = []

    def progress(done: int, total: int) -> None:
        if done >= share * total and not acted:
            acted.append(True)
            act()

    return progress


def is_incomplete(partial: Path) -> bool:
    with pytest.raises(UserError, match="it was not written to its end"):
        files.read_manifest(partial)
    return not (partial / "config.json").exists()


def test_killed_at_any_file(convert, models, tmp_path):
    out, reused = tmp_path / "out", -1
    for share in (0.05, 0.35, 0.6, 0.9):
        assert in_a_process(lambda s=share: convert(models[convert], out, progress=at(s, die))) == -signal.SIGKILL
        assert not out.exists()
        assert is_incomplete(tmp_path / "out.partial")
        finished = len((tmp_path / "out.partial" / "progress.jsonl").read_text().splitlines()) - 1
        assert finished >= reused
        reused = finished
    assert reused > 0
    partial = tmp_path / "out.partial"
    lines = (partial / "progress.jsonl").read_text().splitlines()[1:]
    names = [name for line in lines for name in json.loads(line)]
    before = {name: (partial / name).stat().st_mtime_ns for name in names}
    assert convert(models[convert], out).reused == reused
    assert contents(out) == contents(models[convert.__name__])
    assert {name: (out / name).stat().st_mtime_ns for name in names} == before


def test_killed_at_random_moments(convert, models, tmp_path):
    moments = random.Random(0)
    for _ in range(5):
        in_a_process(lambda: convert(models[convert], tmp_path / "out"), kill_after=moments.uniform(0, 0.25))
        assert not (tmp_path / "out").exists() or contents(tmp_path / "out") == contents(models[convert.__name__])
    if not (tmp_path / "out").exists():
        convert(models[convert], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(models[convert.__name__])
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("moment", ["manifest", "rename"])
def test_killed_at_its_last_steps(moment, convert, models, tmp_path, monkeypatch):
    """All files are there: what speaks of the whole is written again, and nothing else."""
    with monkeypatch.context() as patch:
        if moment == "rename":
            patch.setattr(journal.os, "rename", die)
        else:
            patch.setattr(Journal, "publish", die)
        assert in_a_process(lambda: convert(models[convert], tmp_path / "out")) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert convert(models[convert], tmp_path / "out").reused > 3
    assert contents(tmp_path / "out") == contents(models[convert.__name__])


def test_a_journal_whose_last_line_was_cut(convert, models, tmp_path):
    in_a_process(lambda: convert(models[convert], tmp_path / "out", progress=at(0.7, die)))
    path = tmp_path / "out.partial" / "progress.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) > 2
    path.write_text("".join(lines[:-1]) + lines[-1][:7])
    assert convert(models[convert], tmp_path / "out").reused == len(lines) - 2
    assert contents(tmp_path / "out") == contents(models[convert.__name__])


def test_interrupted_by_the_user(convert, models, tmp_path, monkeypatch, capsys):
    whole = getattr(forth if convert is from_hf else back, convert.__name__)
    interrupt = at(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    module = forth if convert is from_hf else back
    words = ["convert", convert.__name__.replace("_", "-"), str(models[convert]), "--to", str(tmp_path / "out")]
    words += [] if convert is from_hf else ["--shard-size", "60KB"]
    with monkeypatch.context() as patch:
        patch.setattr(module, convert.__name__, lambda *a, progress, **b: whole(*a, progress=interrupt, **b))
        assert cli.main(words) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "maniple: interrupted; what is finished stays: the same command goes on\n"
    assert is_incomplete(tmp_path / "out.partial")
    assert cli.main(words) == 0
    assert "files were there from an earlier try" in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(models[convert.__name__])


# --- other work under the same name -----------------------------------------------------------------------------------


def interrupted(work: Callable[..., object], *words, **options) -> int:
    """The number of files that it has finished."""
    assert in_a_process(lambda: work(*words, progress=at(0.7, die), **options)) == -signal.SIGKILL
    partial = words[1].with_name("out.partial")
    return len((partial / "progress.jsonl").read_text().splitlines()) - 1


def negate(path: Path) -> None:
    """The same file with other numbers: as many bytes, at the same time."""
    times = path.stat()
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size


@pytest.mark.parametrize("change", ["weights", "config", "dtype"])
def test_nothing_of_another_source_is_used(change, models, tmp_path):
    source, options = shutil.copytree(models[from_hf], tmp_path / "hf"), {}
    assert interrupted(from_hf, source, tmp_path / "out") > 2
    if change == "weights":
        for path in source.glob("*.safetensors"):
            negate(path)
    elif change == "config":
        hf_models.set_config(source, rms_norm_eps=1e-5)
    else:
        options = {"dtype": "fp32"}
    assert from_hf(source, tmp_path / "out", **options).reused == 0
    from_hf(source, tmp_path / "undisturbed", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed") != contents(models["from_hf"])


@pytest.mark.parametrize("change", ["weights", "dtype"])
def test_nothing_of_another_checkpoint_is_used(change, models, tmp_path):
    source, options = tmp_path / "hf", {}
    hf_models.write(source, shards=1, seed=1)
    tensors = load_file(source / "model.safetensors")
    save_file({name: t.half() for name, t in tensors.items()}, source / "model.safetensors")
    from_hf(source, tmp_path / "weights", dtype="bf16")
    assert interrupted(to_hf, tmp_path / "weights", tmp_path / "out") > 2
    if change == "weights":
        shutil.rmtree(tmp_path / "weights")
        shutil.copytree(models[to_hf], tmp_path / "weights")
    else:
        options = {"dtype": "bf16"}  # as the checkpoint has them, but not as its source had them
    assert to_hf(tmp_path / "weights", tmp_path / "out", **options).reused == 0
    to_hf(tmp_path / "weights", tmp_path / "undisturbed", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_source_that_changes_while_it_is_read(models, tmp_path):
    source = shutil.copytree(models[from_hf], tmp_path / "hf")
    path = next(source.glob("*.safetensors"))
    with pytest.raises(UserError, match="was changed while it was converted: run the same command again"):
        from_hf(source, tmp_path / "out", progress=at(0.5, lambda: negate(path)))
    assert not (tmp_path / "out").exists()
    assert from_hf(source, tmp_path / "out").reused == 0
    from_hf(source, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_two_at_once(convert, models, tmp_path):
    """The second is refused while the first writes, and the first is not disturbed."""
    refused = []

    def second():
        with pytest.raises(UserError, match="another conversion is writing") as caught:
            convert(models[convert], tmp_path / "out")
        refused.append(str(caught.value))

    convert(models[convert], tmp_path / "out", progress=at(0.5, second))
    assert len(refused) == 1
    assert "\n" not in refused[0]
    assert contents(tmp_path / "out") == contents(models[convert.__name__])
    assert "progress.jsonl" not in os.listdir(tmp_path / "out")


def test_who_waited_at_the_lock_does_not_write_again(tmp_path, monkeypatch):
    """The folder got its name between the look for it and the lock."""
    first = Journal(tmp_path / "out", tmp_path / "source", [1])
    lock = Journal._lock

    def late(self):
        with first:
            first.publish()
        lock(self)

    monkeypatch.setattr(Journal, "_lock", late)
    with pytest.raises(UserError, match="exists: name another folder"):
        Journal(tmp_path / "out", tmp_path / "source", [1])
    assert os.listdir(tmp_path / "out") == []


def test_halves_of_files_are_not_counted_nor_left(models, tmp_path):
    assert interrupted(from_hf, models[from_hf], tmp_path / "out") > 2
    partial = tmp_path / "out.partial"
    os.truncate(partial / "__0_0.distcp", 10)
    (partial / "maniple.json").write_text("{}")
    (partial / "left").mkdir()
    lines = (partial / "progress.jsonl").read_text().splitlines()
    assert from_hf(models[from_hf], tmp_path / "out").reused == len(lines) - 2
    assert contents(tmp_path / "out") == contents(models["from_hf"])


def test_transformers_takes_no_half_for_a_model(models, tmp_path):
    import transformers

    assert interrupted(to_hf, models[to_hf], tmp_path / "out") > 2
    with pytest.raises((OSError, ValueError)):
        transformers.AutoConfig.from_pretrained(tmp_path / "out.partial")
    to_hf(models[to_hf], tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 64


def test_training_takes_no_half_for_weights(models, tmp_path):
    assert interrupted(from_hf, models[from_hf], tmp_path / "out") > 2
    job = TrainConfig.model_validate({"checkpoint": {"init_from": str(tmp_path / "out.partial")}})
    with pytest.raises(UserError, match="it was not written to its end"):
        check_checkpoints(job, load_card("deepseek-v3"))
    from_hf(models[from_hf], tmp_path / "out")
    job = TrainConfig.model_validate({"checkpoint": {"init_from": str(tmp_path / "out")}})
    check_checkpoints(job, load_card(str(tmp_path / "out" / "card.yaml")))
    with pytest.raises(UserError, match=r"differ; set model\.card=.*/out/card\.yaml$"):
        check_checkpoints(job, load_card("deepseek-v3"))
