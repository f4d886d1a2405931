"""`maniple data tokenizer`: text in, a tokenizer that `prepare` takes out, and one line for every mistake."""

import gzip

import pytest

from maniple import cli
from maniple.data.indexed import open_indexed
from maniple.data.new_tokenizer import make_tokenizer
from maniple.data.tokenizer import END_OF_TEXT, load_tokenizer, train_bpe
from maniple.errors import UserError

TEXTS = [f"the quick fox {i} jumps over {i * i} lazy dogs\n" * 3 for i in range(60)]


def made(inputs, output, size=320, **options):
    return make_tokenizer(inputs, output, size, progress=False, **options)


def test_from_text_to_a_dataset_on_the_command_line(tmp_path, capsys, write_lines):
    lines, path = write_lines("a.jsonl", TEXTS), tmp_path / "new" / "tokenizer.json"
    assert cli.main(["data", "tokenizer", str(lines), "--output", str(path), "--vocab-size", "320"]) == 0
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"{path}: 320 tokens, from 60 documents, {sum(map(len, TEXTS)):,} characters in ")
    words = ["data", "prepare", str(lines), "--output", str(tmp_path / "set"), "--tokenizer", str(path)]
    assert cli.main([*words, "--workers", "1"]) == 0
    tokens = open_indexed(str(tmp_path / "set")).tokens()
    assert load_tokenizer(path).decode(tokens) == "".join(text + END_OF_TEXT for text in TEXTS)
    assert len(tokens) < sum(map(len, TEXTS)) / 2


def test_it_is_what_the_library_makes_of_the_same_texts(tmp_path, write_lines):
    result = made([write_lines("a.jsonl", TEXTS)], tmp_path / "a.json")
    train_bpe(TEXTS, 320, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (result.vocab_size, result.documents) == (320, 60)


def test_folders_gzip_another_key_and_lone_surrogates(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(TEXTS[0])
    with gzip.open(tmp_path / "in" / "b.jsonl.gz", "wt") as file:
        file.write('{"body": "ab \\ud800 ab"}\n\n{"body": ""}\n')
    result = made([tmp_path / "in"], tmp_path / "t.json", 4000, key="body")
    assert (result.documents, result.characters) == (3, len(TEXTS[0]) + 7)
    assert 257 < result.vocab_size < 4000


def test_part_of_a_large_input(tmp_path):
    for number in range(8):  # each a chunk
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 1000)
    result = made(sorted(tmp_path.iterdir()), tmp_path / "t.json", max_bytes=2000)
    assert (result.documents, result.characters) == (2, 2000)
    vocabulary = load_tokenizer(tmp_path / "t.json")
    assert len(vocabulary.encode("0" * 100)) < 10 > len(vocabulary.encode("4" * 100))  # the first and the fifth
    assert len(vocabulary.encode("7" * 100)) == 100


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ('{"text": "x"}\nbroken\n', {}, r"in\.jsonl:2: not a line of JSON"),
        ('{"text": "x"}\n', {"key": "body"}, r"in\.jsonl:1: no key 'body' \(found: text\)"),
        ('{"text": ""}\n', {}, r"no text in .*in\.jsonl"),
        ('{"text": "x"}\n', {"size": 256}, "at least 257 tokens, not 256"),
        ('{"text": "x"}\n', {"max_bytes": 0}, "max_bytes must be at least 1, not 0"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path, text, options, said):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        made([tmp_path / "in.jsonl"], tmp_path / "t.json", **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_nothing_is_overwritten(tmp_path, write_lines):
    lines = write_lines("a.jsonl", TEXTS)
    (tmp_path / "t.json").write_text("kept")
    with pytest.raises(UserError, match=r"t\.json exists, .*: choose another --output"):
        made([lines], tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "kept"
    with pytest.raises(UserError, match=r"is a folder: name a file in it, e\.g\. .*tokenizer\.json"):
        made([lines], tmp_path)
    with pytest.raises(UserError, match=r"t\.json/x\.json: Not a directory|t\.json: File exists"):
        made([lines], tmp_path / "t.json" / "x.json")
