"""The MoE layer beside transformers' and Liger's at the shapes that its bars are set for; prints the bars' verdicts.

    python benchmarks/moe_layer.py                            # everything; rows to benchmarks/results/
    python benchmarks/moe_layer.py --only qwen3-30b-a3b       # a part, may be repeated
    python benchmarks/moe_layer.py --recipe bf16 --no-liger   # without the minutes that Liger takes to choose kernels
    python benchmarks/moe_layer.py --verdicts FILE...         # the verdicts of rows that were measured before

bf16 of every shape is measured first, then the other recipes; after --limit seconds nothing new begins. Rows are
written as they come. On a CPU the layers are tiny and nothing counts: it shows that the script runs. The exit code is 0
if everything of ours ran and was right, whatever the verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from maniple.bench import bars, command, facts, layer_shapes, moe_layer, rows
from maniple.errors import UserError

RESULTS = Path(__file__).parent / "results"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=layer_shapes.PARTS, help="default: all")
    parser.add_argument("--recipe", action="append", choices=moe_layer.RECIPES, help="default: all")
    parser.add_argument("--seed", type=int, help="of the random shapes and operands; default: today's date")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--no-liger", action="store_true", help="leave Liger out")
    parser.add_argument(
        "--variants", choices=["selected", "few", "all"], help="of ours; default: all at the first shape"
    )
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="default: 240")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-GPU-moe-layer.jsonl; CPU: none")
    parser.add_argument("--verdicts", type=Path, nargs="+", metavar="FILE", help="measure nothing, judge these rows")
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.verdicts:
        judge([row for file in options.verdicts for row in rows.read(file)])
        return 0

    device = command.device_of("auto")
    seed = int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}") if options.seed is None else options.seed
    again = [] if options.seed is not None else ["--seed", str(seed)]
    shapes = [shape for part in options.only or layer_shapes.PARTS for shape in layer_shapes.of_part(part, seed)]
    print(f"seed {seed}")
    plan = moe_layer.Plan(
        [shape.tiny() for shape in shapes] if device.type == "cpu" else shapes,
        [recipe for recipe in moe_layer.RECIPES if recipe in (options.recipe or moe_layer.RECIPES)],
        device,
        command.QUICK_ROUNDS if options.quick else command.ROUNDS,
        seed,
        rows.command_of(["python", "benchmarks/moe_layer.py", *words, *again]),
        not options.no_liger,
        options.limit,
        options.variants,
    )
    out = options.out
    if out is None and device.type == "cuda":
        out = RESULTS / facts.file_name(device, "-".join(["moe-layer", *(options.only or ())]))
    found: list[rows.Row] = []

    def run(progress: Callable[[str], None]) -> Iterator[list[rows.Row]]:
        for contest in moe_layer.run(plan, progress):
            found.extend(contest)
            yield contest

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(rows.create(out)) if out else None
        stack.callback(judge, found)  # of what there is, however the run ends
        return command.report(run, file=file)[1]


def judge(found: list[rows.Row]) -> None:
    """Prints what each bar came to."""
    print("Bars, a peer's time or peak memory over ours:")
    for verdict in bars.verdicts(found):
        print(f"  {verdict}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"moe_layer.py: {error}")
