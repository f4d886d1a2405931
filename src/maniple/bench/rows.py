"""A measurement as a record: one flat JSON object a line, a table for people, a table for the guide. No torch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from maniple.errors import UserError

Row = dict[str, Any]
HEADINGS = (
    "op",
    "recipe",
    "implementation",
    "ms",
    "TFLOP/s",
    "GB/s",
    "of the floor",
    "speed over a peer's",
    "error",
    "",
)


def create(path: Path) -> IO[str]:
    """A new file for rows. Raises UserError if it exists, as raw rows are never written over, or has no folder."""
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}; make it first")
    try:
        return open(path, "x", encoding="utf-8")
    except FileExistsError:
        raise UserError(f"--out {path} is there already: name another file, raw rows are never written over") from None
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from None


def write(file: IO[str], row: Row) -> None:
    """Adds a row at once, so that a run that is ended keeps what it measured."""
    file.write(json.dumps(row, allow_nan=False) + "\n")
    file.flush()


def read(path: Path) -> list[Row]:
    """Rows of a file. Raises UserError for a line that is none."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; give a file that maniple bench wrote")
        rows.append(row)
    return rows


def command_of(words: Sequence[str], places: Sequence[str] = ("--out",)) -> str:
    """A command line as rows keep it: without the options `places`, which change nothing measured and may name folders
    of this machine."""
    kept, skip = [], False
    for word in words:
        if not skip and not any(word == place or word.startswith(f"{place}=") for place in places):
            kept.append(word)
        skip = not skip and word in places
    return shlex.join(kept)


def shape_key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["matrix"], row["groups"], row["n"], row["k"], row["rows"]


def title(row: Row) -> str:
    """A shape in words."""
    size = f"{row['groups']} groups of {row['smallest_group']:,} to {row['largest_group']:,} rows"
    return f"{row['model']} {row['matrix']}: N {row['n']:,}, K {row['k']:,}, {row['rows']:,} rows in {size}"


def machine(row: Row) -> str:
    """What a run's rows were measured on, and what it attains there."""
    hardware, versions = row["hardware"], row["versions"]
    name = hardware["gpus"][0]["name"] if hardware["gpus"] else hardware["cpu"]
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if value and key != "platform")
    return f"{name}; copy {row['copy_gb_per_s']:,.0f} GB/s; {software}"


def cells(row: Row) -> list[str]:
    """A row under `HEADINGS`."""
    name = row["implementation"] + {"ceiling": " (ceiling)", "peer": "", "alternative": " (not selected)"}.get(
        row["role"], " (ours)"
    )
    if row["milliseconds"] is None:
        return [row["op"], row["recipe"], name, *[""] * 6, f"not run: {row['not_run']}"]
    remarks = []
    if row["group_multiple"] > 1:
        more = row.get("padded_rows", row["rows"]) / row["rows"] - 1  # rows of older files were rounded
        remarks.append(f"groups of multiples of {row['group_multiple']}" + (f", {more:.1%} more rows" if more else ""))
    if peak := row.get("peak_bytes"):
        saved = f", {row['saved_bytes'] / 2**30:.2f} of them saved" if row["saved_bytes"] else ""
        remarks.append(f"{peak / 2**30:.2f} GiB at most{saved}")
    remarks += [row["note"]] if row["note"] else []
    return [
        row["op"],
        row["recipe"],
        name,
        f"{row['milliseconds']:.3f} ({row['milliseconds_p20']:.3f}–{row['milliseconds_p80']:.3f})",
        "" if row["tflops"] is None else f"{row['tflops']:,.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.3f}",
        "" if row["gb_per_s"] is None else f"{row['gb_per_s']:,.0f}",
        "" if row["floor_share"] is None else f"{row['floor_share']:.0%} ({row['floor_of']})",
        ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row["ratios"].items()),
        "" if row["error"] is None else f"{row['error']:.1e}",
        "; ".join(remarks),
    ]


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Prints rows of one shape as a table."""
    console = console or Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    table = Table(title=title(rows[0]), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in ("ms", "TFLOP/s", "GB/s") else "left")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for row in rows:
        for line in spent(row):
            console.print(line)
    console.print()


def spent(row: Row) -> list[str]:
    """Where a layer's time goes, as lines: by stage, and by kernel. None where a row does not say it."""
    lines, name = [], f"{row['recipe']} {row['implementation']}"
    if stages := row.get("stages"):
        total = sum(stages.values())
        lines.append(f"{name}: {total:.3f} ms, by stage")
        lines += [f"  {took:8.3f} {took / total:4.0%}  {stage}" for stage, took in stages.items()]
    if kernels := row.get("kernels"):
        total = sum(took for _, _, took in kernels)
        lines.append(f"{name}: {total:.3f} ms of kernels, and how often each was launched")
        lines += [f"  {took:8.3f} {took / total:4.0%}  {kernel[:100]} ({count})" for kernel, count, took in kernels]
    return lines


def by_shape(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows in the order in which their shapes came."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(shape_key(row), []).append(row)
    return list(found.values())


def markdown(rows: Iterable[Row]) -> str:
    """The selected and the peers' rows as Markdown tables, one a shape: what the guide shows between its marks."""
    blocks = []
    for each in by_shape(rows):
        lines = [
            f"**{title(each[0])}**",
            "",
            "| op | recipe | implementation | TFLOP/s | GB/s | of the floor | speed over a peer's |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for row in each:
            if row["role"] != "alternative":
                op, recipe, name, _, tflops, gb_per_s, floor, ratios, _, remark = cells(row)
                lines.append(f"| {op} | {recipe} | {name} | {tflops} | {gb_per_s} | {floor} | {ratios or remark} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
