"""AdamW over flat shards against torch's own in float64; how bf16 is rounded; what does not depend on a shard's cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maniple.kernels import registry
from maniple.kernels.adamw import Shard, adamw_, launch, reference

BF16, FP32 = torch.bfloat16, torch.float32
HYPER = dict(learning_rate=0.03, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.2)


def shard(n: int, main=FP32, avg=FP32, sq=FP32, grad=FP32, *, model: bool = False, seed: int = 0, first: int = 0):
    """At unit scale, its moments those of a run under way."""
    g = torch.Generator().manual_seed(seed)
    values = [torch.randn(n, generator=g) for _ in range(4)]
    return Shard(
        values[0].to(grad),
        values[1].to(main),
        (0.3 * values[2]).to(avg),
        values[3].square().to(sq),
        torch.full((n,), math.nan, dtype=BF16) if model else None,
        seed=seed,
        first=first,
    )


def clone(s: Shard, part: slice = slice(None), first: int | None = None) -> Shard:
    model = None if s.model is None else s.model[part].clone()
    tensors = (t[part].clone() for t in (s.grad, s.main, s.exp_avg, s.exp_avg_sq))
    return Shard(*tensors, model, s.seed, s.first + (part.start or 0) if first is None else first)


def oracle(s: Shard, step: int, scale: float = 1.0):
    """(main, exp_avg, exp_avg_sq) after torch's AdamW in float64."""
    weight = torch.nn.Parameter(s.main.double())
    adam = torch.optim.AdamW(
        [weight],
        lr=HYPER["learning_rate"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["epsilon"],
        weight_decay=HYPER["weight_decay"],
    )
    moments = {"exp_avg": s.exp_avg.double(), "exp_avg_sq": s.exp_avg_sq.double()}
    adam.state[weight] = {"step": torch.tensor(float(step - 1)), **moments}
    weight.grad = s.grad.double() * scale
    adam.step()
    return weight.detach(), *(adam.state[weight][name] for name in moments)


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([0, 1, 3, 31, 257]),
    dtypes=st.tuples(*[st.sampled_from([FP32, BF16])] * 4),
    step=st.sampled_from([1, 2, 1000]),
    scale=st.sampled_from([None, 0.25, "tensor"]),
    seed=st.integers(0, 99),
)
def test_it_is_torchs_adamw(n, dtypes, step, scale, seed):
    s = shard(n, *dtypes, model=True, seed=seed)
    wanted = oracle(s, step, 1.0 if scale is None else 0.25)
    adamw_([s], step=step, grad_scale=torch.tensor(0.25) if scale == "tensor" else scale, **HYPER)
    for got, exact in zip((s.main, s.exp_avg, s.exp_avg_sq), wanted, strict=True):
        # fp32: a few roundings; bf16: the next number below or above
        bound = 1e-6 if got.dtype == FP32 else 2**-7
        assert (got.double() - exact).abs().le(bound * exact.abs() + 3e-7).all()
    if s.main.dtype == FP32:
        assert torch.equal(s.model, s.main.bfloat16())
    else:
        assert (s.model.double() - wanted[0]).abs().le(2**-8 * wanted[0].abs() + 3e-7).all()  # the nearest


def test_bf16_is_rounded_without_bias_and_to_one_of_two_neighbours():
    x = torch.tensor([1.0 + 2**-9, -1.0 - 3 * 2**-9, 3e-39, 1.0, 0.0]).repeat(40_000, 1)  # of the least normal below
    s = shard(x.numel(), seed=3)
    noise, _ = reference.dither(slice(0, x.numel()), s, step=7)
    got = reference.stochastic(x.flatten(), noise & 0xFFFF).view(x.shape).double()
    assert {len(column.unique()) for column in got[:, :3].T} == {2}
    assert got[:, 3].eq(1).all()
    assert got[:, 4].eq(0).all()
    # the standard deviation of a mean over 40,000 is 2e-5 of the step between neighbours, 2^-7 of the number
    assert (got.mean(0) - x[0].double()).abs().le(3e-4 * x[0].double().abs() + 1e-42).all()


def test_no_number_that_is_not_finite_becomes_another():
    x = torch.tensor([math.nan, math.inf, -math.inf])
    for noise in (0, 0xFFFF):
        got = reference.stochastic(x, torch.full((3,), noise))
        assert got.isnan().tolist() == [True, False, False]
        assert got[1:].tolist() == [math.inf, -math.inf]


