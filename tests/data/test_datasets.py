import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.config.schema import TrainConfig
from maniple.data.datasets import build_datasets, iterate, prepare_source
from maniple.data.indexed import open_indexed
from maniple.data.prepare import prepare
from maniple.errors import UserError

LENGTH = 8


@pytest.fixture
def prefixes(tmp_path, tokenizer, write_lines):
    """Two datasets of 60 documents each, told apart by their words."""
    paths = []
    for name, word in (("a", "alpha"), ("b", "beta")):
        lines = write_lines(f"{name}.jsonl", [f"{word}{i}" * (1 + i % 3) for i in range(60)])
        prepare([lines], tmp_path / name, tokenizer.path, progress=False)
        paths.append(str(tmp_path / name))
    return paths


def config(tokenizer, train, validation=(), seed=1, length=LENGTH):
    data = {"source": "megatron", "train": list(train), "validation": list(validation), "sequence_length": length}
    return TrainConfig.model_validate({"data": {**data, "tokenizer": tokenizer.name}, "train": {"seed": seed}})


def build(job, folder, train_samples=50, valid_samples=10, **options):
    source = prepare_source(job, folder, True, lambda: None)
    return build_datasets(job, source, train_samples=train_samples, valid_samples=valid_samples, **options)


def texts(dataset):
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def test_samples_are_consecutive_text(tmp_path, tokenizer, prefixes):
    train, valid = build(config(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path)
    sample = train[0]
    assert {key: (tuple(x.shape), x.dtype) for key, x in sample.items()} == {
        "tokens": ((LENGTH,), torch.int64),
        "labels": ((LENGTH,), torch.int64),
        "loss_mask": ((LENGTH,), torch.float32),
        "position_ids": ((LENGTH,), torch.int64),
    }
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    for dataset, prefix in ((train, prefixes[0]), (valid, prefixes[1])):
        file = open_indexed(prefix)
        known = {tuple(d.tolist()) for d in np.split(file.tokens(), np.cumsum(file.lengths)[:-1])}
        for i in range(len(dataset)):
            assert dataset[i]["tokens"][1:].tolist() == dataset[i]["labels"][:-1].tolist()
            assert dataset[i]["loss_mask"].tolist() == [1.0] * LENGTH
            row = [*dataset[i]["tokens"].tolist(), int(dataset[i]["labels"][-1])]
            ends = [j for j, token in enumerate(row) if token == tokenizer.eod]
            for first, last in itertools.pairwise(ends):
                assert tuple(row[first + 1 : last + 1]) in known  # whole documents between two ends


def test_an_epoch_reads_every_token_once(tmp_path, tokenizer, prefixes):
    file = open_indexed(prefixes[0])
    samples = (file.num_tokens - 1) // LENGTH
    train, _ = build(config(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path, train_samples=samples)
    assert len(train) == samples
    read = np.bincount(np.concatenate(texts(train)), minlength=300)
    assert (read <= np.bincount(file.tokens(), minlength=300)).all()
    assert read.sum() == samples * LENGTH


def test_repeats_the_text_for_more_samples(tmp_path, tokenizer, prefixes):
    train, valid = build(config(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path, 500, 300)
    assert len(train) >= 500
    assert len(valid) >= 300


def test_seed_decides_the_order(tmp_path, tokenizer, prefixes):
    first, again, other = (
        texts(build(config(tokenizer, [prefixes[0]], [prefixes[1]], seed), tmp_path / name)[0])
        for seed, name in ((1, "x"), (1, "y"), (2, "z"))
    )
    assert first == again
    assert first != other


def test_blend_follows_its_weights(tmp_path, tokenizer, prefixes):
    a, b = prefixes
    train, valid = build(config(tokenizer, ["3", a, "1", b], [a, b]), tmp_path, train_samples=200, valid_samples=30)
    assert len(train) >= 200
    assert len(valid) >= 30
    members = np.array([int(train[i]["dataset_id"]) for i in range(200)])
    assert abs((members == 0).mean() - 0.75) < 0.02
    batch = next(
        iterate(
            train,
            start_sample=0,
            micro_batch_size=4,
            data_parallel_rank=0,
            data_parallel_size=1,
            global_batch_size=4,
        )
    )
    assert sorted(batch) == ["labels", "loss_mask", "position_ids", "tokens"]


def test_split_datasets_do_not_overlap(tmp_path, tokenizer, prefixes):
    job = config(tokenizer, [prefixes[0]])
    job = job.model_copy(update={"data": job.data.model_copy(update={"split": "80,20,0"})})
    source = prepare_source(job, tmp_path, True, lambda: None)
    train, valid = build_datasets(job, source, train_samples=50, valid_samples=10)
    assert train.indices.tolist() == list(range(48))
    assert valid.indices.tolist() == list(range(48, 60))


def test_dataset_prepared_anew_is_not_read_with_old_indices(tmp_path, tokenizer, prefixes, write_lines):
    job = config(tokenizer, [prefixes[0]], [prefixes[1]])
    build(job, tmp_path)
    # As many documents as before, of other lengths.
    lines = write_lines("new.jsonl", [f"new{i}" for i in range(60)])
    prepare([lines], prefixes[0], tokenizer.path, overwrite=True, progress=False)
    train, _ = build(job, tmp_path)
    assert texts(train) == texts(build(job, tmp_path / "fresh")[0])
    assert len(list((tmp_path / "cache" / "indices").iterdir())) == 2


def test_half_written_index_is_never_trusted(tmp_path, tokenizer, prefixes, monkeypatch):
    """A job killed while it writes indices must not spoil the next one."""
    job = config(tokenizer, [prefixes[0]], [prefixes[1]])
    save, calls = np.save, []

    class Killed(BaseException):
        pass

    def dying(file, array, **options):
        calls.append(file)
        if len(calls) == 2:
            raise Killed
        save(file, array, **options)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", dying)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            build(job, tmp_path)
    left = list((tmp_path / "cache" / "indices").iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".")
    train, _ = build(job, tmp_path)
    assert texts(train) == texts(build(job, tmp_path / "fresh")[0])


def test_cache_without_write_access_is_one_line(tmp_path, tokenizer, prefixes):
    job = config(tokenizer, [prefixes[0]], [prefixes[1]])
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write the data cache") as caught:
        build(job, tmp_path)
    assert "\n" not in str(caught.value)


def test_rank_that_needs_no_data_gets_none(tmp_path, tokenizer, prefixes):
    job = config(tokenizer, [prefixes[0]], [prefixes[1]])
    assert build(job, tmp_path, is_built_on_rank=lambda: False) == (None, None)
    assert len(list((tmp_path / "cache" / "indices").iterdir())) == 1


def test_missing_compiled_helpers_are_one_line(tmp_path, tokenizer, prefixes, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(UserError, match="compiled dataset helpers"):
        build(config(tokenizer, [prefixes[0]], [prefixes[1]]), tmp_path)


def test_compiled_helpers_are_installed():
    from megatron.core.datasets import helpers_cpp

    assert Path(helpers_cpp.__file__).suffix in {".so", ".pyd"}


def test_synthetic_datasets(tmp_path):
    job = TrainConfig.model_validate({"data": {"source": "synthetic", "sequence_length": 32}})
    train, valid = build(job, tmp_path)
    assert (len(train), len(valid)) == (50, 10)
    assert train[0]["tokens"].tolist() != valid[0]["tokens"].tolist()


def _cold_start(rank, world_size, job, folder):
    source = prepare_source(job, Path(folder), rank == 0, torch.distributed.barrier)
    train, valid = build_datasets(
        job, source, train_samples=24, valid_samples=8, is_writer=rank == 0, barrier=torch.distributed.barrier
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
    misuse = ""
    try:
        build_datasets(job, source, train_samples=24, valid_samples=8, is_writer=True)
    except ValueError as error:
        misuse = str(error)
    return source.description, source.unigram_entropy_nats, rows, valid[0]["tokens"].tolist(), misuse


def test_two_processes_on_a_cold_cache(tmp_path):
    job = TrainConfig.model_validate(
        {"data": {"corpus_bytes": 600_000, "tokenizer_vocab_size": 300, "sequence_length": 32}}
    )
    first, second = run_ranks(_cold_start, 2, job, str(tmp_path), timeout=100.0)
    assert first[:2] == second[:2]
    assert first[3] == second[3]
    assert first[4] == ""
    assert "global rank 0" in second[4]
    source = prepare_source(job, tmp_path, True, lambda: None)
    train, _ = build_datasets(job, source, train_samples=24, valid_samples=8)
    alone = [train[i]["tokens"].tolist() for i in range(24)]
    together = [row for pair in zip(first[2], second[2], strict=True) for rows in pair for row in rows]
    assert together == alone
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]
