"""`config show`: all values, each with its origin."""

import io
import json

from rich.console import Console

from maniple.config.load import load
from maniple.config.show import as_data, as_table, show


def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("extends: laptop\ntrain: {steps: 7}\n")
    return load(path, ["optimizer.learning_rate=1e-4"]), path


def test_data_has_every_value_and_its_origin(tmp_path):
    loaded, path = job(tmp_path)
    data = as_data(loaded)
    assert list(data) == list(loaded.origin)
    assert data["train.steps"] == {"value": 7, "from": "file", "source": f"{path}:2"}
    assert data["optimizer.learning_rate"] == {"value": 1e-4, "from": "cli", "source": ""}
    assert data["train.seed"] == {"value": 1234, "from": "default", "source": ""}
    assert data["precision.dtype"]["from"] == "preset"
    assert data["output_dir"]["value"] == "runs"


def test_json_on_standard_output(tmp_path, capsys):
    loaded, _ = job(tmp_path)
    show(loaded, as_json=True)
    assert json.loads(capsys.readouterr().out) == as_data(loaded)


def test_the_table_has_a_row_a_value(tmp_path):
    loaded, path = job(tmp_path)
    console = Console(file=io.StringIO(), width=300)
    console.print(as_table(loaded))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert [line[0] for line in lines[1:]] == list(loaded.origin)
    assert ["train.steps", "7", "file", f"{path}:2"] in lines
    assert ["optimizer.learning_rate", "0.0001", "command", "line"] in lines
