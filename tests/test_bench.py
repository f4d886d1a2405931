"""`maniple bench` on a CPU: what it measures, and whether it counts right. What needs a GPU of peers has stand-ins."""

from __future__ import annotations

import importlib.util
import json
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maniple import cli
from maniple.bench import bars, ceilings, command, contest, grouped_gemm, mlp, peers, quantizing, rows, timing
from maniple.bench.contender import Absent, Contender
from maniple.bench.operands import BOUNDS, make
from maniple.bench.ours import ours
from maniple.bench.shapes import OPS, Shape, at_random, group_sizes, of_model
from maniple.errors import UserError
from maniple.kernels import quantize, sources
from maniple.models import load_card

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SHAPE = Shape("m", "fc1", 48, 64, (5, 0, 130, 1, 77, 43))
CEILINGS = ceilings.Ceilings({"bf16": 1e12, "fp8": 2e12}, 1e11)


@pytest.fixture(scope="module")
def operands():
    return make(SHAPE, CPU, 0)


# --- shapes and counts ------------------------------------------------------------------------------------------------


def test_group_sizes_are_seeded_skewed_and_whole():
    sizes = group_sizes(128, 65_536, seed=3)
    assert sum(sizes) == 65_536
    assert sizes == group_sizes(128, 65_536, seed=3) != group_sizes(128, 65_536, seed=4)
    assert max(sizes) > 1.5 * min(sizes)
    assert sum(size % 128 == 0 for size in sizes) < 8
    # the spread of Dirichlet(8): a group's deviation is 1 / sqrt(8) of the mean
    deviation = torch.tensor(sizes, dtype=torch.float64).std().item() / 512
    assert 0.25 < deviation < 0.45


def test_rounded_groups_keep_the_rows_and_stay_near():
    shape = Shape("m", "fc1", 64, 64, group_sizes(32, 65_536, seed=1))
    near = shape.rounded(128)
    assert near.rows == 65_536
    assert all(size % 128 == 0 for size in near.sizes)
    assert max(abs(a - b) for a, b in zip(shape.sizes, near.sizes, strict=True)) < 128
    assert near.multiple == 128
    with pytest.raises(ValueError, match="256 rows are no multiple of 100"):
        SHAPE.rounded(100)


def test_padded_groups_keep_their_rows(operands):
    wide = operands.padded(128)
    assert all(size % 128 == 0 for size in wide.shape.sizes)
    assert sum(wide.shape.sizes) - sum(operands.shape.sizes) < 128 * operands.shape.groups
    assert wide.ends_G.tolist() == torch.tensor(wide.shape.sizes).cumsum(0).tolist()
    for few, many in ((operands.x_SK, wide.x_SK), (operands.grad_SN, wide.grad_SN)):
        parts = zip(few.split(operands.shape.sizes), many.split(wide.shape.sizes), strict=True)
        for some, group in parts:
            assert torch.equal(group[: len(some)], some)
            assert not group[len(some) :].any()
    facts = operands.shape.facts(128)
    assert (facts["rows"], facts["padded_rows"]) == (operands.shape.rows, wide.shape.rows)


def test_shapes_of_a_model_are_those_of_its_experts():
    fc1, fc2 = of_model(load_card("deepseek-v3"), rows=65_536, expert_parallel_size=8)
    assert (fc1.groups, fc1.n, fc1.k, fc1.rows) == (32, 4096, 7168, 65_536)
    assert (fc2.groups, fc2.n, fc2.k, fc2.rows) == (32, 7168, 2048, 65_536)
    fc1, fc2 = of_model(load_card("qwen3-30b-a3b"), rows=65_536)
    assert [(s.groups, s.n, s.k) for s in (fc1, fc2)] == [(128, 1536, 2048), (128, 2048, 768)]
    with pytest.raises(UserError, match="3 does not divide the 128 experts"):
        of_model(load_card("qwen3-30b-a3b"), rows=8, expert_parallel_size=3)


