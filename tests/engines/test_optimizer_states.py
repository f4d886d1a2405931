"""Main parameters and moments in bf16: updates are the fp32 optimizer's up to a rounding, and checkpoints hold them.

Steps are compared with the job whose states are fp32, from the same weights and batches, with gradients clipped. Runs
are resumed bit for bit, also under another layout, and read by jobs with other dtypes or refused in one line. States in
host memory change no bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks
from tests.engines import test_checkpoint as suite
from tests.engines.test_checkpoint import HALF, assert_equal, records

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

BOTH = {"main_params_dtype": "bf16", "moments_dtype": "bf16"}
MOMENTS = {"moments_dtype": "bf16"}
# by `adam.py`, which has them there; the second by upstream's `step` in the place of ours
AS_ON_A_GPU: dict[str, Any] = {"moments_dtype": "fp32"}
BY_UPSTREAMS_STEP: dict[str, Any] = {**AS_ON_A_GPU}
BF16, SHARDED, PLAIN = {"dtype": "bf16"}, {"distributed_optimizer": True}, {"distributed_optimizer": False}
EP2 = {"expert_parallel_size": 2, **SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
# of which one step is compared with that of the fp32 states
ONE_STEP: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "both": (SHARDED, BF16, BOTH),
    "moments": (SHARDED, BF16, MOMENTS),
    "fp32, as on a GPU": (SHARDED, BF16, AS_ON_A_GPU),
    "fp32, as on a GPU, plain optimizer": (PLAIN, BF16, AS_ON_A_GPU),
    "fp32, as on a GPU, upstream's step": (SHARDED, BF16, BY_UPSTREAMS_STEP),
    "moments, fp32 model": (SHARDED, {}, MOMENTS),
    "moments, plain optimizer, fp32 model": (PLAIN, {}, MOMENTS),
}
# of which one step is made again with so much of their states in host memory
OFFLOADED = {
    "both": 1.0,
    "fp32, as on a GPU": 0.6,
    "fp32, as on a GPU, plain optimizer": 1.0,
    "moments, plain optimizer, fp32 model": 0.6,
}
ALONE: dict[str, suite.Sections] = {
    "moments": {"parallel": SHARDED, "precision": BF16, "optimizer": MOMENTS},
    "moments, plain optimizer": {"parallel": PLAIN, "precision": BF16, "optimizer": MOMENTS},
}
PAIR: dict[str, suite.Sections] = {
    "both": {"parallel": EP2, "precision": BF16, "optimizer": {**BOTH, "offload_fraction": 0.5}},  # half in host memory
}


def in_each_of_two(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    runs = suite._run_variants(folder, PAIR)
    return {"runs": runs, "tied": _tied(rank)}


def in_one(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {}
    steps = {}
    for name, (*words, own) in ONE_STEP.items():
        if repr(words) not in known:
            known[repr(words)] = _one_step(*words, {})
        steps[name] = known[repr(words)], _one_step(*words, own)
    report = {"steps": steps, "runs": suite._run_variants(folder, ALONE), "others": _others(folder)}
    return report | {"offloaded": _offloaded(folder)}


def _offloaded(folder: Path) -> dict[str, Any]:
    """The steps again with states in host memory; runs that go on from each other's checkpoints with states there and
    without; what a machine with too little memory says."""
    from tests.engines import jobs

    from maniple.engines.megatron import offload
    from maniple.errors import UserError

    offload.CHUNK = 5000  # so that large parameters are cut
    found: dict[str, Any] = {"steps": {}, "runs": {}}
    for name, share in OFFLOADED.items():
        parallel, precision, own = ONE_STEP[name]
        found["steps"][name] = _one_step(parallel, precision, {**own, "offload_fraction": share})
    for name, sections in ALONE.items():
        there = {**sections, "optimizer": {**sections["optimizer"], "offload_fraction": 1.0}}
        start = {"resume": str(folder / name / "straight" / "checkpoints" / HALF)}
        short = suite._job(folder / name, "there", there, checkpoint=start, train={"max_minutes": 1e-9})
        jobs.run(short, suite._card())
        start = {"resume": str(folder / name / "there" / "checkpoints" / "step_00000004"), "save_at_end": False}
        back = jobs.run(suite._job(folder / name, "back", sections, checkpoint=start), suite._card())
        found["runs"][name] = suite._weights(back)
    offload._physical_bytes = lambda: 1000
    try:
        _one_step(SHARDED, BF16, {"offload_fraction": 0.5})
    except UserError as error:
        found["refused"] = str(error)
    return found


def _one_step(parallel, precision, optimizer) -> dict[str, Any]:
    """Main weights, moments and model after a step from zero moments, by name; the norm; bytes of all states."""
    from tests.engines import helpers

    from maniple.engines.megatron import optimizer as optimizers
    from maniple.engines.megatron import parallel as parallel_groups
    from maniple.engines.megatron import step as steps
    from maniple.engines.megatron.optimizer import parts

    optimizers._on_gpu = lambda chunks: optimizer is AS_ON_A_GPU or optimizer is BY_UPSTREAMS_STEP
    # an epsilon that lets the update depend on the gradient's size, and a bound far under the norm
    words = {"epsilon": 1e-2, "clip_grad": 0.05, "weight_decay": 0.3, "learning_rate": 0.1} | optimizer
    job = helpers.make_job(parallel=parallel, precision=precision, optimizer=words)
    engine = helpers.Engine(suite._card(), job)
    batches = helpers.make_batches(300, 2, 2)
    if optimizer is BY_UPSTREAMS_STEP:
        steps.zero_gradients(engine.chunks, engine.optimizer)
        steps.run_schedule(engine.chunks, [iter(batches)], job, engine.device, forward_only=False)
        engine.optimizer.prepare_grads()
        before = engine.optimizer.get_grad_norm()
        updated, norm, _ = engine.optimizer.step()
        assert updated
        assert before == norm
    else:
        norm = engine.step(batches).grad_norm
    found: dict[str, Any] = {"norm": norm, "bytes": 0, "kept": 0, "hosted": 0}
    for number, part in enumerate(parts(engine.optimizer)):
        for index, weight in enumerate(weight for group in part.param_groups for weight in group["params"]):
            state = part.optimizer.state[weight]
            found[f"main {number}.{index}"] = state.get("master_param", weight).detach().clone()
            for name in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {number}.{index}"] = state[name].clone()
            size = sum(t.nbytes for name, t in state.items() if name != "step")
            found["bytes"] += size
            found["hosted"] += size if weight in getattr(part.optimizer, "host", ()) else 0
            found["kept"] += weight.numel()
    found |= {f"model {name}": weight for name, weight in engine.weights().items()}
    parallel_groups.stop_groups()
    return found


def _tied(rank: int) -> torch.Tensor:
    """The embedding of a model that ties it to its head, which two pipeline stages hold, after three steps."""
    from tests.engines import helpers

    from maniple.engines.megatron import parallel
    from maniple.models import load_card

    card = load_card("deepseek-v3").tiny().with_overrides({"tied_embeddings": True, "num_mtp_layers": 0})
    stages = {"pipeline_parallel_size": 2, **SHARDED}
    card = card.with_overrides({"num_layers": 2})
    job = helpers.make_job(parallel=stages, precision=BF16, optimizer=BOTH)
    engine = helpers.Engine(card, job)
    for seed in range(3):
        engine.step(helpers.make_batches(card.vocab_size, 2, 2, seed))
    parallel.stop_groups()
    return engine.weights()["embedding.word_embeddings.weight"]


def _others(folder: Path) -> dict[str, Any]:
    """What other jobs make of the checkpoints of two processes."""
    from tests.engines import jobs

    from maniple.errors import UserError

    card, found = suite._card(), {}
    for name, before, sections in (
        ("both-resharded", "both", {"parallel": SHARDED, "precision": BF16, "optimizer": BOTH}),
        ("moments-plain", "moments", {"parallel": PLAIN, "precision": BF16, "optimizer": MOMENTS}),
        ("moments-to-fp32", "moments", {"parallel": SHARDED, "precision": BF16}),
        ("fp32-to-moments", "moments-to-fp32", {"parallel": SHARDED, "precision": BF16, "optimizer": MOMENTS}),
        ("main-to-fp32", "both", {"parallel": SHARDED, "precision": BF16, "optimizer": MOMENTS}),
        ("main-to-bf16", "moments", {"parallel": SHARDED, "precision": BF16, "optimizer": BOTH}),
    ):
        run = "straight" if (folder / before / "straight").exists() else before
        place = folder / before if run == "straight" else folder
        first = 4 if run == before else 3
        wanted = str(place / run / "checkpoints" / f"step_{first:08d}")
        job = suite._job(folder, name, sections, checkpoint={"resume": wanted}, train={"steps": first + 1})
        try:
            found[name] = suite._weights(jobs.run(job, card))
        except UserError as error:
            found[name] = str(error)
    job = suite._job(
        folder,
        "from-weights",
        {"parallel": SHARDED, "precision": BF16, "optimizer": BOTH},
        checkpoint={"init_from": str(folder / "both" / "straight" / "checkpoints" / HALF)},
        train={"steps": 1},
    )
    found["from-weights"] = suite._weights(jobs.run(job, card))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(folder) -> list[dict[str, Any]]:
    return run_ranks(in_each_of_two, 2, folder, timeout=400)


@pytest.fixture(scope="module")
def alone(folder, pair) -> dict[str, Any]:
    return run_ranks(in_one, 1, folder, timeout=400)[0]


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_is_that_of_fp32_states_up_to_their_rounding(alone, name):
    wanted, got = alone["steps"][name]
    assert got["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
    assert wanted["norm"] > 0.5  # clipped, ten times and more
    assert {key for key in got if not key.startswith("main")} == {key for key in wanted if not key.startswith("main")}
    for key, there in got.items():
        if key in ("norm", "bytes", "kept", "hosted"):
            continue
        exact = wanted[key].double()
        half = there.dtype == torch.bfloat16 and not key.startswith("model")
        halves = key.startswith("exp") and not name.startswith("fp32")
        assert half == (halves or (key.startswith("main") and name == "both")), key
        bound = 2**-7 if half or (key.startswith("model") and name == "both") else 1e-6
        assert (there.double() - exact).abs().le(bound * exact.abs() + 1e-7).all(), key
        assert key.startswith("model") or exact.abs().sum() > 0, key


@pytest.mark.parametrize("name", OFFLOADED)
def test_states_in_host_memory_change_no_bit(alone, name):
    _, wanted = alone["steps"][name]
    got = alone["offloaded"]["steps"][name]
    assert got.keys() == wanted.keys()
    for key in got:
        same = torch.equal(got[key], wanted[key]) if isinstance(got[key], torch.Tensor) else got[key] == wanted[key]
        assert same or key == "hosted", key
    assert wanted["hosted"] == 0
    share = got["hosted"] / got["bytes"]
    assert OFFLOADED[name] <= share < OFFLOADED[name] + 0.02


@pytest.mark.parametrize("variant", ALONE)
def test_a_run_goes_on_with_states_in_host_memory_and_without(alone, folder, variant):
    assert records(folder / variant / "back") == records(folder / variant / "straight")[4:]
    assert_equal(alone["offloaded"]["runs"][variant], alone["runs"][variant]["straight"])


def test_the_planner_knows_how_much_is_on_the_device_at_once():
    from maniple.engines.megatron import offload
    from maniple.plan.profile import MANIPLE

    assert MANIPLE.passing == offload.SLOTS * offload.CHUNK


def test_more_host_memory_than_there_is_is_refused(alone):
    said = alone["offloaded"]["refused"]
    assert said.startswith("optimizer.offload_fraction 0.5 keeps ")
    assert "bytes) of this rank in pinned host memory" in said
    assert "and cannot: this machine has 1.0 KiB; set a smaller one" in said


def test_upstream_still_needs_a_construction_of_our_own():
    from megatron.core.optimizer import OptimizerConfig

    with pytest.raises(RuntimeError, match="requires FusedAdam from TransformerEngine"):
        OptimizerConfig(use_distributed_optimizer=True, use_precision_aware_optimizer=True)


@pytest.mark.parametrize(("name", "each"), [("both", 4), ("moments", 8), ("moments, fp32 model", 4)])
def test_states_take_the_bytes_of_their_dtypes(alone, name, each):
    _, got = alone["steps"][name]
    assert got["bytes"] == each * got["kept"]


@pytest.mark.parametrize("variant", [*ALONE, *PAIR])
def test_resumed_equals_uninterrupted(pair, alone, folder, variant):
    straight = records(folder / variant / "straight")
    assert records(folder / variant / "resumed") == straight[3:]
    for rank in pair if variant in PAIR else [alone]:
        assert_equal(rank["runs"][variant]["resumed"], rank["runs"][variant]["straight"])
    losses = [record["loss"] for record in straight]
    assert losses[-1] < losses[0]


def test_a_weight_that_two_stages_hold_stays_one(pair):
    first, last = (rank["tied"] for rank in pair)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, last)


@pytest.mark.parametrize("name", ["both-resharded", "moments-plain", "moments-to-fp32"])
def test_another_layout_goes_on(alone, folder, name):
    before = "both" if name.startswith("both") else "moments"
    wanted, got = records(folder / before / "straight")[3:], records(folder / name)
    assert isinstance(alone["others"][name], dict), alone["others"][name]
    assert [record["step"] for record in got] == [4]
    # of the very weights, whose products are summed in another order
    assert got[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=2e-3)


def test_moments_are_stored_in_their_dtype(alone, folder):
    from maniple.engines.megatron.checkpoint import index

    for name in (*PAIR, *ALONE):
        tensors = index.read_index(folder / name / "straight" / "checkpoints" / HALF).tensors
        dtypes = {key.split(".")[2]: t.dtype for key, t in tensors.items() if key.startswith("optimizer.state.")}
        main = {} if name == "both" else {"param": "float32"}
        assert dtypes == {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"} | main


def test_moments_of_another_dtype_are_read(alone, folder):
    assert isinstance(alone["others"]["fp32-to-moments"], dict), alone["others"]["fp32-to-moments"]
    dtypes = {t.dtype for key, t in alone["others"]["fp32-to-moments"].items() if "exp_avg" in key}
    assert dtypes == {torch.bfloat16}
    assert records(folder / "fp32-to-moments")[-1]["step"] == 5


@pytest.mark.parametrize(
    ("name", "saved", "mine"), [("main-to-fp32", "bf16", "fp32"), ("main-to-bf16", "fp32", "bf16")]
)
def test_main_weights_of_another_dtype_are_refused(alone, name, saved, mine):
    said = alone["others"][name]
    assert f"saved with optimizer.main_params_dtype {saved}, this job has {mine}: set " in said
    assert "checkpoint.init_from" in said
    assert "\n" not in said


def test_a_run_begins_with_weights_of_another_dtype(alone, folder):
    first = records(folder / "both" / "straight")[0]["loss"]
    assert records(folder / "from-weights")[0]["loss"] < first - 0.5  # of the very batch, three updates later
