"""How calls are timed."""

from __future__ import annotations

import itertools
import types

import torch
from tests.bench.small import CPU

from maniple.bench import timing


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.interleaved(calls, CPU, rounds=20)
    warm_up, *turns = ("".join(order[i : i + 3]) for i in range(0, len(order), 3))
    assert warm_up == "abc"
    assert [sorted(turn) for turn in turns] == [list("abc")] * 20
    before = {one + two for one, two in itertools.pairwise(order[3:])}
    assert {"ab", "ac", "ba", "bc", "ca", "cb"} <= before  # nobody has the same neighbour every time
    assert {each.rounds for each in times.values()} == {20}
    again, order = order, []
    timing.interleaved(calls, CPU, rounds=20)
    assert order == again


def fake_gpu(monkeypatch, milliseconds):
    """A list of all that is asked of a GPU on which a call lasts so long."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(done)
            done.append("event")

        def elapsed_time(self, end):
            assert done[-1] == "synchronize"
            return milliseconds * (end.at - self.at) / 2  # a call and its event

    flush = types.SimpleNamespace(zero_=lambda: done.append("flush"))
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda device: done.append("synchronize"))
    monkeypatch.setattr(timing, "torch", types.SimpleNamespace(cuda=cuda, empty=lambda *a, **k: flush, uint8=None))
    return done


def test_on_a_gpu_events_enclose_the_call_alone(monkeypatch):
    done = fake_gpu(monkeypatch, 20.0)
    calls = {name: lambda name=name: done.append(name) for name in "ab"}
    times = timing.interleaved(calls, torch.device("cuda"), rounds=3)
    measured = [word for name in "ab" for word in ("event", name, "event", "synchronize")]
    # two calls fill 30 ms, after one that does not count; as many turns as rounds, of which there are few
    assert done[:6] + done[-1:] == ["a"] * 3 + ["b"] * 3 + ["synchronize"]
    turns = done[6 + len(measured) : -1]
    assert done[6 : 6 + len(measured)] == measured
    assert len(turns) == 3 * 2 * 12
    for turn in range(3):
        both = [turns[12 * n : 12 * n + 12] for n in (2 * turn, 2 * turn + 1)]
        assert sorted(both) == [["flush", "event", name, "event"] * 3 for name in "ab"]
    assert times["a"] == timing.Times(20.0, 20.0, 20.0, 6)


def test_a_short_call_takes_several_turns_too(monkeypatch):
    done = fake_gpu(monkeypatch, 0.1)
    calls = {name: lambda name=name: done.append(name) for name in "abc"}
    times = timing.interleaved(calls, torch.device("cuda"), rounds=30)
    assert times["a"].rounds == timing.TURNS * 30
    called = [word for word in done if word in calls][3 * timing.WARM_UP + 3 :]
    assert len(list(itertools.groupby(called))) > 2 * timing.TURNS  # nobody's rounds are all behind one neighbour


def test_times_are_medians_and_fifths():
    assert timing.Times.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0]) == timing.Times(3.5, 2.0, 5.0, 6)
