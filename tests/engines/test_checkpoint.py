"""A job that is interrupted and resumed is, bit for bit, the job that was not; what does not fit is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.errors import UserError
from maniple.metrics import read_metrics

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

STEPS, HALF = 6, "step_00000003"
Sections = dict[str, dict[str, Any]]
ALONE: dict[str, Sections] = {
    "fp32": {},
    "bf16-distributed-optimizer": {"parallel": {"distributed_optimizer": True}, "precision": {"dtype": "bf16"}},
}
OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PAIR: dict[str, Sections] = {
    "ep2": {"parallel": {"expert_parallel_size": 2, "distributed_optimizer": True}},
    # chunks without experts and without layers
    "pipeline": {"parallel": {"pipeline_parallel_size": 2, "pipeline_layout": "E|t|t|mL"}},
    # weights are whole only after the next step has begun to gather them
    "overlapped": {"parallel": OVERLAP},
    "overlapped, bf16": {"parallel": OVERLAP, "precision": {"dtype": "bf16"}},
}
VARIANTS = (*ALONE, *PAIR)
SAME = ("step", "loss", "mtp_loss", "aux_loss", "z_loss", "grad_norm", "learning_rate", "expert_counts")


def run_pair(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Any], list[bool]]:
    """In each of two processes: its part of what needs two."""
    _validate_overlapped(folder)
    return _run_variants(folder, PAIR), _random_states(rank, folder)


def run_alone(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """In one process, after the two: what needs one."""
    return _run_variants(folder, ALONE), _other_uses(folder)


def _run_variants(folder: Path, variants: dict[str, Sections]) -> dict[str, Any]:
    """Every variant uninterrupted and resumed, one also stopped; the final weights of each run."""
    from tests.engines import jobs

    card = _card()
    final: dict[str, Any] = {}
    for variant, sections in variants.items():
        place = folder / variant
        straight = _job(place, "straight", sections, checkpoint={"save_interval": 3})
        resumed = _job(
            place, "resumed", sections, checkpoint={"resume": str(place / "straight" / "checkpoints" / HALF)}
        )
        final[variant] = {job.name: _weights(jobs.run(job, card)) for job in (straight, resumed)}
        if variant == "fp32":
            final[variant]["stopped"] = _stop_and_go_on(place, sections, card)
    return final


def _validate_overlapped(folder: Path) -> None:
    from tests.engines import jobs

    for name in ("validated", "validated-overlapped"):
        overlap = {} if name == "validated" else {"parallel": OVERLAP}
        jobs.run(jobs.make_job(folder, name, train={"steps": 3, "eval_interval": 1}, **overlap), _card())


def _card():
    """A dense layer, an MoE layer and an MTP layer."""
    from tests.engines import jobs

    return jobs.tiny_card("deepseek-v3", num_layers=2)


def _job(place: Path, name: str, sections: Sections, **more: dict[str, Any]):
    from tests.engines import jobs

    own: Sections = {"train": {"steps": STEPS, **more.get("train", {})}}
    own["checkpoint"] = {"save_at_end": True, **more.get("checkpoint", {})}
    return jobs.make_job(place, name, **sections, **own)


def _stop_and_go_on(place: Path, sections: Sections, card) -> dict[str, Any]:
    from tests.engines import jobs

    # there is no checkpoint yet: it starts afresh, and stops after one step; a halved one is left by a killed job
    killed = place / "stopped" / "checkpoints" / "step_00000009.partial"
    killed.mkdir(parents=True)
    (killed / "__0_0.distcp").touch()
    late = _job(place, "stopped", sections, checkpoint={"resume": "auto"}, train={"max_minutes": 1e-9})
    jobs.run(late, card)
    checkpoints = place / "stopped" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000001"]
    return _weights(jobs.run(_job(place, "stopped", sections, checkpoint={"resume": "auto"}), card))


def _weights(trainer) -> dict[str, Any]:
    """Weights and biases of the routers by name, and the optimizer's fp32 weights and moments by number."""
    from maniple.engines.megatron.model import unwrap

    found: dict[str, Any] = {"guard.losses": torch.tensor(trainer.guard.losses)}
    for number, chunk in enumerate(map(unwrap, trainer.chunks)):
        state = chunk.state_dict().items()
        found |= {f"{number}.{name}": t.clone() for name, t in state if isinstance(t, torch.Tensor)}
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for number, part in enumerate(parts):
        groups = part.optimizer.param_groups
        for index, weight in enumerate(weight for group in groups for weight in group["params"]):
            tensors = {"weight": weight.detach(), **part.optimizer.state[weight]}
            found |= {f"optimizer.{number}.{index}.{key}": tensor.clone() for key, tensor in tensors.items()}
    return found


