import json
import os
import shutil

import numpy as np
import pytest
from tests.data.pairs import job, write_pair, write_tokenizer

from maniple.config.schema import TrainConfig
from maniple.data.identity import check_identity, difference, identity
from maniple.data.indexed import content_mark, sampled_mark
from maniple.data.sources import prepare_source
from maniple.errors import UserError


@pytest.fixture
def made(tmp_path):
    a, _ = write_pair(tmp_path, [9] * 30, name="a")
    b, _ = write_pair(tmp_path, [9] * 30, name="b", tokens=range(5, 275))
    tokenizer = write_tokenizer(tmp_path, 400)

    def make(train=(a,), validation=(a,), **options):
        options = {"tokenizer": tokenizer} | options
        config = job(options.pop("tokenizer"), train, validation, **options)
        return identity(config, prepare_source(config, tmp_path, True, lambda: None))

    make.a, make.b, make.folder = a, b, tmp_path
    return make


def test_same_data_wherever_they_lie_and_however_they_are_read(made):
    base = made()
    assert json.loads(json.dumps(base)) == base
    moved = made.folder / "moved"
    moved.mkdir()
    for end in (".bin", ".idx"):
        shutil.copy(made.a + end, moved / f"other{end}")
    for same in (
        made((str(moved / "other"),)),
        made(steps=500),
        made(validation=(made.b,)),
        made(("3", made.a)),
        made(num_workers=3, attend_across_documents=False),
    ):
        assert difference(base, same) is None
        assert check_identity(base, same, "refuse") is None


def test_whatever_changes_the_samples_is_named(made):
    base = made(("0.5", made.a, "0.5", made.b))
    cases = [
        (made(("0.5", made.a, "0.5", made.b), seed=2), "seed 1 -> 2"),
        (made(("0.5", made.a, "0.5", made.b), length=16), "sequence_length 8 -> 16"),
        (made(("0.6", made.a, "0.4", made.b)), "training datasets of other weight"),
        (made((made.a,)), "2 training datasets -> 1"),
        (made(("0.5", made.b, "0.5", made.a)), "training datasets of other content"),
        (made(("0.5", made.a, "0.5", made.b), (), split="50,50,0"), "training datasets of other documents"),
        (made(("0.5", made.a, "0.5", made.b), tokenizer=write_tokenizer(made.folder, 401)), "another tokenizer"),
    ]
    for changed, words in cases:
        with pytest.raises(UserError, match="the data are not those that the checkpoint was trained on") as caught:
            check_identity(base, changed, "refuse")
        assert words in str(caught.value)
        assert "data.on_change=continue" in str(caught.value)
        assert "\n" not in str(caught.value)
        warning = check_identity(base, changed, "continue")
        assert words in warning
        assert "\n" not in warning


def test_a_dataset_prepared_anew_is_another(made):
    base = made()
    write_pair(made.folder, [9] * 30, name="a", tokens=range(1, 271))
    assert difference(base, made()) == "training datasets of other content"


def spoil(path, at: int) -> None:
    """Changes one byte."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def test_a_bin_of_the_same_size_with_other_tokens_is_another(made):
    """Both ends of the file, which tell datasets apart at every start, are as they were; so is the index."""
    lengths, ends = [1000] * 2000, (1 << 18) // 2
    tokens = np.arange(sum(lengths)) % 250
    a, _ = write_pair(made.folder, lengths, name="a", tokens=tokens)
    base, ends_alone = made((a,)), content_mark(a)
    tokens[ends:-ends] = tokens[ends:-ends][::-1]
    write_pair(made.folder, lengths, name="a", tokens=tokens)
    assert content_mark(a) == ends_alone
    with pytest.raises(
        UserError, match=r"\(training datasets of other content\): restore them, or set data\.on_change="
    ):
        check_identity(base, made((a,)), "refuse")


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_every_byte_of_a_file_that_is_read_whole_counts(tmp_path, end):
    size = 3 << 19
    for name in ("bin", "idx"):
        (tmp_path / f"a.{name}").write_bytes(bytes(size))
    marks = {content_mark(str(tmp_path / "a")) + sampled_mark(str(tmp_path / "a"))}
    places = [*range(0, size, 99_991), (1 << 18) - 1, 1 << 18, (5 << 18) - 1, 5 << 18, size - 1]
    for at in places:
        spoil(tmp_path / f"a.{end}", at)
        marks.add(content_mark(str(tmp_path / "a")) + sampled_mark(str(tmp_path / "a")))
        spoil(tmp_path / f"a.{end}", at)
    assert len(marks) == 1 + len(set(places))


def test_a_terabyte_is_sampled_from_end_to_end_in_no_time(tmp_path, monkeypatch):
    size, read = 1 << 40, []
    (tmp_path / "a.idx").touch()
    with open(tmp_path / "a.bin", "wb") as data:
        data.truncate(size)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, at: (read.append((at, count)), pread(file, count, at))[1])
    sampled_mark(str(tmp_path / "a"))
    monkeypatch.undo()
    assert len(read) == 64
    assert sum(count for _, count in read) <= 1 << 20
    starts = [0, *(at for at, _ in read), size]
    assert max(np.diff(starts)) < size / 60
    before = sampled_mark(str(tmp_path / "a"))
    spoil(tmp_path / "a.bin", read[40][0] + 5)
    assert sampled_mark(str(tmp_path / "a")) != before


def test_sources_without_files(tmp_path):
    def of(**data):
        config = TrainConfig.model_validate({"data": {"source": "synthetic", **data}})
        return identity(config, prepare_source(config, tmp_path, True, lambda: None))

    assert difference(of(), of()) is None
    assert difference(of(), of(sequence_length=32)) == "sequence_length 256 -> 32"
    assert difference(of(), of(tokenizer_vocab_size=500)) == "another tokenizer"
    assert difference({"order": 0}, of())
