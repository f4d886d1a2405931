"""Speeds that the guide claims, and the raw rows that they come from.

A claim is a number with a unit of speed in running text, or a cell of a table under a heading with such a unit. It
stands in a block that names its raw rows, files of `benchmarks/results/`:

    <!-- measured: FILE [FILE...] [historical] -->     up to the next empty line,
    <!-- measured: FILE [FILE...] [historical] -->     or up to
    <!-- measured: end -->

    <!-- rows: FILE [historical] -->                   a block that `maniple.bench.rows.markdown` wrote from the file
    <!-- rows: end -->

The claims of one line of a table come from one and the same row. A row's figure is of its `sources`, by operation the
digest of `maniple.kernels.sources`: those must be today's. A row of other sources, or of none, may only stand in a
block marked historical, which then says "measured on" and the row's date.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from maniple.bench import rows as bench_rows

# How a unit is written, and which numbers of a row have it.
UNITS: dict[str, tuple[str, float]] = {
    r"TFLOP/s|TFLOPS|TFLOPs": ("tflops", 1.0),
    r"tok/s|tokens/s|tokens\s+a\s+second|tokens\s+per\s+second|TGS": ("tokens_per_second", 1.0),
    r"GB/s": ("gb_per_s", 1.0),
    r"TB/s": ("gb_per_s", 1e-3),
    r"%\s?MFU": ("mfu", 100.0),
    r"%?\s?of\sthe\sfloor": ("floor_share", 100.0),
}
CLAIMS = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s*({'|'.join(UNITS)})(?![\w])")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MARK = re.compile(r"^<!-- (measured|rows): (.*?) -->$")


@dataclass(frozen=True)
class Block:
    """Lines of a page, and the mark that they stand under (None: no mark)."""

    line: int
    lines: tuple[str, ...]
    kind: str | None = None
    files: tuple[str, ...] = ()
    historical: bool = False


def blocks(text: str) -> Iterator[Block]:
    """The page in blocks: marked ones whole, the rest between empty lines. Fenced code is left out."""
    lines = re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S).splitlines()
    number = 0
    while number < len(lines):
        mark = MARK.match(lines[number])
        if mark and mark[2] != "end":
            kind, words = mark[1], mark[2].split()
            ends = [i for i, line in enumerate(lines) if i > number and line == f"<!-- {kind}: end -->"]
            marks = [i for i, line in enumerate(lines) if i > number and MARK.match(line) and i not in ends]
            if ends and not any(number < i < ends[0] for i in marks):
                stop, after = ends[0], ends[0] + 1
            else:
                stop = next((i for i in range(number, len(lines)) if not lines[i].strip()), len(lines))
                after = stop
            files = tuple(word for word in words if word != "historical")
            yield Block(number + 2, tuple(lines[number + 1 : stop]), kind, files, "historical" in words)
            number = after
            continue
        stop = number
        while stop < len(lines) and lines[stop].strip() and not (MARK.match(lines[stop]) and stop > number):
            stop += 1
        yield Block(number + 1, tuple(lines[number:stop]))
        number = max(stop, number + 1)


@dataclass(frozen=True)
class Claim:
    line: int
    number: str
    key: str
    scale: float

    @property
    def text(self) -> str:
        return f"{self.number} ({self.key})"


def claims(block: Block) -> Iterator[list[Claim]]:
    """The claims of a block, those of one line of a table together."""
    numbered = enumerate(block.lines, block.line)
    for is_table, group in itertools.groupby(numbered, key=lambda line: line[1].startswith("|")):
        lines = list(group)
        yield from _in_table(lines) if is_table else _in_text(lines)


def _in_text(lines: list[tuple[int, str]]) -> Iterator[list[Claim]]:
    text = "\n".join(line for _, line in lines)  # a number and its unit may stand on two lines
    for found in CLAIMS.finditer(text):
        yield [Claim(lines[0][0] + text.count("\n", 0, found.start()), found[1], *_unit(found[2]))]


def _in_table(lines: list[tuple[int, str]]) -> Iterator[list[Claim]]:
    rows = [(number, [cell.strip() for cell in line.strip().strip("|").split("|")]) for number, line in lines]
    units = [_unit(heading) for heading in rows[0][1]]
    for number, cells in rows[1:]:
        together = []
        for (key, scale), cell in zip(units, cells, strict=False):
            if key and (found := NUMBER.search(cell)):
                together.append(Claim(number, found[0], key, scale))
            elif not key:
                together += [Claim(number, found[1], *_unit(found[2])) for found in CLAIMS.finditer(cell)]
        if together:
            yield together


def _unit(text: str) -> tuple[str, float]:
    return next((meaning for words, meaning in UNITS.items() if re.search(words, text)), ("", 1.0))


def faults(page: str, text: str, results: Path, digest: Callable[[str], str]) -> Iterator[str]:
    """What is wrong with a page's claims, each in one line that says what to do."""
    for block in blocks(text):
        found = list(claims(block))
        if block.kind is None:
            for group in found:
                where = f"{page}:{group[0].line}: {', '.join(claim.text for claim in group)}"
                yield f"{where} has no raw row: put <!-- measured: FILE --> before it (of benchmarks/results/)"
            continue
        rows = []
        for name in block.files:
            if not (results / name).is_file():
                yield f"{page}:{block.line}: benchmarks/results/{name} is not there"
            else:
                rows += [row | {"date": row.get("date", name[:10])} for row in bench_rows.read(results / name)]
        if block.kind == "rows":
            if "\n".join(block.lines).strip() != bench_rows.markdown(rows).strip():
                yield f"{page}:{block.line}: is not what maniple.bench.rows.markdown makes of {' '.join(block.files)}"
            for row in rows:
                yield from _stale(f"{page}:{block.line}", block, row, digest)
            continue
        for group in found:
            where = f"{page}:{group[0].line}: {', '.join(claim.text for claim in group)}"
            sources = [row for row in rows if all(_says(row, claim) for claim in group)]
            if not sources:
                yield f"{where} is in no row of {' '.join(block.files)}: copy it from there, or measure anew"
            else:
                stale = [list(_stale(where, block, row, digest)) for row in sources]
                yield from min(stale, key=len)


def _says(row: dict, claim: Claim) -> bool:
    """Whether a row has the claim's number, rounded to the digits that the claim shows."""
    digits = claim.number.replace(",", "")
    if "." in digits:
        places = len(digits.split(".")[1])
    else:  # 2,200 may stand for 2,198
        places = -(len(digits) - len(digits.rstrip("0"))) if digits.strip("0") else 0
    values = [value * claim.scale for key, value in _numbers(row) if claim.key in key]
    return any(round(value, places) == float(digits) for value in values)


def _numbers(row: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def _stale(where: str, block: Block, row: dict, digest: Callable[[str], str]) -> Iterator[str]:
    """Why a row does not speak for today's sources; nothing if it does, or if the block says of when it is."""
    sources = row.get("sources") or {}
    changed = [op for op, then in sources.items() if digest(op) != then]
    if sources and not changed:
        return
    what = f"the sources of {' and '.join(changed)} have changed since" if sources else "its row names no sources"
    if not block.historical:
        yield f"{where} is stale: {what}; measure anew: {row['command']} (or mark it historical and say when)"
    elif f"measured on {row['date']}" not in " ".join(block.lines).lower():
        yield f"{where} is historical ({what}): its text needs the words 'measured on {row['date']}'"
