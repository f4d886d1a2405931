"""From the `data` section of a job to tokenized datasets on disk: which files, which part of them, in what proportion.

Three sources: `python` builds the demo corpus, its tokenizer and its `.bin/.idx` files in the cache folder; `megatron`
takes prefixes that exist; `synthetic` needs no files. One process writes to the cache, in a private folder that is
renamed when whole, so that neither a killed job nor two jobs that start at once leave anything half-written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from maniple.config.schema import DataConfig, TrainConfig
from maniple.data.blend import LONGEST_PERIOD, number, parse_blend, period_slots
from maniple.data.corpus import Document, read_corpus
from maniple.data.indexed import IndexedFile, open_indexed, stranger_among
from maniple.data.prepare import prepare
from maniple.data.tokenizer import TokenizerLike, load_tokenizer, train_bpe
from maniple.errors import UserError

_CACHE_VERSION = 1
# A vocabulary of a few thousand is as good from a third of the corpus, and trains in a third of the time.
_MAX_BPE_BYTES = 8_000_000
# Entropy and ids are counted over at most so many tokens of a part; the demo corpus' validation text is far smaller.
_MAX_COUNTED_TOKENS = 1 << 24


@dataclass(frozen=True)
class Part:
    """Documents `first` to `stop` of one dataset. weight: its share of the samples; a blend's add up to 1, exactly."""

    prefix: str
    first: int
    stop: int
    num_tokens: int
    weight: Fraction


@dataclass(frozen=True)
class Source:
    """What a job reads.

    description: one phrase for logs; says "synthetic data" if it is. unigram_entropy_nats: entropy of the token
    distribution of the validation text, which is the loss of the best predictor that ignores context. train and
    validation are empty for the synthetic source.
    """

    tokenizer: TokenizerLike
    train: tuple[Part, ...]
    validation: tuple[Part, ...]
    description: str
    unigram_entropy_nats: float
    cache_dir: Path


def prepare_source(config: TrainConfig, work_dir: Path, is_writer: bool, barrier: Callable[[], object]) -> Source:
    """Make the job's data ready. Every process calls it; only the one with `is_writer` writes.

    work_dir: holds `cache/` unless `data.cache_dir` is set; all processes must see the same folder. barrier: returns
    once every process has called it. Raises UserError, with one line, for whatever the user can mend.
    """
    data = config.data
    cache = (data.cache_dir or Path(work_dir) / "cache").expanduser().absolute()
    if data.source != "megatron" and (data.train or data.validation):
        raise UserError(f"data.train and data.validation are read with data.source megatron only, not {data.source}")
    if data.source == "synthetic":
        return _synthetic_source(config, cache)
    if data.source == "python":
        return _python_source(data, cache, is_writer, barrier)
    return _megatron_source(data, cache, is_writer, barrier)


def check_files(data: DataConfig) -> None:
    """What a look at the file system tells before a job starts: raises UserError for data that is not there.

    Reads names, sizes and headers only.
    """
    if data.source != "megatron":
        return
    tokenizer = Path(_megatron_lists(data)).expanduser()
    if not tokenizer.exists():
        raise UserError(f"data.tokenizer {tokenizer} does not exist: give a tokenizer.json, or a folder that holds one")
    for what, items in (("data.train", data.train), ("data.validation", data.validation)):
        for prefix, _ in parse_blend(items, what):
            open_indexed(_absolute(prefix))


