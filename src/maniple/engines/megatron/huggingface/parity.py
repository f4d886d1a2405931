"""`maniple models check`: the same weights and tokens through transformers' own class and through the engine, in fp32.

Compared are logits, the loss, and every gradient mapped back to the tensor of Hugging Face's that it belongs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from safetensors.torch import load_file

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import model, parallel
from maniple.engines.megatron.checkpoint import files, tensors
from maniple.engines.megatron.checkpoint import state as checkpoint_state
from maniple.engines.megatron.huggingface import families, made
from maniple.engines.megatron.huggingface.from_hf import from_hf
from maniple.engines.megatron.huggingface.to_hf import to_hf
from maniple.errors import UserError
from maniple.models.card import ModelCard

LOGITS, LOSS, GRADIENTS = 1e-4, 1e-5, 1e-4  # bounds: see Verdict
_SEQUENCES = 2


@dataclass(frozen=True)
class Verdict:
    """How far the engine is from transformers.

    logits: largest difference over the largest logit. loss: ours and theirs, in nats. gradients: by tensor, largest
    difference over the largest magnitude in it. beyond: tokens, of `tokens`, with a logit beyond the bound.
    """

    card: str
    family: str
    source: str
    layers: int
    tokens: int
    logits: float
    beyond: int
    loss: tuple[float, float]
    gradients: dict[str, float]
    seconds: float

    @property
    def loss_error(self) -> float:
        return abs(self.loss[0] - self.loss[1]) / abs(self.loss[1])

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor whose gradient is furthest off, and how far. NaN is further than any number."""
        return max(self.gradients.items(), key=lambda item: (item[1] != item[1], item[1]))

    @property
    def equal(self) -> bool:
        return self.logits <= LOGITS and self.loss_error <= LOSS and self.worst[1] <= GRADIENTS


def as_rows(verdict: Verdict) -> list[list[str]]:
    """What was compared, its difference, its bound, and a remark."""
    name, worst = verdict.worst
    beyond = f"{verdict.beyond} of {verdict.tokens} tokens beyond it" if verdict.beyond else ""
    return [
        ["logits, of the largest", f"{verdict.logits:.1e}", f"{LOGITS:.0e}", beyond],
        ["loss", f"{verdict.loss_error:.1e}", f"{LOSS:.0e}", f"{verdict.loss[0]:.6f} and {verdict.loss[1]:.6f} nats"],
        [f"{len(verdict.gradients)} gradients, each of its largest", f"{worst:.1e}", f"{GRADIENTS:.0e}", name],
    ]


def in_words(verdict: Verdict) -> str:
    """The verdict in one line."""
    what = f"{verdict.card} ({verdict.family}, {verdict.layers} layers, {verdict.source})"
    said = "computes what transformers computes" if verdict.equal else "does NOT compute what transformers computes"
    return f"{what} {said}: {verdict.tokens} tokens, fp32, {verdict.seconds:.0f} s"


def as_json(verdict: Verdict) -> dict[str, Any]:
    bounds = {"logits": LOGITS, "loss": LOSS, "gradients": GRADIENTS}
    return asdict(verdict) | {"loss_error": verdict.loss_error, "equal": verdict.equal, "bounds": bounds}


