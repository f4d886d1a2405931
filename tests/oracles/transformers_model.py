"""The objective and its gradients by transformers' own classes, MTP layers too, from a folder of weights.

Import it in spawned processes only.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from maniple.engines.megatron.huggingface import families, made
from maniple.models.card import ModelCard
from maniple.models.huggingface import config_of

Batch = dict[str, torch.Tensor]


def save(card: ModelCard, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model with random weights: the decoder by transformers, which has no MTP layers, and those beside it. Biases
    that balance experts are fp32, as in releases."""
    made.make(card.with_overrides({"num_mtp_layers": 0}), folder, seed=1)
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(folder / "model.safetensors")
    for name, shape in families.hf_shapes(card).items():
        if name not in tensors:
            noise = torch.randn(shape, generator=generator)
            is_norm = "norm" in name
            tensors[name] = 1 + 0.2 * noise if is_norm else 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    for name, original in families.copies(card).items():
        if families.layer_of(name) is not None:
            tensors[name] = tensors[original].clone()
    tensors = {name: tensor if "e_score" in name else tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(card, dtype=str(dtype).removeprefix("torch."))))
    return folder


def objective(card: ModelCard, folder: Path, batches: list[Batch], mtp_coefficient: float):
    """(mean loss, mean MTP loss or None, gradients by the names in files); over all batches' tokens that count."""
    transformers = made.quiet_transformers()
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train()
    # transformers knows the numbers of the released models' MTP layers, and finds its weights by them
    layers = range(card.num_layers, card.num_layers + card.num_mtp_layers)
    net._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\." for layer in layers]
    mtp = MtpModel.from_pretrained(net) if card.num_mtp_layers else None
    tokens = sum(float(batch["loss_mask"].sum()) for batch in batches)
    loss, ahead = torch.zeros(()), torch.zeros(card.num_mtp_layers, 2)
    total = torch.zeros(())
    for batch in batches:
        hidden = net.get_decoder()(input_ids=batch["tokens"], use_cache=False).last_hidden_state
        main = _loss(net.lm_head(hidden), batch["labels"], batch["loss_mask"])
        loss, total = loss + main.detach(), total + main
        if mtp is None:
            continue
        cache, positions = MtpCache(config=net.config.get_mtp_config()), batch["position_ids"]
        ids, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
        for depth in range(card.num_mtp_layers):
            ids, labels, mask = _ahead(ids), _ahead(labels), _ahead(mask)
            hidden = mtp.forward_layer(depth, hidden, positions + depth + 1, cache, input_ids=ids)
            part = _loss(mtp.shared_head(hidden), labels, mask)
            ahead[depth] += torch.stack([part.detach(), mask.sum()])
            total = total + part * mtp_coefficient / card.num_mtp_layers
    (total / tokens).backward()
    gradients = _gradients(net)
    for depth, layer in enumerate(mtp.layers if mtp is not None else ()):
        gradients |= _of_mtp(layer, f"model.layers.{card.num_layers + depth}.", card.moe.expert_ffn_size)
    mtp_loss = float((ahead[:, 0] / ahead[:, 1]).mean()) if card.num_mtp_layers else None
    return float(loss) / tokens, mtp_loss, gradients


def greedy(folder: Path, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The tokens that transformers generates after `ids`."""
    transformers = made.quiet_transformers()
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return net.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)[:, ids.shape[1] :]


def _loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    return (losses * mask_BS.flatten()).sum()


def _ahead(x_BS: torch.Tensor) -> torch.Tensor:
    return F.pad(x_BS[:, 1:], (0, 1))


def _gradients(net) -> dict[str, torch.Tensor]:
    """Saved as if they were the weights: in files every tensor has its released name and shape."""
    state = {name: weight.detach() for name, weight in net.state_dict().items()}
    state |= {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder, state_dict=state)
        return {name: g for path in Path(folder).glob("*.safetensors") for name, g in load_file(path).items()}


def _of_mtp(layer, prefix: str, ffn: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in layer.named_parameters():
        name = name.removeprefix("mtp_block.")
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if name == "mlp.experts.gate_up_proj":
            for e, both in enumerate(grad):
                found[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = both[:ffn]
                found[f"{prefix}mlp.experts.{e}.up_proj.weight"] = both[ffn:]
        elif name == "mlp.experts.down_proj":
            found |= {f"{prefix}mlp.experts.{e}.down_proj.weight": each for e, each in enumerate(grad)}
        else:
            found[prefix + ("shared_head.norm.weight" if name == "post_norm.weight" else name)] = grad
    return found
