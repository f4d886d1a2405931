"""The guard's decisions: what counts as a spike, what follows, and that a resumed run decides as the uninterrupted."""

import json
import math
import random

import pytest

from maniple.config.schema import GuardConfig
from maniple.engines.megatron.faults.guard import Guard


def guard(**options):
    return Guard(GuardConfig(**{"spike_window": 8, **options}))


def fed(judge, losses):
    for loss in losses:
        assert judge.judge(loss, 1.0).action == "go"
    return judge


LEVEL = [3.0, 3.1, 2.9, 3.05, 2.95, 3.0, 3.1, 2.9]  # median 3.0, MAD 0.075


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_what_is_not_finite_is_never_applied(loss, norm, policy):
    verdict = guard(nonfinite=policy).judge(loss, norm)
    assert (verdict.action, verdict.kind, verdict.updates) == (policy, "nonfinite", False)
    assert str(loss if not math.isfinite(loss) else norm) in verdict.why


def test_a_spike_is_measured_in_robust_deviations():
    sigma = 1.4826 * 0.075
    for loss, action in ((3.0 + 8 * sigma * 1.001, "warn"), (3.0 + 8 * sigma * 0.999, "go")):
        assert fed(guard(), LEVEL).judge(loss, 1.0).action == action
    # one outlier in the window does not hide the next, as it would with mean and standard deviation
    judge = fed(guard(), LEVEL)
    assert judge.judge(100.0, 1.0).action == "warn"
    assert judge.judge(100.0, 1.0).action == "warn"


def test_no_alarm_before_the_window_is_full_nor_when_off():
    assert fed(guard(), LEVEL[:-1]).judge(100.0, 1.0).action == "go"
    assert fed(guard(spike="off"), LEVEL).judge(100.0, 1.0).action == "go"


def test_losses_that_hardly_differ_and_falling_ones_make_no_alarm():
    flat = fed(guard(), [3.0] * 8)
    assert flat.judge(3.01, 1.0).action == "go"
    assert flat.judge(3.1, 1.0).action == "warn"
    draw = random.Random(0)
    fed(guard(spike_window=64), [2 + 4 * math.exp(-n / 100) + draw.gauss(0, 0.05) for n in range(1000)])


def test_a_spike_that_is_left_out_does_not_enter_the_statistics():
    judge = fed(guard(spike="skip"), LEVEL)
    assert judge.judge(9.0, 1.0).action == "skip"
    assert 9.0 not in judge.losses
    assert judge.judge(3.0, 1.0).action == "go"


def test_so_many_in_a_row_stop_the_run():
    judge = guard(nonfinite="skip", max_skips=2)
    assert [judge.judge(math.nan, 1.0).action for _ in range(3)] == ["skip", "skip", "stop"]
    judge = guard(nonfinite="skip", max_skips=2)
    assert [judge.judge(loss, 1.0).action for loss in (math.nan, math.nan, 3.0, math.nan)] == [
        "skip",
        "skip",
        "go",
        "skip",
    ]
    judge = guard(nonfinite="rollback", max_skips=1)
    assert judge.judge(math.nan, 1.0).action == "rollback"
    judge.leave_out(5, newest_saved=2)
    assert judge.judge(math.nan, 1.0).action == "stop"


def test_a_rollback_leaves_out_the_window_about_the_step():
    judge = guard(skip_steps=2)
    judge.leave_out(9, newest_saved=5)
    assert [judge.end_of_window(step) for step in (6, 7, 9, 11, 12)] == [None, 11, 11, 11, None]
    judge.leave_out(9, newest_saved=8)  # batches that are in the checkpoint cannot be left out of it
    assert judge.left_out[-1] == [9, 11]


def test_a_resumed_run_decides_alike():
    draw = random.Random(1)
    losses = [draw.choice([3 + draw.gauss(0, 0.1), 3.0, 30.0, math.nan]) for _ in range(400)]
    options = {"nonfinite": "skip", "spike": "skip", "max_skips": 3}
    whole = guard(**options)
    expected = [whole.judge(loss, 1.0).action for loss in losses]
    assert set(expected) == {"go", "skip", "stop"}
    judge, actions = guard(**options), []
    for loss in losses:  # saved and loaded at every step
        state = json.loads(json.dumps(judge.state()))
        judge = guard(**options)
        judge.load_state(state)
        actions.append(judge.judge(loss, 1.0).action)
    assert actions == expected
