"""`maniple checkpoint inspect` and `verify`: what a checkpoint is and whether it is whole. No torch, no GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint.index import Index
from maniple.errors import UserError

_OPTIMIZER = "optimizer.state."
_KINDS = {"param": "main weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
_LAYOUT = {
    "TP": "tensor_parallel_size",
    "PP": "pipeline_parallel_size",
    "VPP": "virtual_pipeline_size",
    "CP": "context_parallel_size",
    "EP": "expert_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


def inspect(folder: Path, *, as_json: bool) -> None:
    """Prints what a checkpoint holds. Raises UserError if it is none, or damaged as far as sizes and index tell."""
    manifest = files.read_manifest(folder)
    files.check_files(folder, manifest)
    facts = _facts(folder, manifest, files.check_index(folder, manifest))
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console(markup=False, highlight=False)
    table = Table(title=Text(str(folder)), title_justify="left", show_header=False, box=None)
    versions = " · ".join(f"{name} {number}" for name, number in facts["versions"].items())
    for name, value in (
        ("model", facts["model"]),
        ("step", f"{facts['step']:,} ({facts['samples']:,} samples read)"),
        ("holds", "weights alone, for checkpoint.init_from" if facts["holds"] == "weights" else facts["holds"]),
        ("saved", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["saved"]))),
        ("written by", f"{facts['world_size']} ranks: " + " ".join(f"{k} {v}" for k, v in facts["layout"].items())),
        ("versions", versions),
        ("files", f"{facts['files']:,}, {size_of(facts['file_bytes'])}"),
    ):
        table.add_row(name, value)
    console.print(table)
    parts = Table("component", "tensors", "numbers", "types", "size", box=None)
    for column in (1, 2, 4):
        parts.columns[column].justify = "right"
    for name, part in facts["components"].items():
        counts = f"{part['tensors']:,}", f"{part['numbers']:,}"
        parts.add_row(name, *counts, ", ".join(part["dtypes"]), size_of(part["bytes"]))
    console.print(parts)


def verify(folder: Path) -> None:
    """Reads every file of a checkpoint, or of all of a run (the run's folder or the one with its checkpoints), and
    compares digests. Prints the first damage of each damaged one, a line each; raises UserError if there is any."""
    folders, place = [folder], folder / "checkpoints"
    if not files.has(folder, files.MANIFEST):
        if not place.is_dir():
            place = folder
        folders = files.all_in(place) or ([folder] if place == folder else [])
    if not folders:
        raise UserError(f"no checkpoint in {place}")
    wrong: list[UserError] = []
    console = Console(stderr=True, markup=False)
    with Progress(
        TextColumn("{task.description}", markup=False),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        for each in folders:
            try:
                _verify(each, progress)
            except UserError as error:
                wrong.append(error)
    if len(folders) == 1 and wrong:
        raise wrong[0]
    for fault in wrong:
        print(fault, file=sys.stderr)
    if wrong:
        raise UserError(f"{len(wrong)} of {len(folders)} checkpoints in {place} are not whole")


def _verify(folder: Path, progress: Progress) -> None:
    manifest = files.read_manifest(folder)
    files.check_files(folder, manifest)
    total = _bytes(manifest)
    task = progress.add_task(folder.name, total=total)
    files.check_digests(folder, manifest, progress=lambda count: progress.advance(task, count))
    files.check_index(folder, manifest)
    alone = ", weights alone" if files.holds_weights_alone(manifest) else ""
    print(f"{folder}: whole, {len(manifest['files'])} files, {size_of(total)}{alone}")


def _bytes(manifest: dict[str, Any]) -> int:
    return sum(int(entry["bytes"]) for entry in manifest["files"].values())


def size_of(count: float) -> str:
    """`14.2 GB`, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def _facts(folder: Path, manifest: dict[str, Any], index: Index) -> dict[str, Any]:
    parallel = manifest["job"].get("parallel", {})
    components: dict[str, dict[str, Any]] = {}
    for key, tensor in sorted(index.tensors.items()):
        part = components.setdefault(_component(key), {"tensors": 0, "numbers": 0, "bytes": 0, "dtypes": set()})
        part["tensors"] += 1
        part["numbers"] += tensor.numbers
        part["bytes"] += tensor.bytes
        part["dtypes"].add(tensor.dtype)
    return {
        "folder": str(folder),
        "format": manifest["format"],
        "step": manifest["step"],
        "samples": manifest["samples"],
        "saved": manifest["saved"],
        "model": manifest["card"].get("name"),
        "holds": manifest.get("holds", "all"),
        "world_size": manifest["world_size"],
        "layout": {short: parallel.get(key) or 1 for short, key in _LAYOUT.items()},
        "versions": manifest["versions"],
        "files": len(manifest["files"]),
        "file_bytes": _bytes(manifest),
        "components": {
            name: {**part, "dtypes": sorted(part["dtypes"])} for name, part in sorted(components.items(), key=_order)
        },
        "extra": manifest["extra"],
        "tensors": {
            key: {"shape": list(tensor.shape), "dtype": tensor.dtype} for key, tensor in sorted(index.tensors.items())
        },
    }


def _component(key: str) -> str:
    if key.startswith("rng."):
        return "random states"
    if key.startswith(_OPTIMIZER):
        kind = key.removeprefix(_OPTIMIZER).partition(".")[0]
        return _KINDS.get(kind, kind)
    if key.endswith("expert_bias"):
        return "balancing bias"
    return "expert weights" if ".experts." in key else "other weights"


def _order(item: tuple[str, dict[str, Any]]) -> tuple[int, str]:
    return -item[1]["bytes"], item[0]
