"""YAML for job files and model cards: plain data only, each key once, and the line of every key.

A stricter reading than PyYAML's safe one, because a job file decides what a thousand GPUs do: a repeated key, an alias
or merge key (`extends` is the way to share) and a key that is not text are errors; dates stay text; and `1e-3` is a
number, as in YAML 1.2, where PyYAML makes it text. Numbers that YAML 1.1 means otherwise than they look (`1:30` is 90,
`012` is 10, `2024_01` is 202401) are errors; `1_000_000`, `0x10` and `0b1` are what they look like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maniple.errors import UserError

_FLOAT = "tag:yaml.org,2002:float"
_INT = "tag:yaml.org,2002:int"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
_LOOKS_OTHERWISE = re.compile(r"[-+]?0[0-9_]|.*:|.*_(?![0-9]{3}(?![0-9]))|[-+]?([0-9]{4,}|)_")
_LARGEST = 1 << 20  # bytes of a file: far past any, and a wrong path (a dataset, /dev/zero) costs no memory


@dataclass(frozen=True)
class Document:
    """`data` is what the text says; `lines` gives the 1-based line of every mapping key by its dotted path."""

    data: Any
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read here; use extends", mark)
        return super().compose_node(parent, index)

    def construct_number(self, node):
        text = node.value
        if _LOOKS_OTHERWISE.match(text):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{text} is read as a number in more than one way: write it plainly, or in quotes if it is text",
                node.start_mark,
            )
        return self.construct_yaml_float(node) if node.tag == _FLOAT else self.construct_yaml_int(node)

    def construct_mapping(self, node, deep=False):
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _MERGE or not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if not isinstance(self.construct_object(key), str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key must be text, and {key.value!r} is not", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def parse(text: str, where: str) -> Document:
    """Reads one YAML document; `where` names it in errors. Raises UserError, in one line, for anything unreadable."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            data = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        place = f"{where}:{mark.line + 1}" if mark and "\n" in text else where
        raise UserError(f"{place}: {problem}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply to read") from None
    except ValueError as error:  # e.g. an integer of thousands of digits
        raise UserError(f"{where}: {error}") from None
    lines: dict[str, int] = {}
    if root is not None:
        _note_lines(root, "", lines)
    return Document(data, lines)


def read(path: Path, what: str = "job file") -> Document:
    """Reads a YAML file. Raises UserError for a file that is missing, a folder, not readable, or not UTF-8 YAML.

    what: it should be, in errors.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"{path}: larger than {_LARGEST >> 20} MiB, so no {what}; give the path of a YAML file")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a {what} (YAML)") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, not a {what}; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse(text, str(path))


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            lines[path] = key.start_mark.line + 1
            _note_lines(value, f"{path}.", lines)
