"""Counts past 32 bits, and memory that does not grow with what is on disk. Files are holes: they take no room."""

import os
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from tests.data.pairs import build, job, write_pair, write_tokenizer

from maniple.data.indexed import open_indexed, token_dtype, write_index
from maniple.data.packing import PackedDataset
from maniple.data.sources import Part
from maniple.errors import UserError


def sparse(folder, lengths, name="data", dtype=np.uint16):
    """A dataset of zeros."""
    waiting = folder / "lengths"
    np.asarray(lengths, np.int32).tofile(waiting)
    write_index(folder / f"{name}.idx", waiting, np.dtype(dtype))
    with open(folder / f"{name}.bin", "wb") as data:
        data.truncate(int(np.sum(lengths, dtype=np.int64)) * np.dtype(dtype).itemsize)
    return str(folder / name)


def packed(prefix, folder, length):
    file = open_indexed(prefix, thorough=True)
    part = Part(prefix, 0, file.num_sequences, file.num_tokens, Fraction(1))
    return PackedDataset(part, length, 60_000, seed=1, split="train", cache=folder / "indices")


def test_tokens_samples_and_bytes_past_32_bits(tmp_path):
    """7 documents of 2^30 tokens: 7.5e9 tokens, 15 GB, and with 2 tokens a sample 3.8e9 samples an epoch."""
    prefix = sparse(tmp_path, [1 << 30] * 7)
    dataset = packed(prefix, tmp_path, 2)
    assert dataset.samples_per_epoch == ((7 << 30) - 1) // 2 > 1 << 31
    with open(f"{prefix}.bin", "r+b") as data:  # the last three tokens of the last two documents on disk
        for document in (5, 6):
            os.pwrite(data.fileno(), np.array([7, 8, document], np.uint16).tobytes(), ((document + 1) << 31) - 6)
    resident = resident_bytes()
    epoch = dataset._epoch(0)
    order = epoch.documents(np.arange(7)).tolist()
    for document in (5, 6):
        wanted = (((order.index(document) + 1) << 30) - 3) // 2  # the sample that holds the document's end
        dataset._epoch = lambda _, wanted=wanted: epoch._replace(samples=lambda _: wanted)
        assert dataset.text(0).tolist() in ([0, 7, 8], [7, 8, document])
        dataset._open()
    for index in (0, 1 << 31, (1 << 32) + 5, dataset.samples_per_epoch - 1, 3 * dataset.samples_per_epoch + 1):
        assert dataset.text(index).shape == (3,)
    assert resident_bytes() - resident < 32 << 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_source_of_many_gigabytes(tmp_path):
    prefix = sparse(tmp_path, [1 << 30] * 5)
    config = job(write_tokenizer(tmp_path, 300), [prefix], [prefix])
    resident = resident_bytes()
    train, valid = build(config, tmp_path)
    assert train[(1 << 33) + 1]["tokens"].tolist() == [0] * 8
    assert len(valid) == 10
    assert resident_bytes() - resident < 400 << 20  # of 10 GB


def test_memory_of_an_index_does_not_grow_with_documents(tmp_path):
    """Each document costs an eighth of a byte, where arrays of its order and ends would take 16."""
    peaks = []
    for documents in (1 << 19, 3 << 19):
        dataset = packed(sparse(tmp_path, np.full(documents, 3), str(documents)), tmp_path, 64)
        tracemalloc.start()
        dataset.build(10)
        dataset.text(5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < (1 << 20) * 1.0
    files = sorted((tmp_path / "indices").glob("*/*"))
    assert sorted(file.stat().st_size for file in files) == [8 * (1 << 19) // 64, 8 * (3 << 19) // 64]


@pytest.mark.parametrize(("vocab_size", "token"), [(65_499, 65_498), (65_536, 65_535), (129_280, 129_279)])
def test_every_token_of_small_and_large_vocabularies(tmp_path, vocab_size, token):
    dtype = token_dtype(vocab_size)
    prefix, _ = write_pair(tmp_path, [40], dtype, tokens=[token] * 40)
    part = Part(prefix, 0, 1, 40, Fraction(1))
    options = {"seed": 1, "split": "train", "cache": tmp_path}
    assert PackedDataset(part, 8, vocab_size, **options).text(0).tolist() == [token] * 9
    with pytest.raises(UserError, match=rf"data: document 0 holds token {token}, and the tokenizer has {token:,} tok"):
        PackedDataset(part, 8, vocab_size - 1, **options).text(0)


def test_a_strange_token_far_into_a_dataset_names_its_document(tmp_path):
    """Past the first tokens, which alone are looked at when a job starts."""
    prefix = sparse(tmp_path, [1000] * 100, dtype=np.int32)
    with open(f"{prefix}.bin", "r+b") as data:
        os.pwrite(data.fileno(), np.array([-5], np.int32).tobytes(), 4 * 70_500)
    dataset = packed(prefix, tmp_path, 500)
    with pytest.raises(UserError, match="document 70 holds token -5") as caught:
        _ = [dataset.text(index) for index in range(dataset.samples_per_epoch)]
    assert "\n" not in str(caught.value)
