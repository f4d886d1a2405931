"""`maniple config show`: every effective value of a job and where it came from."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maniple.config.load import Loaded


def as_data(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """`{"train.steps": {"value": 100, "from": "file", "source": "demo.yaml:12"}, ...}`, in the schema's order."""
    return {
        key: {"value": value, "from": loaded.origin[key].kind, "source": loaded.origin[key].source}
        for key, value in loaded.values().items()
    }


def as_table(loaded: Loaded) -> Table:
    """A table of key, value (as JSON) and origin; defaults are dim, so that what was set stands out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for key, value in loaded.values().items():
        origin = loaded.origin[key]
        style = "dim" if origin.kind == "default" else ""
        table.add_row(
            Text(key, style),
            Text(json.dumps(value, ensure_ascii=False), style),
            Text(str(origin), style),
        )
    return table


def show(loaded: Loaded, *, as_json: bool) -> None:
    """Prints the job's values and origins to standard output: a table, or JSON."""
    if as_json:
        print(json.dumps(as_data(loaded), indent=2, ensure_ascii=False))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(as_table(loaded))
