"""The index of a checkpoint (torch's `.metadata`, a pickle), read without torch and without running anything.

Whatever a pickle names is built as a plain record here, and only the names that a checkpoint holds are known: a
stranger's index can neither call a function nor import a module. Later torch unpickles the same bytes; by then they
are known to name nothing that acts.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

INDEX = ".metadata"
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu",), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of the whole model, as its parts are stored."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it: `float32`

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Index:
    """tensors: by name. ends: the last byte (exclusive) that the index has in each file."""

    tensors: dict[str, Tensor]
    ends: dict[str, int]


def read_index(folder: Path) -> Index:
    """Raises ValueError saying what is wrong: no such file, another kind of pickle, a tensor without all its parts."""
    try:
        with open(folder / INDEX, "rb") as file:
            root = _Reader(file).load()
        return _index(root)
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise ValueError(str(error) or type(error).__name__) from error


class _Record:
    """Stands for an instance of any of torch's classes: keeps its state, has no behaviour."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


class _BytesRecord(_Record):
    """Stands for `BytesStorageMetadata`, which says by its class alone what it is."""


_PLAIN: dict[tuple[str, str], Callable] = {
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,  # its home in newer Pythons
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _BytesRecord,
}
_RECORDS = {
    *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata")
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return name
        if module == "torch.distributed.checkpoint.metadata" and name in _RECORDS:
            return _Record
        if (module, name) not in _PLAIN:
            raise ValueError(f"it names {module}.{name}, which no checkpoint holds")
        return _PLAIN[module, name]


def _index(root: _Record) -> Index:
    ends: dict[str, int] = {}
    stored: dict[str, set[tuple[int, ...]]] = {}
    for key, place in root["storage_data"].items():
        name, start, length = place["relative_path"], place["offset"], place["length"]
        if place.state.get("transform_descriptors"):
            raise ValueError(f"{key['fqn']} is stored in a form that this version does not read")
        if not (isinstance(name, str) and name == PurePosixPath(name).name and name not in ("", ".", "..")):
            raise ValueError(f"it names the file {name!r}, which is not one of its folder")
        if not (type(start) is type(length) is int and start >= 0 and length >= 0):
            raise ValueError(f"{key['fqn']} has no proper place in {name}")
        ends[name] = max(ends.get(name, 0), start + length)
        stored.setdefault(key["fqn"], set()).add(tuple(key.state.get("offset") or ()))
    tensors = {}
    for key, kind in root["state_dict_metadata"].items():
        if isinstance(kind, _BytesRecord):
            continue
        tensor = Tensor(tuple(kind["size"]), kind["properties"].state[0])
        parts = {tuple(chunk["offsets"]): math.prod(chunk["sizes"]) for chunk in kind["chunks"]}
        if sum(parts.values()) != math.prod(tensor.shape) or not parts.keys() <= stored.get(key, set()):
            raise ValueError(f"{key} was not written whole")
        tensors[key] = tensor
    return Index(tensors, ends)
