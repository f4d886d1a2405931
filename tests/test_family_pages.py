"""The pages of model families: one shape, every card on one of them, and the tests that they and the guide name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from maniple.models import list_cards, load_card

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "families").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in [*PAGES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]}
HEADINGS = ["Supported", "Not supported", "Layouts that are refused", "Tensors", "How near to transformers"]


def test_every_card_is_on_one_page_with_its_release():
    shown = [
        found for page in PAGES for found in re.findall(r"^\| `([^`]+)` \| (\S+/\S+) \|$", TEXTS[page], re.MULTILINE)
    ]
    assert sorted(shown) == [(name, load_card(name).huggingface) for name in list_cards()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_one_shape(page):
    assert re.findall(r"^## (.*)$", TEXTS[page], re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_card_of_a_page_has_its_measured_difference(page):
    cards = set(re.findall(r"^\| `([^`]+)` \| \S+/\S+ \|$", TEXTS[page], re.MULTILINE))
    rows = re.findall(r"^\| ([^|]+) \| ([\d.e-]+) \| ([\d.e-]+) \| ([\d.e-]+) \|$", TEXTS[page], re.MULTILINE)
    assert {name for row in rows for name in re.findall("`([^`]+)`", row[0])} == cards
    assert all(float(figure) < 1e-5 for row in rows for figure in row[1:])


@pytest.mark.parametrize("page", [page for page in TEXTS if "`tests/" in TEXTS[page]], ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page):
    for name in set(re.findall(r"`(tests/[^`]+?\.py(?:::\w+)?)`", TEXTS[page])):
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not function or function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
