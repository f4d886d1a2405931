"""The grouped GEMM benchmark on the shapes that its bars are set for, and two random ones; prints the bars' verdicts.

    python benchmarks/grouped_gemm.py                        # everything; rows to benchmarks/results/
    python benchmarks/grouped_gemm.py --only deepseek-v3     # a part: deepseek-v3, qwen3-30b-a3b or random
    python benchmarks/grouped_gemm.py --verdicts FILE...     # the verdicts of rows that were measured before

65,536 rows, as 8,192 tokens have with 8 experts each, in skewed groups of any size. DeepSeek-V3's experts are one of
eight ranks' (32), Qwen3-30B's all 128. On a CPU the models are tiny and nothing counts: it shows that the script runs.
The exit code is 0 if everything of ours ran and was right, whatever the verdicts.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from functools import partial
from pathlib import Path

import torch

from maniple.bench import bars, command, grouped_gemm, rows
from maniple.bench.shapes import Shape, at_random
from maniple.errors import UserError

MODELS = {"deepseek-v3": 8, "qwen3-30b-a3b": 1}  # and over how many ranks the experts are spread
RESULTS = Path(__file__).parent / "results"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*MODELS, "random"], help="default: all")
    parser.add_argument("--recipe", action="append", choices=grouped_gemm.RECIPES, help="default: all")
    parser.add_argument("--op", action="append", choices=grouped_gemm.ALL_OPS, help="default: all")
    parser.add_argument(
        "--seed", type=int, help="of the random shapes, group sizes and operands; default: today's date"
    )
    parser.add_argument("--multiple", type=int, default=1, help="round the groups' sizes to it; default: any sizes")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-GPU-grouped-gemm.jsonl; CPU: none")
    parser.add_argument("--verdicts", type=Path, nargs="+", metavar="FILE", help="measure nothing, judge these rows")
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.verdicts:
        judge([row for file in options.verdicts for row in rows.read(file)])
        return 0

    device = command.device_of("auto")
    seed = int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}") if options.seed is None else options.seed
    again = [] if options.seed is not None else ["--seed", str(seed)]
    parts = options.only or [*MODELS, "random"]
    print(f"seed {seed}")
    plan = grouped_gemm.Plan(
        [shape.rounded(options.multiple) for part in parts for shape in shapes_of(part, device, seed)],
        options.recipe or grouped_gemm.RECIPES,
        device,
        command.QUICK_ROUNDS if options.quick else command.ROUNDS,
        None,
        seed,
        rows.command_of(["python", "benchmarks/grouped_gemm.py", *words, *again]),
        options.op,
    )
    run = partial(grouped_gemm.run, plan)
    out = options.out
    if out is None and device.type == "cuda":
        gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
        part = f"-{'-'.join(options.only)}" if options.only else ""
        out = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{gpu}-grouped-gemm{part}.jsonl"
    if out is None:
        found, code = command.report(run)
    else:
        with rows.create(out) as file:
            found, code = command.report(run, file=file)
    judge(found)
    return code


def shapes_of(part: str, device: torch.device, seed: int) -> list[Shape]:
    """The shapes of a model, or the random ones: on a CPU small enough for it."""
    if part == "random":
        shapes = at_random(seed, rows=65_536)
        if device.type == "cuda":
            return shapes
        return [
            Shape(s.model, s.matrix, s.n // 128 * 8, s.k // 128 * 8, tuple(size // 256 for size in s.sizes))
            for s in shapes
        ]
    ranks = MODELS[part] if device.type == "cuda" else 1
    return command.shapes_of(command.Options(model=part, expert_parallel_size=ranks, seed=seed), device)


def judge(found: list[rows.Row]) -> None:
    """Prints what each bar came to."""
    print("Bars, ours over the fastest peer named, or the share of the floor:")
    for verdict in bars.verdicts(found):
        print(f"  {verdict}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"grouped_gemm.py: {error}")