def test_random_shapes_are_seeded_and_uneven():
    first, second = at_random(7, rows=65_536)
    assert [first, second] == at_random(7, rows=65_536)
    assert [first, second] != at_random(8, rows=65_536)
    assert first.rows == second.rows == 65_536
    assert {first.n % 64, first.k % 64, second.n % 64, second.k % 64} == {0}
    assert any(size % 128 for size in first.sizes + second.sizes)


def test_counts_by_hand():
    s, n, k, groups, filled = 256, 48, 64, 6, 5
    assert SHAPE.flops == 2 * s * n * k
    assert SHAPE.bytes_moved("forward", "bf16") == 2 * (s * k + filled * n * k + s * n)
    assert SHAPE.bytes_moved("dgrad", "bf16") == 2 * (s * n + filled * n * k + s * k)
    assert SHAPE.bytes_moved("wgrad", "bf16") == 2 * (s * n + s * k + groups * n * k)
    assert SHAPE.bytes_moved("wgrad_accumulate", "bf16") == 2 * (s * n + s * k) + 8 * filled * n * k
    assert SHAPE.bytes_moved("forward", "fp8_block") == (1 + 1 / 32) * (s * k + filled * n * k) + 2 * s * n


def test_the_floor_is_the_larger_of_operations_and_bytes():
    assert CEILINGS.floor(2e9, 1e8, "bf16") == (2.0, "operations")
    assert CEILINGS.floor(2e9, 3e8, "bf16") == (3.0, "bytes")
    assert CEILINGS.floor(2e9, 1e7, "fp8") == (1.0, "operations")
    assert CEILINGS.floor(0.0, 1e8, "bf16") == (1.0, "bytes")
    assert CEILINGS.floor(2e9, 3e8, "mxfp8") is None


def test_measured_ceilings_are_sane():
    found = ceilings.measure(CPU, rounds=3)
    assert found.flops_per_s["bf16"] == found.flops_per_s["fp8"] > 1e8
    assert found.copy > 1e8


# --- timing -----------------------------------------------------------------------------------------------------------


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


# --- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recipe", grouped_gemm.RECIPES)
def test_ours_are_right(op, recipe, operands):
    found = list(ours(op, recipe, operands, None))
    assert next(each.role for each in found) == "selected"
    for each in found:
        operands.main_grad_GNK.zero_()
        error = operands.error(op, each.call())
        assert error < BOUNDS[recipe], (each.name, error)
        if recipe != "bf16":
            assert error > 1e-2, f"{each.name} has no quantization error"


@pytest.mark.parametrize("op", OPS)
def test_torch_is_right(op, operands):
    operands.main_grad_GNK.zero_()
    assert operands.error(op, peers.torch_grouped(op, operands).call()) < BOUNDS["bf16"]
    dense = peers.dense_bf16(op, operands).call()
    assert dense.shape == {"forward": (256, 48), "dgrad": (256, 64)}.get(op, (48, 64))


def deep_gemm(alignment=128):
    """DeepGEMM's functions as it documents them, in plain torch; groups that it would not take are refused."""

    def rows_by(weight):
        def function(a, b, out, groups_S, *rest):
            a, b = (t if isinstance(t, torch.Tensor) else dequantized(*t) for t in (a, b))
            for g in groups_S.unique().tolist():
                assert int((groups_S == g).sum()) % alignment == 0
            out.copy_(torch.stack([weight(b[g].float()) @ row.float() for row, g in zip(a, groups_S, strict=True)]))

        return function

    def wgrad(a, b, out, sizes, counts, into):
        assert out is into
        assert counts.tolist() == sizes
        start = 0
        for g, size in enumerate(sizes):
            assert size % alignment == 0
            out[g] += a[start : start + size].float().t() @ b[start : start + size].float()
            start += size

    def dequantized(data, scales):
        assert data.dim() == 3 or (scales.stride(0) == 1 and scales.stride(1) % 4 == 0)
        side = (128, 128) if data.dim() == 3 else (1, 128)
        wide = scales.repeat_interleave(side[0], -2).repeat_interleave(side[1], -1)
        return data.float() * wide[..., : data.shape[-2], : data.shape[-1]]

    return types.SimpleNamespace(
        m_grouped_bf16_gemm_nt_contiguous=rows_by(lambda w: w),
        m_grouped_bf16_gemm_nn_contiguous=rows_by(lambda w: w.t()),
        m_grouped_fp8_fp4_gemm_nt_contiguous=rows_by(lambda w: w),
        k_grouped_bf16_gemm_tn_contiguous=wgrad,
    )


