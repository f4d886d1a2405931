"""Does a low-precision recipe learn as bf16 does? Runs as rows, what the rows show, and their picture. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maniple.bench.rows import Row
from maniple.kernels import sources
from maniple.metrics.figure import STYLE
from maniple.metrics.records import iter_metrics

BENCHMARK = "convergence"
BASELINE = "bf16"
RECIPES = (BASELINE, "fp8_block", "mxfp8")
BAR = 0.005  # a recipe's loss is to be this near to bf16's, as a share of it
LAST = 20  # steps whose mean is a run's last loss
_COLORS = {"bf16": "#22272e", "fp8": "#c2263a", "fp8_block": "#2563eb", "mxfp8": "#ea7317"}


def row_of(run_dir: Path, **facts: Any) -> Row:
    """A run's row, from the `metrics.jsonl` that it left, whole or not, and its `summary.json` where there is one.

    losses: nats a token of steps 1, 2, ..., None where one was not finite. validation: [step, loss] pairs. last_loss:
    mean of the last steps' losses. Speeds are medians of the second half. facts: what else the row says: `recipe`,
    `wanted_steps`, `tokens_a_step`, `parameters`, and what `of_run` says of every row.
    """
    records = list(iter_metrics(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else []
    training = [record for record in records if "loss" in record]
    validation = [[record["step"], record["validation_loss"]] for record in records if "validation_loss" in record]
    losses = [None if record["loss"] is None else round(record["loss"], 6) for record in training]
    settled, last = training[len(training) // 2 :], training[-1] if training else {}
    summary = run_dir / "summary.json"
    told = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return {
        "benchmark": BENCHMARK,
        **facts,
        "steps": len(training),
        "losses": losses,
        "validation": validation,
        "last_loss": last_mean(losses),
        "validation_loss": validation[-1][1] if validation else None,
        "tokens_per_second_per_gpu": _median([record["tokens_per_second_per_gpu"] for record in settled]),
        "mfu": _median([record["mfu"] for record in settled if record["mfu"] is not None]),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "data": last.get("data"),
        **{key: told.get(key) for key in ("precision", "seconds", "stopped")},
        "sources": sources.digests(),
    }


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def last_mean(losses: Sequence[float | None]) -> float | None:
    """Mean of the last losses; None if one of them was not finite, or if there is none."""
    last = [loss for loss in losses[-LAST:] if loss is not None]
    return sum(last) / len(last) if last and len(last) == len(losses[-LAST:]) else None


@dataclass(frozen=True)
class Verdict:
    """A recipe's losses over bf16's, less 1, one a seed, None where it is not known. missing: why it shows nothing, ""
    if it does."""

    recipe: str
    what: str
    differences: tuple[float | None, ...]
    missing: str = ""

    @property
    def difference(self) -> float | None:
        """The mean over the seeds; None if one is not known."""
        known = [share for share in self.differences if share is not None]
        return sum(known) / len(known) if known and len(known) == len(self.differences) else None

    @property
    def holds(self) -> bool:
        return not self.missing and self.difference is not None and abs(self.difference) <= BAR

    def __str__(self) -> str:
        came = "" if self.difference is None else f"{self.difference:+.3%} of {BASELINE}'s"
        known = [share for share in self.differences if share is not None]
        if self.difference is not None and len(known) > 1:
            came += f", {len(known)} seeds, {min(known):+.3%} to {max(known):+.3%}"
        said = f"not shown: {self.missing}" if self.missing else "holds" if self.holds else "fails"
        return f"{self.recipe:9} {self.what:24} {came:18} (within {BAR:.1%}): {said}"


def _by_recipe(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Rows by recipe and seed; of several alike the last."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["benchmark"] == BENCHMARK:
            found.setdefault(row["recipe"], {})[row["seed"]] = row
    return found


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """What each recipe's rows came to beside bf16's of the same seed, in the last steps of training that both have, and
    on validation."""
    found = _by_recipe(rows)
    bases = found.pop(BASELINE, {})
    for recipe, runs in found.items():
        missing = ""
        shares: list[list[float | None]] = [[], []]
        for seed, row in runs.items():
            base = bases.get(seed)
            missing = missing or _missing(base, row)
            both: Iterable[tuple[float | None, float | None]] = [(None, None)] * 2
            if base is not None and _same_job(base) == _same_job(row):
                both = _common(base, row)
            for share, (theirs, ours) in zip(shares, both, strict=True):
                share.append(None if ours is None or theirs is None else ours / theirs - 1)
        for what, share in zip((f"mean of {LAST} last steps", "validation"), shares, strict=True):
            yield Verdict(recipe, what, tuple(share), missing or ("no finite loss" if None in share else ""))


def _common(base: Row, row: Row) -> Iterator[tuple[float | None, float | None]]:
    """Both losses at the last step, and at the last validation, that both came to."""
    steps = min(base["steps"], row["steps"])
    yield last_mean(base["losses"][:steps]), last_mean(row["losses"][:steps])
    theirs, ours = dict(base["validation"]), dict(row["validation"])
    at = max(theirs.keys() & ours.keys(), default=None)
    yield theirs.get(at), ours.get(at)


def _missing(base: Row | None, row: Row) -> str:
    if base is None:
        return f"no run in {BASELINE} from seed {row['seed']} beside it"
    if _same_job(base) != _same_job(row):
        return f"the run in {BASELINE} was another job"
    for one in (base, row):
        if one["steps"] < one["wanted_steps"]:
            return f"{one['recipe']} came to {one['steps']} of {one['wanted_steps']} steps"
    return ""


def _same_job(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("wanted_steps", "seed", "tokens_a_step", "parameters", "data"))


def differences(rows: Sequence[Row]) -> dict[str, list[np.ndarray]]:
    """Of each recipe but bf16, and each seed that bf16 ran from too, the smoothed loss over bf16's, less 1, by step, as
    far as both went. The mean of the last ones is what `verdicts` judges."""
    found = _by_recipe(rows)
    bases = {seed: _smoothed(row["losses"]) for seed, row in found.pop(BASELINE, {}).items()}
    shares: dict[str, list[np.ndarray]] = {}
    for recipe, runs in found.items():
        for seed in (seed for seed in runs if seed in bases):
            base, loss = bases[seed], _smoothed(runs[seed]["losses"])
            both = min(len(base), len(loss))
            shares.setdefault(recipe, []).append(loss[:both] / base[:both] - 1)
    return shares


def _smoothed(losses: Sequence[float | None]) -> np.ndarray:
    """Of each step the mean with those before it, at most `LAST` in all; NaN where one was not finite."""
    values = np.array([np.nan if loss is None else loss for loss in losses], dtype=np.float64)
    return np.array([values[max(0, end - LAST) : end].mean() for end in range(1, len(values) + 1)])


def draw(rows: Sequence[Row], path: Path) -> Path | None:
    """The picture of runs: their losses, and their distance from bf16's with the bar. None without any step to draw."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = _by_recipe(row for row in rows if row["steps"])
    if not found:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 4.6), dpi=140, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
        for recipe, runs in found.items():
            color = _COLORS.get(recipe)
            for number, row in enumerate(runs.values()):
                steps = np.arange(1, row["steps"] + 1)
                losses = [np.nan if loss is None else loss for loss in row["losses"]]
                left.plot(steps, losses, color=color, alpha=0.2 / len(runs), lw=0.7)
                label = None if number else _label(list(runs.values()))
                left.plot(steps, _smoothed(row["losses"]), color=color, lw=1.6, label=label)
                at = [(step, loss) for step, loss in row["validation"] if loss is not None]
                left.plot(*zip(*at, strict=True), ls="", marker="o", ms=4.5, color=color, mec="white") if at else None
        left.set(title=f"Loss, nats a token (mean of {LAST} steps; dots: validation)", xlabel="step")
        left.legend(loc="upper right")
        _draw_differences(right, differences(rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _label(runs: Sequence[Row]) -> str:
    last = [row["last_loss"] for row in runs if row["last_loss"] is not None]
    at_last = f"  {sum(last) / len(last):.4f}" if len(last) == len(runs) else ""
    short = next((row for row in runs if row["steps"] < row["wanted_steps"]), None)
    whole = "" if short is None else f", {short['steps']} of {short['wanted_steps']} steps"
    return f"{runs[0]['recipe']}{at_last}{whole}" + (f", {len(runs)} seeds" if len(runs) > 1 else "")


def _draw_differences(axes: Any, shares: Mapping[str, Sequence[np.ndarray]]) -> None:
    bar, largest = 100 * BAR, 0.0
    axes.axhspan(-bar, bar, color="#15803d", alpha=0.12, lw=0, label=f"within {bar:g} %")
    axes.axhline(0, color=_COLORS[BASELINE], lw=1.0)
    for recipe, runs in shares.items():
        both = min(len(share) for share in runs)
        percent = 100 * np.mean([share[:both] for share in runs], axis=0)
        at_last = percent[-1] if both else np.nan
        label = f"{recipe}  {at_last:+.3f} %" if np.isfinite(at_last) else recipe
        steps = np.arange(1, both + 1)
        axes.plot(steps, percent, color=_COLORS.get(recipe), lw=1.5, label=label)
        for share in runs if len(runs) > 1 else ():
            axes.plot(np.arange(1, len(share) + 1), 100 * share, color=_COLORS.get(recipe), lw=0.7, alpha=0.35)
        settled = np.abs([100 * share[:both] for share in runs])[:, both // 5 :]  # at first runs lie further apart
        largest = max(largest, float(np.nanmax(settled)) if np.isfinite(settled).any() else 0.0)
    reach = max(2 * bar, 1.15 * largest)
    several = " (thin: one seed)" if any(len(runs) > 1 for runs in shares.values()) else ""
    axes.set(title=f"Smoothed loss over {BASELINE}'s, less 1, in %{several}", xlabel="step", ylim=(-reach, reach))
    axes.legend(loc="upper right")
