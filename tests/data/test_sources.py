import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tests.data.pairs import write_pair

from maniple.config.schema import TrainConfig
from maniple.data import sources
from maniple.data.corpus import is_validation, read_corpus
from maniple.data.indexed import open_indexed
from maniple.data.prepare import prepare
from maniple.data.sources import check_files, prepare_source, publish, split_bounds, wait_until_visible
from maniple.errors import UserError


def config(**data):
    return TrainConfig.model_validate({"data": {"sequence_length": 16, **data}})


def alone(job, folder):
    return prepare_source(job, folder, is_writer=True, barrier=lambda: None)


@pytest.fixture
def dataset(tmp_path, tokenizer, write_lines):
    """Prefix of 100 documents; document i says i."""

    def make(name="data", count=100, word="number"):
        lines = write_lines(f"{name}.jsonl", [f"{word} {i} of {count}" for i in range(count)])
        prepare([lines], tmp_path / name, tokenizer.path, progress=False)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("documents", [1, 7, 100, 12_345])
@pytest.mark.parametrize("split", ["949,50,1", "99,1,0", "0.5,0.25,0.25", "1,1,1"])
def test_split_cuts_where_megatron_core_does(split, documents):
    from megatron.core.datasets import blended_megatron_dataset_config as theirs

    matrix = theirs.convert_split_vector_to_split_matrix(theirs.parse_and_normalize_split(split))
    for ours, ends in zip(split_bounds(split, documents), matrix, strict=True):
        if ends is None:
            assert ours[0] == ours[1]
        else:
            assert ours == tuple(round(end * float(documents)) for end in ends)


@pytest.mark.parametrize("split", ["", "1,2", "a,b,c", "1,-1,1", "0,0,0", "nan,1,1", "1,2,3,4"])
def test_bad_split(split):
    with pytest.raises(UserError, match=r"data\.split"):
        split_bounds(split, 100)


def test_megatron_source(tmp_path, tokenizer, dataset):
    a, b, v = dataset("a"), dataset("b", 300), dataset("v", word="value")
    job = config(source="megatron", train=["3", a, "1", b], validation=[v], tokenizer=tokenizer.name)
    source = alone(job, tmp_path)
    assert [(p.prefix, p.first, p.stop, p.weight) for p in source.train] == [(a, 0, 100, 0.75), (b, 0, 300, 0.25)]
    assert [p.prefix for p in source.validation] == [v]
    assert "2 datasets" in source.description
    counts = Counter(open_indexed(v).tokens().tolist())
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert source.unigram_entropy_nats == pytest.approx(expected, rel=1e-12)


def test_weights_default_to_tokens(tmp_path, tokenizer, dataset):
    a, b = dataset("a"), dataset("b", 300)
    source = alone(config(source="megatron", train=[a, b], validation=[a], tokenizer=tokenizer.name), tmp_path)
    tokens = [open_indexed(prefix).num_tokens for prefix in (a, b)]
    assert [p.weight for p in source.train] == pytest.approx([t / sum(tokens) for t in tokens])


def test_validation_split_shares_no_document_and_gives_the_entropy(tmp_path, tokenizer, dataset):
    job = config(source="megatron", train=[dataset()], split="80,20,0", tokenizer=tokenizer.name)
    source = alone(job, tmp_path)
    (train,), (valid,) = source.train, source.validation
    assert (train.first, train.stop, valid.first, valid.stop) == (0, 80, 80, 100)
    lengths = open_indexed(valid.prefix).lengths
    assert valid.num_tokens == lengths[80:].sum()
    counts = np.bincount(open_indexed(valid.prefix).tokens()[-valid.num_tokens :])
    shares = counts[counts > 0] / counts.sum()
    assert source.unigram_entropy_nats == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)


