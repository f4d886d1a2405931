"""Caches that several processes and jobs make at once, and that are killed while they make them."""

import os
import random
import shutil
import signal
import time
from fractions import Fraction

import numpy as np
import pytest
from tests.data.pairs import write_pair

from maniple.data.indexed import open_indexed
from maniple.data.packing import PackedDataset
from maniple.data.sources import Part, publish
from maniple.errors import UserError


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """30,000 documents: an epoch takes some milliseconds to index."""
    return write_pair(tmp_path_factory.mktemp("many"), np.arange(30_000) % 5, tokens=np.arange(60_000) % 5000)[0]


def packed(prefix, cache):
    file = open_indexed(prefix)
    part = Part(prefix, 0, file.num_sequences, file.num_tokens, Fraction(1))
    return PackedDataset(part, 64, 5000, seed=1, split="train", cache=cache)


def started(work):
    """Process id of a copy of this process that does `work` and ends with 0, or 1 if it raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def test_many_writers_at_once(tmp_path, prefix):
    """Ranks and jobs that all believe to be the writer, on a cold cache: all end well and read the same."""
    samples = 20 * packed(prefix, tmp_path).samples_per_epoch
    expected = [packed(prefix, tmp_path / "none").text(i).tolist() for i in range(0, samples, 997)]

    def work():
        dataset = packed(prefix, tmp_path)
        dataset.build(samples)
        assert [dataset.text(i).tolist() for i in range(0, samples, 997)] == expected

    assert [ended(child) for child in [started(work) for _ in range(4)]] == [0] * 4
    files = list(tmp_path.glob("*/*"))
    assert len(files) == 20
    assert not list(tmp_path.rglob(".*"))


def test_killed_while_it_writes_an_index(tmp_path, prefix):
    """Killed at any moment: what is there is whole, and the next job goes on."""
    samples = 60 * packed(prefix, tmp_path).samples_per_epoch
    whole = packed(prefix, tmp_path / "none")
    chance = random.Random(1)
    files: list = []
    for _ in range(12):
        before = len(files)
        child = started(lambda: packed(prefix, tmp_path).build(samples))
        more = before + chance.randrange(4)
        wait_for(lambda more=more: len(list(tmp_path.glob("*/epoch*"))) >= more)
        time.sleep(chance.uniform(0.0, 0.01))
        os.kill(child, signal.SIGKILL)
        ended(child)
        files = sorted(tmp_path.glob("*/epoch*"))
        assert {file.stat().st_size for file in files} <= {8 * -(-30_000 // 64)}
        reader = packed(prefix, tmp_path)
        for epoch in {0, len(files) - 1, len(files)} - {-1}:
            index = epoch * reader.samples_per_epoch + 7
            assert reader.text(index).tolist() == whole.text(index).tolist()
    assert files
    packed(prefix, tmp_path).build(samples)
    assert len(list(tmp_path.glob("*/epoch*"))) == 60


def test_killed_while_it_publishes_a_folder(tmp_path):
    def write(folder):
        for number in range(10):
            (folder / f"part{number}").write_bytes(b"x" * 200_000)

    chance = random.Random(2)
    seen = set()
    for _ in range(25):
        child = started(lambda: publish(tmp_path / "thing", write))
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        ended(child)
        there = (tmp_path / "thing").is_dir()
        seen.add(there)
        if there:
            assert sorted(file.stat().st_size for file in (tmp_path / "thing").iterdir()) == [200_000] * 10
            shutil.rmtree(tmp_path / "thing")
    publish(tmp_path / "thing", write)
    assert len(list((tmp_path / "thing").iterdir())) == 10
    assert False in seen


def test_two_jobs_publish_at_once(tmp_path):
    def write(folder):
        for number in range(5):
            (folder / f"part{number}").write_bytes(b"x" * 100_000)
            time.sleep(0.002)

    children = [started(lambda: publish(tmp_path / "thing", write)) for _ in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    assert len(list((tmp_path / "thing").iterdir())) == 5


def test_full_disk_while_publishing_is_one_line(tmp_path):
    def full(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write the data cache .*: No space left on device") as caught:
        publish(tmp_path / "cache" / "thing", full)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
