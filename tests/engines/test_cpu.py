"""A CPU process as Megatron-Core's device: every redirect works, and is still needed.

Each redirect is looked up in upstream's source: where upstream no longer says what it was made for, its test fails and
the redirect can go. What happens without them is seen in a process that cannot find a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.engines.megatron import cpu

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work


def _constructs() -> dict[str, Callable[[], Any]]:
    """What Megatron-Core does with CUDA, by name, and what becomes of it."""
    ones = torch.ones(2)
    return {
        "device=cuda": lambda: torch.zeros(1, device="cuda").device.type,
        "device=cuda:0": lambda: torch.empty(1, device=torch.device("cuda", 0)).device.type,
        "device=current_device()": lambda: torch.full((1,), 2.0, device=torch.cuda.current_device()).device.type,
        "tensor.cuda()": lambda: ones.cuda().device.type,
        "tensor.cuda(non_blocking)": lambda: ones.cuda(non_blocking=True).device.type,
        "tensor.to(cuda)": lambda: ones.to("cuda").device.type,
        "tensor.to(cuda, dtype)": lambda: str(ones.to("cuda", torch.bfloat16).dtype),
        "tensor.to(device=cuda)": lambda: ones.to(device="cuda").device.type,
        "pin_memory": lambda: torch.empty(1, pin_memory=True).device.type,
        "set_device": lambda: torch.cuda.set_device(0),
        "default_stream": lambda: torch.cuda.default_stream().query(),
        "current_stream": lambda: torch.cuda.current_stream().query(),
        "stream": _streams,
        "event": _events,
        "record_stream": lambda: ones.record_stream(torch.cuda.current_stream()),
        "synchronize": lambda: torch.cuda.synchronize(),
        "get_rng_state": lambda: torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state()),
        "is_current_stream_capturing": lambda: torch.cuda.is_current_stream_capturing(),
        "get_device_capability": lambda: torch.cuda.get_device_capability(),
    }


def _streams() -> bool:
    torch.cuda.Stream.priority_range()
    stream = torch.cuda.Stream(device="cuda", priority=-1)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(stream.record_event())
    torch.cuda.set_stream(stream)
    stream.synchronize()
    return stream.query()


def _events() -> bool:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream())
    event.wait()
    event.synchronize()
    return event.query()


def probe(rank: int, world_size: int) -> dict[str, Any]:
    """In a process without a GPU: every construct before and after `install`."""
    before: dict[str, str] = {}
    for name, construct in _constructs().items():
        try:
            before[name] = f"gave {construct()}"
        except Exception as error:
            before[name] = f"raised {type(error).__name__}"
    report: dict[str, Any] = {"before": before, "types before": _types(), "installed before": cpu.is_installed()}
    report["devices before"] = torch.cuda.device_count()
    report["seeds before"] = _seeded_alike()
    report["compiled before"] = _compiler_is_called()

    cpu.install()
    cpu.install()  # is idempotent
    report["after"] = {name: construct() for name, construct in _constructs().items()}
    report["types"] = _types()
    report["installed"] = cpu.is_installed()
    report["devices"] = torch.cuda.device_count()
    report["seeds"] = _seeded_alike()
    report["compiled"] = _compiler_is_called()
    report["depth"] = len(torch.overrides._get_current_function_mode_stack())
    report["nvtx"] = torch.cuda.nvtx.range_push("x") + torch.cuda.nvtx.range_pop()
    report["rng"] = _tracker()
    return report


def _types() -> list[str]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(1))
    return [*(torch.ones(1, dtype=dtype).type() for dtype in dtypes), weight.type(), str(weight.type(torch.half).dtype)]


def _seeded_alike() -> bool:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.rand(1)
    torch.cuda.manual_seed(3)
    seeded = torch.equal(torch.rand(4), wanted)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.rand(1)
    torch.cuda.set_rng_state(state)
    return seeded and torch.equal(torch.rand(4), wanted)


def _compiler_is_called() -> bool:
    calls: list[int] = []

    def backend(graph, example_inputs):
        calls.append(1)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(calls)


def _tracker() -> dict[str, bool]:
    """Upstream's tracker: named streams that repeat, and neither they nor the default one disturb each other."""
    import logging

    from megatron.core.tensor_parallel import random

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    tracker.add("a", 1)
    tracker.add("b", 2)
    with tracker.fork("a"):
        first = torch.rand(2)
    states = tracker.get_states()
    with tracker.fork("a"):
        second = torch.rand(2)
    with tracker.fork("b"):
        other = torch.rand(2)
    default = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("a"):
        again = torch.rand(2)
    return {
        "default stream is not disturbed": torch.equal(default, wanted),
        "a fork goes on": not torch.equal(first, second),
        "streams differ": not torch.equal(first, other),
        "a state comes back": torch.equal(again, second),
        "no warning": not warnings,
    }


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.setenv(name, "-1")
        return run_ranks(probe, 1, timeout=400)[0]


