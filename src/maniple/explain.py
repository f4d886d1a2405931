"""What is wrong with plain data that does not fit a pydantic model, in one line for the one who wrote it."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text (numbers and dates in quotes)",
    "path": "a path",
    "list": "a list",
    "dict": "a mapping of keys",
    "model": "a mapping of keys",
}
_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}


def explained(error: ValidationError, prefix: str = "") -> str:
    """The first fault of a pydantic error as `prefix.key: expected ..., got ...`, in one line."""
    fault = error.errors(include_url=False)[0]
    key = prefix
    for part in fault["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    place = f"{key}: " if key else ""  # a fault of the whole has none
    kind, context = fault["type"], fault.get("ctx", {})
    got = f", got {shown(fault['input'])}"
    if kind == "value_error":
        return f"{place}{fault['msg'].removeprefix('Value error, ')}"
    if kind == "missing":
        return f"{place}this value is needed and not given"
    if kind == "extra_forbidden":
        return f"{place}this key is not known"
    if kind in _BOUNDS:
        (bound,) = context.values()
        return f"{place}expected {_BOUNDS[kind]} {bound}{got}"
    if kind == "literal_error":
        return f"{place}expected {context['expected']}{got}"
    if kind == "string_pattern_mismatch":
        return f"{place}expected letters, digits, '.', '_' and '-', the first a letter or digit{got}"
    if kind == "list_type" and isinstance(value := fault["input"], str | int | float) and not isinstance(value, bool):
        got += f"; write {key}=[{shown(value).strip("'")}]"
    expected = _EXPECTED.get(kind.partition("_")[0])
    return f"{place}expected {expected}{got}" if expected else f"{place}{fault['msg']}{got}"


def shown(value: Any) -> str:
    """A value as YAML or Python has it, in 60 letters at most."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
