"""A `config.json` as a strict dictionary: fields are asked for by name and type, and what nobody asks for is refused.

What is wrong with a file is said in one line that names the field and its value, as `UserError`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maniple.errors import UserError

_MOST_BYTES = 4 << 20  # released files have a few kB
_MOST_COUNT = 1 << 40
_MOST_NUMBER = 1e15
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")


def read_config(folder: Path) -> dict[str, Any]:
    """`folder/config.json` as a dictionary.

    Raises UserError, in one line, if it is missing, larger than 4 MiB, or anything but one strict JSON object (a name
    given twice, NaN and Infinity are refused too).
    """
    path = Path(folder) / "config.json"
    if os.path.isfile(folder):  # Path's own would raise for a name that is too long
        raise UserError(
            f"{folder} is a file: give the folder of a Hugging Face model, with config.json and its weights"
        )
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: give the folder of a Hugging Face model on this machine; nothing is downloaded"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: that is no model's config.json")
    try:
        config = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(f"{path} is not JSON: {reason}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object but {shown(config)}")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return out


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def shown(value: object) -> str:
    """`value` as at most 60 characters of one line."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list | tuple):
        if len(value) > 8 or any(isinstance(item, list | tuple | dict) for item in value):
            return f"a list of {len(value)} items"
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """The fields of one JSON object, each to be taken by its name; `finish` refuses those that were not."""

    def __init__(self, values: dict[str, Any], where: str = "config.json"):
        self.where = where
        self._values = values
        self._taken: set[str] = set()

    def refuse(self, name: str, supported: str) -> UserError:
        """The error to raise for the value of field `name`, or for its lack."""
        if not self.has(name):
            return self._missing(name)
        return UserError(f"{self.where} has {name} = {shown(self._values.get(name))}; supported: {supported}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def take(self, name: str) -> Any:
        """The value as it is; None if it is missing or null."""
        self._taken.add(name)
        return self._values.get(name)

    def integer(self, *names: str, low: int = 1, default: int | None = None) -> int:
        """A whole number under any of its names, which must agree; `default` None: it must be there."""
        found = {name: value for name in names if (value := self.take(name)) is not None}
        for name, value in found.items():
            if type(value) is not int or not low <= value <= _MOST_COUNT:
                raise self.refuse(name, f"a whole number, {low} or more")
        if len(set(found.values())) > 1:
            said = " and ".join(f"{name} = {value}" for name, value in found.items())
            raise UserError(f"{self.where} has {said}, which are one thing: make them equal")
        if not found and default is None:
            raise self._missing(" or ".join(names))
        return next(iter(found.values()), default)  # type: ignore[return-value]

    def integer_or_null(self, name: str) -> int | None:
        """A whole number, or null; but it must be there."""
        if name not in self._values:
            raise self._missing(name)
        return self.integer(name) if self.has(name) else self.take(name)

    def number(self, name: str, *, default: float | None = None, or_zero: bool = False) -> float:
        """A finite number above zero (or zero)."""
        value = self.take(name)
        if value is None:
            if default is None:
                raise self._missing(name)
            return default
        if type(value) not in (int, float) or not (0 < value < _MOST_NUMBER or (or_zero and value == 0)):  # NaN is not
            raise self.refuse(name, "a number, 0 or more" if or_zero else "a number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self.take(name)
        if value is None:
            if default is None:
                raise self._missing(name)
            return default
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def choice(self, name: str, *supported: str) -> str:
        value = self.take(name)
        if value is None:
            raise self._missing(name)
        if value not in supported:
            raise self.refuse(name, " or ".join(map(shown, supported)))
        return value

    def only(self, **supported: Any) -> None:
        """Each field, if it is there and not null, has this one value (a tuple: one of these)."""
        for name, values in supported.items():
            value = self.take(name)
            options = values if isinstance(values, tuple) else (values,)
            same = (isinstance(value, bool) == isinstance(option, bool) and value == option for option in options)
            if value is not None and not any(same):
                raise self.refuse(
                    name, " or ".join(shown(option) for option in options if option is not None) or "null"
                )

    def ignore(self, names: Collection[str]) -> None:
        """These change nothing."""
        self._taken.update(names)

    def finish(self) -> None:
        """Refuses the first field, in alphabetical order, that was not taken."""
        unknown = sorted((name for name in self._values if name not in self._taken), key=str)
        if unknown:
            name = unknown[0]
            plain = name if isinstance(name, str) and _NAME.fullmatch(name) else shown(name)
            raise UserError(
                f"{self.where} has {plain} = {shown(self._values[name])}, which maniple does not know: "
                "it could change the model"
            )

    def _missing(self, name: str) -> UserError:
        return UserError(f"{self.where} lacks {name}: it is needed to know the model")


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a checkpoint are stored: `block` (rows, columns) of a matrix shares one scale."""

    kind: Literal["fp8_block", "mxfp4"]
    block: tuple[int, int]


def quantization_of(config: dict[str, Any]) -> Quantization | None:
    """The storage that `quantization_config` names: e4m3 with a scale a block, MXFP4, or None if there is none.

    Raises UserError for every other kind (AWQ, GPTQ, bitsandbytes, compressed-tensors, fp8 with a scale a tensor, ...).
    """
    for name in ("compression_config", "quantization"):
        if config.get(name) is not None:
            raise UserError(f"config.json has {name}: supported are unquantized weights, fp8 in blocks, and mxfp4")
    stored = config.get("quantization_config")
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise UserError(f"config.json has quantization_config = {shown(stored)}; supported: an object, or none")
    fields = Fields(stored, "config.json's quantization_config")
    method = fields.choice("quant_method", "fp8", "mxfp4")
    fields.ignore(("modules_to_not_convert", "ignored_layers", "dequantize"))
    if method == "mxfp4":
        fields.finish()
        return Quantization("mxfp4", (1, 32))
    block = fields.take("weight_block_size")
    pair = isinstance(block, list) and len(block) == 2 and all(type(b) is int and 1 <= b <= 1 << 20 for b in block)
    if not pair:
        raise fields.refuse("weight_block_size", "two whole numbers, such as [128, 128]")
    fields.only(fmt=("e4m3", "float8_e4m3fn"), activation_scheme="dynamic", scale_fmt=("float", "ue8m0"))
    fields.finish()
    return Quantization("fp8_block", (block[0], block[1]))
