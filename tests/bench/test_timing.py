"""How calls are timed."""

from __future__ import annotations

import types

import torch
from tests.bench.small import CPU

from maniple.bench import timing


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.interleaved(calls, CPU, rounds=3)
    assert "".join(order) == "abc" + "abc" * 3  # a call each to warm up, then rounds
    assert {each.rounds for each in times.values()} == {3}


def test_on_a_gpu_events_enclose_the_call_alone(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(done)
            done.append("event")

        def elapsed_time(self, end):
            assert done[-1] == "synchronize"
            return 10.0 * (end.at - self.at)

    flush = types.SimpleNamespace(zero_=lambda: done.append("flush"))
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda device: done.append("synchronize"))
    monkeypatch.setattr(timing, "torch", types.SimpleNamespace(cuda=cuda, empty=lambda *a, **k: flush, uint8=None))
    calls = {name: lambda name=name: done.append(name) for name in "ab"}
    times = timing.interleaved(calls, torch.device("cuda"), rounds=3)
    measured = [word for name in "ab" for word in ("event", name, "event", "synchronize")]  # a call lasts 20
    # two calls fill 30 ms, after one that does not count; the second turn is there for the third round
    turns = [word for name in "ab" for word in ["flush", "event", name, "event"] * 3] * 2
    assert done == ["a"] * 3 + ["b"] * 3 + measured + turns + ["synchronize"]
    assert times["a"] == timing.Times(20.0, 20.0, 20.0, 4)


def test_times_are_medians_and_fifths():
    assert timing.Times.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0]) == timing.Times(3.5, 2.0, 5.0, 6)
