"""Loader processes that fail, die, are kept, and end."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import torch
from tests.data.pairs import build, job, write_pair, write_tokenizer

from maniple.data.batches import Batches, iterate
from maniple.errors import UserError

OPTIONS = {
    "start_sample": 0,
    "micro_batch_size": 2,
    "data_parallel_rank": 0,
    "data_parallel_size": 1,
    "global_batch_size": 2,
}


class Faulty(torch.utils.data.Dataset):
    """Sample i says which process made it; sample 5 does `fault`."""

    def __init__(self, fault=None, size=12):
        self.fault, self.size = fault, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 5 and self.fault is not None:
            self.fault()
        row = torch.full((3,), os.getpid())
        return {"tokens": row, "labels": row, "loss_mask": row.float(), "position_ids": row}


def raise_users():
    raise UserError("dataset x: document 7 holds token 9")


def raise_other():
    raise KeyError("what")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pids(batches):
    return {int(pid) for batch in batches for pid in batch["tokens"].flatten()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_users_fault_reads_the_same_wherever_it_was_found(num_workers):
    batches = iterate(Faulty(raise_users), num_workers=num_workers, **OPTIONS)
    next(batches), next(batches)
    with pytest.raises(UserError) as caught:
        next(batches)
    assert str(caught.value) == "dataset x: document 7 holds token 9"


def test_any_other_fault_is_one_line_with_its_traceback_as_a_note():
    with pytest.raises(RuntimeError) as caught:
        pids(iterate(Faulty(raise_other), num_workers=2, **OPTIONS))
    assert str(caught.value) == "data: sample 5: KeyError: 'what'"
    assert "raise_other" in caught.value.__notes__[0]


def test_a_loader_that_was_killed_is_one_line():
    """torch's handler of SIGCHLD raises wherever the main process is, and once more when the other loader ends."""
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012 (the handler goes before the error is seen)
        try:
            pids(iterate(Faulty(die), num_workers=2, **OPTIONS))
        finally:
            handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message = str(caught.value)
    for child in multiprocessing.active_children():  # the other loader, and what earlier tests left: not SIGTERM, which
        child.kill()  # they ignore; once they are waited for, the handler finds nothing to raise for
        child.join(30)
    signal.signal(signal.SIGCHLD, handler)
    assert "\n" not in message.strip()
    assert "killed by signal" in message or "exited unexpectedly" in message


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_loader_that_dies_while_it_hands_a_batch_over_is_one_line(error, monkeypatch):
    def next_of(self):
        raise error

    batches = iterate(Faulty(lambda index: index), num_workers=0, **OPTIONS)
    monkeypatch.setattr("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", next_of)
    with pytest.raises(RuntimeError, match=r"^data: a loader process died \(exited unexpectedly: \w+\): out of memory"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_document_is_named(tmp_path, num_workers):
    prefix, tokens = write_pair(tmp_path, [300] * 4)
    config = job(write_tokenizer(tmp_path, 1200), [prefix], [prefix], length=100)
    train, _ = build(config, tmp_path)
    tokens[350] = 60_000
    np.asarray(tokens).tofile(f"{prefix}.bin")
    with pytest.raises(UserError, match=f"dataset {prefix}: document 1 holds token 60000") as caught:
        _ = [batch for batch, _ in zip(iterate(train, num_workers=num_workers, **OPTIONS), range(12), strict=False)]
    assert "\n" not in str(caught.value)


def test_loaders_are_kept_from_one_validation_to_the_next_and_end_with_it():
    batches = Batches(Faulty(), num_workers=2, **OPTIONS)
    first = pids(batches)
    assert len(first) == 2
    assert os.getpid() not in first
    for _ in range(3):
        half = iter(batches)
        next(half)  # a validation that stops early
        assert pids(batches) == first
    del half, batches
    deadline = time.monotonic() + 30
    while {child.pid for child in multiprocessing.active_children()} & first and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not {child.pid for child in multiprocessing.active_children()} & first


def test_a_second_pass_starts_over():
    batches = Batches(Numbered(), num_workers=2, **OPTIONS)
    expected = [[2 * i, 2 * i + 1] for i in range(6)]
    for _ in range(2):
        next(iter(batches))
        assert [batch["tokens"][:, 0].tolist() for batch in batches] == expected


class Numbered(Faulty):
    def __getitem__(self, index):
        return {key: torch.full((3,), index) for key in ("tokens", "labels", "loss_mask", "position_ids")}


SCRIPT = """
import time
from tests.data.test_loader_faults import OPTIONS, Faulty, iterate, pids
batches = iterate(Faulty(size=10**6), num_workers=2, **OPTIONS)
print(*{int(next(batches)["tokens"][0, 0]) for _ in range(4)}, flush=True)
time.sleep(300)
"""


def test_loaders_do_not_outlive_a_killed_process():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        loaders = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(loaders) == 2
    deadline = time.monotonic() + 60  # torch's loaders look after their parent every 5 s
    while any(map(is_running, loaders)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_running, loaders))


HOLDS = """
from tests.data.test_loader_faults import OPTIONS, Faulty, iterate
batches = iterate(Faulty(size=10**6), num_workers=2, **OPTIONS)
next(batches)
"""


def test_a_process_that_still_holds_loaders_ends():
    subprocess.run([sys.executable, "-c", HOLDS], check=True, timeout=120)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("over", [0, 1])
def test_a_long_path_of_temporary_files_is_one_line(tmp_path, monkeypatch, over):
    """At the longest path that passes the loaders' tensors do come; one byte more is refused before there is any."""
    folder = f"/tmp/{os.getpid()}"
    folder += "x" * (75 + over - len(folder))
    os.mkdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    try:
        if over:
            with pytest.raises(UserError, match=r"has 76 bytes.*room for 75: set TMPDIR to a shorter path") as caught:
                Batches(Faulty(), num_workers=1, **OPTIONS)
            assert "\n" not in str(caught.value)
        else:
            assert len(list(Batches(Faulty(), num_workers=1, **OPTIONS))) == 6
    finally:
        shutil.rmtree(folder)