def wait_until_visible(path: Path, seconds: float = 60.0) -> None:
    """Return once `path` exists: network file systems may show a new folder to other hosts a while later."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path} is not visible here: set data.cache_dir to a folder that all hosts share")
        time.sleep(0.1)


def split_bounds(split: str, num_documents: int) -> list[tuple[int, int]]:
    """First and last document of train, validation and test, for proportions such as `949,50,1`.

    Rounds as Megatron-Core does, so that both cut a dataset at the same documents.
    """
    parts = [number(part.strip()) for part in split.split(",")]
    if len(parts) != 3 or any(part is None or not (0 <= part < math.inf) for part in parts) or not sum(parts):  # type: ignore[arg-type]
        raise UserError(f"data.split {split!r} must be three numbers such as 949,50,1 (train, validation, test)")
    shares = np.array(parts, np.float64) / sum(parts)  # type: ignore[arg-type]
    ends = [0.0]
    for share in shares.tolist():
        ends.append(ends[-1] + share)
    bounds = [round(end * float(num_documents)) for end in ends]
    return list(itertools.pairwise(bounds))


def _synthetic_source(config: TrainConfig, cache: Path) -> Source:
    from maniple.data.synthetic import SyntheticDataset, SyntheticTokenizer

    data = config.data
    vocab_size = load_tokenizer(data.tokenizer).vocab_size if data.tokenizer else data.tokenizer_vocab_size
    samples = min(1024, max(8, (1 << 18) // data.sequence_length))
    dataset = SyntheticDataset(samples, data.sequence_length, vocab_size, config.train.seed, split=1)
    counts = sum(np.bincount(dataset.tokens(index), minlength=vocab_size) for index in range(samples))
    return Source(
        tokenizer=SyntheticTokenizer(vocab_size),
        train=(),
        validation=(),
        description=f"synthetic data (Zipf chain over {vocab_size:,} tokens)",
        unigram_entropy_nats=_entropy(np.asarray(counts, np.float64)),
        cache_dir=cache,
    )


def _python_source(data: DataConfig, cache: Path, is_writer: bool, barrier: Callable[[], object]) -> Source:
    given = load_tokenizer(data.tokenizer) if data.tokenizer else None
    vocabulary = given.fingerprint if given else data.tokenizer_vocab_size
    identity = [_CACHE_VERSION, sys.version, sysconfig.get_path("stdlib"), data.corpus_bytes, vocabulary]
    folder = cache / f"python-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}"
    if is_writer and not folder.is_dir():
        print(f"maniple: making the demo's corpus and tokenizer in {cache}, once", file=sys.stderr, flush=True)
        publish(folder, lambda partial: _write_corpus(data, partial))
    barrier()
    wait_until_visible(folder)
    facts = json.loads((folder / "corpus.json").read_text())
    tokenizer = given or load_tokenizer(folder / "tokenizer.json")
    hint = "raise data.corpus_bytes or shorten data.sequence_length"
    train = _parts([(str(folder / "train"), None)], None, data, "the Python corpus' training text", hint)
    validation = _parts([(str(folder / "validation"), None)], None, data, "the Python corpus' validation text", hint)
    skipped = f", {facts['undecodable']} undecodable skipped" if facts["undecodable"] else ""
    return Source(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        description=f"Python {facts['python']} sources and documentation ({facts['documents']:,} files, "
        f"{facts['bytes'] / 1e6:.1f} MB{skipped}; {train[0].num_tokens:,} training tokens)",
        unigram_entropy_nats=_checked_entropy(train, validation, tokenizer),
        cache_dir=cache,
    )


def _write_corpus(data: DataConfig, folder: Path) -> None:
    corpus = read_corpus(data.corpus_bytes)
    if not corpus.train or not corpus.validation:
        raise UserError(
            f"data.corpus_bytes {data.corpus_bytes:,} leaves no {'validation' if corpus.train else 'training'} text, "
            "less than one sequence: raise it"
        )
    tokenizer = Path(data.tokenizer).expanduser() if data.tokenizer else folder / "tokenizer.json"
    if not data.tokenizer:
        every = math.ceil(corpus.num_bytes / _MAX_BPE_BYTES)
        train_bpe((document.text for document in corpus.train[::every]), data.tokenizer_vocab_size, tokenizer)
    for name, documents in (("train", corpus.train), ("validation", corpus.validation)):
        lines = folder / f"{name}.jsonl"
        _write_json_lines(lines, documents)
        prepare([lines], folder / name, tokenizer, progress=False)
        lines.unlink()
    facts = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "documents": len(corpus.train) + len(corpus.validation),
        "bytes": corpus.num_bytes,
        "undecodable": corpus.undecodable,
        "duplicates": corpus.duplicates,
        "tables": corpus.tables,
    }
    (folder / "corpus.json").write_text(json.dumps(facts, indent=1))


def _write_json_lines(path: Path, documents: Iterable[Document]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps({"name": document.name, "text": document.text}) + "\n")


def publish(folder: Path, write: Callable[[Path], object]) -> None:
    """Create `folder` whole or not at all: `write` fills a private folder, which is then renamed.

    If another job was faster, its folder stays and ours is dropped: same name, same content. Raises UserError if the
    disk cannot be written.
    """
    partial = folder.with_name(private_name(folder.name))
    try:
        partial.mkdir(parents=True)
        write(partial)
        for file in partial.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())  # else a machine that fails could keep the name and lose what is in it
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise UserError(f"cannot write the data cache {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def private_name(name: str) -> str:
    """What a file or folder is called until it is whole: no other process, machine or container takes the same."""
    return f".{name}.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"


def _absolute(prefix: str) -> str:
    return os.path.abspath(os.path.expanduser(prefix))


def _megatron_lists(data: DataConfig) -> str:
    """The tokenizer's path; UserError if it or the training list is not given."""
    if not data.train:
        raise UserError("data.source megatron needs data.train: dataset prefixes, each optionally after a weight")
    if data.tokenizer is None:
        raise UserError("data.source megatron needs data.tokenizer: the one that the datasets were prepared with")
    return data.tokenizer


