"""What is saved in the place of a tensor that is forgotten, how often it is computed again, and when it is let go."""

from __future__ import annotations

import gc

import pytest
import torch

from maniple.kernels import forgotten
from maniple.kernels.forgotten import active, forget, forgetting, hold, recomputed


class Square:
    """x -> x², told to be forgotten; counts how often it is computed again."""

    def __init__(self, late: bool = False) -> None:
        self.again, self.late = 0, late

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x * x
        if active():
            kept = hold(x)

            def compute() -> list[torch.Tensor]:
                self.again += 1
                assert not torch.is_grad_enabled()
                return [kept() * kept()]

            forget([out], compute, late=self.late)
        return out


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_()


def consume(y: torch.Tensor) -> torch.Tensor:
    """Saves y three times: as it is, turned, and a part of it."""
    return (y * y).sum() + y.t().sin().sum() + y[1:, ::2].exp().sum()


def test_gradients_are_those_of_what_is_kept_and_it_is_computed_again_once(x):
    (wanted,) = torch.autograd.grad(consume(x * x), x)
    square = Square()
    with forgetting():
        loss = consume(square(x))
    (got,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(got, wanted)
    assert square.again == 1
    assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)
    assert square.again == 2


def test_what_is_let_go_late_is_there_once(x):
    (wanted,) = torch.autograd.grad(consume(x * x), x)
    square = Square(late=True)
    with forgetting():
        y = square(x)
        storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        loss = consume(y)
    del y
    gc.collect()
    assert not storage.expired()
    for again in (0, 1, 2):
        (got,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(got, wanted)
        assert square.again == again
        assert storage.expired()
    with forgetting():
        y = square(x)
        storage, loss = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()), consume(y)
    del y, loss  # a graph that nobody runs
    gc.collect()
    assert storage.expired()


def test_one_forgotten_tensor_is_made_from_another(x):
    (wanted,) = torch.autograd.grad(consume((x * x) * (x * x)), x)
    first, second = Square(), Square()
    with forgetting():
        loss = consume(second(first(x)))
    (got,) = torch.autograd.grad(loss, x)
    assert torch.equal(got, wanted)
    assert second.again == 1
    assert first.again >= 1


def test_the_values_are_gone_in_between(x):
    square = Square()
    with forgetting():
        y = square(x)
        storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        loss = consume(y)
    assert not storage.expired()
    del y
    gc.collect()
    assert storage.expired()
    assert not forgotten._known
    loss.backward()


def test_outside_a_scope_or_without_gradients_nothing_is_forgotten(x):
    square = Square()
    consume(square(x)).backward()
    with forgetting(), torch.no_grad():
        consume(square(x))
    assert square.again == 0
    assert not forgotten._known


def test_another_dtype_on_the_same_memory_is_not_taken_for_it(x):
    square = Square()
    with forgetting():
        y = square(x)
        assert forgotten.is_forgotten(y)
        assert forgotten.is_forgotten(y.t()[1:])
        assert not forgotten.is_forgotten(y.detach().view(torch.int64))
        assert not forgotten.is_forgotten(y.clone())


def test_a_function_is_computed_again_whole(x):
    weight = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    calls = []

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return (a * weight).exp() * b

    fixed = torch.arange(3.0, dtype=torch.float64)[:, None]  # needs no gradient
    function(x, fixed).sum().backward()
    wanted = [leaf.grad.clone() for leaf in (x, weight)]
    x.grad = weight.grad = None
    calls.clear()
    recomputed(function, x, fixed).sum().backward()
    assert calls == [False, True]
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])
    assert fixed.grad is None
