"""Text to token ids and back: a byte-level BPE trained here, or any tokenizer that the user brings.

A `tokenizer.json` is read with the `tokenizers` library; a folder with `transformers.AutoTokenizer`, offline and
without running code from it. No start or end token is ever added: documents are ended by `eod`, which the dataset
writer appends. Text that spells a special token is encoded as the tokenizer defines it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from maniple.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# Used only where a tokenizer.json has no tokenizer_config.json beside it that says which token ends a document.
_KNOWN_END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "[EOS]",
    "<eos>",
    "</s>",
)


class TokenizerLike(Protocol):
    """What training and Megatron-Core's datasets ask of a tokenizer."""

    name: str
    vocab_size: int
    eod: int
    unique_identifiers: dict[str, Any]

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class TextTokenizer:
    """A tokenizer from disk.

    name: the path it came from. vocab_size: one more than its highest id (added tokens and holes counted). eod: id of
    the token that ends a document. fingerprint: sha256 of its files. unique_identifiers: what Megatron-Core writes
    into the key of a dataset's index cache.
    """

    def __init__(self, path: Path, backend: Any, *, eod: int, vocab_size: int, fingerprint: str) -> None:
        self.path = path
        self.name = str(path)
        self.eod = eod
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.unique_identifiers: dict[str, Any] = {"class": type(self).__name__, "sha256": fingerprint}
        self._backend = backend
        self._is_native = isinstance(backend, Tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, in order. Lone surrogates, which no byte sequence encodes, become U+FFFD."""
        texts = [_without_surrogates(text) for text in texts]
        if self._is_native:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        if not texts:
            return []
        return self._backend(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens spelt out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> TextTokenizer:
    """Train a byte-level BPE on `texts`, save it as `path` (a tokenizer.json) and return it.

    Every byte is in the alphabet, so any text encodes and decodes to itself; id 0 is `<|endoftext|>`. The result
    depends on the texts and the size only. `vocab_size` (at least 257) is reached only if the text has enough pairs.
    """
    if vocab_size < 257:
        raise UserError(f"a byte-level vocabulary needs at least 257 tokens, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    partial.replace(path)
    return load_tokenizer(path)


def load_tokenizer(path: Path | str) -> TextTokenizer:
    """Read a tokenizer.json, or a folder that `transformers.AutoTokenizer` reads. Raises UserError if it cannot."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise UserError(f"tokenizer {path} does not exist: give a tokenizer.json or a folder with a saved tokenizer")
    try:
        text = path.read_bytes()
        backend = Tokenizer.from_str(text.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise UserError(f"tokenizer {path} cannot be read: {_first_line(error)}") from error
    # A saved length limit would silently cut documents.
    backend.no_truncation()
    backend.no_padding()
    eod = _end_token(path, backend)
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(path, backend, eod=eod, vocab_size=vocab_size, fingerprint=hashlib.sha256(text).hexdigest())


def _load_folder(path: Path) -> TextTokenizer:
    if not any(file.name.startswith(("tokenizer", "vocab")) or file.suffix == ".model" for file in path.iterdir()):
        raise UserError(f"tokenizer folder {path} cannot be read: it holds no tokenizer.json or the like")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a family's loader raises, the file is what is wrong
        raise UserError(f"tokenizer folder {path} cannot be read: {_first_line(error)}") from error
    if backend.eos_token_id is None:
        raise UserError(f"tokenizer folder {path} names no eos_token: set it in its tokenizer_config.json")
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in {".json", ".model", ".txt", ".jinja"} and "index" not in file.name:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    vocab_size = max(len(backend), max(backend.get_vocab().values()) + 1)
    return TextTokenizer(path, backend, eod=backend.eos_token_id, vocab_size=vocab_size, fingerprint=digest.hexdigest())


def _end_token(path: Path, backend: Tokenizer) -> int:
    config = path.with_name("tokenizer_config.json")
    names: tuple[str, ...] = _KNOWN_END_TOKENS
    if config.is_file():
        try:
            declared = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{config} is not a JSON object: {_first_line(error)}") from error
        if isinstance(declared, dict):  # an AddedToken, written out
            declared = declared.get("content")
        if isinstance(declared, str):
            names = (declared,)
    for name in names:
        token = backend.token_to_id(name)
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {path} has no end-of-document token: put a tokenizer_config.json with eos_token beside it "
        f"(tried {', '.join(names)})"
    )


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