@pytest.mark.parametrize(
    ("recipe", "op"),
    [
        ("bf16", "forward"),
        ("bf16", "dgrad"),
        ("bf16", "wgrad_accumulate"),
        ("fp8_block", "forward"),
        ("fp8_block", "dgrad"),
    ],
)
def test_deep_gemm_gets_what_it_takes(recipe, op, operands, monkeypatch):
    monkeypatch.setattr(peers, "_deep_gemm", deep_gemm)
    build = peers.deep_gemm_bf16 if recipe == "bf16" else peers.deep_gemm_fp8
    peer = build(op, operands)
    assert peer.multiple == 128
    operands.main_grad_GNK.zero_()
    assert operands.padded(128).error(op, peer.call()) < BOUNDS[recipe]


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_scaled_grouped_mm_gets_what_it_takes(op, operands, monkeypatch):
    def scaled(a, b, a_scale, b_scale, *, offs, out_dtype, use_fast_accum):
        ends, start, parts = offs.tolist(), 0, []
        for g, end in enumerate(ends):
            if b.dim() == 3:
                assert b.stride(1) == 1
                part = (a[start:end].float() * a_scale[start:end, None]) @ (b[g].float() * b_scale[g])
            else:
                n, k = a.shape[0], b.shape[1]
                assert a.stride(1) == b.stride(0) == 1
                assert (end - start) % 16 == 0
                scales = a_scale.view(-1, n)[g, :, None] * b_scale.view(-1, k)[g]
                part = (a[:, start:end].float() @ b[start:end].float()) * scales
            parts.append(part.to(out_dtype))
            start = end
        return torch.cat(parts) if b.dim() == 3 else torch.stack(parts)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    peer = peers.torch_scaled_grouped(op, operands)
    assert 1e-2 < operands.padded(peer.multiple).error(op, peer.call()) < BOUNDS["fp8"]
    assert isinstance(peers.torch_scaled_grouped("wgrad_accumulate", operands), Absent)


def test_a_peer_that_cannot_run_says_why(operands, monkeypatch):
    (deep,) = (p for p in peers.peers("forward", "bf16", operands) if p.name == "DeepGEMM")
    assert deep == Absent("DeepGEMM", "peer", "needs an NVIDIA GPU")
    assert "No module named 'deep_gemm'" in peers.deep_gemm_bf16("forward", operands).reason
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: 1 / 0)
    found = grouped_gemm._product("forward", "bf16", operands, None)
    torch_row = next(r for r in contest.hold(found, CEILINGS, CPU, 1) if r["implementation"] == "torch._grouped_mm")
    assert torch_row["not_run"] == "ZeroDivisionError: division by zero"
    assert torch_row["milliseconds"] is None


def test_preparing_a_peer_may_fail(operands, monkeypatch):
    monkeypatch.setitem(peers._BUILDERS, "bf16", (("x", "peer", "", lambda op, o: o.shape.rounded(100)),))
    assert list(peers.peers("forward", "bf16", operands)) == [
        Absent("x", "peer", "ValueError: 256 rows are no multiple of 100")
    ]


# --- a contest --------------------------------------------------------------------------------------------------------