def test_nothing_works_without_it(report):
    assert not {name: what for name, what in report["before"].items() if not what.startswith("raised")}
    assert not report["installed before"]
    assert report["devices before"] == 0
    assert not report["seeds before"]
    assert report["compiled before"]
    assert report["types before"][0] == "torch.FloatTensor"


def test_everything_is_led_to_the_cpu(report):
    after = dict(report["after"])
    assert after.pop("tensor.to(cuda, dtype)") == "torch.bfloat16"
    assert after.pop("get_device_capability") == (0, 0)
    for nothing in ("set_device", "record_stream", "synchronize"):
        assert after.pop(nothing) is None
    assert after.pop("is_current_stream_capturing") is False
    for name in ("stream", "event", "default_stream", "current_stream", "get_rng_state"):
        assert after.pop(name) is True, name
    assert set(after.values()) == {"cpu"}
    assert report["devices"] == 1
    assert report["seeds"]
    assert report["nvtx"] == 0


def test_installed_once(report):
    assert report["installed"]
    assert report["depth"] == 1


def test_tensors_pass_for_cuda_ones(report):
    names = ["FloatTensor", "HalfTensor", "BFloat16Tensor", "FloatTensor"]
    assert report["types"] == [*(f"torch.cuda.{name}" for name in names), "torch.float16"]


def test_nothing_is_compiled(report):
    assert not report["compiled"]


def test_random_streams(report):
    assert report["rng"]
    assert not [name for name, true in report["rng"].items() if not true]


def test_in_use_cuda_is_not_replaced(monkeypatch):
    monkeypatch.setattr(cpu, "_installed", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="cannot become a CPU device"):
        cpu.install()


UPSTREAM = Path(importlib.util.find_spec("megatron.core").origin).parent  # found, not imported


@pytest.fixture(scope="module")
def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in UPSTREAM.rglob("*.py"))


@pytest.mark.parametrize("name", [*cpu._REDIRECTS, "nvtx.range_push", "nvtx.range_pop", "random.get_rng_state"])
def test_upstream_still_uses(source, name):
    assert f"torch.cuda.{name}(" in source or f"torch.cuda.{name}." in source


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("optimizer.optimizer", "== 'torch.cuda.FloatTensor'"),
        ("optimizer.optimizer", "in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']"),
        ("optimizer.distrib_optimizer", "== 'torch.cuda.FloatTensor'"),
        ("tensor_parallel.random", "_lazy_call(cb)"),
        ("tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
        ("tensor_parallel.random", "def _get_cuda_rng_state("),
        ("pipeline_parallel.utils", "input.record_stream(self.stream)"),
        ("jit", "torch.compile"),
        ("distributed.param_and_grad_buffer", "torch.cuda.stream("),
        ("pipeline_parallel.p2p_communication", "torch.cuda.synchronize()"),
        ("tensor_parallel.layers", "torch.cuda.current_device()"),
    ],
)
def test_upstream_still_says(module, words):
    assert words in (UPSTREAM / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def gloo_threads(rank: int, world_size: int) -> tuple[int, int, float]:
    """Threads that a group costs by torch itself, and here; and what groups of ours compute together."""
    import os

    import torch.distributed as dist

    def threads_of(groups: int) -> int:
        before = len(os.listdir("/proc/self/task"))
        made = [dist.new_group() for _ in range(groups)]
        for group in made:
            dist.all_reduce(torch.ones(1), group=group)
        threads = len(os.listdir("/proc/self/task")) - before
        for group in made:
            dist.destroy_process_group(group)
        return threads

    plain = threads_of(5)
    cpu.install()
    ours = threads_of(5)
    groups = [dist.new_group() for _ in range(3)]
    values = [torch.tensor([float(rank + number)]) for number in range(3)]
    waits = [dist.all_reduce(value, group=group, async_op=True) for value, group in zip(values, groups, strict=True)]
    for wait in reversed(waits):
        wait.wait()
    return plain, ours, sum(value.item() for value in values)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted under /proc")
def test_groups_share_a_device():
    for plain, ours, total in run_ranks(gloo_threads, 2):
        assert plain >= 15, "torch's own groups have become cheap: the redirect is no longer needed"
        assert ours <= 6
        assert total == 9
