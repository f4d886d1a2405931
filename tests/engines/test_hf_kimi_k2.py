"""Kimi-K2's files: a model type that transformers knows only by code beside them, and DeepSeek-V3's model in them."""

from __future__ import annotations

import json

import pytest
import torch
from tests import released_folders

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


def test_an_export_is_what_transformers_knows(folder):
    import transformers

    config = json.loads((folder / "back" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert "auto_map" not in config
    net, loading = transformers.AutoModelForCausalLM.from_pretrained(folder / "back", output_loading_info=True)
    assert type(net).__name__ == "DeepseekV3ForCausalLM"
    assert not any(loading.values())
    assert net(torch.arange(8)[None]).logits.isfinite().all()


def test_a_released_folder_is_compared(folder, tmp_path):
    from maniple.engines.megatron.huggingface import parity
    from maniple.engines.megatron.huggingface.from_hf import CARD
    from maniple.models import load_card

    verdict = parity.check(
        load_card(str(folder / "weights" / CARD)), folder / "released", tmp_path, tokens=8, device="cpu"
    )
    assert verdict.equal
