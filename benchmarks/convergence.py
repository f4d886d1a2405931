"""Does a model learn in fp8_block and mxfp8 as it does in bf16? Trains it once a recipe from one seed, or from several.

    python benchmarks/convergence.py                       # all recipes; rows to benchmarks/results/, picture to docs/
    python benchmarks/convergence.py --recipe bf16 --recipe mxfp8 --time-limit 120
    python benchmarks/convergence.py --seed 1234 --seed 1235   # each recipe once a seed: runs of one recipe differ too
    python benchmarks/convergence.py --tiny                # a toy for minutes on a CPU: shows that the script runs
    python benchmarks/convergence.py --verdicts FILE...    # what rows that were measured before show; draws them too

The job is configs/convergence_350m.yaml, run by `maniple train` on one GPU. After each run its row and a new picture
are written, so that what has been measured is there however this ends. A run that takes longer than `--time-limit`
stops, and its row says how far it came. The exit code is 0 if every run came to its end, whatever the verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from maniple.bench import convergence, rows
from maniple.bench.command import device_of
from maniple.bench.facts import file_name, of_run
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models import counting, flops

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "configs" / "convergence_350m.yaml"
PICTURE = ROOT / "docs" / "images" / "convergence.png"
RESULTS = ROOT / "benchmarks" / "results"
GRACE = 60.0  # seconds from being asked to stop to being killed
TINY = [
    *("model.overrides.num_layers=2", "model.overrides.hidden_size=128", "model.overrides.num_heads=2"),
    *("model.overrides.num_kv_heads=1", "model.overrides.head_dim=64", "model.overrides.vocab_size=512"),
    *("model.overrides.moe.num_experts=4", "model.overrides.moe.topk=2", "model.overrides.moe.expert_ffn_size=128"),
    *("data.sequence_length=128", "data.tokenizer_vocab_size=512", "data.corpus_bytes=1000000", "data.num_workers=0"),
    *("train.steps=30", "train.micro_batch_size=4", "train.global_batch_size=4", "train.eval_interval=10"),
    *("train.eval_batches=1", "train.device=cpu", "optimizer.warmup_steps=5", "optimizer.learning_rate=2e-3"),
]


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = parser().parse_args(words)
    if options.verdicts:
        report([row for file in options.verdicts for row in rows.read(file)], options.figure or PICTURE)
        return 0
    recipes = options.recipe or list(convergence.RECIPES)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    changes = [*(TINY if options.tiny else []), *options.set]
    seeds = options.seed or [1234]
    job = load(JOB, changes).config
    device = device_of("cpu" if options.tiny else "auto")
    if device.type == "cpu" and not options.tiny:
        raise UserError("torch sees no GPU: add --tiny for a toy on the CPU")
    folder = options.runs or ROOT / "runs" / f"convergence-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    runs = [(seed, recipe, f"{recipe}-{seed}") for seed in seeds for recipe in recipes]
    if any((folder / name).exists() for _, _, name in runs):
        raise UserError(f"--runs {folder} holds such runs already: name another folder")
    picture = options.figure or (folder / PICTURE.name if options.tiny else PICTURE)
    words = ["python", "benchmarks/convergence.py", *words]
    said = rows.command_of(words, ("--out", "--runs", "--figure"))
    found: list[rows.Row] = []
    codes = []
    with contextlib.ExitStack() as stack:
        out = options.out or (None if options.tiny else RESULTS / file_name(device, "convergence"))
        file = stack.enter_context(rows.create(out)) if out else None
        for seed, recipe, name in runs:
            command = [sys.executable, "-m", "maniple", "train", str(JOB), "--nproc", "1", *changes]
            command += [f"train.seed={seed}", f"precision.recipe={recipe}", f"name={name}", f"output_dir={folder}"]
            command += [f"data.cache_dir={folder / 'cache'}", f"train.max_minutes={options.time_limit / 60}"]
            try:
                codes.append(run(command, options.time_limit))
            finally:  # also after Ctrl-C: what the run came to is kept
                row = convergence.row_of(folder / name, **facts(job, recipe), **of_run(device, seed, said, []))
                found.append(row)
                if file:
                    rows.write(file, row)
                report(found, picture)
    whole = all(row["steps"] == row["wanted_steps"] for row in found)
    return 0 if whole and not any(codes) else 1


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument(
        "--recipe",
        action="append",
        choices=["bf16", "fp8", "fp8_block", "mxfp8"],
        help="default: " + ", ".join(convergence.RECIPES),
    )
    out.add_argument("--seed", type=int, action="append", help="may be repeated; default: 1234")
    out.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the job, e.g. train.steps=1000"
    )
    out.add_argument(
        "--time-limit", type=float, default=150.0, metavar="SECONDS", help="of a run's training; default: 150"
    )
    out.add_argument("--tiny", action="store_true", help="a toy model on the CPU")
    out.add_argument("--runs", type=Path, help="folder of the runs; default: runs/convergence-DATE")
    out.add_argument(
        "--out", type=Path, help="file of the rows; default: benchmarks/results/DATE-GPU-convergence.jsonl; tiny: none"
    )
    out.add_argument("--figure", type=Path, help="default: docs/images/convergence.png; tiny: in the runs' folder")
    out.add_argument(
        "--verdicts", type=Path, nargs="+", metavar="FILE", help="train nothing, judge and draw these rows"
    )
    return out


def run(command: list[str], time_limit: float) -> int:
    """Runs a training job, which stops by itself after `time_limit` seconds of training; one that does not is asked to
    stop, then killed. Its exit code. It never outlives this call."""
    longest = time_limit + 3 * GRACE  # imports, corpus and tokenizer come before the training
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(longest)
    except subprocess.TimeoutExpired:
        print(f"convergence.py: asking the run to stop after {longest:.0f} s", file=sys.stderr)
        return end(process)
    finally:
        end(process)


def end(process: subprocess.Popen) -> int:
    """Its exit code, once it has ended: a job saves and ends by SIGTERM, and its workers end with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def facts(job: TrainConfig, recipe: str) -> dict[str, Any]:
    """What a row says of its job."""
    card = resolve_card(job)
    count = counting.count(card)
    return {
        "recipe": recipe,
        "model": f"{card.name}, {job.model.overrides['num_layers']} layers of {card.hidden_size}",
        "parameters": count.total,
        "active_parameters": count.active,
        "flops_per_token": flops.training_flops_per_token(card, job.data.sequence_length),
        "wanted_steps": job.train.steps,
        "tokens_a_step": job.train.global_batch_size * job.data.sequence_length,
    }


def report(found: list[rows.Row], picture: Path) -> None:
    """Prints what each run came to and the verdicts, and draws them."""
    for row in found:
        speed, loss, held_out = row["tokens_per_second_per_gpu"], row["last_loss"], row["validation_loss"]
        print(
            f"{row['recipe']:9} seed {row['seed']}: {row['steps']} of {row['wanted_steps']} steps, "
            f"last loss {'none' if loss is None else f'{loss:.4f}'}, "
            f"validation {'none' if held_out is None else f'{held_out:.4f}'}"
            + ("" if speed is None else f", {speed:,.0f} tokens/s")
        )
    for verdict in convergence.verdicts(found):
        print(f"  {verdict}")
    if convergence.draw(found, picture):
        print(f"picture: {picture}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"convergence.py: {error}")
