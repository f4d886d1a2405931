"""From files and command line to one typed job, with where every value came from.

Precedence: command line > the job file > what it extends > the schema's default. It goes by what was *set*: a file that
sets a key to its default still beats the preset it extends. Sections and `model.overrides` merge key by key; any other
value, lists included, is replaced whole.

`extends:` names one or several files, relative to the file that says so, or presets shipped with Maniple; of several,
the later wins. A preset is an ordinary job file in `presets/`.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from maniple import yamlfile
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.explain import explained, shown
from maniple.models.card import ModelCard

PRESETS = Path(__file__).parent / "presets"
_OVERRIDES = "model.overrides"  # the one free-form value: it has the shape of a ModelCard


@dataclass(frozen=True)
class Origin:
    """Where a value came from: `source` is FILE:LINE for files and presets, else empty."""

    kind: Literal["default", "preset", "file", "cli"]
    source: str = ""

    def __str__(self) -> str:
        return {"default": "default", "cli": "command line"}.get(self.kind) or f"{self.kind} {self.source}"


@dataclass(frozen=True)
class Loaded:
    """`origin` has an entry for every effective value, by dotted key (`train.steps`, `model.overrides.moe.topk`)."""

    config: TrainConfig
    origin: dict[str, Origin]

    def values(self) -> dict[str, Any]:
        """Every effective value by dotted key, in the schema's order, as plain JSON data."""
        return dict(_leaves(self.config.model_dump(mode="json"), TrainConfig))


