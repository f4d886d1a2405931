"""Reading `config.json` strictly, and how its weights are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.released_configs import RELEASED

from maniple.errors import UserError
from maniple.models.huggingface import Quantization, quantization_of, read_config


def test_read_config(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(UserError, match="does not exist"):
        read_config(tmp_path)
    file.mkdir()
    with pytest.raises(UserError, match="not a file"):
        read_config(tmp_path)
    file.rmdir()
    for content, said in [
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[1]", "no JSON object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1, "a": 1}', '"a" is there twice'),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": "' + b"x" * (5 << 20) + b'"}', "larger than 4 MiB"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_config(tmp_path)
        assert said in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    file.write_text(json.dumps(RELEASED["kimi-k2"]))
    assert read_config(Path(tmp_path)) == RELEASED["kimi-k2"]


def test_quantization():
    assert quantization_of(RELEASED["mixtral-8x7b"]) is None
    assert quantization_of({"quantization_config": None}) is None
    assert quantization_of(RELEASED["gpt-oss-20b"]) == Quantization("mxfp4", (1, 32))
    for name in ("deepseek-v3", "minimax-m2"):
        assert quantization_of(RELEASED[name]) == Quantization("fp8_block", (128, 128))
    fp8 = RELEASED["deepseek-v3"]["quantization_config"]
    assert quantization_of({"quantization_config": fp8 | {"weight_block_size": [64, 32]}}).block == (64, 32)
    for stored, said in [
        ({"quant_method": "awq", "bits": 4}, '"awq"; supported: "fp8" or "mxfp4"'),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"bits": 4}, "lacks quant_method"),
        ([], "an object, or none"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        (fp8 | {"weight_block_size": None}, "weight_block_size"),
        (fp8 | {"weight_block_size": [128]}, "weight_block_size = [128]"),
        (fp8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (fp8 | {"weight_block_size": [True, 128]}, "weight_block_size"),
        (fp8 | {"fmt": "e5m2"}, "fmt"),
        (fp8 | {"activation_scheme": "static"}, "activation_scheme"),
        (fp8 | {"kv_cache": 1}, "kv_cache = 1, which maniple does not know"),
        ({"quant_method": "mxfp4", "block": 16}, "block = 16"),
    ]:
        with pytest.raises(UserError) as caught:
            quantization_of({"quantization_config": stored})
        assert said in str(caught.value)
    for other in ("compression_config", "quantization"):
        with pytest.raises(UserError, match=other):
            quantization_of({other: {"bits": 4}})
