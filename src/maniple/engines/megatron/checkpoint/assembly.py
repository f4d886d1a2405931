"""What a checkpoint's writers share: files digested while they are written, and the last files, which speak of all."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from maniple.engines.megatron.checkpoint import files


class DigestingFile:
    """A file that is written from start to end, with its SHA-256."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self.digest = hashlib.sha256()
        self._raw, self._position = raw, 0

    def tell(self) -> int:
        return self._position

    def write(self, data) -> int:
        self._raw.write(data)
        self.digest.update(data)
        self._position += len(data)
        return len(data)

    def flush(self) -> None:
        self._raw.flush()

    def save(self, data: io.BytesIO | torch.Tensor) -> None:
        if isinstance(data, io.BytesIO):
            self.write(data.getbuffer())
        else:
            torch.save(data, self)


def write_last_files(
    partial: Path, metadata: Metadata, reports: list[dict[str, Any]], manifest: dict[str, Any]
) -> None:
    """Writes what speaks of the whole, the manifest last.

    A report has `files` (bytes and sha256 by name) and `places`: [tensor, offset, number, file, start, length] of each
    part of a tensor. Raises OSError.
    """
    results = [
        WriteResult(
            index=MetadataIndex(key, None if offset is None else torch.Size(offset), number),
            size_in_bytes=length,
            storage_data=_StorageInfo(name, start, length),
        )
        for report in reports
        for key, offset, number, name, start, length in report["places"]
    ]
    FileSystemWriter(partial).finish(metadata, [results])
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    written = {name: entry for report in reports for name, entry in report["files"].items()}
    for path in (partial / files.INDEX, partial / "metadata.json"):
        written[path.name] = {"bytes": path.stat().st_size, "sha256": files.file_digest(path)}
    files.write_manifest(partial, {**manifest, "files": written})
