"""Files that go with weights and are not changed: the tokenizer's, and the settings of generation."""

from __future__ import annotations

import os
from pathlib import Path

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.huggingface.journal import told

NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "generation_config.json"),
)


def copy(source: Path, to: Path) -> tuple[str, ...]:
    """Copies those that there are, and returns their names. Raises UserError."""
    found = tuple(name for name in NAMES if files.has(source, name))
    for name in found:
        try:
            content = (source / name).read_bytes()
        except OSError as error:
            raise files.unreadable(source / name, error) from error
        with told(to), open(to / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return found
