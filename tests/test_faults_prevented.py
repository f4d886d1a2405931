"""The table of faults keeps its word: every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults-prevented.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| kind of fault")]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`(tests/[^`]+)`", row)})


def test_every_row_names_a_fault_a_guarantee_and_a_test():
    assert len(ROWS) > 30
    for row in ROWS:
        fault, guarantee, tests = (cell.strip() for cell in row.strip("|").split("|"))
        assert fault, row
        assert guarantee, row
        assert re.fullmatch(r"`tests/\S+\.py::test_\w+`(, `tests/\S+\.py::test_\w+`)*", tests), tests


@pytest.mark.parametrize("name", NAMED)
def test_is_there(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