def test_bad_megatron_sources(tmp_path, tokenizer, dataset):
    small, large = dataset("small", 1), dataset("large")
    name = tokenizer.name
    for data, message in [
        ({"train": [], "tokenizer": name}, r"needs data\.train"),
        ({"train": [large]}, r"needs data\.tokenizer"),
        ({"train": [str(tmp_path / "absent")], "tokenizer": name}, "absent.idx and absent.bin not found"),
        ({"train": [large], "validation": [small], "tokenizer": name}, "shorter than one sequence"),
        ({"train": [large], "split": "1,0,0", "tokenizer": name}, "shorter than one sequence"),
        ({"train": [large], "tokenizer": str(tmp_path / "absent.json")}, "does not exist"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            alone(config(source="megatron", **data), tmp_path)
        assert "\n" not in str(caught.value)


def test_blends_that_cannot_be_are_one_line(tmp_path, tokenizer, dataset):
    a, b, tiny = dataset("a"), dataset("b"), dataset("tiny", 1)
    empty = tmp_path / "empty"
    write_pair(tmp_path, [], name="empty")
    for train, message in [
        (["1", a, "1", a], "is listed twice"),
        (["1", a, "1", str(tmp_path / "x" / ".." / "a")], "is listed twice"),
        (["1", a, "1", tiny], "shorter than one sequence"),
        (["1", a, "1", str(empty)], "holds no documents"),
        (["0", a, "1", b], "must be a positive number"),
        (["1", a, "1e9", b], r"a would give less than one sample in 1,048,576"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            alone(config(source="megatron", train=train, validation=[a], tokenizer=tokenizer.name), tmp_path)
        assert "\n" not in str(caught.value)


def test_twenty_datasets(tmp_path, tokenizer, dataset):
    prefixes = [dataset(f"d{index}", 10 + index) for index in range(20)]
    items = [item for index, prefix in enumerate(prefixes) for item in (str(index + 1), prefix)]
    source = alone(config(source="megatron", train=items, validation=[prefixes[0]], tokenizer=tokenizer.name), tmp_path)
    assert [part.weight for part in source.train] == [Fraction(index + 1, 210) for index in range(20)]


def test_what_is_missing_is_known_before_the_start(tmp_path, tokenizer, dataset):
    a = dataset("a")
    good = {"source": "megatron", "train": [a], "tokenizer": tokenizer.name}
    check_files(config(**good).data)
    check_files(config(source="synthetic").data)
    for change, message in [
        ({"train": []}, r"needs data\.train"),
        ({"tokenizer": None}, r"needs data\.tokenizer"),
        ({"tokenizer": str(tmp_path / "absent.json")}, "absent.json"),
        ({"train": [str(tmp_path / "absent")]}, "absent.idx and absent.bin not found"),
        ({"validation": [str(tmp_path / "absent")]}, "absent.idx and absent.bin not found"),
        ({"train": ["0.5", a, a]}, "give every prefix a weight"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            check_files(config(**good | change).data)
        assert "\n" not in str(caught.value)


def test_only_the_writer_reads_whole_indices_and_before_the_others_start(tmp_path, tokenizer, dataset, monkeypatch):
    calls = []
    opened = sources.open_indexed

    def noted(prefix, **options):
        calls.append(bool(options.get("thorough")))
        return opened(prefix, **options)

    monkeypatch.setattr(sources, "open_indexed", noted)
    job = config(source="megatron", train=[dataset()], split="80,20,0", tokenizer=tokenizer.name)
    prepare_source(job, tmp_path, is_writer=True, barrier=lambda: calls.append("barrier"))
    assert calls[:2] == [True, "barrier"]
    calls.clear()
    prepare_source(job, tmp_path, is_writer=False, barrier=lambda: calls.append("barrier"))
    assert calls[0] == "barrier"
    assert True not in calls


def test_dataset_of_another_tokenizer_is_refused(tmp_path, tokenizer, dataset):
    prefix = dataset()
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    tokens[5] = 300
    tokens.tofile(prefix + ".bin")
    with pytest.raises(UserError, match="holds token 300"):
        alone(config(source="megatron", train=[prefix], split="90,10,0", tokenizer=tokenizer.name), tmp_path)


def test_prefixes_of_another_source_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"with data\.source megatron only"):
        alone(config(source="synthetic", train=["a"]), tmp_path)


def test_synthetic_source_says_so(tmp_path):
    source = alone(config(source="synthetic", tokenizer_vocab_size=400), tmp_path)
    assert "synthetic data" in source.description
    assert (source.tokenizer.vocab_size, source.train, source.validation) == (400, (), ())
    assert 0.3 * math.log(400) < source.unigram_entropy_nats < math.log(400)
    assert list(tmp_path.iterdir()) == []


def test_python_source(tmp_path, capsys):
    job = config(source="python", corpus_bytes=600_000, tokenizer_vocab_size=600)
    source = alone(job, tmp_path)
    making = f"maniple: making the demo's corpus and tokenizer in {tmp_path / 'cache'}, once\n"
    assert capsys.readouterr().err == making
    assert source.tokenizer.vocab_size == 600
    assert "Python" in source.description
    corpus = read_corpus(600_000)
    for (part,), documents in ((source.train, corpus.train), (source.validation, corpus.validation)):
        file = open_indexed(part.prefix)
        texts = np.split(file.tokens(), np.cumsum(file.lengths)[:-1])
        assert len(texts) == len(documents)
        assert source.tokenizer.decode(texts[0]) == documents[0].text + "<|endoftext|>"
        assert source.tokenizer.decode(texts[-1]) == documents[-1].text + "<|endoftext|>"
    assert all(is_validation(document.name) for document in corpus.validation)
    assert 2 < source.unigram_entropy_nats < math.log(600)

    folder = next((tmp_path / "cache").iterdir())
    assert sorted(p.name for p in folder.iterdir()) == [
        "corpus.json", "tokenizer.json", "train.bin", "train.idx", "validation.bin", "validation.idx",
    ]  # fmt: skip
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}
    assert alone(job, tmp_path).unigram_entropy_nats == source.unigram_entropy_nats
    assert making not in capsys.readouterr().err
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()} == before
    assert prepare_source(job, tmp_path, is_writer=False, barrier=lambda: None).train == source.train
    elsewhere = config(source="python", corpus_bytes=600_000, tokenizer_vocab_size=600, cache_dir=tmp_path / "other")
    again = next(iter(Path(alone(elsewhere, tmp_path).train[0].prefix).parent.parent.iterdir()))
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: text for p, (_, text) in before.items()}


def test_python_source_with_a_given_tokenizer(tmp_path, tokenizer):
    source = alone(config(source="python", corpus_bytes=600_000, tokenizer=tokenizer.name), tmp_path)
    assert source.tokenizer.vocab_size == 300
    assert not list(tmp_path.rglob("tokenizer.json"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"corpus_bytes": 500}, "less than one sequence"),
        ({"corpus_bytes": 600_000, "sequence_length": 1_000_000}, "shorter than one sequence"),
    ],
)
def test_corpus_shorter_than_one_sequence(tmp_path, data, message):
    with pytest.raises(UserError, match=message) as caught:
        alone(config(source="python", tokenizer_vocab_size=300, **data), tmp_path)
    assert "corpus_bytes" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*partial*"))


def test_publish_is_all_or_nothing(tmp_path):
    def fails(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        publish(tmp_path / "cache" / "thing", fails)
    assert list((tmp_path / "cache").iterdir()) == []


def test_publish_keeps_what_a_faster_job_published(tmp_path):
    def slow(folder):
        (folder / "a").write_text("mine")
        (tmp_path / "thing").mkdir()
        (tmp_path / "thing" / "a").write_text("theirs")

    publish(tmp_path / "thing", slow)
    assert (tmp_path / "thing" / "a").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_cache_that_other_hosts_do_not_see(tmp_path):
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        wait_until_visible(tmp_path / "absent", seconds=0.2)


def test_corpus_facts_are_recorded(tmp_path):
    sources._write_corpus(config(source="python", corpus_bytes=600_000, tokenizer_vocab_size=300).data, tmp_path)
    facts = json.loads((tmp_path / "corpus.json").read_text())
    assert 0 < facts["bytes"] <= 600_000
    assert {"undecodable", "duplicates", "tables", "documents"} <= facts.keys()