def _other_uses(folder: Path) -> dict[str, Any]:
    """One process goes on from what two saved, and for longer; bad checkpoints; random states; processes left."""
    import psutil
    from tests.engines import jobs

    card = _card()
    theirs, own = (
        folder / "ep2" / "straight" / "checkpoints" / HALF,
        folder / "fp32" / "straight" / "checkpoints" / HALF,
    )
    distributed = {"parallel": {"distributed_optimizer": True}}
    job = _job(folder, "alone", distributed, checkpoint={"resume": str(theirs)})
    report: dict[str, Any] = {"alone": _weights(jobs.run(job, card)), "refused": {}}
    report["children"] = [child.name() for child in psutil.Process().children()]

    # nothing but the checkpoint's progress is taken from the former job: not its length, not its rates
    longer = _job(folder, "longer", {}, train={"steps": STEPS + 2}, checkpoint={"resume": str(own)})
    jobs.run(longer, card)

    cases = {
        "foreign": (own, {}, jobs.tiny_card("qwen3-30b-a3b")),
        "missing": (folder / "nowhere", {}, card),
        "partial": (folder / "fp32" / "stopped" / "checkpoints", {}, card),
        "precision": (own, {"precision": {"dtype": "bf16"}}, card),
        "vocabulary": (own, {"model": {"vocab_size_multiple": 16}}, card),
    }
    for name, (checkpoint, sections, model) in cases.items():
        try:
            jobs.run(_job(folder, f"refused-{name}", sections, checkpoint={"resume": str(checkpoint)}), model)
            report["refused"][name] = "not refused"
        except UserError as error:
            report["refused"][name] = str(error)
    return report


