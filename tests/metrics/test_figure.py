import subprocess
import sys

import numpy as np
import pytest

from maniple.metrics import MetricsWriter, draw_curves
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


def test_nothing_to_draw_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "validation_loss": 2.0}\n')
    with pytest.raises(ValueError, match="no training record"):
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
