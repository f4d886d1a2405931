"""What the compiler makes of the portable kernels for an MI355X (gfx950): registers, spills, LDS, matrix instructions.

    python -m benchmarks.gfx950_table        (from the repository's root; no GPU)

writes benchmarks/results/<date>-gfx950-compiled.jsonl, a row a kernel. Compiled, not run: it says what fits, not how
fast it is. The main loop is the smallest loop that multiplies matrices.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "python -m benchmarks.gfx950_table"
TARGET = "gfx950"
SOURCES = [
    "src/maniple/kernels/grouped_gemm/swiglu_kernels.py",
    "src/maniple/kernels/grouped_gemm/triton_kernels.py",
    "src/maniple/kernels/swiglu/triton_kernels.py",
    "tests/kernels/portable_kernels.py",
]


def sources() -> str:
    """SHA-256 of the kernels and of how they are compiled here."""
    total = hashlib.sha256()
    for name in SOURCES:
        total.update(name.encode() + (ROOT / name).read_bytes())
    return total.hexdigest()


def main_loop(assembly: str) -> list[str]:
    """Instructions of the smallest loop with a matrix product; empty if there is none."""
    lines = [line.split(";")[0].strip() for line in assembly.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.LBB\w+:", line)}
    loops = []
    for number, line in enumerate(lines):
        jump = re.fullmatch(r"s_c?branch\w*\s+(\.LBB\w+)", line)
        if jump and labels.get(jump[1], number) < number:
            body = [text for text in lines[labels[jump[1]] : number + 1] if re.match(r"[a-z]\w+", text)]
            if any(text.startswith("v_mfma") for text in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def row(name: str, case: Any) -> dict[str, Any]:
    """The table's row of one kernel. Compiles it: some seconds."""
    import triton

    compiled = case.compile()
    assembly = compiled.asm["amdgcn"]

    def noted(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[0])

    loop = main_loop(assembly)
    products = [text.split()[0] for text in loop if text.startswith("v_mfma")]
    return {
        "kernel": name,
        "target": TARGET,
        "tile": vars(case.tile),
        "vgpr": noted("vgpr_count"),
        "agpr": noted("agpr_count"),
        "sgpr": noted("sgpr_count"),
        "vgpr_spills": noted("vgpr_spill_count"),
        "sgpr_spills": noted("sgpr_spill_count"),
        "lds_bytes": compiled.metadata.shared,
        "mfma": sorted(set(products)),
        "mfma_in_main_loop": len(products),
        "instructions_in_main_loop": len(loop),
        "loads_in_main_loop": sum(text.startswith(("global_load", "buffer_load")) for text in loop),
        "lds_reads_in_main_loop": sum(text.startswith("ds_read") for text in loop),
        "lds_writes_in_main_loop": sum(text.startswith("ds_write") for text in loop),
        "branches_in_main_loop": sum(text.startswith("s_cbranch") for text in loop),
        "what": "compiled, not run",
        "triton": triton.__version__,
        "sources": sources(),
        "command": COMMAND,
    }


def newest() -> Path | None:
    """The last table that was recorded."""
    return max(RESULTS.glob("*-gfx950-compiled.jsonl"), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="another file than the day's")
    out = parser.parse_args().out or RESULTS / f"{datetime.date.today():%Y-%m-%d}-gfx950-compiled.jsonl"

    from tests.kernels.portable_kernels import PRODUCTS, STREAMS

    rows = []
    for name, make in (PRODUCTS | STREAMS).items():
        rows.append(row(name, make(TARGET)))
        print(
            "{kernel:42} vgpr {vgpr:3} + {agpr:3}  spills {vgpr_spills} + {sgpr_spills}  LDS {lds_bytes:6}  "
            "main loop: {mfma_in_main_loop:3} of {instructions_in_main_loop:4} multiply".format(**rows[-1]),
            flush=True,
        )
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} kernels, compiled, not run")


if __name__ == "__main__":
    main()
