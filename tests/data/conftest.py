import json
from pathlib import Path

import pytest

from maniple.data.tokenizer import TextTokenizer, train_bpe

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # número {i} – ok\n" for i in range(200)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A BPE of 300 tokens over a few hundred lines."""
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def write_lines(tmp_path: Path):
    """Writes JSON lines with a `text` key to a file of this name and returns its path."""

    def write(name: str, texts: list[str], key: str = "text") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
        return path

    return write
