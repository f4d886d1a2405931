"""Folders that look like released models, at toy sizes: config.json, safetensors with an index, the tokenizer's files.

Names and shapes are those that the conversion of the family reads (`families.hf_shapes`); numbers are random. Needs no
transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.engines import hf_models

from maniple.data.tokenizer import train_bpe
from maniple.engines.megatron.huggingface import families
from maniple.models import load_card
from maniple.models.huggingface import config_of

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NO_TYPE = {"torch_dtype": None}  # what the release's config.json says of it
# By name: the card, how matrices are stored, fields of config.json that config_of has otherwise, and other files.
FOLDERS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "DeepSeek-V2-Lite": ("deepseek-v2-lite", "bf16", {}, ("tokenizer.json", "modeling_deepseek.py")),
    "DeepSeek-V3": ("deepseek-v3", "fp8", {}, ("tokenizer.json", "modeling_deepseek.py")),
    "Kimi-K2-Base": ("kimi-k2", "fp8", {"model_type": "kimi_k2"}, ("tiktoken.model", "tokenization_kimi.py")),
    "GLM-4.5-Air": ("glm-4.5-air", "bf16", {}, ("tokenizer.json", "chat_template.jinja")),
    "MiniMax-M2": ("minimax-m2", "fp8", NO_TYPE, ("tokenizer.json", "modeling_minimax_m2.py")),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", "bf16", {}, ("tokenizer.json", "generation_config.json")),
    "gpt-oss-20b": ("gpt-oss-20b", "mxfp4", NO_TYPE, ("tokenizer.json", "chat_template.jinja")),
    "Mixtral-8x7B-v0.1": ("mixtral-8x7b", "bf16", {}, ("tokenizer.model",)),
}
VOCABULARY = 384


def write(folder: Path, name: str, tokenizer: bytes = b"{}") -> None:
    """The one of `FOLDERS` that has this name, as `folder`. tokenizer: the content of its `tokenizer.json`."""
    _write(folder, *FOLDERS[name], tokenizer=tokenizer, seed=list(FOLDERS).index(name))


def write_all(folder: Path) -> None:
    """Each of `FOLDERS` in `folder/released`, and damaged ones in `folder/damaged`."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    train_bpe(texts, VOCABULARY, folder / "tokenizer.json")
    tokenizer = (folder / "tokenizer.json").read_bytes()
    released, damaged = folder / "released", folder / "damaged"
    for name in FOLDERS:
        write(released / name, name, tokenizer)
    for name, source in {
        "a-file-is-missing": "Qwen3-30B-A3B",
        "three-layers-said": "Qwen3-30B-A3B",
        "sparse-attention": "DeepSeek-V3",
    }.items():
        shutil.copytree(released / source, damaged / name)
    (damaged / "a-file-is-missing" / "model-00002-of-00002.safetensors").unlink()
    hf_models.set_config(damaged / "three-layers-said", num_hidden_layers=3)
    hf_models.set_config(damaged / "sparse-attention", model_type="deepseek_v32")


def _write(
    folder: Path,
    card_name: str,
    storage: str,
    config: dict[str, Any],
    beside: tuple[str, ...],
    *,
    tokenizer: bytes,
    seed: int,
) -> None:
    card = load_card(card_name).tiny()
    widths = {"expert_ffn_size": 64, "shared_ffn_size": 64 * card.moe.num_shared_experts}  # whole blocks of 32
    card = card.with_overrides({"vocab_size": VOCABULARY, "moe": widths})
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in families.hf_shapes(card).items():
        if storage == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            packed = experts, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*packed, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, packed, generator=generator, dtype=torch.uint8)
            continue
        numbers = torch.randn(shape, generator=generator) * (1.0 if "embed" in name else shape[-1] ** -0.5)
        if storage == "fp8" and "_proj." in name and "eh_proj" not in name:
            tensors[name] = numbers.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones([-(-size // 128) for size in shape])
        elif "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = numbers if "e_score" in name else numbers.bfloat16()
    for name, original in families.copies(card).items():
        if families.layer_of(name) is not None:
            tensors[name] = tensors[original].clone()
    folder.mkdir(parents=True)
    hf_models.save(tensors, folder, 2)
    quantized = {"fp8": {"quantization_config": FP8}, "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}}}
    (folder / "config.json").write_text(json.dumps(config_of(card) | config | quantized.get(storage, {})))
    for name in beside:
        content = b"{}" if name.endswith(".json") else b"\n"
        (folder / name).write_bytes(tokenizer if name == "tokenizer.json" else content)
