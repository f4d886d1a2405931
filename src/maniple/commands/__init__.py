"""Commands that have a file of their own, and what all commands share. Nothing heavy is imported before it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from maniple.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output")]


def file_named(text: str) -> Path:
    """A path of the command line. `Path("")` would be the working directory."""
    if not text:
        raise typer.BadParameter("it is empty: give a file's name")
    return Path(text)


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


def print_table(
    headings: list[str], lines: list[list[str]], numbers: Iterable[int] = (), spare: Iterable[str] = ()
) -> None:
    """numbers: columns that are never cut nor broken; spare: headings of those that a narrow terminal does without, the
    first before the next, but for any that there is room for once the others are gone. A line beneath names them."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    shown, numbers, left_out = list(range(len(headings))), set(numbers), []
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]

    def fits(*more: int) -> bool:
        columns = [*shown, *more]
        return sum(widths[index] for index in columns) + 2 * (len(columns) - 1) <= console.width

    for heading in spare:
        if fits():
            break
        shown.remove(headings.index(heading))
        left_out.append(heading)
    for heading in reversed(left_out):
        if fits(headings.index(heading)):
            shown.append(headings.index(heading))
    shown.sort()
    left_out = [heading for heading in left_out if headings.index(heading) not in shown]
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for index in shown:
        number = index in numbers
        table.add_column(headings[index], justify="right" if number else "left", no_wrap=number)
    for line in lines:
        table.add_row(*(line[index] for index in shown))
    console.print(table)
    if left_out:
        print(f"(a wider terminal also shows: {', '.join(left_out)})")


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Says on a terminal's standard error, while it takes, what is waited for; the function says what of it."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield lambda part: None
        return
    with console.status(what, spinner="line") as status:  # in ASCII
        yield lambda part: status.update(f"{what}: {part}")


def given(*options: tuple[str, object]) -> list[str]:
    """Words of a command line: each option that has a value."""
    return [word for option, value in options if value is not None for word in (option, str(value))]


def check_target(option: str, file: Path) -> None:
    """Raises UserError if what `option` asks for cannot be written to `file`, before any work: something is there, no
    folder is, or the folder takes no file."""
    folder = file.absolute().parent
    try:
        if not folder.is_dir():
            raise UserError(f"{option} {file}: there is no folder {file.parent}: give another name")
        with suppress(FileNotFoundError):
            file.lstat()  # unlike `exists` it sees links to nowhere, and names that no file can have
            what = "it is a folder: give a file's name" if file.is_dir() else "it exists already: give another name"
            raise UserError(f"{option} {file}: {what}")
        with TemporaryFile(dir=folder):  # the surest test of rights, quotas and read-only mounts
            pass
    except OSError as error:
        raise UserError(f"{option} {file}: it cannot be written: {error.strerror}: give another name") from None


def check_targets(*targets: tuple[str, Path | None]) -> None:
    """`check_target` of each (option, file) that is given; UserError too if two mean the same file."""
    taken: dict[Path, str] = {}
    for option, file in targets:
        if file is None:
            continue
        check_target(option, file)
        meant = file.resolve()  # one file has many spellings
        if meant in taken:
            raise UserError(f"{taken[meant]} and {option} are both {meant}: give one another name")
        taken[meant] = option