def held(entrants, baselines=(), error=lambda contender: 1e-3, monkeypatch=None):
    """Rows of a contest whose times are its contenders' notes."""
    notes = {e.name: float(e.note) for e in [*entrants, *baselines] if isinstance(e, Contender)}
    monkeypatch.setattr(
        contest, "interleaved", lambda calls, *rest: {name: timing.Times.of([notes[name]]) for name in calls}
    )
    used = ("grouped_gemm",)
    found = contest.Contest("forward", "bf16", SHAPE, entrants, 1e9, 1e7, "bf16", used, error, 3e-3, [*baselines])
    return contest.hold(found, CEILINGS, CPU, 1)


def test_rows_say_time_rate_floor_and_ratios(monkeypatch):
    entrants = [
        Contender("a", "selected", lambda: None, note="2"),
        Contender("b", "alternative", lambda: None, note="4"),
        Contender("p", "peer", lambda: None, note="3", multiple=64),
        Contender("d", "ceiling", lambda: None, note="1"),
        Absent("q", "peer", "is not installed"),
    ]
    a, b, p, d, q = held(entrants, [Contender("base", "alternative", lambda: None, note="5")], monkeypatch=monkeypatch)
    assert (a["milliseconds"], a["tflops"], a["gb_per_s"]) == (2.0, 0.5, 5.0)
    assert (a["floor_milliseconds"], a["floor_of"], a["floor_share"]) == (1.0, "operations", 0.5)
    assert a["ratios"] == {"p": 1.5, "d": 0.5, "base": 2.5}
    assert b["ratios"]["p"] == 0.75
    assert p["ratios"] == d["ratios"] == {}
    assert (p["group_multiple"], a["group_multiple"]) == (64, 1)
    assert p["largest_group"] % 64 == 0
    assert (q["milliseconds"], q["not_run"], q["failed"]) == (None, "is not installed", False)
    assert a["sources"] == {"grouped_gemm": sources.digest("grouped_gemm")}


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_result_has_no_time(error, monkeypatch):
    entrants = [
        Contender("a", "selected", lambda: None, note="2"),
        Contender("p", "peer", lambda: None, note="3"),
    ]
    a, p = held(entrants, error=lambda c: error if c.name == "p" else 1e-3, monkeypatch=monkeypatch)
    assert "wrong: its error is" in p["not_run"]
    assert p["failed"]
    assert p["milliseconds"] is None
    assert a["ratios"] == {}
    json.dumps(p, allow_nan=False)


def test_errors_are_found_in_every_part(operands):
    for op in OPS:
        operands.main_grad_GNK.zero_()
        good = next(ours(op, "bf16", operands, None)).call()
        for where in ((-1, -1), (0, -1)) if op in ("forward", "dgrad") else ((-1, -1, -1), (0, -1, -1)):
            bad = good.clone()
            bad[where] += 10
            assert operands.error(op, bad) > BOUNDS["bf16"] > operands.error(op, good), (op, where)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8"])
def test_quantization_is_checked_both_ways(recipe, operands, monkeypatch):
    found = list(quantizing.contests(recipe, operands))
    assert [each.op for each in found] == ["quantize_rows", "quantize_weight"] + ["emulate_rows"] * (recipe == "mxfp8")
    for each in found:
        (selected,) = each.entrants
        assert 1e-2 < each.error(selected) < each.bound
    true_rows = quantize.quantize_rows

    def turned_wrong(*args, **kwargs):
        made = true_rows(*args, **kwargs)
        wrong = replace(made.columnwise, scales=made.columnwise.scales.flip(0))
        return replace(made, columnwise=wrong)

    monkeypatch.setattr(quantize, "quantize_rows", turned_wrong)
    if recipe != "fp8":  # which has one scale
        assert found[0].error(found[0].entrants[0]) > found[0].bound


