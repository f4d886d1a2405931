import tracemalloc

import numpy as np
import pytest

from maniple.data.indexed import open_indexed, token_dtype, write_index
from maniple.errors import UserError

UINT16 = np.dtype(np.uint16)


def write_pair(folder, lengths, dtype=UINT16):
    lengths = np.array(lengths, np.int32)
    (folder / "lengths").write_bytes(lengths.tobytes())
    tokens = np.arange(lengths.sum()).astype(dtype)
    (folder / "data.bin").write_bytes(tokens.tobytes())
    write_index(folder / "data.idx", folder / "lengths", dtype)
    return str(folder / "data"), tokens


@pytest.mark.parametrize("vocab_size", [300, 65_499, 65_500, 65_536, 200_000])
def test_same_files_as_megatron_core_writes(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    dtype = token_dtype(vocab_size)
    assert dtype == DType.optimal_dtype(vocab_size)
    lengths = [3, 1, 4, 1, 5]
    prefix, tokens = write_pair(tmp_path, lengths, dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    for document in np.split(tokens, np.cumsum(lengths)[:-1]):
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert (tmp_path / "data.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert (tmp_path / "data.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    assert [len(document) for document in IndexedDataset(prefix)] == lengths


def test_reads_back(tmp_path):
    prefix, tokens = write_pair(tmp_path, [3, 1, 4])
    file = open_indexed(prefix)
    assert (file.num_sequences, file.num_tokens, file.dtype) == (3, 8, np.uint16)
    assert file.tokens().tolist() == tokens.tolist()
    assert file.tokens(1, 3).tolist() == [3, 4, 5, 6, 7]
    assert file.tokens(2, 2).tolist() == []


def test_offsets_pass_32_bits(tmp_path):
    lengths = np.full(6, 1 << 30, np.int32)  # 6.4e9 tokens: 12.9 GB, of which only the index is written
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_index(tmp_path / "data.idx", tmp_path / "lengths", np.dtype(np.uint16))
    raw = (tmp_path / "data.idx").read_bytes()
    offsets = np.frombuffer(raw, np.int64, count=6, offset=34 + 24)
    assert offsets.tolist() == [i << 31 for i in range(6)]
    with open(tmp_path / "data.bin", "wb") as data:
        data.truncate(6 << 31)  # a hole
    assert open_indexed(str(tmp_path / "data")).num_tokens == 6 << 30


def test_memory_does_not_grow_with_documents(tmp_path):
    documents = 1_500_000
    (tmp_path / "lengths").write_bytes(np.ones(documents, np.int32).tobytes())
    tracemalloc.start()
    write_index(tmp_path / "data.idx", tmp_path / "lengths", np.dtype(np.uint16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20  # lists of lengths, offsets and bounds would be over 100 MB
    raw = (tmp_path / "data.idx").read_bytes()
    assert len(raw) == 34 + 12 * documents + 8 * (documents + 1)
    offsets = np.frombuffer(raw, np.int64, count=documents, offset=34 + 4 * documents)
    assert np.array_equal(offsets, 2 * np.arange(documents))
    bounds = np.frombuffer(raw, np.int64, count=documents + 1, offset=34 + 12 * documents)
    assert np.array_equal(bounds, np.arange(documents + 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "data.bin").unlink(), "data.bin not found"),
        (lambda folder: (folder / "data.idx").unlink(), "data.idx not found"),
        (lambda folder: (folder / "data.idx").write_bytes(b"no index" * 9), "not a Megatron index"),
        (lambda folder: (folder / "data.idx").write_bytes(b""), "not a Megatron index"),
        (lambda folder: (folder / "data.idx").write_bytes((folder / "data.idx").read_bytes()[:-1]), "cut short"),
        (lambda folder: (folder / "data.bin").write_bytes(b"\0" * 15), "has 15 bytes where its index says 16"),
    ],
)
def test_spoilt_pair_is_one_line(tmp_path, spoil, message):
    prefix, _ = write_pair(tmp_path, [3, 1, 4])
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        open_indexed(prefix)
    assert "\n" not in str(caught.value)


def test_empty_dataset_is_refused(tmp_path):
    prefix, _ = write_pair(tmp_path, [])
    with pytest.raises(UserError, match="no documents"):
        open_indexed(prefix)
