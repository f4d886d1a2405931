"""`maniple convert from-hf`: a folder of Hugging Face weights becomes a checkpoint that any layout reads.

Tensors are read and written one after another, of stacked experts one expert at a time: no more than the largest of
them is in memory beside the files' own pages. Nothing is left out, added or guessed: see `families` and `source`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import maniple
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.assembly import DigestingFile, write_last_files
from maniple.engines.megatron.checkpoint.saved_card import CARD
from maniple.engines.megatron.huggingface import companions, encodings, families
from maniple.engines.megatron.huggingface.journal import Journal, told, write_text
from maniple.engines.megatron.huggingface.links import Chunk
from maniple.engines.megatron.huggingface.source import Source
from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.models.config_json import shown
from maniple.models.huggingface import card_of, matching_card, quantization_of, read_config

RECORD = "huggingface.json"  # what was converted: for the way back
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OF_CONFIG = {"bfloat16": "bf16", "float32": "fp32"}
_FILE_BYTES = 4 << 30
_OVERHEAD = 4096  # bytes of a stored tensor beside its numbers, at most


@dataclass(frozen=True)
class Converted:
    """What `from_hf` has made. rounded: tensors, not quantized, whose numbers had more digits than `dtype` has."""

    out: Path
    card: ModelCard
    shipped: str | None  # the name under which Maniple has this model's card
    dtype: str
    quantized: bool  # some of the source's tensors were
    numbers: int
    bytes: int
    rounded: int
    reused: int  # files that an earlier try had finished


def from_hf(
    folder: Path,
    out: Path,
    *,
    dtype: str | None = None,
    drop_mtp: bool = False,
    layers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Writes the checkpoint `out` from the weights in `folder`. progress: called with bytes written, and in all.

    dtype: `bf16` or `fp32`; None: config.json's. drop_mtp: MTP layers are left out, also where config.json has them and
    the files do not. layers: only the first of the others. What an interrupted conversion has finished is used by the
    next one. Raises UserError, in one line, for whatever is missing, extra, damaged or of another shape.
    """
    config = read_config(folder)
    quantization = quantization_of(config)
    card = card_of(config, name=_name(folder))
    shipped = matching_card(card)
    card = card.model_copy(update={"name": shipped}) if shipped else card
    there = card.num_layers + card.num_mtp_layers  # of the files
    if drop_mtp or layers is not None:
        card = _cut(card, layers)
        shipped = matching_card(card)
    dtype = dtype or _dtype(config)
    with Source(folder, quantization) as source:
        source.leave_out(range(card.num_layers + card.num_mtp_layers, there))
        source.check(card)
        _check_copies(source, card)
        plan = list(_files(card, DTYPES[dtype]))
        work = _Work(source, DTYPES[dtype])
        identity = [maniple.__version__, source.state(), str(quantization), card.model_dump(mode="json"), dtype]
        total = sum(_bytes(chunk, work.dtype) for _, chunks in plan for chunk in chunks)
        with Journal(out, folder, identity) as journal, told(journal.partial):
            journal.check_room(total)
            reused, done = len(journal.finished), 0
            for name, chunks in plan:
                if name not in journal.finished:

                    def advance(written: int, before: int = done) -> None:
                        progress(before + written, total)

                    journal.note(name, work.write(journal.partial, name, chunks, advance))
                done += sum(_bytes(chunk, work.dtype) for chunk in chunks)
                progress(done, total)
            reports = [_report(name, journal.finished[name]) for name, _ in plan]
            reports.append({"files": _companions(source, journal.partial, card, config, DTYPES[dtype]), "places": []})
            if source.state() != identity[1]:
                raise UserError(f"{folder} was changed while it was converted: run the same command again")
            write_last_files(journal.partial, _metadata(plan, work.dtype), reports, _manifest(card, dtype))
            journal.publish()
        quantized = any(map(source.is_quantized, families.hf_shapes(card)))
    rounded = sum(entry["rounded"] for entry in journal.finished.values())
    numbers = sum(chunk.numbers for _, chunks in plan for chunk in chunks)
    return Converted(out, card, shipped, dtype, quantized, numbers, total, rounded, reused)


class _Work:
    """Fills chunks from a source, and writes them."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype

    def write(self, partial: Path, name: str, chunks: list[Chunk], progress: Callable[[int], None]) -> dict[str, Any]:
        """A file of the checkpoint; what the journal keeps of it."""
        places, rounded, done = [], 0, 0
        with open(partial / name, "wb") as raw:
            file = DigestingFile(raw)
            for chunk in chunks:
                tensor, inexact = self._fill(chunk)
                rounded += inexact
                start = file.tell()
                file.save(tensor)
                places.append([chunk.key, list(chunk.offset), start, file.tell() - start])
                done += _bytes(chunk, self.dtype)
                progress(done)
            raw.flush()
            os.fsync(raw.fileno())
        return {"bytes": file.tell(), "sha256": file.digest.hexdigest(), "places": places, "rounded": rounded}

    def _fill(self, chunk: Chunk) -> tuple[torch.Tensor, int]:
        """The chunk, and how many of its tensors lost digits. Raises UserError for a tensor that is not finite
        throughout: the chunk is NaN before it is filled, so that a place no tensor fills is found as well."""
        dtype = torch.float32 if chunk.fp32 else self.dtype
        out = torch.full(chunk.size, torch.nan, dtype=dtype)
        rounded = 0
        for link in chunk.links:
            theirs = self.source.read(link.name, link.row)
            rounded += not (theirs.dtype == dtype or self.source.is_quantized(link.name) or _is_exact(theirs, dtype))
            link.put(theirs, out)
        if not encodings.is_finite(out):
            names = ", ".join(link.name for link in chunk.links)
            raise UserError(f"{self.source.folder}: {names}: there are values that are not finite (NaN or infinite)")
        return out, rounded


def _is_exact(theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((theirs.to(dtype).to(theirs.dtype) == theirs).all())


def _name(folder: Path) -> str:
    """A card's name from a folder's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._").lower()
    return name[:200] or "model"


