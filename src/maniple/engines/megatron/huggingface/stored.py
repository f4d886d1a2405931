"""Regions of a checkpoint's tensors, read from its files without a process group, whatever layout wrote them."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.index import Index, Part

_KEPT = 2  # parts in memory: the matrices of a layer's experts lie one behind another


class Stored:
    """The tensors of a checkpoint folder. Raises UserError where a file does not hold what the index says."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._kept: dict[Part, torch.Tensor] = {}

    def read(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """`size` numbers of tensor `key` from `offset` on."""
        dtype = getattr(torch, self.index.tensors[key].dtype)
        out = torch.empty(size, dtype=dtype)
        found = 0
        for part in self.index.parts[key]:
            first = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
            ends = zip(offset, size, part.offset, part.shape, strict=True)
            last = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(first, last, strict=True)) or not size:
                here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
                there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, part.offset, strict=True))
                out[here] = self._part(key, part, dtype)[there]
                found += out[here].numel()
        if found != math.prod(size):
            raise files.damaged(self.folder, f"the parts of {key} do not make a whole")
        return out

    def _part(self, key: str, part: Part, dtype: torch.dtype) -> torch.Tensor:
        if part not in self._kept:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[part] = self._load(key, part, dtype)
        return self._kept[part]

    def _load(self, key: str, part: Part, dtype: torch.dtype) -> torch.Tensor:
        path = self.folder / part.file
        try:
            with open(path, "rb") as file:
                file.seek(part.start)
                tensor = torch.load(io.BytesIO(file.read(part.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise files.unreadable(path, error) from error
        except Exception as error:  # a damaged file raises whatever its bytes happen to ask for
            raise files.damaged(self.folder, f"{key} cannot be read from {part.file}") from error
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != part.shape:
            raise files.damaged(self.folder, f"{part.file} holds something else than {key}")
        return tensor
