"""Tables on narrow terminals: whole cells, and a line that names what is left out."""

from __future__ import annotations

import pytest
import rich.console

from maniple.commands import print_table
from maniple.plan import report, scaling, search_report

_WIDE = ["1,024", "8", "16", "8", "2", "64", "8", "64", "8", "16 a chunk", "0.0191", "2,813,440", "107,053", "*"]
_WIDE += ["25.5%", "287.6", "100%", "Et*3|t*3|(tt|)*21,L"]
_RANK = ["15 *", "E 0-1 · 8-9 · 16-17 · 24-25 · 32-33 · 40-41", "12.34B", *["104.56"] * 6, "1,139.77", "100%"]
_POINT = ["strong", "131,072", "65,536", "1,024", "0.0191", "107,053", "100.0%", "10%", "1,164.0", "yes"]
SEARCH = search_report.HEADINGS, _WIDE, search_report.WORDS, search_report.spare([_WIDE])

_HEADINGS = ["rank", "holds", "parameters", "weights", "gradients", "optimizer", "activations", "working", "device"]
RANKS = [*_HEADINGS, "total GiB", "of GPU"], _RANK, ("rank", "holds"), report.SPARE
SCALING = scaling.HEADINGS, _POINT, ("scaling", "fits"), scaling.SPARE


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
@pytest.mark.parametrize("table", [SEARCH, RANKS, SCALING], ids=["search", "ranks", "scaling"])
def test_columns_are_whole_or_named(table, width, shown):
    lines = shown(width, *table).splitlines()
    headings, cells, *_ = table
    assert max(map(len, lines[:2])) <= width
    left_out = (
        lines[2].removeprefix("(a wider terminal also shows: ").removesuffix(")").split(", ") if lines[2:] else []
    )
    for heading, cell in zip(headings, cells, strict=True):
        assert heading in left_out or (f" {heading} " in f" {lines[0]} " and f" {cell} " in f" {lines[1]} ")


def test_a_column_comes_back_where_there_is_room_once_wider_ones_are_gone(shown):
    headings, cells = ["a", "wide", "b", "last"], ["1", "x" * 40, "2", "3"]
    first, *_, said = shown(30, headings, cells, (), ("b", "wide", "last")).splitlines()
    assert first.split() == ["a", "b", "last"]
    assert said == "(a wider terminal also shows: wide)"


def test_sizes_that_are_one_in_every_row_go_first():
    row = dict(zip(search_report.HEADINGS, _WIDE, strict=True))
    usual = search_report.spare([list((row | {"CP": "2", "ETP": "2"}).values())])
    assert search_report.spare([list((row | {"CP": "2", "ETP": "1"}).values())])[0] == "ETP"
    mixed = [list((row | {"CP": "2", "ETP": size}).values()) for size in "12"]
    assert search_report.spare(mixed) == usual


def test_layouts_that_differ_in_etp_alone_look_different_in_80_columns(shown):
    assert " ETP " in shown(80, *SEARCH).splitlines()[0]
