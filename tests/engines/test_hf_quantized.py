"""Released weights in float8 blocks and in MXFP4: the numbers are those of transformers' own readers, and convert."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from maniple.engines.megatron.huggingface import encodings, families
from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.to_hf import to_hf
from maniple.errors import UserError
from maniple.models import load_card
from maniple.models.huggingface import config_of

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
MXFP4 = {"quant_method": "mxfp4"}


def draw(shape, generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.fixture
def fp8_model(tmp_path):
    """A tiny DeepSeek-V3 with float8 matrices, as the release has them; what they stand for, in bf16."""
    card = load_card("deepseek-v3").tiny()
    generator, stored, meant = torch.Generator().manual_seed(0), {}, {}
    for name, shape in families.hf_shapes(card).items():
        plain = draw(shape, generator)
        if len(shape) == 2 and "proj" in name and "eh_proj" not in name:
            rows, columns = -(-shape[0] // 32), -(-shape[1] // 16)
            scales = torch.rand(rows, columns, generator=generator) + 0.1
            stored[name] = plain.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            by_hand = stored[name].float()
            for i in range(rows):
                for j in range(columns):
                    by_hand[32 * i : 32 * i + 32, 16 * j : 16 * j + 16] *= scales[i, j]
            meant[name] = by_hand.bfloat16()
        else:
            stored[name] = meant[name] = plain.float() if "e_score" in name else plain
    for name, original in families.copies(card).items():
        stored[name] = meant[name] = stored[original].clone()
    folder = tmp_path / "fp8"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(card) | {"quantization_config": FP8}))
    return folder, card, meant


def test_float8_blocks_become_bf16(fp8_model, tmp_path):
    folder, _, meant = fp8_model
    done = from_hf(folder, tmp_path / "weights")
    assert (done.dtype, done.quantized, done.rounded) == ("bf16", True, 0)
    to_hf(tmp_path / "weights", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    assert all(torch.equal(back[name], meant[name]) and back[name].dtype == meant[name].dtype for name in meant)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (128, 128), (256, 64)])
def test_float8_blocks_are_transformers_own(rows, columns):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // 32, columns // 16, generator=generator) + 0.5
    theirs = Fp8Dequantize(None)._dequantize_one(data, scales, torch.float32)
    assert torch.equal(encodings.from_fp8_blocks(data, scales, (32, 16)), theirs)


def test_blocks_at_the_edge_are_cut():
    data = torch.ones(40, 20).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    numbers = encodings.from_fp8_blocks(data, scales, (32, 16))
    wanted = (
        torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2).repeat_interleave(32, 0)[:40].repeat_interleave(16, 1)[:, :20]
    )
    assert torch.equal(numbers, wanted)


def test_every_mxfp4_number_is_transformers_own():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(64).view(1, 8, 128, 16)  # each byte
    scales = torch.arange(1, 255, dtype=torch.uint8).repeat(5)[: 8 * 128].view(1, 8, 128)  # scales that bf16 can hold
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)[0]  # inputs by outputs
    ours = encodings.from_mxfp4(blocks[0], scales[0]).T
    assert torch.equal(ours.bfloat16(), theirs)
    assert torch.equal(ours.bfloat16().float(), ours)  # nothing is rounded


def test_a_scale_of_255_is_no_number():
    numbers = encodings.from_mxfp4(
        torch.zeros(2, 1, 16, dtype=torch.uint8), torch.tensor([[255], [127]], dtype=torch.uint8)
    )
    assert numbers.isnan().all(1).tolist() == [True, False]
    assert numbers[1].eq(0).all()


def test_mxfp4_experts_become_bf16(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    card = load_card("gpt-oss-20b").tiny().with_overrides({"moe": {"expert_ffn_size": 32}})
    generator, stored, meant = torch.Generator().manual_seed(0), {}, {}
    for name, shape in families.hf_shapes(card).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            packed = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*packed, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(100, 140, packed, generator=generator, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        else:
            stored[name] = meant[name] = draw(shape, generator)
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(card) | {"quantization_config": MXFP4}))
    from_hf(folder, tmp_path / "weights")
    to_hf(tmp_path / "weights", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    assert all(torch.equal(back[name], meant[name]) for name in meant)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("scale missing", "lacks model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"),
        ("scale of another shape", "up_proj.weight_scale_inv has shape [2, 5], and [2, 4] by config.json"),
        ("scale of no float8", "has model.norm.weight_scale_inv, which"),
        ("float8 without blocks", "stored as F8_E4M3, not as F32 or F16 or BF16"),
    ],
)
def test_float8_that_does_not_fit_is_refused(change, says, fp8_model, tmp_path):
    folder, _, _ = fp8_model
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if change == "scale missing":
        del tensors[f"{name}_scale_inv"]
    elif change == "scale of another shape":
        tensors[f"{name}_scale_inv"] = torch.ones(2, 5)
    elif change == "scale of no float8":
        tensors["model.norm.weight_scale_inv"] = torch.ones(1)
    else:
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        for key in [key for key in tensors if key.endswith("_scale_inv")]:
            del tensors[key]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        from_hf(folder, tmp_path / "weights")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "weights").exists()
