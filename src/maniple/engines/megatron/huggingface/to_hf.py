"""`maniple convert to-hf`: a checkpoint, of training or converted, becomes a folder that transformers loads.

One tensor of the result is in memory at a time, and of the checkpoint the parts that are being read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import maniple
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.state import RNG
from maniple.engines.megatron.huggingface import companions, encodings, families
from maniple.engines.megatron.huggingface.from_hf import DTYPES, RECORD
from maniple.engines.megatron.huggingface.journal import Journal, told, write_text
from maniple.engines.megatron.huggingface.links import Chunk, Link
from maniple.engines.megatron.huggingface.source import INDEX, SINGLE
from maniple.engines.megatron.huggingface.stored import Stored
from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.models.huggingface import card_of, config_of, forward_differences, read_config

_OPTIMIZER = "optimizer."
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # rows past the vocabulary are padding
_SAFETENSORS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _SAFETENSORS.items()}
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_STORED = ("float32", "bfloat16", "float16")
_TORCH_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
Pieces = list[tuple[Chunk, Link]]


@dataclass(frozen=True)
class Exported:
    """What `to_hf` has made. companions: files of the tokenizer and the like that went with it."""

    out: Path
    card: ModelCard
    dtype: str
    numbers: int
    bytes: int
    files: int
    companions: tuple[str, ...]
    reused: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the result: where its pieces come from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Pieces

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    like: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    verify: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Writes the folder `out` from a checkpoint's model weights. progress: called with bytes written, and in all.

    like: a folder of Hugging Face's whose config.json and tokenizer go with the result; None: what the checkpoint was
    converted from, if it was. dtype: `bf16` or `fp32`; None: as the checkpoint has them, and where it was converted as
    each tensor was before. verify: the checkpoint's files are compared with their digests first. Raises UserError, in
    one line, for a checkpoint that lacks a tensor, has one more, or is damaged.
    """
    manifest = files.read_manifest(checkpoint)
    files.check_files(checkpoint, manifest)
    index = files.check_index(checkpoint, manifest)
    card = _card(checkpoint, manifest)
    record = _record(checkpoint, manifest)
    saved = manifest["job"].get("precision", {}).get("dtype")
    own = dtype or (saved if saved in DTYPES else "bf16")
    dtypes = {} if dtype or record is None else record["dtypes"]
    copies = _copies_of_releases(card) if record is None else record["copies"]
    config = _config(card, own, like, record)
    stored = Stored(checkpoint, index)
    tensors = list(_tensors(card, stored, DTYPES[own], dtypes, copies))
    plan = _shards(tensors, shard_bytes)
    names = [[name, [[tensor.name, str(tensor.dtype)] for tensor in shard]] for name, shard in plan]
    total, done = sum(tensor.bytes for tensor in tensors), 0
    identity = [maniple.__version__, manifest["sha256"], names]
    with Journal(out, checkpoint, identity) as journal, told(journal.partial):
        journal.check_room(total)
        if verify:
            files.check_digests(checkpoint, manifest)
        reused = len(journal.finished)
        for name, shard in plan:
            if name not in journal.finished:

                def advance(written: int, before: int = done) -> None:
                    progress(before + written, total)

                journal.note(name, _write(stored, journal.partial / name, shard, advance))
            done += sum(tensor.bytes for tensor in shard)
            progress(done, total)
        if len(plan) > 1:
            places = {tensor.name: name for name, shard in plan for tensor in shard}
            _write_json(journal.partial / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        beside = companions.copy(like or checkpoint, journal.partial)
        _write_json(journal.partial / "config.json", config)  # last: no reader takes a folder without it for a model
        journal.publish()
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    return Exported(out, card, own, numbers, total, len(plan), beside, reused)


def _card(checkpoint: Path, manifest: dict[str, Any]) -> ModelCard:
    try:
        return ModelCard.model_validate(manifest["card"])
    except ValueError as error:
        raise files.damaged(checkpoint, "its model card is none") from error


def _record(checkpoint: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """What the checkpoint was converted from: config.json, dtypes, copies. None if it is one of training."""
    if RECORD not in manifest["files"]:
        return None
    try:
        record = json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))
        dtypes, config, copies = record["dtypes"], record["config"], record["copies"]
        if not isinstance(config, dict) or not isinstance(dtypes, dict) or not isinstance(copies, list):
            raise TypeError
        dtypes = {str(name): _SAFETENSORS[stored] for name, stored in dtypes.items()}
        return {"config": config, "dtypes": dtypes, "copies": copies}
    except OSError as error:
        raise files.unreadable(checkpoint / RECORD, error) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise files.damaged(checkpoint, f"its {RECORD} is none") from error


