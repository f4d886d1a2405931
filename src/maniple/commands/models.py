"""`maniple models`: the model cards, and whether a model of Hugging Face's is computed alike."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from maniple.commands import AsJson, Command, Group, print_table
from maniple.errors import UserError


class _Cards(Group):
    """A word that is no command is the name of a card: `maniple models qwen3-30b-a3b`."""

    def parse_args(self, ctx, args):
        first = args[0] if args else ""
        return super().parse_args(ctx, args if first in (*self.commands, "--help") else ["show", *args])


app = typer.Typer(cls=_Cards, help="Model cards: `maniple models` lists them, `maniple models NAME` shows one.")


@app.command(cls=Command)
def show(
    name: Annotated[str | None, typer.Argument(help="one model: its whole card")] = None, as_json: AsJson = False
) -> None:
    """List the model cards, with exact parameter counts."""
    from maniple.models import load_card
    from maniple.models.table import row, rows

    if name is None:
        every = rows()
        if as_json:
            print(json.dumps(every, indent=2))
        else:
            print_table(
                ["model", "total", "active", "layers", "experts", "top-k", "attention", "router"],
                [
                    [
                        facts["name"],
                        f"{facts['total_parameters'] / 1e9:.2f}B",
                        f"{facts['active_parameters'] / 1e9:.2f}B",
                        f"{facts['layers']}" + (f" + {facts['mtp_layers']} MTP" if facts["mtp_layers"] else ""),
                        *(str(facts[key]) for key in ("experts", "topk", "attention", "router")),
                    ]
                    for facts in every
                ],
                numbers=range(1, 6),
            )
        return
    card = load_card(name)
    facts = row(card) | {"card": card.model_dump(mode="json")}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        lines = [[key, _as_yaml(value) if key.startswith("card.") else _said(value)] for key, value in _flat(facts)]
        print_table(["fact", "value"], lines)


@app.command(cls=Command)
def check(
    card: Annotated[str, typer.Argument(metavar="CARD", help="name of a card, or its file")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="weights as transformers has them; none: a tiny random model")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="compare the first layers only")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="of each of the two sequences")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or gpu")] = "auto",
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="for converted weights: twice the model in fp32; none: TMPDIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the same weights through transformers and through the engine, in fp32: logits, loss and every gradient."""
    from maniple.models import load_card

    facts = load_card(card)
    if work is not None and not work.is_dir():
        raise UserError(f"--work {work}: there is no such folder")
    from maniple.engines.megatron.huggingface import parity

    with tempfile.TemporaryDirectory(prefix="maniple-check-", dir=work) as place:
        verdict = parity.check(
            facts.tiny() if folder is None else facts,
            folder,
            Path(place),
            tokens=tokens,
            layers=layers,
            device=device,
            progress=lambda said: print(f"maniple: {said}", file=sys.stderr, flush=True),
        )
    if as_json:
        print(json.dumps(parity.as_json(verdict), indent=2))
    else:
        print_table(["", "difference", "bound", ""], parity.as_rows(verdict))
        print(parity.in_words(verdict))
    if not verdict.equal:
        raise typer.Exit(1)


def _said(value: object) -> str:
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)


def _as_yaml(value: object) -> str:
    """On one line, as it can stand under model.overrides."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6).strip()[1:-1]


def _flat(facts: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
