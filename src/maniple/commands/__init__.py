"""Commands that have a file of their own, and what all commands share. Nothing heavy is imported before it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from maniple.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output")]


class _Flags:
    """Flags without a type beside them in the help: they take no value."""

    def get_params(self, ctx):
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_Flags, TyperCommand):
    """A command of the line."""


class Group(_Flags, TyperGroup):
    """Commands under a name."""


def print_table(headings: list[str], lines: list[list[str]], numbers: Iterable[int] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in numbers else "left")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def given(*options: tuple[str, object]) -> list[str]:
    """Words of a command line: each option that has a value."""
    return [word for option, value in options if value is not None for word in (option, str(value))]


def check_target(option: str, file: Path) -> None:
    """Raises UserError if what `option` asks for cannot be written to `file`: something is there, or no folder is."""
    try:
        if file.exists():
            raise UserError(f"{option} {file}: it exists already: give another name")
        if not file.absolute().parent.is_dir():
            raise UserError(f"{option} {file}: there is no folder {file.parent}")
    except OSError as error:  # a name that no file can have
        raise UserError(f"{option} {file}: {error.strerror}") from None
