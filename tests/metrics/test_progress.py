import io

import pytest
from rich.console import Console

from maniple.metrics import TrainProgress
from maniple.metrics.progress import _clock_text


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(terminal=False, steps=range(1, 101), **options):
    """What a run of 100 steps at 2 seconds a step prints."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=120)
    with TrainProgress(100, console=console, clock=clock, **options) as progress:
        for step in steps:
            clock.now += 2.0
            progress.update(step, loss=5.0 - step / 100, tokens_per_second=2810.4, imbalance=1.318)
    return out.getvalue()


def test_without_a_terminal_a_line_every_few_seconds():
    lines = shown(plain_interval=60.0).splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "31/100", "61/100", "91/100", "100/100"]
    assert lines[1] == "step 31/100 · loss 4.690 · 2,810 tok/s · balance 1.32x · 2:18 left"
    assert lines[-1].endswith("0:00 left")


def test_on_a_terminal_the_bar_ends_at_the_last_step():
    assert "step 100/100 · loss 4.000 · 2,810 tok/s · balance 1.32x" in shown(terminal=True)


def test_a_resumed_run_counts_its_own_time_only():
    first, second = shown(plain_interval=0.0, steps=(51, 52), start_step=50).splitlines()
    assert "left" not in first
    assert second.endswith("1:36 left")


@pytest.mark.parametrize("options", [{"rank": 1}, {"enabled": False}])
def test_other_ranks_and_quiet_runs_print_nothing(options):
    assert shown(**options) == ""


def test_what_is_not_known_is_left_out():
    out = io.StringIO()
    with TrainProgress(5, console=Console(file=out)) as progress:
        progress.update(1, loss=float("nan"))
    assert out.getvalue() == "step 1/5 · loss nan\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (41.2, "0:42"), (3600, "1:00:00"), (11229, "3:07:09"), (184029, "2d 3:07:09")]
)
def test_clock(seconds, text):
    assert _clock_text(seconds) == text
