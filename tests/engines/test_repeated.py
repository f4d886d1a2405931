"""Calls on meta tensors that are not made again: the same shapes, strides, types and memory as if they had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from maniple.engines.megatron.dry_run.repeated import Repeated


class _Counted(TorchDispatchMode):
    """Leads operations through `Repeated`, and counts those that it passed on to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = Repeated()
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def counted(*args, **kwargs):
            self.made.append(func._schema.name)
            return func(*args, **kwargs)

        counted._schema = func._schema
        names = self.__dict__.setdefault("names", {})  # one wrapper an operator, as torch has one object
        return self.repeated(names.setdefault(func, counted), args, kwargs or {})


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CALLS: dict[str, Any] = {
    "broadcast": lambda: tensor(3, 1, 5) + tensor(4, 1),
    "promoted": lambda: tensor(3, dtype=torch.bfloat16) * 2.5 + tensor(3),
    "turned": lambda: tensor(4, 6).t() * 2,
    "several": lambda: torch.topk(tensor(7, 9), 3),
    "reduced": lambda: tensor(3, 4).sum(0, dtype=torch.float64),
    "list": lambda: torch.cat([tensor(2, 3), tensor(5, 3)]),
    "kept layout": lambda: torch.empty_like(tensor(3, 4, 5).permute(2, 0, 1)),
    "cast": lambda: tensor(3).to(torch.bfloat16),
    "matrix product": lambda: tensor(2, 3, 4) @ tensor(4, 5),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_gives_what_the_first_gave_in_memory_of_its_own(name):
    def described(made) -> list[tuple]:
        made = list(made) if isinstance(made, tuple) else [made]
        return [(t.shape, t.stride(), t.dtype, t.device.type, t.untyped_storage().nbytes()) for t in made]

    call = CALLS[name]
    plain = call()
    with _Counted() as mode:
        first = call()
        count = len(mode.made)
        second = call()
        allocations = [op for op in mode.made[count:] if op != "aten::t" and "permute" not in op]
    assert described(first) == described(second) == described(plain)
    assert type(second) is type(first)
    assert not [op for op in allocations if op not in ("aten::view", "aten::_unsafe_view", "aten::expand")]
    pair = [t[0] if isinstance(t, tuple) else t for t in (first, second)]
    assert pair[0].untyped_storage()._cdata != pair[1].untyped_storage()._cdata


def test_what_changes_or_views_its_operands_is_always_done():
    x = tensor(4, 6)
    with _Counted() as mode:
        for _ in range(2):
            mode.made.clear()
            assert x.add_(1) is x
            assert x.view(24).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.ops.aten._unsafe_view(x, [24]).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert mode.made == ["aten::add_", "aten::view", "aten::_unsafe_view"]


def test_operands_that_differ_are_told_apart():
    with _Counted():
        for made, dtype in ((tensor(3) * 1, torch.float32), (tensor(3, dtype=torch.int64) * True, torch.int64)):
            assert made.dtype == dtype
        assert (tensor(3, dtype=torch.int64) * 1.0).dtype == torch.float32
        assert (tensor(3, dtype=torch.int64) * 1).dtype == torch.int64
        assert (tensor(2, 3) + tensor(3)).shape != (tensor(3) + tensor(3)).shape
        with pytest.raises(RuntimeError):
            tensor(2) + tensor(3)


def test_real_tensors_are_computed():
    with _Counted():
        assert [(torch.ones(2) * value).tolist() for value in (2.0, 3.0, 2.0)] == [[2, 2], [3, 3], [2, 2]]