def test_bytes_of_quantization_by_hand(operands):
    rows_, weight = list(quantizing.contests("fp8_block", operands))
    padded = 128 + 256 + 128 + 128 + 128  # 5, 130, 1, 77 and 43 rows, the empty group none
    assert rows_.moved == 2 * 256 * 64 + (1 + 1 / 32) * (256 + padded) * 64
    assert weight.moved == 4 * 6 * 48 * 64


@pytest.mark.parametrize("recipe", grouped_gemm.RECIPES)
def test_the_mlp_is_right_and_counted(recipe, monkeypatch):
    fc1 = make(Shape("m", "fc1", 96, 64, SHAPE.sizes), CPU, 0)
    fc2 = make(Shape("m", "fc2", 64, 48, SHAPE.sizes), CPU, 1)
    experts = mlp.Experts(fc1, fc2)
    assert experts.flops == 18 * 256 * 48 * 64
    found = mlp.contest(recipe, experts, None)
    for entrant in [*found.entrants, *found.baselines]:
        fc1.main_grad_GNK.zero_()
        fc2.main_grad_GNK.zero_()
        assert found.error(entrant) < found.bound
        assert fc1.main_grad_GNK.abs().sum() > 0 < fc2.main_grad_GNK.abs().sum()
    if recipe == "bf16":
        assert not found.baselines
    else:
        assert [b.name for b in found.baselines] == [bars.OUR_BF16, bars.OUR_FUSED]
    whole = mlp.expert_mlp
    monkeypatch.setattr(mlp, "swiglu", lambda x, probs: x[:, ::2] * probs[:, None].to(x))
    monkeypatch.setattr(mlp, "expert_mlp", lambda x, probs, *others, **how: whole(x, 2 * probs, *others, **how))
    wrong = mlp.contest(recipe, experts, None)
    assert wrong.error(wrong.entrants[0]) > wrong.bound


# --- bars -------------------------------------------------------------------------------------------------------------


def measured(op, recipe, ratios, *, model="deepseek-v3", share=0.9, implementation="hopper", device="cuda"):
    row = {"op": op, "recipe": recipe, "model": model, "matrix": "fc1", "groups": 2, "n": 8, "k": 8, "rows": 9}
    row |= {"implementation": implementation, "role": "selected", "milliseconds": 1.0, "not_run": None}
    return row | {"ratios": ratios, "floor_share": share, "hardware": {"device": device}}


@pytest.mark.parametrize(
    ("row", "word", "number"),
    [
        (measured("forward", "bf16", {bars.TORCH: 1.2, bars.DEEP_GEMM: 1.0}), "reached", 1.0),
        (measured("forward", "bf16", {bars.TORCH: 1.2, bars.DEEP_GEMM: 0.99}), "missed", 0.99),
        (measured("wgrad", "bf16", {bars.TORCH: 1.05}), "reached", 1.05),
        (measured("wgrad", "bf16", {bars.TORCH: 1.05}, model="qwen3-30b-a3b"), "missed", 1.05),
        (measured("dgrad", "fp8_block", {bars.DEEP_GEMM: 0.95}), "reached", 0.95),
        (measured("wgrad", "fp8_block", {bars.OUR_BF16: 1.2}), "missed", 1.2),
        (measured("forward", "mxfp8", {bars.OUR_BF16: 0.86}), "reached", 0.86),
        (measured("quantize_rows", "fp8_block", {}, share=0.79), "missed", 0.79),
        (measured("expert_mlp", "fp8_block", {bars.OUR_BF16: 1.4, bars.OUR_FUSED: 1.29}), "missed", 1.29),
        (
            measured("expert_mlp", "fp8_block", {bars.OUR_BF16: 1.2, bars.OUR_FUSED: 1.2}, model="qwen3-30b-a3b"),
            "reached",
            1.2,
        ),
        (measured("forward", "bf16", {bars.TORCH: 2.0}, implementation="reference"), "not measured", None),
        (measured("forward", "bf16", {bars.TORCH: 2.0}, device="cpu"), "not measured", None),
        (measured("dgrad", "fp8_block", {}), "not measured", None),
    ],
)
def test_verdicts(row, word, number):
    (verdict,) = bars.verdicts([row])
    assert (verdict.word, verdict.measured) == (word, number)
    assert str(verdict).startswith(word)


