"""The guide's tables are current, its figures measured, and its rules kept."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from tests.docs.guide import PAGES, ROOT, SOURCE

from maniple.config import reference
from maniple.config.schema import TrainConfig
from maniple.models.table import rows


def test_the_table_of_keys_is_the_schemas():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- reference: begin .*?-->\n(.*)\n<!-- reference: end -->", page, re.DOTALL)[1]
    how = 'python -c "from maniple.config.reference import markdown; print(markdown())"'
    assert shown.strip() == reference.markdown().strip(), f"write between the marks what this prints: {how}"


def test_every_key_has_one_meaning():
    known = dict(reference.keys(TrainConfig))
    assert not set(reference.MEANING) - set(known)
    assert all(reference.meaning(key, field) for key, field in known.items())
    with pytest.raises(ValueError, match="has 2 descriptions"):
        reference.meaning("train.seed", FieldInfo(annotation=int, description="said twice"))


def test_readme_lists_the_models_with_their_counts():
    found = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [
        (row["name"], f"{row['total_parameters'] / 1e9:.1f}", f"{row['active_parameters'] / 1e9:.1f}") for row in rows()
    ]
    assert found == wanted


def test_measured_numbers_are_in_the_raw_rows():
    measured = set()
    for file in (ROOT / "benchmarks" / "results").glob("*training*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            summary = row["summary"]
            measured.add(
                (
                    str(summary["world_size"]),
                    f"{row['first_loss']:.2f} → {row['last_loss']:.2f}",
                    f"{summary['tokens_per_second_per_gpu']:,.0f}",
                    f"{summary['peak_memory_bytes'] / 2**30:.1f} GiB",
                )
            )
    pattern = r"^\| [^|]+ \| (\d+) \| ([\d.]+ → [\d.]+) \| ([\d,]+) \| ([\d.]+ GiB) \|$"
    claimed = re.findall(pattern, PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert claimed
    assert not set(claimed) - measured


def test_imports_go_the_way_the_architecture_says():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (order,) = re.findall(r"^    (cli → .*)$", page, re.MULTILINE)
    levels = [level.split(", ") for level in order.split(" → ")]
    rank = {package: number for number, level in enumerate(levels) for package in level} | {"__main__": -1}
    leaves = {"config", "models", "hardware", "yamlfile", "explain", "terminal", "errors", "__init__"}
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages == set(rank) | leaves
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for other in _imported(path) - leaves - {package}:
            assert package not in leaves, f"{path}: {package} is a leaf and imports {other}"
            assert rank[package] < rank[other], f"{path}: {package} imports {other}"


def _imported(path: Path) -> set[str]:
    """First-level packages of ours that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "maniple":
            names += [f"maniple.{alias.name}" for alias in node.names if (SOURCE / alias.name).is_dir()]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("maniple.")}


def test_every_redirect_of_the_cpu_device_is_explained():
    tree = ast.parse((SOURCE / "engines" / "megatron" / "cpu.py").read_text(encoding="utf-8"))
    tables = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "_REDIRECTS"]
    (table,) = tables
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [key.value for key in table.keys if f"`{key.value}`" not in page]
