import json

import numpy as np
import pytest
import torch

from maniple.metrics.records import drop_after, plain, read_metrics, to_json, write_json


def strict(text):
    """json.loads that refuses Python's own NaN and Infinity, as every other reader does."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_values_that_are_not_finite_become_null_and_are_named():
    record = {"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "layers": [1.0, [float("-inf")]]}
    assert strict(to_json(record)) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "layers": [1.0, [None]],
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "layers[1][0]": "-inf"},
    }


def test_tensors_and_arrays_are_taken():
    record = {
        "a": torch.tensor(1.5),
        "b": torch.tensor([[1, 2], [3, 4]]),
        "c": np.float32(0.25),
        "d": np.int64(2**62),
        "e": torch.tensor(float("nan"), dtype=torch.bfloat16),
    }
    assert plain(record) == {
        "a": 1.5,
        "b": [[1, 2], [3, 4]],
        "c": 0.25,
        "d": 2**62,
        "e": None,
        "nonfinite": {"e": "nan"},
    }


def test_a_value_json_lacks_is_an_error_that_names_it():
    with pytest.raises(TypeError, match=r"metric a\.b is a complex"):
        to_json({"a": {"b": 1j}})


def test_a_line_cut_short_is_not_read_and_not_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_write_json_leaves_the_old_file_whole_when_it_fails(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    assert strict(path.read_text()) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_lines_that_are_no_record_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    junk = ['{"step": "two"}', '{"step": null}', '{"step": true}', '{"loss": 1.0}', "[1]", "[" * 100_000, "", "\x00"]
    path.write_text("\n".join(['{"step": 1}', *junk, '{"step": 3}', ""]))
    assert [record["step"] for record in read_metrics(path)] == [1, 3]
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n'
