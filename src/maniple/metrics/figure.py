"""`curves.png`: one picture that tells whether a run learned and whether its experts shared the work.

Loss (training, smoothed, validation, against the unigram entropy), learning rate and speed, of each MoE layer the share
of choices by expert against the uniform share, and the imbalance over time. Legends stand above what they explain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maniple.metrics.balance import expert_balance
from maniple.metrics.records import iter_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_INK, _GREY, _GRID = "#22272e", "#8b949e", "#e6e9ed"
_BLUE, _ORANGE, _GREEN, _RED = "#2563eb", "#ea7317", "#15803d", "#c2263a"
_EVENT_MARKERS = "vDsP"
_EVENT_WORDS = {"nonfinite": "not finite", "spike": "spike"}
_ACTION_WORDS = {"warn": "kept", "skip": "left out", "rollback": "rolled back", "stop": "stopped"}
_LEFT = 0.014  # where headings begin, as a share of the width
_MAX_LAYERS = 6  # more layers than this: that many of them, evenly chosen
_MAX_LINES = 16  # more experts than this: a map instead of lines
_MAX_COUNTS = 1000  # expert counts are thinned out evenly to at most this many steps: they are most of a file
_SMOOTHING = 1 / 80  # standard deviation of the smoothing window, as a share of the run

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


class NothingToDraw(ValueError):
    """A run that has recorded no step."""


def draw_curves(
    metrics_jsonl: Path | str,
    out_png: Path | str,
    *,
    unigram_entropy: float | None = None,
    title: str | None = None,
    layers: Sequence[str] | None = None,
) -> Path:
    """Draws the records of a `metrics.jsonl` (keys: see `writer`) and returns the picture's path.

    unigram_entropy: nats a token; drawn as the line that a model must get below. layers: what the MoE layers are called
    (default, or if there are others in the file: by number among themselves, from 0). Panels without data are left out.
    Raises NothingToDraw if the file has no training record.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    training, validation, events, steps_N, counts_NLE = _read(iter_metrics(metrics_jsonl))
    if not training:
        raise NothingToDraw(f"{metrics_jsonl} has no training record to draw")
    num_layers = counts_NLE.shape[1]
    if layers is None or len(layers) != num_layers:
        layers = [f"MoE layer {number}" for number in range(num_layers)]

    with matplotlib.rc_context(STYLE):
        panels = min(num_layers, _MAX_LAYERS)
        columns = {1: 1, 2: 2, 4: 2}.get(panels, 3)
        rows = -(-panels // columns)
        heights = [3.9] + ([2.35 * rows + 0.35, 2.2] if num_layers else [])
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        figure = Figure(figsize=(11.5, sum(heights) + 0.5), dpi=140, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        name = title or Path(metrics_jsonl).resolve().parent.name
        figure.suptitle(name, x=_LEFT, ha="left", size=14, weight="bold")
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_learning(parts[0], training, validation, unigram_entropy, events)
        if num_layers:
            _draw_experts(parts[1], steps_N, counts_NLE, layers, rows, columns)
            _draw_imbalance(parts[2], steps_N, counts_NLE)
        out = Path(out_png)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    return out


def _read(records: Iterable[dict[str, Any]]) -> tuple[list[dict], list[dict], list[dict], np.ndarray, np.ndarray]:
    """Training records, validation records and events, without counts; steps [N] and counts [N, L, E] of those that
    have some."""
    training, validation, events = [], [], []
    counts: list[tuple[int, np.ndarray]] = []
    stride, seen = 1, 0
    for record in records:
        counts_LE = record.pop("expert_counts", None)
        if "loss" in record:
            training.append(record)
        if record.get("validation_loss") is not None:
            validation.append(record)
        if "event" in record:
            events.append(record)
        if counts_LE:
            counts_LE = np.array(counts_LE, dtype=np.int64)
            if counts and counts[-1][1].shape != counts_LE.shape:  # another model: what came before is not comparable
                counts, stride, seen = [], 1, 0
            if seen % stride == 0:
                counts.append((record["step"], counts_LE))
            seen += 1
            if len(counts) > _MAX_COUNTS:
                counts, stride = counts[::2], 2 * stride
    counts_NLE = np.array([counts_LE for _, counts_LE in counts]) if counts else np.zeros((0, 0, 0), np.int64)
    return training, validation, events, np.array([step for step, _ in counts]), counts_NLE


def _series(records: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of `key`, both [N]; null (a value that was not finite) becomes NaN, a gap in the line."""
    having = [record for record in records if key in record]
    values = [np.nan if record[key] is None else record[key] for record in having]
    return np.array([record["step"] for record in having]), np.array(values, dtype=np.float64)


def _smoothed(values_N: np.ndarray) -> np.ndarray:
    """Average [N] under a centred Gaussian, which unlike a trailing average does not lag. A gap (NaN) stays a gap."""
    sigma = _SMOOTHING * len(values_N)
    if sigma < 0.5:
        return values_N
    reach = int(3 * sigma) + 1
    window = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    known_N = np.isfinite(values_N)
    # "full" and a slice, since "same" returns the window's length where that is longer than the values.
    sums_N = np.convolve(np.where(known_N, values_N, 0.0), window)[reach : reach + len(values_N)]
    weights_N = np.convolve(known_N.astype(np.float64), window)[reach : reach + len(values_N)]
    return np.where(known_N, sums_N / np.maximum(weights_N, 1e-300), np.nan)


def _draw_learning(
    part: SubFigure,
    training: Sequence[dict[str, Any]],
    validation: Sequence[dict[str, Any]],
    unigram_entropy: float | None,
    events: Sequence[dict[str, Any]],
) -> None:
    side = [
        (key, name, color)
        for key, name, color in (
            ("learning_rate", "learning rate", _GREEN),
            ("tokens_per_second_per_gpu", "tokens / s / device", _ORANGE),
        )
        if any(key in record for record in training)
    ]
    grid = part.add_gridspec(max(1, len(side)), 2 if side else 1, width_ratios=[2.5, 1] if side else [1])
    axes = part.add_subplot(grid[:, 0])
    steps, losses = _series(training, "loss")
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, losses, color=_BLUE, alpha=0.28, lw=0.9)
    axes.plot(steps, _smoothed(losses), color=_BLUE, lw=1.9, marker=marker, label="training")
    if validation:
        axes.plot(
            *_series(validation, "validation_loss"),
            color=_RED,
            lw=1.1,
            marker="o",
            ms=5,
            mec="white",
            mew=0.9,
            label=f"validation, at last {validation[-1]['validation_loss']:.3f}",
        )
    if unigram_entropy is not None:
        label = f"unigram entropy {unigram_entropy:.3f}"
        axes.axhline(unigram_entropy, color=_INK, ls=(0, (5, 3)), lw=1.1, label=label)
    for number, kind in enumerate(dict.fromkeys((event["event"], event["action"]) for event in events)):
        # along the lower edge: the loss of such a step may be no number
        at = [event["step"] for event in events if (event["event"], event["action"]) == kind]
        axes.plot(
            at,
            [0.02 + 0.04 * (number % 4)] * len(at),
            transform=axes.get_xaxis_transform(),
            ls="",
            marker=_EVENT_MARKERS[number % 4],
            ms=7,
            color=_ORANGE,
            mec="white",
            mew=0.8,
            clip_on=False,
            label=f"{_EVENT_WORDS.get(kind[0], kind[0])}, {_ACTION_WORDS.get(kind[1], kind[1])}: {len(at)}",
        )
    axes.set(title="Loss, nats a token", xlabel="step")
    _step_axis(axes)
    _legend_above(axes, ncols=3)
    for row, (key, name, color) in enumerate(side):
        small = part.add_subplot(grid[row, 1], sharex=axes)
        small.plot(*_series(training, key), color=color, lw=1.4, marker=marker)
        small.set_title(name[0].upper() + name[1:])
        small.set_ylim(bottom=0)
        _step_axis(small)
        if key == "learning_rate":
            small.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        if row == len(side) - 1:
            small.set_xlabel("step")
        else:
            small.tick_params(labelbottom=False)


def _legend_above(axes: Axes, ncols: int) -> None:
    """In the line of the title, at the right, where there are no data."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=ncols, columnspacing=1.4)


def _step_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _draw_experts(
    part: SubFigure, steps_N: np.ndarray, counts_NLE: np.ndarray, layers: Sequence[str], rows: int, columns: int
) -> None:
    from matplotlib import colormaps

    _, num_layers, num_experts = counts_NLE.shape
    totals_NL1 = counts_NLE.sum(axis=2, keepdims=True)
    shares_NLE = 100 * counts_NLE / np.maximum(totals_NL1, 1)
    uniform = 100 / num_experts
    shown = np.unique(np.linspace(0, num_layers - 1, min(num_layers, _MAX_LAYERS)).round().astype(int))
    heading = "Load: each expert's share of the choices"
    if len(shown) < num_layers:
        heading += f", {len(shown)} of {num_layers} MoE layers"
    if num_experts <= _MAX_LINES:
        heading += f" (dashed: the uniform share, {uniform:.3g} %)"
    part.suptitle(heading, x=_LEFT, ha="left", size=11, weight="bold")
    all_axes = part.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for spare in all_axes[len(shown) :]:
        spare.set_axis_off()
    colors = [*colormaps["tab10"](range(10)), *colormaps["Dark2"](range(8))]
    image = None
    for place, (axes, layer) in enumerate(zip(all_axes, shown, strict=False)):
        axes.set_title(layers[layer], weight="normal")
        if num_experts <= _MAX_LINES:
            for expert in range(num_experts):
                shares_N, color = shares_NLE[:, layer, expert], colors[expert]
                axes.plot(steps_N, shares_N, color=color, lw=0.7, alpha=0.25)
                axes.plot(steps_N, _smoothed(shares_N), color=color, lw=1.3, marker="o" if len(steps_N) == 1 else None)
            axes.axhline(uniform, color=_INK, ls=(0, (5, 3)), lw=1.1, zorder=5)
            axes.set_ylim(0, max(2.0 * uniform, 1.04 * shares_NLE[:, shown].max()))
        else:
            busy = float(np.percentile(shares_NLE[:, shown], 99.5)) / uniform
            image = _draw_map(axes, steps_N, shares_NLE[:, layer] / uniform, max(2.0, busy))
        _step_axis(axes)
        if place % columns == 0:
            axes.set_ylabel("% of choices" if image is None else "expert")
        if place >= (rows - 1) * columns:
            axes.set_xlabel("step")
    if image is not None:
        bar = part.colorbar(image, ax=list(all_axes), pad=0.01, aspect=30, extend="max")
        bar.set_label("share / uniform share", labelpad=8)
        bar.outline.set_visible(False)


def _draw_map(axes: Axes, steps_N: np.ndarray, ratios_NE: np.ndarray, top: float) -> Any:
    """Experts by steps, blue below the uniform share, white at it, red above."""
    from matplotlib.colors import TwoSlopeNorm

    axes.grid(False)
    centers_E = np.arange(ratios_NE.shape[1])
    return axes.pcolormesh(
        steps_N, centers_E, ratios_NE.T, cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, top), shading="nearest"
    )


def _draw_imbalance(part: SubFigure, steps_N: np.ndarray, counts_NLE: np.ndarray) -> None:
    balances = [expert_balance(counts_LE) for counts_LE in counts_NLE]
    per_layer_NL = np.array([balance.per_layer for balance in balances])
    axes = part.subplots()
    marker = "o" if len(steps_N) == 1 else None
    axes.fill_between(
        steps_N,
        per_layer_NL.min(axis=1),
        per_layer_NL.max(axis=1),
        color=_ORANGE,
        alpha=0.18,
        lw=0,
        label="range of the layers",
    )
    worst_N = per_layer_NL.max(axis=1)
    axes.plot(steps_N, worst_N, color=_ORANGE, lw=1.7, marker=marker, label="worst layer")
    axes.axhline(1.0, color=_INK, ls=(0, (5, 3)), lw=1.1, label="perfect balance")
    axes.set(title="Imbalance: busiest expert over mean expert", xlabel="step")
    axes.set_ylim(0.9, max(1.5, 1.05 * worst_N.max()))
    _step_axis(axes)
    empty = [balance.empty_fraction for balance in balances]
    if max(empty):
        axes.plot([], [], " ", label=f"experts without a token: {100 * empty[-1]:.1f} % at last")
    _legend_above(axes, ncols=4)
