"""Tapes count as autograd frees: by hand, on rows of operations small enough to follow."""

from __future__ import annotations

import pytest

from maniple.plan.tape import Tape


def test_what_nothing_keeps_is_freed_after_its_last_reader():
    tape = Tape(given=4)
    tape.op("a", ["x"], {"u": 10})
    tape.op("b", ["u"], {"v": 20})
    tape.op("c", ["v"], {"y": 5})
    held = tape.run("y")
    assert held.kept == {"c": 5}  # the result stays
    assert held.forward == 30  # u and v at once
    assert held.result == 5


def test_kept_tensors_are_counted_where_they_were_made():
    tape = Tape(given=4)
    tape.op("a", ["x"], {"u": 10}, ["x"], extra=1)
    tape.op("b", ["u"], {"y": 20}, ["u"])
    held = tape.run("y")
    assert held.kept == {"a": 11, "b": 20}
    assert held.kept_bytes == 31
    assert held.forward == 31


def test_backward_frees_what_it_has_read():
    tape = Tape(given=4)
    tape.op("a", ["x"], {"u": 10}, ["x"])
    tape.op("b", ["u"], {"y": 20}, ["u"], backward=100)
    # of b: u, the gradients of y and u, and its own 100; y itself is freed with what comes after
    assert tape.run("y").backward == 10 + 20 + 10 + 100
    tape.op("c", ["y"], {"z": 1})
    # nothing keeps y; its gradient is there beside z's before b runs
    assert tape.run("z").backward == 10 + 20 + 10 + 100


def test_a_gradient_that_its_caller_holds_stays_until_the_end():
    tape = Tape(given=4)
    tape.op("a", ["x"], {"u": 10}, ["x"], backward=100)
    tape.op("b", ["u"], {"y": 20}, ["u"])
    # of a: the gradients of u and x, and its own 100; y's is the caller's
    assert tape.run("y").backward == 10 + 4 + 100
    assert tape.run("y", held=True).backward == 10 + 4 + 100 + 20


def test_two_gradients_of_one_tensor_are_added_in_place_or_not():
    def branches(sums_in_place: bool) -> int:
        tape = Tape(given=50, sums_in_place=sums_in_place)
        tape.op("a", ["x"], {"u": 1})
        tape.op("b", ["x"], {"v": 1})
        tape.op("c", ["u", "v"], {"y": 1})
        return tape.run("y").backward

    assert branches(True) == 50 + 50 + 1  # of a, as its new gradient joins b's
    assert branches(False) == 50 + 50 + 50 + 1


def test_a_sum_passes_its_gradient_on_in_the_same_memory():
    tape = Tape(given=8)
    tape.op("a", ["x"], {"u": 8})
    tape.op("sum", ["x", "u"], {"y": 8}, passes="x")
    assert tape.run("y").backward == 16  # the residual's, and the branch's own


def test_moves_says_whose_gradients_are_made():
    tape = Tape(given=8)
    tape.op("a", ["x"], {"u": 100}, moves=[])
    tape.op("b", ["u"], {"y": 1}, moves=["u"])
    assert tape.run("y").backward == 101


@pytest.mark.parametrize(("weight_first", "wanted"), [(False, 100 + 40 + 100), (True, 40 + 100)])
def test_what_is_computed_again_for_a_weight_is_gone_before_the_inputs_gradient(weight_first, wanted):
    tape = Tape(given=100, forgets={"rows": ()})
    tape.op("exchange", ["x"], {"rows": 100})
    tape.op("experts", ["rows"], {"out": 40}, ["rows"], weight_first=weight_first)
    assert tape.run("out").backward == max(wanted, 200)  # 200: the gradients of rows and of x
