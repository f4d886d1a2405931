"""A model for comparisons, made by transformers' own class with random weights at unit scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from maniple.models.card import ModelCard
from maniple.models.huggingface import config_of


def make(card: ModelCard, folder: Path, *, seed: int) -> Path:
    """Saves it in `folder`, as fp32, and returns the folder. Norms, biases and sinks matter as much as matrices do."""
    transformers = quiet_transformers()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(card, dtype="float32")), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(folder)
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() == 1 or "bias" in name:
                tensor.copy_(0.2 * noise)
            elif "embed" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    net.save_pretrained(folder)
    return folder


def quiet_transformers() -> Any:
    """The library, with neither advice nor progress bars: what is wrong is raised."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
