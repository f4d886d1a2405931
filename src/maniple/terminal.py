"""What may stand on a terminal: our letters in ASCII where it has no others, and names without control bytes."""

from __future__ import annotations

import codecs
import sys

# every letter beyond ASCII that a command prints; `|` is also what pipeline layouts have between stages
_ASCII = {"·": "|", "×": "x", "…": "...", "–": "-", "−": "-", "’": "'", "≥": ">=", "≤": "<=", "²": "^2", "³": "^3"}


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def prepare_output() -> None:
    """A letter that standard output or error lacks is no reason to stop."""
    codecs.register_error("maniple", _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="maniple")


def in_one_line(message: str) -> str:
    """A message whose names may hold anything: control bytes, which could clear the screen, as Python writes them."""
    line = " ".join(part.strip() for part in message.splitlines())
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)
