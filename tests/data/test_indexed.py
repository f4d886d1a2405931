import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.pairs import write_pair

from maniple.data.indexed import TokenReader, content_mark, open_indexed, token_dtype, write_index
from maniple.errors import UserError


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
    assert open_indexed(str(tmp_path / "data"), thorough=True).num_tokens == 6 << 30


def test_memory_does_not_grow_with_documents(tmp_path):
    documents = 1_500_000
    (tmp_path / "lengths").write_bytes(np.ones(documents, np.int32).tobytes())
    tracemalloc.start()
    write_index(tmp_path / "data.idx", tmp_path / "lengths", np.dtype(np.uint16))
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 16 << 20  # lists of lengths, offsets and bounds would be over 100 MB
    with open(tmp_path / "data.bin", "wb") as data:
        data.truncate(2 * documents)
    tracemalloc.reset_peak()
    open_indexed(str(tmp_path / "data"), thorough=True)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    raw = (tmp_path / "data.idx").read_bytes()
    assert len(raw) == 34 + 12 * documents + 8 * (documents + 1)
    offsets = np.frombuffer(raw, np.int64, count=documents, offset=34 + 4 * documents)
    assert np.array_equal(offsets, 2 * np.arange(documents))
    bounds = np.frombuffer(raw, np.int64, count=documents + 1, offset=34 + 12 * documents)
    assert np.array_equal(bounds, np.arange(documents + 1))


def test_a_name_that_the_system_does_not_take(tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        open_indexed(str(tmp_path / ("p" * 300)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "data.bin").unlink(), "data.bin not found"),
        (lambda folder: (folder / "data.idx").unlink(), "data.idx not found"),
        (lambda folder: (folder / "data.idx").write_bytes(b"no index" * 9), "not a Megatron index"),
        (lambda folder: (folder / "data.idx").write_bytes(b""), "not a Megatron index"),
        (lambda folder: (folder / "data.idx").write_bytes((folder / "data.idx").read_bytes()[:-1]), "cut short"),
        (lambda folder: (folder / "data.bin").write_bytes(b"\0" * 15), "has 15 bytes where its index says 16"),
        (lambda folder: (folder / "data.bin").write_bytes(b"\0" * 18), "has 18 bytes where its index says 16"),
        (lambda folder: (folder / "data.bin").write_bytes(b""), "has 0 bytes where its index says 16"),
        (lambda folder: patch(folder, 9, "<Q", 2), "unknown version 2"),
        (lambda folder: patch(folder, 17, "<B", 7), "token type 7"),
        (lambda folder: patch(folder, 18, "<Q", 1 << 60), "cut short"),
        (lambda folder: patch(folder, 26, "<Q", 1 << 60), "cut short"),
        (lambda folder: patch(folder, 18, "<Q", 0), "has 102 bytes where its header says 66"),
        (lambda folder: patch(folder, 34, "<i", -3), "sequence 0 has -3 tokens"),
        (lambda folder: patch(folder, 38, "<i", 2), "sequence 2 starts at byte 8, not at 10"),
        (lambda folder: patch(folder, 46, "<q", 2), "sequence 0 starts at byte 2, not at 0"),
        (lambda folder: patch(folder, 54, "<q", 1 << 40), "sequence 1 starts at byte 1099511627776, not at 6"),
        (lambda folder: patch(folder, 54, "<q", -6), "sequence 1 starts at byte -6, not at 6"),
        (lambda folder: patch(folder, 70, "<q", 1), "document 0 begins at sequence 1 of 3"),
        (lambda folder: patch(folder, 78, "<q", 9), "document 1 begins at sequence 9 of 3"),
        (lambda folder: patch(folder, 86, "<q", 0), "document 2 begins at sequence 0 of 3"),
        (lambda folder: patch(folder, 94, "<q", 2), "documents end at sequence 2 of 3"),
        (lambda folder: (folder / "data.idx").write_bytes((folder / "data.idx").read_bytes() + b"1"), "103 bytes"),
    ],
)
def test_spoilt_pair_is_one_line(tmp_path, spoil, message):
    prefix, _ = write_pair(tmp_path, [3, 1, 4])
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        open_indexed(prefix, thorough=True)
    assert "\n" not in str(caught.value)
    assert prefix in str(caught.value)


def patch(folder, offset, form, value):
    raw = bytearray((folder / "data.idx").read_bytes())
    struct.pack_into(form, raw, offset, value)
    (folder / "data.idx").write_bytes(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_changes_nothing(tmp_path_factory, data):
    """An index cut anywhere, or with bytes changed anywhere."""
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    prefix, tokens = write_pair(folder, [3, 1, 0, 4])
    raw = bytearray((folder / "data.idx").read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "data.idx").write_bytes(raw)
    try:
        file = open_indexed(prefix, thorough=True)
    except UserError as error:
        message = str(error)
        file = None
    if file is None:
        assert message.startswith(f"dataset {prefix}")
        assert "\n" not in message
    else:
        assert file.lengths.tolist() == [3, 1, 0, 4]
        assert file.offsets.tolist() == [0, 6, 8, 8]
        assert file.tokens().tolist() == tokens.tolist()


def test_index_of_another_dataset(tmp_path):
    write_pair(tmp_path, [3, 1, 4], name="one")
    write_pair(tmp_path, [3, 1, 5], name="two")
    (tmp_path / "one.idx").rename(tmp_path / "two.idx")
    with pytest.raises(UserError, match=r"two\.bin has 18 bytes where its index says 16"):
        open_indexed(str(tmp_path / "two"))


def test_documents_of_several_sequences_and_megatrons_own_builder(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "theirs.idx"))
    file = open_indexed(str(tmp_path / "theirs"), thorough=True)
    assert file.lengths.tolist() == [2, 3, 4]
    assert file.count(1, 3) == 7
    assert file.num_tokens == 9


def test_files_that_change_while_they_are_read(tmp_path):
    prefix, _ = write_pair(tmp_path, [3, 1, 4])
    reader = TokenReader(open_indexed(prefix))
    assert reader.read(6, 5).tolist() == [3, 4, 5, 6, 7]
    with open(f"{prefix}.bin", "r+b") as data:
        data.truncate(9)
    with pytest.raises(UserError, match=r"data\.bin ends at byte 9: it was cut short while in use"):
        reader.read(6, 5)


def test_content_mark_tells_datasets_apart(tmp_path):
    prefix, _ = write_pair(tmp_path, [3, 1, 4])
    mark = content_mark(prefix)
    assert mark == content_mark(prefix)
    others = {content_mark(write_pair(tmp_path, lengths)[0]) for lengths in ([1, 3, 4], [3, 1, 5], [3, 1])}
    others.add(content_mark(write_pair(tmp_path, [3, 1, 4], tokens=range(1, 9))[0]))
    assert len(others) == 4
    assert mark not in others


def test_empty_dataset_is_refused(tmp_path):
    prefix, _ = write_pair(tmp_path, [])
    with pytest.raises(UserError, match="no documents"):
        open_indexed(prefix)