def test_small_updates_are_not_lost():
    """A bf16 weight of 1 moves in steps of 2^-7; updates of 2^-11 add up all the same, and second moments decay."""
    n = 4000
    s = Shard(torch.ones(n), torch.ones(n, dtype=BF16), torch.ones(n, dtype=BF16), torch.ones(n, dtype=BF16), seed=1)
    hyper = dict(learning_rate=2**-11, beta1=0.9, beta2=0.999, epsilon=0.0)
    for step in range(10_001, 10_033):
        adamw_([s], step=step, **hyper)
    assert s.main.double().mean().item() == pytest.approx(1 - 32 * 2**-11, abs=2e-4)
    zero = Shard(torch.zeros(n), torch.zeros(n), torch.zeros(n), torch.ones(n, dtype=BF16), seed=1)
    for step in range(10_001, 10_101):
        adamw_([zero], step=step, **hyper)
    assert zero.exp_avg_sq.double().mean().item() == pytest.approx(0.999**100, abs=2e-3)  # rounded to nearest: 1


@pytest.mark.parametrize("first", [0, 2**32 - 7, 2**40 + 1])
def test_bits_do_not_depend_on_cut_or_piece(first, monkeypatch):
    whole = shard(101, BF16, BF16, BF16, BF16, seed=5, first=first)
    cuts = [clone(whole, slice(a, b)) for a, b in ((0, 1), (1, 38), (38, 101))]
    adamw_([whole], step=9, **HYPER)
    monkeypatch.setattr(reference, "_PIECE", 7)
    adamw_(cuts, step=9, **HYPER)
    for name in ("main", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(cut, name) for cut in cuts]))


def test_seeds_steps_and_places_round_apart_and_alike():
    def bits(**changes):
        asked = {"seed": 1, "first": 0, "step": 4} | changes
        s = clone(shard(2000, BF16, BF16, BF16))
        s = Shard(s.grad, s.main, s.exp_avg, s.exp_avg_sq, None, asked["seed"], asked["first"])
        adamw_([s], step=asked["step"], **HYPER | {"beta1": 0.0, "beta2": 0.0, "learning_rate": 1e-9})
        return torch.cat([s.main, s.exp_avg, s.exp_avg_sq])

    one = bits()
    assert torch.equal(one, bits())
    for changes in ({"seed": 2}, {"step": 5}, {"first": 2**32}, {"first": 1}):
        assert (bits(**changes) != one)[2000:].float().mean() > 0.2


def test_the_hash_is_the_hosts():
    words = [0, 1, 2**31, 2**32 - 1, 123456789]
    assert reference._mixed(torch.tensor(words)).tolist() == [launch.mixed(word) for word in words]
    assert len({launch.key(seed, step) for seed in range(50) for step in range(50)}) == 2500
    assert all(-(2**31) <= launch.key(seed, 1) < 2**31 for seed in range(50))


def test_every_bit_of_an_elements_number_matters():
    s = shard(1)
    zero, _ = reference.dither(slice(0, 1), s, 1)
    for bit in range(48):
        there, _ = reference.dither(slice(0, 1), clone(s, first=2**bit), 1)
        assert 6 <= bin(int(there ^ zero)).count("1") <= 26


def test_it_needs_no_copy_of_a_shard():
    """The largest tensor that an update makes is one piece of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "view" not in str(func) and not out._is_view():
                self.elements = max(self.elements, out.numel())
            return out

    s = shard(3 * reference._PIECE + 5, BF16, BF16, BF16)
    with Largest() as largest:
        adamw_([s], step=1, **HYPER)
    assert largest.elements == reference._PIECE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"main": torch.zeros(4, dtype=torch.float16)}, "main is fp32 or bf16"),
        ({"exp_avg": torch.zeros(3)}, "exp_avg is contiguous and as large"),
        ({"grad": torch.zeros(8)[::2]}, "grad is contiguous"),
        ({"model": torch.zeros(4)}, "model copy is bf16"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    tensors = {name: torch.zeros(4) for name in ("grad", "main", "exp_avg", "exp_avg_sq")} | changes
    with pytest.raises(ValueError, match=said):
        adamw_([Shard(**tensors)], step=1, **HYPER)


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match="from 1"):
        adamw_([], step=0, **HYPER)
    with pytest.raises(ValueError, match="one fp32 number"):
        adamw_([], step=1, grad_scale=torch.ones(2), **HYPER)


def test_tensors_without_values_pass():
    s = Shard(*(torch.empty(2**40, device="meta", dtype=dtype) for dtype in (FP32, BF16, BF16, BF16)))
    adamw_([s], step=1, **HYPER)


def test_the_reference_ran():
    adamw_([shard(2)], step=1, **HYPER)
    assert ("adamw", "bf16", "cpu", "reference") in registry.used()