def _dtype(config: dict[str, Any]) -> str:
    said = config.get("dtype", config.get("torch_dtype"))
    if not isinstance(said, str) or said not in _OF_CONFIG:
        raise UserError(
            f"config.json says dtype {shown(said)}: choose --dtype fp32 (keeps every digit) or --dtype bf16 (rounds)"
        )
    return _OF_CONFIG[said]


def _cut(card: ModelCard, layers: int | None) -> ModelCard:
    """The card without MTP layers, and with the first `layers` of the others."""
    layers = card.num_layers if layers is None else layers
    if not 1 <= layers <= card.num_layers:
        raise UserError(f"--layers {layers}: the model has {card.num_layers}")
    dense = min(card.moe.num_dense_layers, layers)
    return card.with_overrides({"num_layers": layers, "num_mtp_layers": 0, "moe": {"num_dense_layers": dense}})


def _check_copies(source: Source, card: ModelCard) -> None:
    for name, original in families.copies(card).items():
        if name in source.tensors and not torch.equal(source.read(name), source.read(original)):
            raise UserError(
                f"{source.folder}: {name} is not the same as {original}, and the model has one place for both"
                + ("; --mtp drop converts it without its MTP layers" if families.layer_of(name) is not None else "")
            )


def _bytes(chunk: Chunk, dtype: torch.dtype) -> int:
    return chunk.numbers * (4 if chunk.fp32 else dtype.itemsize) + _OVERHEAD


def _files(card: ModelCard, dtype: torch.dtype) -> Iterator[tuple[str, list[Chunk]]]:
    """Names of files and what is in them: consecutive chunks of about `_FILE_BYTES`."""
    part: list[Chunk] = []
    number, size = 0, 0
    for chunk in families.chunks(card):
        if part and size + _bytes(chunk, dtype) > _FILE_BYTES:
            yield f"__0_{number}.distcp", part
            number, size, part = number + 1, 0, []
        part.append(chunk)
        size += _bytes(chunk, dtype)
    yield f"__0_{number}.distcp", part


def _report(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """As the writers of training checkpoints report."""
    places = [[key, offset, None, name, start, length] for key, offset, start, length in entry["places"]]
    return {"files": {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]}}, "places": places}


def _metadata(plan: list[tuple[str, list[Chunk]]], dtype: torch.dtype) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    for chunk in (chunk for _, chunks in plan for chunk in chunks):
        if chunk.key not in tensors:
            properties = TensorProperties(dtype=torch.float32 if chunk.fp32 else dtype)
            tensors[chunk.key] = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        part = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))
        tensors[chunk.key].chunks.append(part)
    return Metadata(state_dict_metadata=dict(tensors))


def _manifest(card: ModelCard, dtype: str) -> dict[str, Any]:
    return {
        "format": files.FORMAT,
        "holds": "weights",
        "step": 0,
        "samples": 0,
        "updates": 0,
        "saved": time.time(),
        "world_size": 1,
        "versions": {
            "maniple": maniple.__version__,
            "torch": torch.__version__,
            "megatron-core": version("megatron-core"),
        },
        "card": card.model_dump(mode="json"),
        "job": {"precision": {"dtype": dtype}},
        "extra": {},
    }


def _companions(
    source: Source, partial: Path, card: ModelCard, config: dict[str, Any], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Writes what goes with the weights: card, record of the source, tokenizer. Sizes and digests, by name."""
    own = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    dtypes = {}  # those that the way back would not write by itself
    for chunk in families.chunks(card):
        for name in (link.name for link in chunk.links if not source.is_quantized(link.name)):
            if (stored := source.dtype(name)) != ("F32" if chunk.fp32 else own):
                dtypes[name] = stored
    copies = [name for name in families.copies(card) if name in source.tensors]
    record = {"config": config, "dtypes": dtypes, "copies": copies}
    write_text(partial / RECORD, json.dumps(record, indent=1) + "\n")
    write_text(partial / CARD, yaml.safe_dump(card.model_dump(mode="json"), sort_keys=False))
    paths = [partial / name for name in (RECORD, CARD, *companions.copy(source.folder, partial))]
    return {path.name: {"bytes": path.stat().st_size, "sha256": files.file_digest(path)} for path in paths}
