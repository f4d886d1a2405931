"""A card may be a YAML file of the user's own; what is wrong with it is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from maniple import cli
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.models import list_cards, load_card

FACTS = load_card("deepseek-v3").model_dump(mode="json")


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """`cards/mine.yaml` in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("cards/mine.yaml")
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({**FACTS, "name": "mine", "num_layers": 7}))
    return path


def test_a_file_is_the_card_that_it_says(file):
    assert load_card("cards/mine.yaml").model_dump(mode="json") == {**FACTS, "name": "mine", "num_layers": 7}
    file.write_text(yaml.safe_dump(FACTS))  # as it is now, not as it was when it was first read
    assert load_card(str(file.absolute())) == load_card("deepseek-v3")
    file.rename("mine.yml")
    assert load_card("mine.yml") == load_card("deepseek-v3")


def test_every_shipped_card_is_a_file_like_any_other():
    folder = Path(cli.__file__).parent / "models" / "cards"
    assert len(list_cards()) > 10
    for name in list_cards():
        assert load_card(str(folder / f"{name}.yaml")) == load_card(name)


def test_a_job_takes_it(file, capsys):
    job = load(None, ["model.card=cards/mine.yaml", "model.variant=tiny", "model.overrides.num_layers=4"])
    assert (resolve_card(job.config).name, resolve_card(job.config).num_layers) == ("mine-tiny", 4)
    Path("job.yaml").write_text("model: {card: cards/mine.yaml}")
    assert cli.main(["config", "show", "job.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model.card"]["value"] == "cards/mine.yaml"


def test_models_prints_it(file, capsys):
    assert cli.main(["models", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["name"], facts["layers"], facts["card"]["num_layers"]) == ("mine", 7, 7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": "seven"}, "num_layers: expected a whole number, got 'seven'"),
        ({"num_layers": None}, "num_layers: expected a whole number, got nothing (null)"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1, got 0"),
        ({"moe": {**FACTS["moe"], "topk": 300}}, "moe.topk 300 is more than moe.num_experts 256"),
        ({"moe": {**FACTS["moe"], "router": {"score": "max"}}}, "moe.router.score: expected 'softmax' or 'sigmoid'"),
        ({"layers": 3}, "layers: this key is not known"),
        ({"name": "../mine"}, "name: expected letters, digits"),
    ],
)
def test_the_field_that_is_wrong_is_named(file, change, says):
    file.write_text(yaml.safe_dump({**FACTS, **change}))
    assert refusal(file).startswith(f"cards/mine.yaml: {says}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cards/mine.yaml: a model card is a mapping of keys"),
        ("- 1\n", "cards/mine.yaml: a model card is a mapping of keys"),
        ("a: &x 1\nb: *x\n", "cards/mine.yaml:2: aliases (*name) are not read here"),
        ("a: !!python/object:os.system {}\n", "cards/mine.yaml:1: could not determine a constructor"),
        ("#" * (1 << 20) + "\n", "cards/mine.yaml: larger than 1 MiB, so no model card"),
    ],
)
def test_what_is_no_card_is_refused(file, text, says):
    file.write_text(text)
    assert refusal(file).startswith(says)


def test_a_file_that_is_not_there(file):
    assert refusal("cards/yours.yaml") == "cards/yours.yaml: no such file; give the path of a model card (YAML)"
    assert refusal("./cards") == "cards: a folder, not a model card; give the path of a YAML file"
    assert "no model card is named 'mine'" in refusal("mine")
    with pytest.raises(UserError, match="control character"):
        load(None, ['model.card="a\\tb.yaml"'])


def refusal(name: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_card(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)