def check(
    card: ModelCard,
    folder: Path | None,
    work: Path,
    *,
    tokens: int = 64,
    layers: int | None = None,
    device: str = "auto",
    progress: Callable[[str], None] = lambda said: None,
) -> Verdict:
    """Compares the model in `folder` (None: one of the card's sizes with random weights) on random tokens.

    work: a folder for converted weights, twice as large as the model in fp32 at most. layers: only the first of them.
    MTP layers, which transformers does not run, are left out. Raises UserError if the folder holds another model than
    the card, and for what the conversion refuses.
    """
    from maniple.models.huggingface import card_of, forward_differences, read_config

    started, known = time.monotonic(), True
    if folder is None:
        progress("making the model")
        card = card.with_overrides({"num_mtp_layers": 0})
        folder, source = made.make(card, work / "made", seed=0), "random weights"
    else:
        source = str(folder)
        config = read_config(folder)
        known = config.get("model_type") == card.family  # Kimi-K2's is transformers' deepseek_v3
        different = forward_differences(card_of(config, name=card.name), card)
        if [field for field in different if field != "num_mtp_layers"]:
            raise UserError(f"{folder} is of another model than {card.name}: {', '.join(different)} differ")
    progress("converting")
    done = from_hf(folder, work / "checkpoint", dtype="fp32", drop_mtp=True, layers=layers)
    if layers is not None or done.quantized or not known:
        progress("converting back")
        folder = to_hf(done.out, work / "back", verify=False).out
    job = _job(tokens, device)
    on = parallel.pick_device(job)
    ids = torch.randint(done.card.vocab_size, (_SEQUENCES, tokens + 1), generator=torch.Generator().manual_seed(0))
    progress("running transformers")
    theirs = _theirs(folder, work / "gradients", ids, on)
    progress("running the engine")
    with _group(job, on):
        ours = _ours(done.out, done.card, job, ids, on)
    difference = (ours.logits - theirs.logits).abs().amax(-1) / theirs.logits.abs().max()
    gradients = {name: _distance(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients}
    return Verdict(
        card.name,
        card.family,
        source,
        done.card.num_layers,
        difference.numel(),
        float(difference.max()),
        int((~(difference <= LOGITS)).sum()),
        (ours.loss, theirs.loss),
        gradients,
        time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Pass:
    """logits `[B, S, V]`, the mean loss, gradients by Hugging Face's names; in host memory."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


def _job(tokens: int, device: str) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "fp32"},
        "model": {"vocab_size_multiple": 1},
        "moe": {"aux_loss_coefficient": 0.0},
        "data": {"source": "synthetic", "sequence_length": tokens},
        "train": {"device": device},
    }
    return TrainConfig.model_validate(sections)


@contextmanager
def _group(job: TrainConfig, device: torch.device) -> Iterator[None]:
    """The engine's groups, of this process alone."""
    stop = parallel.stop_groups if dist.is_initialized() else parallel.stop
    parallel.start(job, device)
    try:
        yield
    finally:
        stop()


def _theirs(folder: Path, work: Path, ids: torch.Tensor, device: torch.device) -> _Pass:
    transformers = made.quiet_transformers()
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    net = net.to(device).train()
    ids = ids.to(device)
    logits = net(input_ids=ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    # saved as if they were the weights: in files every tensor has its released name and shape
    state = {name: weight.detach() for name, weight in net.state_dict().items()}
    state |= {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    net.save_pretrained(work, state_dict=state)
    gradients = {name: g for path in work.glob("*.safetensors") for name, g in load_file(path).items()}
    return _Pass(logits.detach().cpu(), loss.item(), gradients)


def _ours(checkpoint: Path, card: ModelCard, job: TrainConfig, ids: torch.Tensor, device: torch.device) -> _Pass:
    chunks = [chunk.to(device).train() for chunk in model.build_chunks(card, job)]
    index = files.check_index(checkpoint, files.read_manifest(checkpoint))
    loaded = tensors.read(checkpoint, index, checkpoint_state.weights(chunks), job, ignored=lambda key: False)
    checkpoint_state.restore_weights(loaded, chunks)
    (net,) = chunks
    ids = ids.to(device)
    inputs = {"input_ids": ids[:, :-1], "attention_mask": None}
    inputs["position_ids"] = torch.arange(ids.shape[1] - 1, device=device).expand(len(ids), -1)
    with torch.no_grad():
        logits = net(**inputs)
    loss = net(**inputs, labels=ids[:, 1:]).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return _Pass(logits.cpu(), loss.item(), _by_their_names(card, chunks))


@torch.no_grad()
def _by_their_names(card: ModelCard, chunks: list) -> dict[str, torch.Tensor]:
    """A model's tensors as Hugging Face has them; of one process, which holds all. Buffers have no gradients."""
    parts: dict[str, list] = {}
    for part in nested_values(load_preprocess(checkpoint_state.weights(chunks))[0]):
        parts.setdefault(part.key, []).append(part)
    found: dict[str, torch.Tensor] = {}
    for chunk in families.chunks(card):
        if chunk.fp32:
            continue
        whole = torch.empty(chunk.shape, dtype=torch.float32)
        for part in parts[chunk.key]:
            at = tuple(slice(a, a + n) for a, n in zip(part.global_offset, part.data.shape, strict=True))
            whole[at] = part.data.cpu()
        at = tuple(slice(a, a + n) for a, n in zip(chunk.offset, chunk.size, strict=True))
        for link in chunk.links:
            theirs = link.take(whole[at])
            if link.row is None:
                found[link.name] = theirs
            else:
                found.setdefault(link.name, torch.full(link.shape, torch.nan))[link.row] = theirs
    return found


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = theirs.abs().max()
    return float((ours - theirs).abs().max() / (scale if scale > 0 else 1))
