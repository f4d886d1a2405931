"""`maniple convert` and `maniple models check` as commands: words, exit codes, help, and what is refused at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.engines import hf_models

from maniple import cli
from maniple.commands.convert import _bytes
from maniple.errors import UserError


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MANIPLE_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "My Model"
    hf_models.write(folder)
    return folder


def mistake(capsys, *words) -> str:
    assert cli.main(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    return err


def test_what_is_said_of_a_conversion_both_ways(source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", "from-hf", str(source), "--to", "of it"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "of it: my-model, 206,208 numbers in bf16, 613 kB",
        "train from it with 'model.card=of it/card.yaml' 'checkpoint.init_from=of it'",
    ]
    assert cli.main(["convert", "to-hf", "of it", "--to", "back", "--shard-size", "100kb"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    count = len(list(Path("back").glob("model-*.safetensors")))
    assert count > 3
    assert out == (f"back: my-model, 206,208 numbers in bf16, 412 kB in {count} files, config.json, tokenizer.json\n")
    Path("of it", "tokenizer.json").unlink()
    assert "is damaged: tokenizer.json is missing" in mistake(capsys, "convert", "to-hf", "of it", "--to", "again")


def test_rounding_is_said(source, tmp_path, capsys):
    other = shutil.copytree(source, tmp_path / "hf")
    from safetensors.torch import load_file, save_file

    path = next(other.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].float() + 1e-6}, path)
    assert cli.main(["convert", "from-hf", str(other), "--to", str(tmp_path / "out")]) == 0
    assert "in bf16, 1 of its tensors rounded to bf16, " in capsys.readouterr().out
    assert cli.main(["convert", "from-hf", str(other), "--to", str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    assert "rounded" not in capsys.readouterr().out


def test_without_a_tokenizer(source, tmp_path, capsys):
    other = shutil.copytree(source, tmp_path / "hf")
    (other / "tokenizer.json").unlink()
    assert cli.main(["convert", "from-hf", str(other), "--to", str(tmp_path / "out")]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "out"), "--to", str(tmp_path / "back")]) == 0
    assert "it has no tokenizer: copy its files into" in capsys.readouterr().out
    like = ["--like", str(source)]
    assert cli.main(["convert", "to-hf", str(tmp_path / "out"), "--to", str(tmp_path / "too"), *like]) == 0
    assert "config.json, tokenizer.json\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1KB", 1000), ("999999999999GB", 999999999999 * 10**9)],
)
def test_sizes(said, size):
    assert _bytes(said) == size


@pytest.mark.parametrize(
    "said", ["", "5", "GB", "5TB", "0GB", "-1GB", "1.5GB", "1e3GB", "５GB", "²GB", "5GiB", "five GB", "9" * 5000 + "GB"]
)
def test_no_sizes(said):
    with pytest.raises(UserError, match="expected a whole number and KB, MB or GB, as 5GB"):
        _bytes(said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["from-hf"], "Missing argument 'DIR'"),
        (["from-hf", "x"], "Missing option '--to'"),
        (["from-hf", "x", "--to", "y", "--dtype", "fp8"], "'fp8'"),
        (["from-hf", "x", "--to", "y", "--mtp", "maybe"], "'maybe'"),
        (["from-hf", "x", "--to", "y", "z"], "unexpected extra argument"),
        (["to-hf", "x", "--to", "y", "--shard-size", "5"], "--shard-size 5: expected a whole number"),
        (["to-hf", "x"], "Missing option '--to'"),
        (["both"], "No such command 'both'"),
    ],
)
def test_mistakes_in_words(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in mistake(capsys, "convert", *words)


def test_help_names_every_option(capsys):
    for command, options in {
        "from-hf": ("--to", "--dtype", "--mtp"),
        "to-hf": ("--to", "--like", "--dtype", "--shard-size", "--no-verify"),
    }.items():
        assert cli.main(["convert", command, "--help"]) == 0
        said = capsys.readouterr().out
        assert all(option in said for option in options)


def test_a_check_of_what_cannot_be_checked(source, tmp_path, capsys):
    """Refused before transformers is loaded."""
    damaged = shutil.copytree(source, tmp_path / "damaged")
    path = next(damaged.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    card = tmp_path / "card.yaml"
    assert cli.main(["convert", "from-hf", str(source), "--to", str(tmp_path / "weights")]) == 0
    shutil.copyfile(tmp_path / "weights" / "card.yaml", card)
    capsys.readouterr()
    for words, says in {
        (): "Missing argument 'CARD'",
        ("qwen9",): "no model card is named 'qwen9'",
        (tmp_path / "none.yaml",): "none.yaml",
        (card, tmp_path / "none"): "config.json does not exist",
        (card, card): "is a file: give the folder of a Hugging Face model",
        (card, tmp_path): "config.json does not exist",
        ("qwen3-30b-a3b", source): "is of another model than qwen3-30b-a3b: ",
        (card, source, "--layers", "0"): "'--layers'",
        (card, source, "--tokens", "1"): "'--tokens'",
        (card, source, "--work", tmp_path / "none"): "none: there is no such folder",
    }.items():
        assert says in mistake(capsys, "models", "check", *words)
    assert cli.main(["models", "check", str(card), str(damaged)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "maniple: converting",
        f"maniple: error: {path} cannot be read (Error while deserializing header: incomplete metadata, file not fully "
        "covered): it is cut short or damaged; fetch it anew",
    ]
    assert cli.main(["models", "check", str(card), str(source), "--layers", "3"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["maniple: error: --layers 3: the model has 2"]
