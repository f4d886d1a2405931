"""`maniple convert`: weights of Hugging Face's to a checkpoint, and back."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from maniple.commands import Command, Group
from maniple.errors import UserError

app = typer.Typer(cls=Group, help="Weights of Hugging Face's to a checkpoint, and back.")

_To = Annotated[Path, typer.Option("--to", metavar="OUT", help="the folder to make; must not exist")]
_Dtype = Annotated[Literal["bf16", "fp32"] | None, typer.Option(help="of the weights; none: as the source has them")]


@app.command("from-hf", cls=Command)
def from_hf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="config.json and safetensors files")],
    out: _To,
    dtype: _Dtype = None,
    mtp: Annotated[Literal["keep", "drop"], typer.Option(help="the model's MTP layers")] = "keep",
) -> None:
    """Make a checkpoint of released weights, which `maniple train` begins with in any layout (checkpoint.init_from)."""
    from maniple.config.schema import ModelConfig
    from maniple.models.huggingface import card_of, read_config

    _check_new(out)  # what needs no torch, which takes seconds to load
    vocabulary = card_of(read_config(folder), name="model").vocab_size
    from maniple.engines.megatron.huggingface import from_hf as converter

    with _progress(f"{folder} to {out}") as advance:
        done = converter.from_hf(folder, out, dtype=dtype, drop_mtp=mtp == "drop", progress=advance)
    from maniple.engines.megatron.checkpoint.report import size_of

    card = done.shipped or out / converter.CARD
    rounded = f", {done.rounded} of its tensors rounded to {done.dtype}" if done.rounded else ""
    again = f" ({done.reused} files were there from an earlier try)" if done.reused else ""
    print(f"{out}: {done.card.name}, {done.numbers:,} numbers in {done.dtype}{rounded}, {size_of(done.bytes)}{again}")
    keys = [f"model.card={card}", f"checkpoint.init_from={out}"]
    if vocabulary % ModelConfig().vocab_size_multiple:
        keys.append(f"model.vocab_size_multiple={vocabulary}")
    print(f"train from it with {shlex.join(keys)}")


@app.command("to-hf", cls=Command)
def to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/step_…, or a converted one")
    ],
    out: _To,
    like: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="take config.json and tokenizer from this folder of Hugging Face's"),
    ] = None,
    dtype: _Dtype = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="of a file, at most: 5GB, 500MB")] = "5GB",
    verify: Annotated[bool, typer.Option(help="compare the checkpoint's files with their digests first")] = True,
) -> None:
    """Make a folder that transformers loads of a checkpoint's weights."""
    size = _bytes(shard_size)
    from maniple.engines.megatron.checkpoint import files
    from maniple.engines.megatron.checkpoint.report import size_of

    _check_new(out)
    files.read_manifest(checkpoint)
    from maniple.engines.megatron.huggingface import to_hf as converter

    with _progress(f"{checkpoint} to {out}") as advance:
        done = converter.to_hf(
            checkpoint, out, like=like, dtype=dtype, shard_bytes=size, verify=verify, progress=advance
        )
    again = f" ({done.reused} files were there from an earlier try)" if done.reused else ""
    with_ = ", ".join(("config.json", *done.companions))
    print(
        f"{out}: {done.card.name}, {done.numbers:,} numbers in {done.dtype}, {size_of(done.bytes)} in "
        f"{done.files} file{'s' if done.files > 1 else ''}{again}, {with_}"
    )
    if not done.companions:
        print(f"it has no tokenizer: copy its files into {out}, or name a folder that has them with --like")


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another folder, or remove it")


def _bytes(size: str) -> int:
    """Of `5GB`. Raises UserError."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = size[:-2].strip(), size[-2:].upper()
    if unit not in units or not re.fullmatch("[0-9]{1,12}", number) or not int(number):
        raise UserError(f"--shard-size {size}: expected a whole number and KB, MB or GB, as 5GB")
    return int(number) * units[unit]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where that is a terminal; and a word when the user interrupts."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, markup=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        try:
            yield lambda done, total: bars.update(task, completed=done, total=total)
        except KeyboardInterrupt:
            print("maniple: interrupted; what is finished stays: the same command goes on", file=sys.stderr)
            raise
