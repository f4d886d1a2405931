"""Regions of a checkpoint's tensors, read from its files without a process group, whatever layout wrote them."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.index import Index, Part


class Stored:
    """The tensors of a checkpoint folder, all of floating point. The parts that were read last stay in memory.

    Raises UserError where a file does not hold what the index says.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._kept: dict[Part, torch.Tensor] = {}

    def read(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """`size` numbers of tensor `key` from `offset` on; not to be changed."""
        dtype = getattr(torch, self.index.tensors[key].dtype)
        common = ((part, _common(offset, size, part)) for part in self.index.parts[key])
        windows = {part: window for part, window in common if window is not None}
        # the next read is of the same place, or of the next expert, which may be in the same parts
        self._kept = {part: tensor for part, tensor in self._kept.items() if part in windows}
        for part in windows:
            if part not in self._kept:
                self._kept[part] = self._load(key, part, dtype)
            if (part.offset, part.shape) == (offset, size):
                return self._kept[part]
        out = torch.full(size, torch.nan, dtype=dtype)  # a place that no part fills is not finite
        for part, window in windows.items():
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(window, offset, strict=True))
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(window, part.offset, strict=True))
            out[here] = self._kept[part][there]
        if sum(math.prod(b - a for a, b in window) for window in windows.values()) != math.prod(size):
            raise files.damaged(self.folder, f"the parts of {key} do not make a whole")
        return out

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


def _common(offset: tuple[int, ...], size: tuple[int, ...], part: Part) -> list[tuple[int, int]] | None:
    """First and last (exclusive) of what a region and a part have in common, by axis; None: nothing."""
    sides = zip(offset, size, part.offset, part.shape, strict=True)
    window = [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]
    return window if all(first < last for first, last in window) else None
