"""benchmarks/whole_step.py on a CPU: what a trace says, what is timed, and that both train what they say."""

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from benchmarks import whole_step as script
from tests.distributed_utils import run_ranks

from maniple.bench import rows, step_trace, whole_step
from maniple.bench.step_ours import job_of
from maniple.bench.step_peer import Peer
from maniple.bench.step_trace import MARK_BYTES, Span
from maniple.errors import UserError
from maniple.models import counting, load_card

TINY = load_card("qwen3-30b-a3b").tiny()


def plan(**changes):
    sizes = {"sequence_length": 32, "micro_batch_size": 2, "micro_batches": 2, "warm_up": 1, "steps": 3}
    given = {"card": TINY, "device": torch.device("cpu"), "seed": 3, "command": "c", **sizes, **changes}
    return whole_step.Plan(**given)


# --- traces -----------------------------------------------------------------------------------------------------------


def mark(at):
    return Span("Memcpy DtoD (Device -> Device)", at, at + 1, None, MARK_BYTES)


def test_a_trace_by_hand():
    gpu = [
        Span("before", 0, 90, 1),
        mark(99),  # the steps begin at 100
        Span("a", 100, 140, 2),
        Span("b", 120, 150, 3),  # beside it on another stream
        Span("c", 170, 200, 4),  # 20 idle: it was launched late
        Span("Memcpy DtoH (Device -> Pageable)", 205, 210, 5, 8),  # 5 idle: launched in time, and late all the same
        Span("a", 240, 250, 6),  # 30 idle: the host had waited for the copy
        mark(249),  # a step ends at 250
        Span("a", 250, 300, 7),
        mark(299),  # and another at 300
        Span("after", 400, 500, 8),
    ]
    host = [
        Span("cudaLaunchKernel", 95, 98, 1),
        Span("cudaLaunchKernel", 99, 101, 2),
        Span("cudaLaunchKernel", 102, 104, 3),
        Span("cudaLaunchKernelExC", 155, 160, 4),
        Span("cudaMemcpyAsync", 161, 163, 5),
        Span("cudaStreamSynchronize", 163, 212, None),
        Span("cudaLaunchKernel", 230, 233, 6),
        Span("cuLaunchKernel", 234, 235, 7),
        Span("cudaDeviceSynchronize", 350, 400, None),
    ]
    found = step_trace.figures(gpu, host)
    assert found["steps"] == 2
    assert found["step_milliseconds"] == pytest.approx(0.1)
    assert found["busy_share"] == pytest.approx(1 - 55 / 200)
    assert found["idle_share"] == pytest.approx(55 / 200)
    assert found["idle_milliseconds"] == pytest.approx({"launch": 0.01, "queued": 0.0025, "after_sync": 0.015})
    assert (found["long_gaps"], found["longest_gap_milliseconds"]) == (1.0, pytest.approx(0.03))
    assert (found["kernels"], found["copies"], found["launches"]) == (2.5, 0.5, 2.0)
    assert found["syncs"] == {"cudaStreamSynchronize": 0.5}
    assert [kernel["name"][:6] for kernel in found["top"]] == ["a", "b", "c", "Memcpy"]
    assert found["top"][0] == pytest.approx({"name": "a", "milliseconds": 0.05, "number": 1.5, "share": 100 / 165})


def test_a_trace_is_read_from_its_file(tmp_path):
    def event(category, name, start, duration, **told):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": told}

    events = [
        event("gpu_memcpy", "Memcpy DtoD", 9.0, 1.0, bytes=MARK_BYTES, correlation=1),
        event("kernel", "k", 12.0, 6.0, correlation=2),
        event("gpu_memset", "Memset", 18.0, 1.0, correlation=3, bytes=4),
        event("gpu_memcpy", "Memcpy DtoD", 19.0, 1.0, bytes=MARK_BYTES, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 11.5, 0.2, correlation=2),
        event("cpu_op", "aten::mm", 0.0, 99.0),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = step_trace.read(path)
    assert (found["steps"], found["kernels"], found["copies"], found["launches"]) == (1, 1, 1, 1)
    assert found["busy_share"] == pytest.approx(0.8)
    assert found["idle_milliseconds"]["launch"] == pytest.approx(0.002)
    path.write_text(json.dumps({"traceEvents": events[1:]}))
    with pytest.raises(UserError, match="has not the copies"):
        step_trace.read(path)


def test_waits_of_the_host_are_named_by_place():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for line in (7, 9, 7):
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "x/site-packages/p/q.py", line)
        warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "a/b/c/d.py", 1)
        warnings.warn_explicit("of something else", UserWarning, "x/site-packages/p/q.py", 7)
    assert whole_step.places(said) == {"p/q.py:7": 2, "p/q.py:9": 1, "c/d.py:1": 1}