def _megatron_source(data: DataConfig, cache: Path, is_writer: bool, barrier: Callable[[], object]) -> Source:
    tokenizer = load_tokenizer(_megatron_lists(data))
    hint = "use more text or a shorter data.sequence_length"
    pairs = parse_blend(data.train, "data.train")
    if is_writer:  # reads every entry of every index, once a job
        for prefix, _ in (*pairs, *parse_blend(data.validation, "data.validation")):
            open_indexed(_absolute(prefix), thorough=True)
    barrier()
    if data.validation:
        train = _parts(pairs, None, data, "data.train", hint)
        validation = _parts(parse_blend(data.validation, "data.validation"), None, data, "data.validation", hint)
    else:
        train = _parts(pairs, 0, data, "data.train", hint)
        validation = _parts(pairs, 1, data, "the validation part of data.train (see data.split)", hint)
    names = f"{len(train)} dataset{'s' if len(train) > 1 else ''}"
    return Source(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        description=f"{names}, {sum(part.num_tokens for part in train):,} training tokens",
        unigram_entropy_nats=_checked_entropy(train, validation, tokenizer),
        cache_dir=cache,
    )


def _parts(
    pairs: list[tuple[str, Fraction | None]], split: int | None, data: DataConfig, what: str, hint: str
) -> tuple[Part, ...]:
    parts = []
    for prefix, weight in pairs:
        file = open_indexed(_absolute(prefix))
        first, stop = (0, file.num_sequences) if split is None else split_bounds(data.split, file.num_sequences)[split]
        tokens = file.count(first, stop)
        if tokens < data.sequence_length + 1:
            needed = data.sequence_length + 1
            raise UserError(f"{what} ({prefix}): {tokens:,} tokens, shorter than one sequence ({needed:,}); {hint}")
        parts.append(Part(file.prefix, first, stop, tokens, Fraction(tokens) if weight is None else weight))
    twice = [part.prefix for index, part in enumerate(parts) if part.prefix in (p.prefix for p in parts[:index])]
    if twice:
        raise UserError(f"{what}: {twice[0]} is listed twice; list it once, with the sum of its weights")
    for part, slots in zip(parts, period_slots([part.weight for part in parts]), strict=True):
        if not slots:
            raise UserError(
                f"{what}: {part.prefix} would give less than one sample in {LONGEST_PERIOD:,}; raise its weight (give "
                "every prefix one), or leave it out"
            )
    total = sum((part.weight for part in parts), Fraction(0))
    return tuple(Part(p.prefix, p.first, p.stop, p.num_tokens, p.weight / total) for p in parts)


def _checked_entropy(train: tuple[Part, ...], validation: tuple[Part, ...], tokenizer: TokenizerLike) -> float:
    """Entropy of the validation blend in nats; UserError if a dataset has ids that the tokenizer does not."""
    for part in train:
        _shares(part, tokenizer)
    return _entropy(np.asarray(sum(float(part.weight) * _shares(part, tokenizer) for part in validation)))


def _shares(part: Part, tokenizer: TokenizerLike) -> np.ndarray:
    file: IndexedFile = open_indexed(part.prefix)
    tokens = file.tokens(part.first, part.stop)[:_MAX_COUNTED_TOKENS]
    if (stranger := stranger_among(tokens, tokenizer.vocab_size)) is not None:
        raise UserError(
            f"dataset {part.prefix} holds token {stranger}, but tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size:,} tokens: set data.tokenizer to the one it was prepared with"
        )
    counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    return counts / counts.sum()


def _entropy(weights: np.ndarray) -> float:
    shares = weights[weights > 0] / weights.sum()
    return float(-(shares * np.log(shares)).sum())
