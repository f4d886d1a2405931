import json

import pytest
from tokenizers import Tokenizer, models

from maniple.data.tokenizer import END_OF_TEXT, load_tokenizer, train_bpe
from maniple.errors import UserError

AWKWARD = ["", "plain", "  tabs\tand\r\nlines ", "日本語 – ünïcode 🎉", "\x00\x01\x7f", END_OF_TEXT]


def test_round_trip_of_any_text(tokenizer):
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]
    assert tokenizer.encode_batch([]) == []


def test_ids_and_size(tokenizer):
    assert tokenizer.eod == 0
    assert tokenizer.decode([0]) == END_OF_TEXT
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode("def ")
    assert 0 not in tokenizer.encode("def ")


def test_lone_surrogate_becomes_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    # A surrogate pair that JSON wrote as two escapes is one character.
    assert tokenizer.decode(tokenizer.encode("\ud83c\udf89")) == "🎉"


def test_training_is_deterministic(tmp_path, tokenizer):
    from tests.data.conftest import TEXTS

    again = train_bpe(iter(TEXTS), 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == tokenizer.path.read_bytes()
    assert again.fingerprint == tokenizer.fingerprint
    assert again.unique_identifiers == tokenizer.unique_identifiers
    assert [p.name for p in tmp_path.iterdir()] == ["again.json"]


def test_vocabulary_that_bytes_do_not_fit(tmp_path):
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(["x"], 256, tmp_path / "tokenizer.json")


def test_folder_reads_as_transformers_does(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": 4})
    )
    folder = load_tokenizer(tmp_path)
    assert (folder.eod, folder.vocab_size) == (0, 300)
    long = "def function_1(x): return x" * 20
    assert folder.encode_batch([long, "x"]) == tokenizer.encode_batch([long, "x"])
    assert folder.decode(folder.encode(long)) == long


def test_end_token_comes_from_the_config_beside_the_file(tmp_path):
    vocabulary = {"a": 0, "b": 1, "<stop>": 7, "</s>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").eod == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.eod == 7
    assert loaded.vocab_size == 8  # ids have holes: what counts is the highest


def test_saved_length_limit_does_not_cut(tmp_path, tokenizer):
    limited = Tokenizer.from_file(tokenizer.name)
    limited.enable_truncation(4)
    limited.enable_padding(length=9)
    limited.save(str(tmp_path / "limited.json"))
    text = "a long enough text"
    assert load_tokenizer(tmp_path / "limited.json").encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("{}"), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path)), "no end-of-document token"),
    ],
)
def test_unreadable_tokenizer_is_one_line(tmp_path, make, message):
    path = tmp_path / "tokenizer.json"
    make(path)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds no tokenizer\.json or the like"):
        load_tokenizer(tmp_path)