def _config(card: ModelCard, dtype: str, like: Path | None, record: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of the result: the given one, of the same model; else the source's; else one made from the card."""
    given = read_config(like) if like else record["config"] if record else None
    if given is None:
        return config_of(card, dtype=_TORCH_NAMES[dtype])
    if not card.num_mtp_layers:  # they may have been left out
        given = {key: 0 if value and key in _MTP_LAYERS else value for key, value in given.items()}
    different = forward_differences(card_of(given, name=card.name), card)
    if different and like:
        raise UserError(f"{like}/config.json is of another model than the checkpoint: {', '.join(different)} differ")
    if different:  # other layers were
        return config_of(card, dtype=_TORCH_NAMES[dtype])
    # code that came beside a release does not go along: transformers' own class has the family's name
    gone = "quantization_config", "dtype", "torch_dtype", "auto_map"
    kept = {key: value for key, value in given.items() if key not in gone} | {"model_type": card.family}
    return kept | {"torch_dtype" if "torch_dtype" in given else "dtype": _TORCH_NAMES[dtype]}


def _tensors(
    card: ModelCard, stored: Stored, dtype: torch.dtype, dtypes: dict[str, torch.dtype], copies: list[str]
) -> Iterator[_Tensor]:
    """What is to be written, in the model's order. Raises UserError unless the checkpoint holds it, and no more."""
    folder, there = stored.folder, stored.index.tensors
    pieces: dict[str, Pieces] = {}
    keys = {}
    for chunk in families.chunks(card):
        keys[chunk.key] = chunk
        for link in chunk.links:
            pieces.setdefault(link.name, []).append((chunk, link))
    for key, chunk in keys.items():
        found = there.get(key)
        if found is None:
            raise UserError(f"checkpoint {folder} lacks {key} of its model")
        padded = key in _PADDED and len(found.shape) == 2 and found.shape[0] >= chunk.shape[0]
        if found.shape != chunk.shape and not (padded and found.shape[1:] == chunk.shape[1:]):
            raise UserError(f"checkpoint {folder}: {key} is {list(found.shape)}, and {list(chunk.shape)} by its card")
        if found.dtype not in _STORED:
            raise UserError(f"checkpoint {folder}: {key} is of {found.dtype}, not of {' or '.join(_STORED)}")
    extra = [key for key in there if key not in keys and not key.startswith((RNG, _OPTIMIZER))]
    if extra:
        raise UserError(f"checkpoint {folder} has {extra[0]}, which its model has no place for")
    written = {}
    for name, parts in pieces.items():
        own = torch.float32 if parts[0][0].fp32 else dtype
        written[name] = _Tensor(name, parts[0][1].shape, dtypes.get(name, own), parts)
        yield written[name]
    for name, original in families.copies(card).items():
        if name in copies:
            yield _Tensor(name, written[original].shape, written[original].dtype, written[original].pieces)


def _copies_of_releases(card: ModelCard) -> list[str]:
    """MTP layers have an embedding and a head of their own; tied models have no head."""
    return [name for name in families.copies(card) if families.layer_of(name) is not None]


def _shards(tensors: list[_Tensor], most: int) -> list[tuple[str, list[_Tensor]]]:
    """Names of files, and what is in them."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    if len(shards) == 1:
        return [(SINGLE, shards[0])]
    return [(f"model-{n:05d}-of-{len(shards):05d}.safetensors", shard) for n, shard in enumerate(shards, 1)]


def _write(stored: Stored, path: Path, shard: list[_Tensor], progress: Callable[[int], None]) -> dict[str, Any]:
    """One file of the result, in the format of safetensors; what the journal keeps of it."""
    shard = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)  # numbers lie at multiples of their size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [end, end := end + tensor.bytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            file.write(_fill(stored, tensor).view(-1).view(torch.uint8).numpy())
            done += tensor.bytes
            progress(done)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size}


def _fill(stored: Stored, tensor: _Tensor) -> torch.Tensor:
    def piece(chunk: Chunk, link: Link) -> torch.Tensor:
        return link.take(stored.read(chunk.key, chunk.offset, chunk.size))

    if tensor.pieces[0][1].row is None:
        ((chunk, link),) = tensor.pieces
        out = piece(chunk, link).to(tensor.dtype)
    else:
        out = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)  # a row that no piece fills is not finite
        for chunk, link in tensor.pieces:
            out[link.row] = piece(chunk, link)
    if not encodings.is_finite(out):
        raise UserError(
            f"checkpoint {stored.folder}: {tensor.name} has values that are not finite as {_NAMES[tensor.dtype]}"
        )
    return out


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
