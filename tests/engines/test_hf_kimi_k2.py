"""Kimi-K2's files: a model type that transformers knows only by code beside them, and DeepSeek-V3's model in them."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from tests import released_folders
from tests.engines.hf_models import set_config

from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.to_hf import to_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A released model, its checkpoint, and what that becomes again."""
    folder = tmp_path_factory.mktemp("kimi")
    released_folders.write(folder / "released", "Kimi-K2-Base")
    from_hf(folder / "released", folder / "weights")
    to_hf(folder / "weights", folder / "back")
    return folder


def test_the_tokenizers_code_stays_behind(folder):
    for place in ("weights", "back"):
        names = {path.name for path in (folder / place).iterdir()}
        assert "tiktoken.model" in names
        assert not [name for name in names if name.endswith(".py")]


def test_an_export_keeps_the_model_type_and_is_deepseek_v3s_model(folder, caplog):
    import transformers

    caplog.set_level(logging.ERROR)
    assert json.loads((folder / "back" / "config.json").read_text())["model_type"] == "kimi_k2"
    with pytest.raises(ValueError, match="kimi_k2"):
        transformers.AutoConfig.from_pretrained(folder / "back")
    set_config(folder / "back", model_type="deepseek_v3")
    net, loading = transformers.AutoModelForCausalLM.from_pretrained(folder / "back", output_loading_info=True)
    assert type(net).__name__ == "DeepseekV3ForCausalLM"
    assert not any(loading.values())
    assert net(torch.arange(8)[None]).logits.isfinite().all()
