import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from maniple.metrics import MetricsWriter, NothingToDraw, draw_curves
from maniple.metrics.figure import _read, _series, _smoothed


def run(folder, layers, experts, steps, nan_at=None, shape_changes_at=None):
    rng = np.random.default_rng(0)
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            record = {"loss": float("nan") if step == nan_at else 8.0 / step, "learning_rate": 1e-3}
            if layers:
                wide = experts + (step == shape_changes_at)
                record["expert_counts"] = rng.integers(0, 9, (layers, wide))
            writer.log(step, record)
            if step % 5 == 0:
                writer.log(step, {"validation_loss": 8.5 / step})
    return writer.path


@pytest.mark.parametrize(
    ("layers", "experts", "steps", "options"),
    [
        (3, 8, 12, {"nan_at": 4}),
        (9, 32, 6, {}),
        (0, 0, 6, {}),
        (1, 4, 1, {}),
        (2, 4, 6, {"shape_changes_at": 2}),
        (1, 1, 3, {}),
    ],
)
def test_every_kind_of_run_is_drawn(tmp_path, layers, experts, steps, options):
    picture = draw_curves(
        run(tmp_path, layers, experts, steps, **options), tmp_path / "a" / "curves.png", unigram_entropy=6.0
    )
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    assert width == 1610
    assert height == {0: 616, 9: 1631}.get(layers, 1302)


@pytest.fixture
def drawn(monkeypatch):
    """Draws a run and gives the figure."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: (save(self, *args), figures.append(self)))

    def draw(*args, **options):
        draw_curves(*args, **options)
        return figures.pop()

    return draw


def test_legends_are_above_the_data(tmp_path, drawn):
    path = run(tmp_path, 3, 8, 12)
    with MetricsWriter(tmp_path, resumed_step=12) as writer:
        for step, (event, action) in enumerate([("spike", "warn"), ("spike", "rollback"), ("nonfinite", "stop")], 3):
            writer.log(step, {"event": event, "action": action, "why": "", "where": None})
    figure = drawn(path, tmp_path / "curves.png", unigram_entropy=7.99)
    with_legends = [axes for axes in figure.axes if axes.get_legend()]
    assert len(with_legends) == 2
    for axes in with_legends:
        legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert legend.y0 >= inside.y1
        title = axes.title if axes.title.get_text() else axes._left_title
        assert not legend.overlaps(title.get_window_extent())
        assert inside.x0 - 1 <= legend.x0 < legend.x1 <= inside.x1 + 1


def test_layers_have_the_names_they_are_given(tmp_path, drawn):
    path = run(tmp_path, 3, 8, 12)
    names = ["layer 1", "layer 2", "layer 3 (MTP)"]

    def titles(**options):
        figure = drawn(path, tmp_path / "curves.png", **options)
        return [axes.get_title("left") for axes in figure.axes if "layer" in axes.get_title("left")]

    assert titles(layers=names) == names
    assert titles() == titles(layers=names[:2]) == ["MoE layer 0", "MoE layer 1", "MoE layer 2"]


def test_the_imbalance_is_the_worst_layers(tmp_path, drawn):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            # of the second layer, with fewer choices, the busiest expert has three times the mean
            writer.log(step, {"loss": 1.0, "expert_counts": [[30, 10, 20, 20], [3, 0, 1, 0]]})
    figure = drawn(writer.path, tmp_path / "curves.png")
    (line,) = [line for axes in figure.axes for line in axes.get_lines() if line.get_label() == "worst layer"]
    assert line.get_ydata().tolist() == [3.0, 3.0]


def test_nothing_to_draw_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "validation_loss": 2.0}\n')
    with pytest.raises(NothingToDraw, match="no training record"):
        draw_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_keeps_a_constant_and_the_gaps():
    values = np.full(400, 2.5)
    values[[3, 200]] = np.nan
    smooth = _smoothed(values)
    np.testing.assert_array_equal(np.isnan(smooth), np.isnan(values))
    np.testing.assert_allclose(smooth[~np.isnan(smooth)], 2.5, rtol=1e-12)


def test_smoothing_does_not_lag():
    ramp = np.arange(400.0)
    np.testing.assert_allclose(_smoothed(ramp)[20:-20], ramp[20:-20], rtol=1e-12)


def test_records_are_sorted_into_what_they_are():
    records = [
        {"step": 1, "loss": 2.0, "expert_counts": [[1]]},
        {"step": 2, "loss": None, "expert_counts": [[1, 2]]},
        {"step": 3, "validation_loss": 1.5},
        {"step": 3, "event": "spike", "action": "warn"},
        {"step": 4, "loss": 1.0, "expert_counts": [[3, 4]]},
    ]
    training, validation, events, steps_N, counts_NLE = _read(records)
    steps, values = _series(training, "loss")
    assert steps.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(values, [2.0, np.nan, 1.0])
    assert validation == [{"step": 3, "validation_loss": 1.5}]
    assert events == [{"step": 3, "event": "spike", "action": "warn"}]
    assert steps_N.tolist() == [2, 4]
    assert counts_NLE.tolist() == [[[1, 2]], [[3, 4]]]


def test_counts_of_a_long_run_are_thinned_out_evenly():
    records = ({"step": step, "loss": 1.0, "expert_counts": [[step, 1]]} for step in range(1, 5001))
    training, _, _, steps_N, counts_NLE = _read(records)
    assert len(training) == 5000
    assert 500 <= len(steps_N) <= 1000
    assert set(np.diff(steps_N)) == {8}
    np.testing.assert_array_equal(counts_NLE[:, 0, 0], steps_N)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, maniple.metrics; print({'torch', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "set()\n"
