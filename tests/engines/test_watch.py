"""Who a hanging job waits for, told from what each rank said last."""

import pytest

from maniple.engines.megatron.faults.watch import Seen, verdict

NOW = 1000.0


def at(step, phase, ago=60.0, told=0.5):
    return Seen(step, phase, NOW - ago, NOW - told)


BACK = at(17, "backward", ago=60)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            {0: BACK, 1: BACK, 2: BACK, 3: at(17, "data loading", ago=61)},
            "step 17: rank 3 stopped in data loading 61 s ago; ranks 0-2 wait in backward",
        ),
        (
            {0: at(5, "gradient reduction"), 1: at(5, "forward", ago=63)},
            "step 5: rank 1 stopped in forward 63 s ago; rank 0 waits in gradient reduction",
        ),
        (
            {0: at(6, "forward"), 1: at(6, "forward"), 2: at(5, "update", ago=70), 3: at(6, "forward")},
            "step 6: rank 2 stopped in update of step 5 70 s ago; ranks 0-1, 3 wait in forward",
        ),
        (
            {0: BACK, 1: at(17, "backward", told=59)},
            "step 17: rank 1 has not answered for 59 s (last in backward); rank 0 waits in backward",
        ),
        (
            {0: at(0, "start-up"), 1: None, 2: None},
            "start-up: ranks 1-2 never joined (1 of 3 did); rank 0 waits in start-up",
        ),
        (
            {0: at(0, "meeting"), 1: at(0, "start-up", ago=63)},
            "start-up: rank 1 stopped in start-up 63 s ago; rank 0 waits in meeting",
        ),
        ({0: BACK, 1: BACK}, "step 17: ranks 0-1 wait in backward"),  # what one sends the other does not take
        ({0: at(3, "data loading"), 1: at(3, "data loading")}, "step 3: ranks 0-1 wait in data loading"),
    ],
)
def test_who_is_missing(found, says):
    assert verdict(found, NOW, silent=5.0) == says