# --- what fits, what is timed, what is said ---------------------------------------------------------------------------


def test_layers_that_fit():
    card = load_card("qwen3-30b-a3b")
    layers = whole_step.fitting_layers(card, 8192, "bf16", 120 * 2**30)
    taken = 18 * counting.count(card.with_overrides({"num_layers": layers})).total
    assert 0.75 * 120 * 2**30 < taken < 120 * 2**30
    assert whole_step.fitting_layers(card, 8192, "bf16", 60 * 2**30) < layers
    assert whole_step.fitting_layers(card, 65_536, "bf16", 120 * 2**30) < layers
    assert whole_step.fitting_layers(card, 65_536, "fp8_block", 120 * 2**30) <= layers
    assert whole_step.fitting_layers(card, 8192, "bf16", 2000 * 2**30) == card.num_layers
    with pytest.raises(UserError, match="not one layer of qwen3-30b-a3b fits 20 GiB"):
        whole_step.fitting_layers(card, 8192, "bf16", 20 * 2**30)


class Fake:
    """A contestant whose steps take one second of a clock of its own, but for the second that is timed."""

    recipe, note = "bf16", "made up"

    def __init__(self, name="maniple", fails=None):
        self.name, self.steps, self.closed, self.fails = name, 0, False, fails

    def step(self):
        if self.fails:
            raise self.fails
        self.steps += 1
        return torch.tensor(5.0 - self.steps)

    def facts(self):
        return {"imbalance": 1.5}

    def close(self):
        self.closed = True


def test_what_is_timed(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(whole_step, "_moment", lambda device: 1.0 * fake.steps + 4.0 * (fake.steps >= 3))
    found = whole_step.measure(fake, plan(), math.inf)
    assert fake.steps == 1 + 3
    assert (found["milliseconds"], found["steps"]) == (1000.0, 3)
    assert (found["milliseconds_p20"], found["milliseconds_p80"]) == (1000.0, 5000.0)
    assert found["tokens_a_step"] == 32 * 2 * 2
    assert found["tokens_per_second"] == 128.0
    assert found["tflops"] == pytest.approx(128 * found["flops_per_token"] / 1e12, rel=1e-12)
    assert sum(found["flops_share"].values()) == pytest.approx(1)
    assert (found["first_loss"], found["last_loss"], found["imbalance"]) == (4.0, 1.0, 1.5)
    assert (found["mfu"], found["profile"], found["not_run"]) == (None, None, None)
    assert (found["parameters"], found["seed"]) == (counting.count(TINY).total, 3)
    json.dumps(found, allow_nan=False)


def test_nothing_is_begun_when_the_time_is_up():
    fake = Fake()
    found = whole_step.measure(fake, plan(), 0.0)
    assert fake.steps == 1
    assert (found["not_run"], found["tokens_per_second"]) == ("the time was up", None)


def test_verdicts():
    def row(role, speed, recipe="bf16", idle=None, why=None):
        profile = None if idle is None else {"idle_share": idle}
        return {"role": role, "recipe": recipe, "tokens_per_second": speed, "not_run": why, "profile": profile}

    said = list(whole_step.verdicts([row("peer", 10.0), row("ours", 14.0, idle=0.03), row("ours", 20.0, "fp8_block")]))
    assert [line.split(": ", 1)[1] for line in said] == [
        "1.40 (at least 1.4): holds",
        "3.0% (at most 3%): holds",
        "2.00",
        "not shown (at most 3%): no profile",
    ]
    said = list(whole_step.verdicts([row("ours", 13.9, idle=0.031), row("peer", 10.0)]))
    assert [line.rsplit(": ", 1)[1] for line in said] == ["fails", "fails"]
    assert "not measured beside it" in next(whole_step.verdicts([row("ours", 1.0)]))
    failed = [row("ours", None, why="OutOfMemoryError"), row("peer", 1.0)]
    assert "not shown (at least 1.4): OutOfMemoryError" in next(whole_step.verdicts(failed))


# --- the script -------------------------------------------------------------------------------------------------------


def test_rows_are_written_as_they_come(monkeypatch, tmp_path, capsys):
    made = []

    def contestant(name, fails=None):
        made.append(Fake(name, fails))
        return made[-1]

    def peer(plan, checkpointing=False):
        return contestant("transformers", None if checkpointing else torch.OutOfMemoryError("no room"))

    monkeypatch.setattr(script, "Peer", peer)
    monkeypatch.setattr(script, "Ours", lambda plan, recipe: contestant("maniple", ValueError("bad\nluck")))
    out = tmp_path / "rows.jsonl"
    assert script.main(["--tiny", "--steps", "2", "--out", str(out), "--trace", str(tmp_path)]) == 1
    peers, ours = rows.read(out)
    assert (peers["implementation"], peers["steps"], peers["not_run"]) == ("transformers", 2, None)
    assert (ours["implementation"], ours["not_run"]) == ("maniple", "ValueError: bad luck")
    assert peers["command"] == "python benchmarks/whole_step.py --tiny --steps 2"
    assert str(tmp_path) not in out.read_text()
    assert [each.closed for each in made] == [True] * 3
    assert "not shown (at least 1.4): ValueError: bad luck" in capsys.readouterr().out
    assert script.main(["--verdicts", str(out)]) == 0
    assert "not shown (at least 1.4): ValueError: bad luck" in capsys.readouterr().out


def test_without_a_gpu_it_asks_for_the_toy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="add --tiny"):
        script.main([])


