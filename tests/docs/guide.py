"""The pages of the guide, and what stands in their fences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maniple"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "families").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A shell command as one line, or a Python script, and the output that the page shows (None: it shows none)."""

    text: str
    output: str | None = None
    python: bool = False


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        text = re.sub(r"\s*\\\n\s*", " ", block.text)
        if block.language in ("sh", "bash", "shell"):
            yield from (Command(line.strip()) for line in _without_comments(text))
        elif block.language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield Command(command, output or None)
        elif block.language == "python":
            yield Command(block.text, python=True)


def _without_comments(text: str) -> list[str]:
    lines = [re.sub(r"(^|\s+)#\s.*", "", line) for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def all_commands() -> dict[Path, list[Command]]:
    """By page; a command that several pages show is the first page's."""
    seen: set[str] = set()
    found: dict[Path, list[Command]] = {}
    for page in PAGES:
        found[page] = []
        for command in commands(page):
            if command.text not in seen:
                found[page].append(command)
                seen.add(command.text)
    return found
