import itertools
import os
import pickle
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.pairs import build, job, texts, write_pair, write_tokenizer
from tests.distributed_utils import run_ranks

from maniple.config.schema import TrainConfig
from maniple.data.batches import iterate
from maniple.data.datasets import build_datasets, prepare_source
from maniple.data.packing import PackedDataset
from maniple.data.sources import Part
from maniple.errors import UserError

LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return write_tokenizer(folder, 4000)


@pytest.fixture(scope="module")
def prefixes(folder):
    """Two datasets of 150 documents of 0 to 16 tokens; the first has tokens below 1500, the second above."""
    lengths = [(7 * i) % 17 for i in range(150)]
    a, tokens = write_pair(folder, lengths, name="a")
    b, _ = write_pair(folder, lengths, name="b", tokens=tokens + 1500)
    return a, b


def test_samples_are_consecutive_text(tmp_path, folder, tokenizer, prefixes):
    train, valid = build(job(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path)
    sample = train[0]
    assert {key: (tuple(x.shape), x.dtype) for key, x in sample.items()} == {
        "tokens": ((LENGTH,), torch.int64),
        "labels": ((LENGTH,), torch.int64),
        "loss_mask": ((LENGTH,), torch.float32),
        "position_ids": ((LENGTH,), torch.int64),
    }
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    assert len(valid) == 10
    starts = set(np.cumsum([0, *((7 * i) % 17 for i in range(150))]).tolist())
    for dataset, shift in ((train, 0), (valid, 1500)):
        for index in range(10):
            tokens, labels = dataset[index]["tokens"], dataset[index]["labels"]
            assert tokens[1:].tolist() == labels[:-1].tolist()
            assert dataset[index]["loss_mask"].tolist() == [1.0] * LENGTH
            row = [*(tokens - shift).tolist(), int(labels[-1]) - shift]
            # tokens count up inside a document, and where they do not, one ends and another begins
            for last, first in itertools.pairwise(row):
                assert first == last + 1 or (last + 1 in starts and first in starts)


def packed(prefix, folder, *, first=0, stop=150, seed=1, length=LENGTH, split="train"):
    tokens = sum((7 * i) % 17 for i in range(first, stop))
    part = Part(prefix, first, stop, tokens, Fraction(1))
    return PackedDataset(part, length, 4000, seed=seed, split=split, cache=folder / "indices")


@settings(max_examples=15, deadline=None)
@given(first=st.integers(0, 100), count=st.integers(20, 150), length=st.integers(4, 40), seed=st.integers(0, 5))
def test_an_epoch_reads_every_sample_once(folder, prefixes, first, count, length, seed):
    """Each epoch is one order of the documents, each cut into samples that overlap by the one token after them."""
    stop = min(first + count, 150)
    dataset = packed(prefixes[0], folder, first=first, stop=stop, seed=seed, length=length)
    starts = np.cumsum([0, *((7 * i) % 17 for i in range(150))])
    all_tokens = range(int(starts[first]), int(starts[stop]))
    for epoch in (0, 1):
        read = Counter()
        for index in range(dataset.samples_per_epoch):
            read.update(dataset.text(epoch * dataset.samples_per_epoch + index)[:-1].tolist())
        assert set(read.values()) == {1}  # no token twice in an epoch
        assert set(read) <= set(all_tokens)
        left = len(all_tokens) - sum(read.values())
        assert left <= length  # the end of the epoch, less than a sample and the token after it


def test_epochs_have_orders_of_their_own(folder, prefixes):
    dataset = packed(prefixes[0], folder)
    count = dataset.samples_per_epoch
    epochs = [[tuple(dataset.text(e * count + i)) for i in range(count)] for e in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for one, other in itertools.combinations(epochs, 2):
        assert len(set(one) & set(other)) < count / 2  # documents meet other neighbours: the cuts differ too
    cuts = [dataset._epoch(epoch).samples(np.arange(count)).tolist() for epoch in (0, 1)]
    assert cuts[0] != cuts[1]  # and are read in another order


def test_seed_and_use_decide_the_order(folder, prefixes):
    def order(**options):
        return tuple(tuple(packed(prefixes[0], folder, **options).text(i)) for i in range(20))

    assert order() == order()
    assert len({order(), order(seed=2), order(split="validation")}) == 3


def test_the_cache_changes_nothing_and_is_used(tmp_path, prefixes, monkeypatch):
    dataset = packed(prefixes[0], tmp_path)
    count = dataset.samples_per_epoch
    expected = [dataset.text(i).tolist() for i in range(2 * count)]
    dataset.build(2 * count)
    files = sorted(p.name for p in next((tmp_path / "indices").iterdir()).iterdir())
    assert files == ["epoch-000000.i64", "epoch-000001.i64"]
    cached = packed(prefixes[0], tmp_path)
    monkeypatch.setattr(cached, "_block_ends", None)
    assert [cached.text(i).tolist() for i in range(2 * count)] == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_spoilt_cache_is_refused_or_right(tmp_path_factory, folder, prefixes, data):
    place = tmp_path_factory.mktemp("cache")
    dataset = packed(prefixes[0], place)
    dataset.build(1)
    (path,) = (place / "indices").glob("*/*.i64")
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    whole = packed(prefixes[0], folder)  # no file: worked out in memory
    spoilt = packed(prefixes[0], place)
    for index in range(0, spoilt.samples_per_epoch, 9):
        try:
            text = spoilt.text(index).tolist()
        except UserError as error:
            text = str(error)
        if isinstance(text, str):
            assert re.fullmatch(r"/.*indices/\S+ is not an index of dataset .* delete it and start again", text)
        else:
            assert text == whole.text(index).tolist()


def test_an_index_of_another_dataset_is_never_read(tmp_path, tokenizer):
    """Prepared anew at the same path, with as many documents and tokens: only the order of lengths differs."""
    prefix, _ = write_pair(tmp_path, [3, 9] * 100)
    config = job(tokenizer, [prefix], [prefix])
    build(config, tmp_path)
    write_pair(tmp_path, [9, 3] * 100)
    train, _ = build(config, tmp_path)
    fresh, _ = build(config, tmp_path / "fresh")
    assert texts(train, 40) == texts(fresh, 40)
    assert len(list((tmp_path / "cache" / "indices").iterdir())) == 4


# --- layout, resume, length -------------------------------------------------------------------------------------------

GLOBAL_BATCH = 12
STEPS = 60  # the larger part of the blend begins anew after 18 and after 36
LAYOUTS = [(micro, size) for micro in (1, 2, 3, 4, 6, 12) for size in (1, 2, 3, 4, 6, 12) if 12 % (micro * size) == 0]


def steps_read(dataset, layout, *, start, steps, num_workers=0):
    """Samples of each step in the order of the global batch, put together from all ranks."""
    micro, size = layout
    options = {"start_sample": start, "micro_batch_size": micro, "data_parallel_size": size}
    options |= {"global_batch_size": GLOBAL_BATCH, "num_workers": num_workers}
    ranks = [iterate(dataset, data_parallel_rank=rank, **options) for rank in range(size)]
    out = []
    for _ in range(steps):
        rows = []
        for _ in range(GLOBAL_BATCH // (micro * size)):
            for rank in ranks:
                rows += next(rank)["tokens"].tolist()
        out.append(rows)
    return out


@pytest.fixture(scope="module")
def blended(folder, tokenizer, prefixes):
    a, b = prefixes
    train, _ = build(job(tokenizer, ["0.7", a, "0.3", b], [a]), folder)
    return train


@pytest.fixture(scope="module")
def uninterrupted(blended):
    return steps_read(blended, (1, 1), start=0, steps=STEPS)


@settings(max_examples=10, deadline=None)
@given(first=st.sampled_from(LAYOUTS), second=st.sampled_from(LAYOUTS), at=st.integers(0, STEPS - 1))
def test_order_is_the_same_in_any_layout_and_after_any_resume(blended, uninterrupted, first, second, at):
    assert steps_read(blended, first, start=0, steps=at) == uninterrupted[:at]
    assert steps_read(blended, second, start=at * GLOBAL_BATCH, steps=STEPS - at) == uninterrupted[at:]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_order_is_the_same_with_loader_processes(blended, uninterrupted, num_workers):
    read = steps_read(blended, (2, 2), start=5 * GLOBAL_BATCH, steps=3, num_workers=num_workers)
    assert read == uninterrupted[5:8]


def test_another_global_batch_size_reads_on(blended, uninterrupted):
    rest = steps_read(blended, (1, 1), start=5 * GLOBAL_BATCH + 4, steps=2)
    flat = [row for step in uninterrupted for row in step]
    assert [row for step in rest for row in step] == flat[64:88]


@settings(max_examples=15, deadline=None)
@given(first=st.integers(1, 400), second=st.integers(1, 3000))
def test_the_length_of_the_run_changes_nothing(tmp_path_factory, folder, tokenizer, prefixes, blended, first, second):
    """A cache made for one length, extended for another: a blend of several epochs of each part."""
    place = tmp_path_factory.mktemp("longer")
    a, b = prefixes
    config = job(tokenizer, ["0.7", a, "0.3", b], [a])
    for samples in (first, second):
        train, _ = build(config, place, train_samples=samples)
    for index in (0, 1, 37, first - 1, first, 399, second - 1):
        assert train[index]["tokens"].tolist() == blended[index]["tokens"].tolist()


def test_validation_has_an_order_that_its_length_does_not_change(tmp_path, tokenizer, prefixes):
    config = job(tokenizer, [prefixes[0]], [prefixes[1]])
    short, long = (build(config, tmp_path, valid_samples=n)[1] for n in (10, 500))
    assert (len(short), len(long)) == (10, 500)
    assert texts(short, 10) == texts(long, 10)
    assert texts(short, 10) != texts(build(config, tmp_path)[0], 10)


def test_datasets_can_be_sent_to_other_processes(blended):
    there = pickle.loads(pickle.dumps(blended))
    assert texts(there, 5) == texts(blended, 5)


# --- blends -----------------------------------------------------------------------------------------------------------


def test_a_part_is_read_in_its_own_order_whatever_it_is_blended_with(tmp_path, tokenizer, prefixes, blended):
    alone, _ = build(job(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path)
    mixed = [row for row in texts(blended, 40) if row[0] < 1500]
    assert mixed == texts(alone, len(mixed))
    assert len(mixed) == 28


def test_a_rare_dataset_is_read(tmp_path, tokenizer, prefixes):
    a, b = prefixes
    train, _ = build(job(tokenizer, ["0.001", a, "0.999", b], [a]), tmp_path)
    from_a = [i for i in range(3000) if train.order(i)[0] == 0]
    assert len(from_a) == 3
    assert [texts(train, i + 1, i)[0][0] < 1500 for i in from_a] == [True] * 3


def test_split_datasets_do_not_overlap(tmp_path, tokenizer, prefixes):
    train, valid = build(job(tokenizer, [prefixes[0]], split="80,20,0"), tmp_path, valid_samples=25)
    border = sum((7 * i) % 17 for i in range(120))
    assert max(max(row) for row in texts(train, 200)) < border
    assert min(min(row) for row in texts(valid, 25)) >= border


# --- the cache folder -------------------------------------------------------------------------------------------------


def test_cache_without_write_access_is_one_line(tmp_path, tokenizer, prefixes):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write the data cache") as caught:
        build(job(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path)
    assert "\n" not in str(caught.value)


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, tokenizer, prefixes, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    config = job(tokenizer, [prefixes[0]], [prefixes[1]])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write the data cache .*: No space left on device") as caught:
            build(config, tmp_path)
    assert "\n" not in str(caught.value)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert texts(build(config, tmp_path)[0], 20) == texts(build(config, tmp_path / "fresh")[0], 20)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_that_holds_everything(tmp_path, tokenizer, prefixes):
    config = job(tokenizer, [prefixes[0]], [prefixes[1]])
    build(config, tmp_path)
    folders = [tmp_path / "cache" / "indices", *(tmp_path / "cache" / "indices").iterdir()]
    for place in folders:
        place.chmod(0o555)
    try:
        build(config, tmp_path)
        with pytest.raises(UserError, match="cannot write the data cache"):
            build(config, tmp_path, train_samples=5000)
    finally:
        for place in folders:
            place.chmod(0o755)


def test_a_whole_cache_is_not_written_to(tmp_path, tokenizer, prefixes, monkeypatch):
    """So that it may be read-only."""
    config = job(tokenizer, [prefixes[0]], [prefixes[1]])
    build(config, tmp_path)
    for call in ("replace", "fsync"):
        monkeypatch.setattr(os, call, None)
    monkeypatch.setattr(Path, "mkdir", None)
    build(config, tmp_path)


def test_rank_that_needs_no_data_gets_none(tmp_path, tokenizer, prefixes):
    config = job(tokenizer, [prefixes[0]], [prefixes[1]])
    assert build(config, tmp_path, is_built_on_rank=lambda: False) == (None, None)
    assert len(list((tmp_path / "cache" / "indices").iterdir())) == 2
    source = prepare_source(config, tmp_path, False, lambda: None)
    nothing = build_datasets(
        config, source, train_samples=50, valid_samples=10, is_writer=False, is_built_on_rank=lambda: False
    )
    assert nothing == (None, None)


def test_synthetic_datasets(tmp_path):
    config = TrainConfig.model_validate({"data": {"source": "synthetic", "sequence_length": 32}})
    train, valid = build(config, tmp_path)
    assert len(valid) == 10
    assert train[10**9]["tokens"].shape == (32,)
    assert train[0]["tokens"].tolist() != valid[0]["tokens"].tolist()


def _cold_start(rank, world_size, config, folder):
    source = prepare_source(config, Path(folder), rank == 0, torch.distributed.barrier)
    train, valid = build_datasets(
        config, source, train_samples=24, valid_samples=8, is_writer=rank == 0, barrier=torch.distributed.barrier
    )
    batches = iterate(
        train,
        start_sample=0,
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=world_size,
        global_batch_size=8,
    )
    rows = [batch["tokens"].tolist() for batch in itertools.islice(batches, 6)]
    return source.description, source.unigram_entropy_nats, rows, valid[0]["tokens"].tolist()


def test_two_processes_on_a_cold_cache(tmp_path):
    config = TrainConfig.model_validate(
        {"data": {"corpus_bytes": 600_000, "tokenizer_vocab_size": 300, "sequence_length": 32}}
    )
    first, second = run_ranks(_cold_start, 2, config, str(tmp_path), timeout=100.0)
    assert first[:2] == second[:2]
    assert first[3] == second[3]
    train, _ = build(config, tmp_path)
    together = [row for pair in zip(first[2], second[2], strict=True) for rows in pair for row in rows]
    assert together == texts(train, 24)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]
