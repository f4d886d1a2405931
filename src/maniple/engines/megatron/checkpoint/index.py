"""The index of a checkpoint (torch's `.metadata`, a pickle), read without torch and without running anything.

Whatever a pickle names is built as a plain record or value here, and only the names, the opcodes and the nesting that a
checkpoint's index has are known: a stranger's can neither call a function, import a module nor change a class, nor
make a key so deep that hashing it overflows the stack. Later torch unpickles the same bytes; by then they are known
to hold nothing that acts.
"""

from __future__ import annotations

import io
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
class Part:
    """A part of a tensor, `shape` numbers from `offset` on, and the bytes of `file` that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Index:
    """tensors and their parts: by name. ends: the last byte (exclusive) that the index has in each file."""

    tensors: dict[str, Tensor]
    parts: dict[str, list[Part]]
    ends: dict[str, int]


def read_index(folder: Path) -> Index:
    """Raises ValueError saying what is wrong: no such file, another kind of pickle, a tensor without all its parts."""
    try:
        with open(folder / INDEX, "rb") as file:
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST >> 20} MiB")
        return _index(_Reader(io.BytesIO(raw)).load())
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from error


class _Record:
    """Stands for an instance of any of torch's classes: keeps its state, has no behaviour."""

    __slots__ = ("state",)
    state: Any

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


class _BytesRecord(_Record):
    """Stands for `BytesStorageMetadata`, which says by its class alone what it is."""

    __slots__ = ()


def _path(*parts: Any) -> PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise ValueError("a path is not of text")
    return PurePosixPath(*parts)


def _layout(name: Any) -> str:
    if type(name) is not str:
        raise ValueError("a tensor's layout is not a name")
    return name


def _memory_format(number: Any) -> int:
    if type(number) is not int:
        raise ValueError("a memory format is not a number")
    return number


def _size(dims: Any) -> tuple[int, ...]:
    if not _is_dims(dims):
        raise ValueError("a tensor's shape is not of whole numbers")
    return dims


def _is_dims(dims: Any) -> bool:
    return type(dims) is tuple and len(dims) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 1 << 48 for n in dims)


def _new_dict() -> dict:
    return {}


_METADATA = "torch.distributed.checkpoint.metadata"
_CALLS: dict[tuple[str, str], Callable] = {
    ("collections", "OrderedDict"): _new_dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # its home in newer Pythons
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
}
_RECORDS: dict[tuple[str, str], type[_Record]] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    (_METADATA, "BytesStorageMetadata"): _BytesRecord,
    **dict.fromkeys(
        (
            (_METADATA, name)
            for name in (
                *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
                *("TensorProperties", "TensorStorageMetadata"),
            )
        ),
        _Record,
    ),
}
_LARGEST = 1 << 30  # bytes of an index; one of 100,000 tensors has some 50 MB
_MOST_DIMS = 64
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    pickle.EMPTY_TUPLE,
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


_TUPLES = pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3


def _flat(make: Callable[[Any], None]) -> Callable[[Any], None]:
    """A tuple's opcode for tuples of plain values, and short ones that hold such."""

    def checked(reader: Any) -> None:
        make(reader)
        inner = [item for item in reader.stack[-1] if type(item) is tuple]
        if inner and (len(reader.stack[-1]) > 3 or any(type(item) is tuple for each in inner for item in each)):
            raise ValueError("its tuples are nested too deep")

    return checked


class _Opcodes(dict):
    def __missing__(self, code: int) -> Any:
        raise ValueError(f"it has the opcode 0x{code:02x}, which no index needs")


class _Reader(pickle._Unpickler):  # the one in Python: what each opcode does can be narrowed
    """Opcodes that an index needs, each with just the operands that it has there."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return name
        known = _CALLS.get((module, name)) or _RECORDS.get((module, name))
        if known is None:
            raise ValueError(f"it names {module}.{name}, which no checkpoint holds")
        return known

    def _new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not (isinstance(kind, type) and issubclass(kind, _Record) and arguments == ()):
            raise ValueError("it makes something else than an empty record")
        self.append(kind())

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function not in _CALLS.values() or type(arguments) is not tuple:
            raise ValueError("it calls what is not to be called")
        self.append(function(*arguments))

    def _build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, _Record) or hasattr(record, "state"):
            raise ValueError("it changes what is not a new record")
        if not (type(state) is tuple or (type(state) is dict and not any(key.startswith("__") for key in state))):
            raise ValueError("a record's state is not one")
        record.state = state

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def _set_many(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict:
            raise ValueError("it sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not _is_place(key):
                raise ValueError("the key of a dictionary is neither a name nor the place of a tensor")
            target[key] = value

    dispatch = _Opcodes(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
        | {code[0]: _flat(pickle._Unpickler.dispatch[code[0]]) for code in _TUPLES}
        | {
            pickle.NEWOBJ[0]: _new,
            pickle.REDUCE[0]: _call,
            pickle.BUILD[0]: _build,
            pickle.SETITEM[0]: _set_one,
            pickle.SETITEMS[0]: _set_many,
        }
    )


def _is_place(key: Any) -> bool:
    """Whether it is a `MetadataIndex` as torch makes it; torch hashes all of its fields."""
    if type(key) is not _Record or type(state := getattr(key, "state", None)) is not dict:
        return False
    return (
        type(state.get("fqn")) is str
        and (state.get("offset") is None or _is_dims(state["offset"]))
        and type(state.get("index")) in (int, type(None))
    )


def _index(root: Any) -> Index:
    ends: dict[str, int] = {}
    stored: dict[str, dict[tuple[int, ...], tuple[str, int, int]]] = {}
    for key, place in root["storage_data"].items():
        name, start, length = place["relative_path"], place["offset"], place["length"]
        if not _is_place(key):
            raise ValueError(f"the place {key!r} is none")
        if place.state.get("transform_descriptors"):
            raise ValueError(f"{key['fqn']} is stored in a form that this version does not read")
        if not (isinstance(name, str) and name == PurePosixPath(name).name and name not in ("", ".", "..")):
            raise ValueError(f"it names the file {name!r}, which is not one of its folder")
        if not (type(start) is type(length) is int and start >= 0 and length >= 0):
            raise ValueError(f"{key['fqn']} has no proper place in {name}")
        ends[name] = max(ends.get(name, 0), start + length)
        stored.setdefault(key["fqn"], {})[key.state.get("offset") or ()] = name, start, length
    tensors, parts = {}, {}
    for key, kind in root["state_dict_metadata"].items():
        if type(key) is not str:
            raise ValueError("the name of a tensor is not text")
        if isinstance(kind, _BytesRecord):
            continue
        tensor = Tensor(_size(kind["size"]), kind["properties"].state[0])
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{key} is of an unknown type")
        sizes = {_size(chunk["offsets"]): _size(chunk["sizes"]) for chunk in kind["chunks"]}
        places = stored.get(key, {})
        if sum(map(math.prod, sizes.values())) != math.prod(tensor.shape) or not sizes.keys() <= places.keys():
            raise ValueError(f"{key} was not written whole")
        tensors[key] = tensor
        parts[key] = [Part(offset, size, *places[offset]) for offset, size in sizes.items()]
    return Index(tensors, parts, ends)