# --- who trains -------------------------------------------------------------------------------------------------------


def test_the_peer_trains_the_card_on_the_labels_that_it_is_given():
    given = plan()
    peer = Peer(given)
    assert sum(p.numel() for p in peer.model.parameters()) == counting.count(TINY).total
    assert {p.dtype for p in peer.model.parameters()} == {torch.bfloat16}
    config = peer.model.config
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "grouped_mm")
    ahead, wanted = whole_step.batches(given), []
    with torch.no_grad():
        for _ in range(given.micro_batches):
            tokens, labels = next(ahead)
            logits = peer.model(input_ids=tokens).logits.float()
            wanted.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    before = peer.model.lm_head.weight.detach().clone()
    assert float(peer.step()) == pytest.approx(float(sum(wanted) / 2), rel=1e-3)
    assert not torch.equal(before, peer.model.lm_head.weight)
    assert 1 <= peer.facts()["imbalance"] <= TINY.moe.num_experts
    assert {state["exp_avg"].dtype for state in peer.optimizer.state.values()} == {torch.bfloat16}


def test_everyone_reads_the_same_tokens():
    one, two = whole_step.batches(plan()), whole_step.batches(plan())
    for _ in range(3):
        (tokens, labels), (same, _) = next(one), next(two)
        assert torch.equal(tokens, same)
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        assert tokens.shape == (2, 32)


def test_our_job_is_the_pretraining_preset():
    job = job_of(plan(), "fp8_block")
    assert (job.precision.dtype, job.precision.recipe, job.optimizer.clip_grad) == ("bf16", "fp8_block", 1.0)
    assert job.parallel.distributed_optimizer
    assert (job.train.micro_batch_size, job.train.global_batch_size, job.data.sequence_length) == (2, 4, 32)


def train_ours(rank, world_size):
    """In a process of its own: two recipes, one after the other, as the script has them."""
    from tests.engines import jobs

    from maniple.bench.step_ours import Ours

    found = []
    with jobs.no_process_group():
        for recipe in ("bf16", "mxfp8"):
            ours = Ours(plan(), recipe)
            tied = sum(p.numel() for chunk in ours.chunks for p in chunk.parameters())
            losses = [ours.step(), ours.step()]
            found.append((tied, losses, ours.facts()))
            ours.close()
    return found


def test_ours_trains_the_card_in_each_recipe():
    ((found,),) = [run_ranks(train_ours, 1, timeout=120)]
    assert any(used.startswith("quantize mxfp8") for used in found[1][2]["used_so_far"])
    for parameters, losses, facts in found:
        assert parameters == counting.count(TINY).total
        assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=2e-2)
        assert losses[1] != losses[0]
        assert 1 < facts["imbalance"] < 8
        assert "routing bf16: reference" in facts["used_so_far"]
