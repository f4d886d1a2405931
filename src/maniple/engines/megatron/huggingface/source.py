"""A folder of Hugging Face weights: what is in it, checked before anything is read, and its tensors one by one."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface import encodings, families
from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.models.huggingface import Quantization

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER = "adapter_config.json"  # transformers would add what it speaks of to the weights
_LARGEST_INDEX = 1 << 28  # bytes
_NUMBERS = ("F32", "F16", "BF16")  # what a weight may be stored as by itself
_MOST_MISSING = 10_000  # tensors, after which no more are looked for
_SCALES = "_scale_inv"  # after the name of a float8 weight


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    file: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]


class Source:
    """The weights of a folder. Files are mapped into memory, and opened once each.

    Raises UserError where a file of the index is missing, cut short, damaged or not in the folder.
    """

    def __init__(self, folder: Path, quantization: Quantization | None = None) -> None:
        self.folder, self.quantization = folder, quantization
        self._stack = ExitStack()
        self.tensors: dict[str, Stored] = {}
        try:
            self._files = {name: self._open(name) for name in self._file_names()}
            for name, file in self._files.items():
                self._list(name, file)
            self._check_index()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, card: ModelCard) -> None:
        """Raises UserError, naming tensors, unless the folder holds what the card says, and nothing else."""
        copies = families.copies(card)
        wanted: dict[str, tuple[int, ...]] = {}
        used: set[str] = set()
        missing: list[str] = []
        wrong: list[str] = []
        for link in (link for chunk in families.chunks(card) for link in chunk.links):
            name, shape = link.name, link.shape
            if name in wanted:  # rows of one tensor
                continue
            if len(missing) > _MOST_MISSING:  # a config.json may describe more than anyone can list
                break
            wanted[name] = shape
            parts = self._parts(name)
            if not all(part in self.tensors for part in parts):
                missing.append(next(part for part in parts if part not in self.tensors))
                continue
            used.update(parts)
            if (fault := self._fault(name, shape)) is not None:
                wrong.append(fault)
        for name, original in copies.items():
            parts = self._parts(name)
            if name in self.tensors and original in wanted:
                used.update(parts)
                if (fault := self._fault(name, wanted[original])) is not None:
                    wrong.append(fault)
        extra = [name for name in self.tensors if name not in used and not families.is_derived(name)]
        if missing:
            mtp = all((families.layer_of(name) or 0) >= card.num_layers for name in missing)
            hint = ": they are all of MTP layers; --mtp drop converts the model without" if mtp else ""
            if extra and not mtp:
                hint = f"; it has {_named(extra)}, which that model has no place for"
            raise UserError(f"{self.folder} lacks {_named(missing)} of the model that its config.json describes{hint}")
        if wrong:
            raise UserError(f"{self.folder}: {wrong[0]}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
        if extra:
            last = card.num_layers + card.num_mtp_layers
            past = all((families.layer_of(name) or 0) >= last for name in extra)
            hint = f": config.json counts {last} layers, with those of MTP" if past else ""
            raise UserError(
                f"{self.folder} has {_named(extra)}, which the model that its config.json describes has no place for"
                + hint
            )

    def leave_out(self, layers: range) -> None:
        """Forgets the tensors of these layers."""
        self.tensors = {name: each for name, each in self.tensors.items() if families.layer_of(name) not in layers}

    def state(self) -> list[list[Any]]:
        """What tells these files from others: where they are, their sizes and times."""
        try:
            found = [(os.path.realpath(self.folder / name), os.stat(self.folder / name)) for name in self._files]
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
        return [[path, each.st_size, each.st_mtime_ns, each.st_ctime_ns] for path, each in found]

    def dtype(self, name: str) -> str:
        """How a tensor is stored, as safetensors names it; the data's where it is quantized."""
        return self.tensors[self._parts(name)[0]].dtype

    def is_quantized(self, name: str) -> bool:
        return len(self._parts(name)) > 1

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A tensor, or its row, as stored; fp32 where it was quantized."""
        data, *scales = (self._load(part, row) for part in self._parts(name))
        if not scales:
            return data
        assert self.quantization is not None
        if self.quantization.kind == "mxfp4":  # of outputs by inputs, where the plain tensor is inputs by outputs
            return encodings.from_mxfp4(data, scales[0]).transpose(-1, -2)
        return encodings.from_fp8_blocks(data, scales[0], self.quantization.block)

    def _parts(self, name: str) -> tuple[str, ...]:
        """The stored tensors that make a tensor: itself, or data and scales."""
        kind = None if self.quantization is None else self.quantization.kind
        if kind == "mxfp4" and f"{name}_blocks" in self.tensors:
            return f"{name}_blocks", f"{name}_scales"
        if kind == "fp8_block" and name in self.tensors and self.tensors[name].dtype == "F8_E4M3":
            return name, name + _SCALES
        return (name,)

    def _fault(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What is wrong with a tensor that is to have that shape; None: nothing."""
        shapes: list[tuple[int, ...]]
        dtypes: list[tuple[str, ...]]
        parts = self._parts(name)
        stored = [self.tensors[part] for part in parts]
        shapes, dtypes = [shape], [_NUMBERS]
        kind = None if self.quantization is None or len(parts) == 1 else self.quantization.kind
        if kind == "mxfp4":
            if len(shape) != 3:
                return f"{name} is in MXFP4 but no stack of matrices"
            experts, inputs, outputs = shape
            if inputs % encodings.MXFP4_BLOCK:
                return f"{name} has {inputs} inputs, which are not whole blocks of {encodings.MXFP4_BLOCK}"
            groups = inputs // encodings.MXFP4_BLOCK
            shapes = [(experts, outputs, groups, encodings.MXFP4_BLOCK // 2), (experts, outputs, groups)]
            dtypes = [("U8",), ("U8",)]
        elif kind is not None:
            assert self.quantization is not None
            if len(shape) != 2:
                return f"{name} is float8 but no matrix"
            shapes = [shape, tuple(-(-n // b) for n, b in zip(shape, self.quantization.block, strict=True))]
            dtypes = [("F8_E4M3",), ("F32", "BF16")]
        for part, found, wanted, types in zip(parts, stored, shapes, dtypes, strict=True):
            if found.shape != wanted:
                return f"{part} has shape {list(found.shape)}, and {list(wanted)} by config.json"
            if found.dtype not in types:
                return f"{part} is stored as {found.dtype}, not as {' or '.join(types)}"
        return None

    def _load(self, name: str, row: int | None) -> torch.Tensor:
        stored = self.tensors[name]
        try:
            file = self._files[stored.file]
            return file.get_tensor(name) if row is None else file.get_slice(name)[row]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(stored.file, error) from error

    def _file_names(self) -> list[str]:
        try:
            there = set(os.listdir(self.folder))
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be read ({error.strerror}): give the folder of a model, with config.json and "
                "safetensors files"
            ) from error
        self._places: dict[str, str] | None = None
        if {INDEX, SINGLE} <= there:
            raise UserError(f"{self.folder} has {INDEX} and {SINGLE}, two sets of weights: move one away")
        if _ADAPTER in there:
            raise UserError(f"{self.folder} has {_ADAPTER}, of a change to its weights: merge that into them first")
        if INDEX not in there:
            if SINGLE not in there:
                others = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth")))
                hint = (
                    f" (it has {others[0]}: pickled weights are not read; save them as safetensors)" if others else ""
                )
                raise UserError(f"{self.folder} has neither {INDEX} nor {SINGLE}{hint}")
            if not files.has(self.folder, SINGLE):
                raise UserError(f"{self.folder / SINGLE} is no file")
            return [SINGLE]
        self._places = _read_places(self.folder / INDEX)
        names = sorted(set(self._places.values()))
        for name in names:
            if name != Path(name).name or name in ("", ".", ".."):
                raise UserError(f"{self.folder / INDEX} names the file {name[:80]!a}, which is not one of its folder")
        absent = [name for name in names if not files.has(self.folder, name)]
        if absent:
            raise UserError(f"{self.folder} lacks {_named(absent)} of its {len(names)} files of weights")
        return names

    def _open(self, name: str) -> Any:
        try:
            with open(self.folder / name, "rb"):  # whose words are better
                pass
        except OSError as error:
            raise files.unreadable(self.folder / name, error) from error
        try:
            return self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> UserError:
        reason = " ".join(str(error).split())
        return UserError(
            f"{self.folder / name} cannot be read ({reason[:160]}): it is cut short or damaged; fetch it anew"
        )

    def _list(self, name: str, file: Any) -> None:
        for key in file.keys():  # noqa: SIM118  (no mapping)
            if key in self.tensors:
                raise UserError(f"{self.folder}: {_named([key])} is in {self.tensors[key].file} and in {name}")
            part = file.get_slice(key)
            self.tensors[key] = Stored(name, part.get_dtype(), tuple(part.get_shape()))

    def _check_index(self) -> None:
        if self._places is None:
            return
        elsewhere = [
            key for key, name in self._places.items() if key not in self.tensors or self.tensors[key].file != name
        ]
        if elsewhere:
            name = self._places[elsewhere[0]]
            key = _named(elsewhere[:1])
            raise UserError(f"{self.folder}: {INDEX} says that {key} is in {name}, which does not hold it")


def _read_places(path: Path) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_LARGEST_INDEX + 1)
        if len(raw) > _LARGEST_INDEX:
            raise ValueError("it is too large")
        found = json.loads(raw)
        places = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("it has no weight_map")
        return places
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no index of weights: {' '.join(str(error).split())[:160]}") from error


def _named(names: list[str]) -> str:
    """The first, which may be a stranger's, and how many more."""
    first = names[0] if names[0].isprintable() and len(names[0]) <= 200 else f"{names[0][:80]!a}..."
    return first + (f" and {len(names) - 1} more" if len(names) > 1 else "")
