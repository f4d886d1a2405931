"""The guide's links lead somewhere, and it names no folder of some machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.guide import PAGES, ROOT, TEXTS, name_of


def anchors(page: Path) -> set[str]:
    """What a `#` link to a page may name: its headings as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_relative_to(ROOT), target
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}, which has no such heading"


def test_every_page_is_in_the_table_of_contents():
    linked = set(re.findall(r"\]\(([^)\s]+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= linked
    assert len(pages) + 1 == len(PAGES)


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_no_path_of_some_machine(page):
    folders = "work|root|tmp|home|Users|mnt|opt|scratch|var|usr|etc|nfs"
    assert not re.findall(rf"(?<![\w.:/])/(?:{folders})\b\S*", page.read_text(encoding="utf-8"))