def _random_states(rank: int, folder: Path) -> list[bool]:
    """Each process draws the same numbers after a load as after the save, and other ones than its peer."""
    import random

    import numpy as np
    import torch.distributed as dist
    from megatron.core import tensor_parallel
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, trainer
    from maniple.engines.megatron.checkpoint import reader
    from maniple.engines.megatron.checkpoint.writer import Saver

    def draw() -> list[float]:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        numbers = [random.random(), np.random.rand(), torch.rand(1).item()]
        for name in sorted(tracker.get_states()):
            with tracker.fork(name):
                numbers.append(torch.rand(1).item())
        return numbers

    card = _card()
    job = jobs.make_job(folder, "random", parallel={"expert_parallel_size": 2}, train={"steps": 1})
    parallel.start(job, parallel.pick_device(job))
    it = trainer.Trainer(job, card, torch.device("cpu"))
    it.run()
    for _ in range(rank + 1):
        random.random(), np.random.rand(), torch.rand(1)  # each rank elsewhere in its streams
    parts = (it.chunks, it.optimizer, it.scheduler)
    saver = Saver(job, card)
    saver.save(*parts, step=1, samples=4, extra={"mean": 0.1 + 0.2, "last": [1, 2]})
    wanted = draw()  # while it is being written
    saver.check()
    saved = job.run_dir / "checkpoints" / "step_00000001"
    restored = reader.load(saved, *parts, card=card, job=job)
    assert restored == reader.Restored(1, 4, {"mean": 0.1 + 0.2, "last": [1, 2]})
    got = draw()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, wanted)
    parallel.stop_groups()
    return [len(wanted) >= 6, got == wanted, all(a != b for a, b in zip(both[0][:3], both[1][:3], strict=True))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(folder) -> list[tuple[dict[str, Any], list[bool]]]:
    return run_ranks(run_pair, 2, folder, timeout=400)


@pytest.fixture(scope="module")
def alone(folder, pair) -> tuple[dict[str, Any], dict[str, Any]]:
    return run_ranks(run_alone, 1, folder, timeout=400)[0]


@pytest.fixture(scope="module")
def runs(pair, alone) -> dict[str, list[dict[str, Any]]]:
    """By variant: each rank's final weights by run."""
    return {name: [alone[0][name]] for name in ALONE} | {name: [rank[0][name] for rank in pair] for name in PAIR}


@pytest.fixture(scope="module")
def others(alone) -> dict[str, Any]:
    return alone[1]


def records(run_dir: Path) -> list[dict[str, Any]]:
    found = [r for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r]
    return [{key: record[key] for key in SAME} for record in found]


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(runs, folder, variant):
    straight = records(folder / variant / "straight")
    assert [record["step"] for record in straight] == list(range(1, STEPS + 1))
    assert records(folder / variant / "resumed") == straight[3:]
    for rank in runs[variant]:
        assert_equal(rank["resumed"], rank["straight"])


def test_validation_sees_the_weights_of_the_last_update(pair, folder):
    found = [
        [r["validation_loss"] for r in read_metrics(folder / name / "metrics.jsonl") if "validation_loss" in r]
        for name in ("validated", "validated-overlapped")
    ]
    assert len(found[0]) == len(found[1]) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(set(found[0])) == 3


def test_stopped_and_resumed_equals_uninterrupted(runs, folder):
    assert records(folder / "fp32" / "stopped") == records(folder / "fp32" / "straight")
    assert_equal(runs["fp32"][0]["stopped"], runs["fp32"][0]["straight"])


def assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(got) == set(wanted)
    assert sum(key.endswith("exp_avg_sq") for key in wanted) > 10
    assert sum(key.endswith("expert_bias") for key in wanted) >= 1
    assert not [key for key, tensor in wanted.items() if not tensor.equal(got[key])]


def test_only_whole_checkpoints_are_left(runs, folder):
    def left(variant: str, name: str) -> list[str]:
        return sorted(path.name for path in (folder / variant / name / "checkpoints").iterdir())

    for variant in VARIANTS:
        assert left(variant, "straight") == [HALF, "step_00000006"]
        assert left(variant, "resumed") == ["step_00000006"]
    assert left("fp32", "stopped") == ["step_00000001", "step_00000006"]


def test_one_process_goes_on_where_two_left_off(others, runs, folder):
    wanted, got = records(folder / "ep2" / "straight")[3:], records(folder / "alone")
    assert [record["step"] for record in got] == [4, 5, 6]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["expert_counts"] == theirs["expert_counts"]
        for key in ("loss", "mtp_loss", "aux_loss", "grad_norm", "learning_rate"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key
    ranks = [rank["straight"] for rank in runs["ep2"]]
    for key, weight in others["alone"].items():
        if not key.startswith("optimizer."):
            whole = torch.cat([rank[key] for rank in ranks]) if ".mlp.experts." in key else ranks[0][key]
            assert (weight - whole).abs().max() <= 1e-4, key


def test_a_longer_job_goes_on(others, folder):
    longer = records(folder / "longer")
    assert [record["step"] for record in longer] == [4, 5, 6, 7, 8]
    # linear from 1e-2 to 1e-3 over the job's own eight steps
    assert longer[-1]["learning_rate"] == pytest.approx(1e-3 + (1e-2 - 1e-3) / 8)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("foreign", "is of another model (deepseek-v3-tiny): "),
        ("missing", "nowhere: there is no such folder"),
        ("partial", "checkpoints: it holds checkpoints and is none: take its newest, "),
        ("precision", "was saved with precision.dtype fp32, this job has bf16: set precision.dtype=fp32"),
        ("vocabulary", "has a vocabulary padded to 300, this job pads it to 304: set model.vocab_size_multiple=300"),
    ],
)
def test_bad_checkpoints_are_refused_in_one_line(others, folder, name, says):
    message = others["refused"][name]
    assert says in message
    assert "\n" not in message
    assert not (folder / f"refused-{name}" / "checkpoints").exists()


def test_each_process_draws_on_where_it_was(pair):
    assert [rank[1] for rank in pair] == [[True, True, True]] * 2


def test_saving_leaves_no_process_behind(others):
    assert others["children"] == []
    # else `_collect_results_in_this_process` has become needless
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert "ctx.Manager().Queue()" in inspect.getsource(filesystem_async.get_write_results_queue)


@pytest.mark.parametrize(
    "words",
    [
        'steps = list(set([s["step"].item() for s in inner_state_dict["state"].values()]))\n            assert',
        "dst_tensors[k] = v\n            for key in dst_tensors:\n                if not isinstance(tensors[key]",
        's["step"] = step\n',  # one tensor for all
    ],
)
def test_upstream_still_needs_what_optimizer_state_mends(words):
    from megatron.core.optimizer import distrib_optimizer

    assert words in inspect.getsource(distrib_optimizer)