def load(path: Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Reads the job file at `path` (None: defaults only) and applies `a.b.c=value` overrides, the last one winning.

    Raises UserError, in one line with the place, for an unknown key, a wrong type, a file that cannot be read, a
    cycle of `extends`, or an override that is not `key=value`.
    """
    merged = _Merged()
    if path is not None:
        for kind, document, name in _layers(Path(path), "file", ()):
            merged.add(document, kind, name)
    for text in overrides:
        merged.add(_override(text), "cli", "command line")
    try:
        config = TrainConfig.model_validate_json(json.dumps(merged.tree()), strict=True)
    except ValidationError as error:
        raise UserError(f"{path or 'command line'}: {explained(error)}") from None
    origins = merged.origins()
    _refuse_unread(config, origins)
    effective = _leaves(config.model_dump(mode="json"), TrainConfig)
    return Loaded(config, {key: origins.get(key, Origin("default")) for key, _ in effective})


_RANKS = {"default": 0, "preset": 1, "file": 2, "cli": 3}


def _refuse_unread(config: TrainConfig, origins: dict[str, Origin]) -> None:
    """UserError for a key of `data` that somebody set and the job would not read.

    Not if what makes it idle was set by somebody who knew of it: the command line overrules a file, a file a preset.
    """
    data = config.data
    only_split = "cuts data.train into parts, and data.validation is given: leave one of them out"
    idle = [
        ("split", data.source != "megatron", "source", f"is read with data.source megatron only, not {data.source}"),
        ("split", bool(data.validation), "validation", only_split),
        ("corpus_bytes", data.source != "python", "source", f"is read with data.source python only, not {data.source}"),
    ]
    for name, is_idle, by, why in idle:
        origin = origins.get(f"data.{name}")
        cause = origins.get(f"data.{by}", Origin("default"))
        if is_idle and origin is not None and _RANKS[origin.kind] >= _RANKS[cause.kind]:
            raise UserError(f"{origin.source or origin}: data.{name} {why}")


def presets() -> list[str]:
    """Names of the shipped presets, for `extends`."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


# --- layers -----------------------------------------------------------------------------------------------------------


def _layers(
    path: Path, kind: Literal["preset", "file"], above: tuple[Path, ...]
) -> Iterator[tuple[Literal["preset", "file"], yamlfile.Document, str]]:
    """The file at `path` after everything it extends, lowest precedence first."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise UserError(f"{path}: {error}") from None
    if real in above:
        chain = " -> ".join(file.name for file in (*above[above.index(real) :], real))
        raise UserError(f"{path}: extends itself: {chain}; break the cycle")
    name = path.name if path.parent == PRESETS else str(path)
    document = yamlfile.read(path)
    if document.data is None:
        raise UserError(f"{path}: empty; a job file sets at least one key")
    if not isinstance(document.data, dict):
        raise UserError(f"{path}: expected a mapping of keys at the top, got {shown(document.data)}")
    data = dict(document.data)
    if "extends" in data:
        place = f"{name}:{document.lines['extends']}: extends"
        for base in _bases(data.pop("extends"), path, place):
            yield from _layers(base, "preset", (*above, real))
    yield kind, yamlfile.Document(data, document.lines), name


def _bases(value: Any, path: Path, place: str) -> list[Path]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{place}: expected a file, a preset, or a list of them, got {shown(value)}")
    found = []
    for name in names:
        is_file = "/" in name or name.endswith((".yaml", ".yml"))
        base = Path(os.path.normpath(path.parent / name)) if is_file else PRESETS / f"{name}.yaml"
        if not base.exists():
            near = difflib.get_close_matches(name, presets(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"shipped presets: {', '.join(presets())}"
            raise UserError(f"{place}: no such {'file' if is_file else 'preset'} {name!r}; {hint}")
        found.append(base)
    return found


def _override(text: str) -> yamlfile.Document:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"command line: expected key=value, as in train.steps=100, got {text!r}")
    data = yamlfile.parse(value, f"command line: {key.strip()}").data
    for part in reversed(key.strip().split(".")):
        data = {part: data}
    return yamlfile.Document(data, {})


class _Merged:
    """Values by dotted key, each with its origin; what is added later wins."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, Origin]] = {}

    def add(self, document: yamlfile.Document, kind: Literal["preset", "file", "cli"], name: str) -> None:
        def place(key: str) -> str:
            return f"{name}:{document.lines[key]}" if key in document.lines else name

        for key, value in _checked(document.data, TrainConfig, "", place):
            clash = [old for old in self._values if f"{old}.".startswith(f"{key}.") or f"{key}.".startswith(f"{old}.")]
            for old in clash:
                del self._values[old]
            self._values[key] = value, Origin(kind, "" if kind == "cli" else place(key))

    def tree(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, (value, _) in self._values.items():
            *sections, last = key.split(".")
            at = out
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = value
        return out

    def origins(self) -> dict[str, Origin]:
        return {key: origin for key, (_, origin) in self._values.items()}


# --- the schema's keys and types --------------------------------------------------------------------------------------


def _section(field: FieldInfo, key: str) -> type[BaseModel] | None:
    """The model behind a key that holds keys of its own, or None for a plain value."""
    if key == _OVERRIDES:
        return ModelCard
    kind = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # MLA | None
        kind = next(
            (arg for arg in typing.get_args(kind) if isinstance(arg, type) and issubclass(arg, BaseModel)), kind
        )
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _checked(data: dict[str, Any], model: type[BaseModel], prefix: str, place) -> Iterator[tuple[str, Any]]:
    """Yields the plain values of a nested mapping by dotted key; UserError for an unknown key or a wrong type."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        field = model.model_fields.get(name)
        if field is None:
            raise UserError(f"{place(key)}: unknown key {key!r}; {_nearest(name, model, prefix)}")
        section = _section(field, key)
        if section is not None and isinstance(value, dict):
            yield from _checked(value, section, f"{key}.", place)
        elif section is not None and not (value is None and not isinstance(field.annotation, type)):
            raise UserError(f"{place(key)}: {key}: expected a mapping of keys, got {shown(value)}")
        else:
            try:
                _adapter(model, name).validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                raise UserError(f"{place(key)}: {explained(error, key)}") from None
            except TypeError:
                raise UserError(f"{place(key)}: {key}: expected plain data, got {shown(value)}") from None
            yield key, value


@functools.cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter:
    return TypeAdapter(model.model_fields[name].rebuild_annotation(), config=ConfigDict(allow_inf_nan=False))


def _leaves(data: dict[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        section = _section(model.model_fields[name], key)
        if section is not None and value:
            yield from _leaves(value, section, f"{key}.")
        else:
            yield key, value


@functools.cache
def _all_keys() -> tuple[str, ...]:
    def walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            key = f"{prefix}{name}"
            yield key
            section = _section(field, key)
            if section is not None:
                yield from walk(section, f"{key}.")

    return tuple(walk(TrainConfig, ""))


# What other programs and papers call a key. One with a section is meant in that section only.
_ALIASES = {
    "tp": "parallel.tensor_parallel_size",
    "pp": "parallel.pipeline_parallel_size",
    "vpp": "parallel.virtual_pipeline_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
    "sp": "parallel.sequence_parallel",
    "lr": "optimizer.learning_rate",
    "min_lr": "optimizer.min_learning_rate",
    "wd": "optimizer.weight_decay",
    "mbs": "train.micro_batch_size",
    "gbs": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "train_iters": "train.steps",
    "max_steps": "train.steps",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "save_every": "checkpoint.save_interval",
    "checkpoint.every": "checkpoint.save_interval",
    "checkpoint.interval": "checkpoint.save_interval",
    "eval_every": "train.eval_interval",
    "train.interval": "train.eval_interval",
}
_SHORTEST = 3  # letters of a word that similar ones are looked for


def _nearest(name: str, model: type[BaseModel], prefix: str) -> str:
    """Names the valid key that was probably meant: one of another name, else the same name elsewhere, else a similar
    one here, else anywhere."""
    alias = _ALIASES.get(f"{prefix}{name}") or _ALIASES.get(name.lower())
    near = [alias] if alias else [key for key in _all_keys() if key.rpartition(".")[2] == name][:2]
    if not near and len(name) >= _SHORTEST:
        here = [f"{prefix}{near}" for near in difflib.get_close_matches(name, list(model.model_fields), n=1)]
        last = {key.rpartition(".")[2]: key for key in reversed(_all_keys())}
        near = here or [last[word] for word in difflib.get_close_matches(name, list(last), n=1)]
    if near:
        return f"did you mean {' or '.join(repr(key) for key in near)}?"
    return f"valid keys here: {', '.join(model.model_fields)}"