def test_a_bar_held_against_fewer_peers_says_so():
    peer = measured("forward", "bf16", {}) | {"role": "peer", "implementation": bars.DEEP_GEMM, "milliseconds": None}
    rows_ = [measured("forward", "bf16", {bars.TORCH: 1.2}), peer | {"not_run": "cannot be imported"}]
    (verdict,) = bars.verdicts(rows_)
    assert verdict.word == "reached"
    assert verdict.remark == "DeepGEMM: cannot be imported"


def test_ours_that_failed_is_not_measured():
    row = measured("forward", "bf16", {}) | {"milliseconds": None, "not_run": "wrong: its error is 1.0e+00"}
    (verdict,) = bars.verdicts([row])
    assert (verdict.word, verdict.remark) == ("not measured", "wrong: its error is 1.0e+00")


def test_alternatives_do_not_count():
    (verdict,) = bars.verdicts([measured("forward", "bf16", {bars.TORCH: 9.0}) | {"role": "alternative"}])
    assert verdict.measured is None


# --- the command ------------------------------------------------------------------------------------------------------


def bench(capsys, *words):
    code = cli.main(["bench", "grouped-gemm", *words])
    return code, *capsys.readouterr()


def test_the_command_measures_and_writes(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    code, out, err = bench(
        capsys, "--quick", "--recipe", "bf16", "--json", "--rows", "64", "--out", str(file), "--model", "deepseek-v3"
    )
    assert code == 0
    assert "this is a CPU: the reference implementation is measured" in err
    found = [json.loads(line) for line in out.splitlines()]
    assert found == rows.read(file)
    products = [(r["matrix"], r["op"]) for r in found if r["role"] == "selected"]
    assert products == [(m, op) for m in ("fc1", "fc2") for op in OPS] + [("fc1+fc2", "expert_mlp")]
    for row in found:
        assert (row["milliseconds"] is None) == (row["not_run"] is not None)
        assert row["sources"]["grouped_gemm"] == sources.digest("grouped_gemm")
        assert row["versions"]["torch"] == torch.__version__
        assert (row["model"], row["rows"], row["hardware"]["device"]) == ("deepseek-v3-tiny", 64, "cpu")
        assert "--out" not in row["command"]
        assert str(tmp_path) not in row["command"]
    forward = next(r for r in found if r["op"] == "forward" and r["role"] == "selected")
    assert forward["implementation"] == "reference"
    assert set(forward["ratios"]) == {"torch._grouped_mm", "dense"}
    assert forward["error"] < BOUNDS["bf16"]
    assert forward["floor_share"] > 0


def test_the_table_shows_what_did_not_run(capsys):
    code, out, _ = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "32", "--model", "qwen3-30b-a3b")
    assert code == 0
    assert "qwen3-30b-a3b-tiny fc1: N 96, K 64, 32 rows in 8 groups" in out
    assert "not run: needs an NVIDIA GPU" in out
    assert "reference (ours)" in out


