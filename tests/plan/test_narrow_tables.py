"""Tables on narrow terminals: whole cells, and a line that names what is left out."""

from __future__ import annotations

import pytest
import rich.console

from maniple.commands import print_table
from maniple.plan import search_report

_WIDE = ["1,024", "8", "16", "8", "2", "64", "8", "64", "8", "16 a chunk", "0.0191", "2,813,440", "107,053", "*"]
_WIDE += ["25.5%", "287.6", "100%", "Et*3|t*3|(tt|)*21,L"]
SEARCH = search_report.HEADINGS, _WIDE, search_report.WORDS, search_report.SPARE


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a table of one row prints at a width."""
    made = rich.console.Console

    def text(width: int, headings: list[str], cells: list[str], words: tuple[str, ...], spare: tuple[str, ...]) -> str:
        monkeypatch.setattr(rich.console, "Console", lambda **options: made(**(options | {"width": width})))
        numbers = [at for at, heading in enumerate(headings) if heading not in words]
        print_table(headings, [cells], numbers, spare)
        return capsys.readouterr().out

    return text


@pytest.mark.parametrize("width", [200, 80, 60, 50, 40, 30])
@pytest.mark.parametrize("table", [SEARCH], ids=["search"])
def test_columns_are_whole_or_named(table, width, shown):
    lines = shown(width, *table).splitlines()
    headings, cells, *_ = table
    assert max(map(len, lines[:2])) <= width
    left_out = (
        lines[2].removeprefix("(a wider terminal also shows: ").removesuffix(")").split(", ") if lines[2:] else []
    )
    for heading, cell in zip(headings, cells, strict=True):
        assert heading in left_out or (f" {heading} " in f" {lines[0]} " and f" {cell} " in f" {lines[1]} ")


def test_layouts_that_differ_in_etp_alone_look_different_in_80_columns(shown):
    assert " ETP " in shown(80, *SEARCH).splitlines()[0]