MISTAKES = {
    ("--model", "gpt-5"): "gpt-5",
    ("--recipe", "fp4"): "there is no such recipe; choose from bf16, fp8, fp8_block, mxfp8",
    ("--device", "gpu"): "torch sees no GPU",
    ("--device", "tpu"): "give auto, cpu or gpu",
    ("--kernels", "hopper"): "cannot use hopper for recipe bf16 on cpu",
    ("--recipe", "fp8_block", "--kernels", "hopper"): "cannot use hopper for recipe fp8_block on cpu",
    ("--expert-parallel-size", "3"): "3 does not divide the 8 experts",
    ("--rows", "0"): "there is nothing to measure",
    ("--rows", "8", "--tokens", "8"): "give one",
    ("--variant", "huge"): "give full or tiny",
    ("--out", "gone/rows.jsonl"): "there is no folder gone; make it first",
    ("--out", "README.md"): "is there already",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_one_line(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("maniple: error: ")
    assert err.count("\n") == 1
    assert MISTAKES[words] in err


def test_failures_of_ours_end_with_1(capsys, monkeypatch):
    true_hold = grouped_gemm.hold

    def broken(*args):
        return [row | {"failed": row["role"] == "selected", "not_run": "broke"} for row in true_hold(*args)]

    monkeypatch.setattr(grouped_gemm, "hold", broken)
    code, _, err = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    assert code == 1
    assert "bench: reference bf16 forward of qwen3-30b-a3b-tiny fc1: broke" in err


def test_rows_are_read_as_written(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[]\n')
    with pytest.raises(UserError, match="line 2: not a JSON object"):
        rows.read(tmp_path / "bad.jsonl")


def test_markdown_has_selected_and_peers(capsys):
    bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    plan = grouped_gemm.Plan([SHAPE], ["bf16"], CPU, 1, None, 0, "command")
    found = [row for each in grouped_gemm.run(plan, lambda what: None) for row in each]
    table = rows.markdown(found)
    assert table.splitlines()[0] == "**m fc1: N 48, K 64, 256 rows in 6 groups of 0 to 130 rows**"
    assert sum(line.startswith("| forward |") for line in table.splitlines()) == 4
    assert "speed over a peer's" in table.splitlines()[2]
    assert rows.cells(found[0] | {"ratios": {"a": 1.139, "b": 0.5}, "milliseconds": 1.0})[7] == "1.14 x a, 0.50 x b"
    assert "| forward | bf16 | DeepGEMM |  |  |  | not run: needs an NVIDIA GPU |" in table


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_script", ROOT / "benchmarks" / "grouped_gemm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_adds_random_shapes_and_judges(script, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words = ["--quick", "--recipe", "bf16", "--only", "random", "--seed", "5", "--out", str(file)]
    assert script.main(words) == 0
    out = capsys.readouterr().out
    assert "seed 5" in out
    assert {row["model"] for row in rows.read(file)} == {"random-5-0", "random-5-1"}
    assert "not measured bf16 forward random-5-0 matrix: wanted 1.00 x torch._grouped_mm or DeepGEMM" in out
    assert script.main(["--verdicts", str(file)]) == 0
    again = capsys.readouterr().out
    assert out.endswith(again)


def test_the_script_has_the_bars_shapes(script):
    gpu = torch.device("cuda")
    shapes = [s for part in ("deepseek-v3", "qwen3-30b-a3b", "random") for s in script.shapes_of(part, gpu, 1)]
    wanted = [(32, 4096, 7168), (32, 7168, 2048), (128, 1536, 2048), (128, 2048, 768)]
    assert [(s.groups, s.n, s.k) for s in shapes[:4]] == wanted
    assert {s.rows for s in shapes} == {65_536}
    assert len(shapes) == 6


def test_the_guide_has_every_field_and_bar(capsys):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    _, out, _ = bench(capsys, "--quick", "--recipe", "bf16", "--rows", "16", "--json")
    fields = set(json.loads(out.splitlines()[0]))
    assert not [field for field in fields if f"`{field}`" not in page]
    table = [
        [
            b.recipe,
            ", ".join(b.ops),
            ", ".join(b.models or ["all"]),
            ", ".join(b.peers or ["the floor"]),
            f"{b.wanted:.2f}",
        ]
        for b in bars.BARS
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    assert re.findall(r"^\| (?:bf16|fp8_block|mxfp8) \|.*\|$", page, re.MULTILINE) == lines


def test_tokens_are_rows_over_topk():
    options = command.Options(model="deepseek-v3", tokens=100, variant="full", expert_parallel_size=8)
    assert {s.rows for s in command.shapes_of(options, CPU)} == {800}
