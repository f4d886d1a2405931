"""A run begins with the weights of any checkpoint, bit for bit and in any layout, and with all else of a new run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks
from tests.engines import test_checkpoint_files as written
from tests.engines.test_checkpoint_faults import refusal

from maniple import cli
from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import files
from maniple.errors import UserError
from maniple.launch.start import check_checkpoints
from maniple.metrics import read_metrics
from maniple.models import load_card

pytestmark = pytest.mark.timeout(900)  # the first test waits for all processes
LAST = 2  # steps of the run whose weights are taken
Sections = dict[str, dict[str, Any]]
SHARDED = {"distributed_optimizer": True}
ONE_STEP = {"train": {"steps": 1}}
KINDS: dict[str, Sections] = {
    "fp32-sharded": {"parallel": SHARDED},
    "bf16": {"precision": {"dtype": "bf16"}},
    "bf16-sharded": {"precision": {"dtype": "bf16"}, "parallel": SHARDED},
}
# each begins with the weights that the one before it has written, itself with those of `source`
PAIR: dict[str, Sections] = {
    "tp2-etp2": {"parallel": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2}},
    "pp2-vpp2": {"parallel": {"pipeline_parallel_size": 2, "pipeline_layout": "Et|t|t|tmL", **SHARDED}},
    "ep2-overlapped": {
        "parallel": {"expert_parallel_size": 2, **SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
    },
}
ALONE: dict[str, Sections] = {"alone": {}}
TIED: dict[str, Sections] = {
    "tied-pp2": {"parallel": {"pipeline_parallel_size": 2, "pipeline_layout": "Ett|ttmL"}},
    "tied-tp2": {"parallel": {"tensor_parallel_size": 2}},
}


def card_of(**changes: Any):
    from tests.engines import jobs

    return jobs.tiny_card("deepseek-v3", num_layers=4).with_overrides(changes)


def job_of(folder: Path, name: str, sections: Sections, **checkpoint: Any) -> TrainConfig:
    from tests.engines import jobs

    train = {"steps": LAST, **sections.get("train", {})}
    return jobs.make_job(folder, name, **{**sections, "train": train, "checkpoint": checkpoint})


def trainer_of(job: TrainConfig, card: Any):
    from maniple.engines.megatron import parallel, trainer

    parallel.stop_groups()
    device = parallel.pick_device(job)
    parallel.start(job, device)
    return trainer.Trainer(job, card, device)


def write_weights(it, folder: Path) -> Path:
    """The trainer's weights as a checkpoint of weights alone, with files of a model beside them. Collective."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from maniple.engines.megatron.checkpoint import state, writer

    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    writer._collect_results_in_this_process()
    dist_checkpointing.save(state.weights(it.chunks), str(folder))
    if dist.get_rank() == 0:
        for name in ("huggingface.json", "tokenizer.json", "chat_template.jinja"):
            (folder / name).write_text("{}")
        facts = {"step": 0, "samples": 0, "updates": 0, "card": it.card.model_dump(mode="json"), "holds": "weights"}
        written.write_manifest(folder, **facts, job={"precision": {"dtype": it.job.precision.dtype}})
    dist.barrier()
    return folder


def contents(path: Path) -> dict[str, torch.Tensor]:
    from tests.distributed.test_reshard import contents

    return {key: tensor for key, tensor in contents(path).items() if not key.startswith("optimizer.")}


def trained(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / f"step_{LAST:08d}"


def loss_of(it) -> float:
    """Of the first batch that a new run reads, by the weights as they are."""
    from maniple.engines.megatron import step

    batches = it._for_chunks(it._batches(it.train_data, 0))
    return step.evaluate(it.chunks, batches, it.job, it.device)


def is_fresh(it) -> bool:
    parts = getattr(it.optimizer, "chained_optimizers", [it.optimizer])
    no_state = not any(part.optimizer.state for part in parts)
    return no_state and (it.scheduler.num_steps, it.progress.step, it.progress.samples) == (0, 0, 0)


# --- in the processes -------------------------------------------------------------------------------------------------


def source(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """In two: the runs whose weights the others begin with; the losses of their last weights."""
    losses = {}
    for name, card in {"source": card_of(), "tied": card_of(tied_embeddings=True)}.items():
        sections: Sections = {"parallel": {"expert_parallel_size": 2, **SHARDED}}
        it = trainer_of(job_of(folder, name, sections, save_at_end=True), card)
        it.run()
        losses[name] = loss_of(it)
    return losses


def chain(rank: int, world_size: int, folder: Path, layouts: dict[str, Sections], before: Path) -> dict[str, Any]:
    """Each layout from what the one before wrote."""
    report = {}
    for name, sections in layouts.items():
        card = card_of(tied_embeddings=name.startswith("tied"))
        it = trainer_of(job_of(folder, name, sections | ONE_STEP, init_from=str(before)), card)
        report[name] = is_fresh(it)
        before = write_weights(it, folder / name / "weights")
        it.run()
    return report


def alone(rank: int, world_size: int, folder: Path, before: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"fresh": chain(rank, world_size, folder, ALONE, before)}
    report["begun"] = {name: _as_by_hand(folder, name, sections) for name, sections in KINDS.items()}
    report["bf16"] = _from_bf16(folder)
    report["resume"] = _resume_wins(folder)
    return report


def _as_by_hand(folder: Path, name: str, sections: Sections) -> dict[str, Any]:
    """A run that begins with a checkpoint's weights, beside one in which the same numbers were set by hand."""
    from maniple.engines.megatron import trainer

    caches, told = trainer.precision.weights_loaded, []
    trainer.precision.weights_loaded = told.append
    begun = trainer_of(job_of(folder, f"{name}-begun", sections, init_from=str(trained(folder, "source"))), card_of())
    trainer.precision.weights_loaded = caches
    report: dict[str, Any] = {"told": told == [begun.chunks], "fresh": is_fresh(begun)}
    report |= {"weights": copied(weights_of(begun)), "mains": copied(mains_of(begun))}
    if name == "bf16":
        write_weights(begun, folder / "stored-as-bf16")
    begun.run()

    by_hand = trainer_of(job_of(folder, f"{name}-by-hand", sections), card_of())
    with torch.no_grad():
        for kind, tensors in {"weights": weights_of(by_hand), "mains": mains_of(by_hand)}.items():
            for key, tensor in tensors.items():
                tensor.copy_(report[kind][key])
    by_hand.run()
    report["ends"] = [copied(weights_of(it) | prefixed(mains_of(it))) for it in (begun, by_hand)]
    return report


def weights_of(it) -> dict[str, torch.Tensor]:
    from maniple.engines.megatron.model import unwrap

    return {key: t for key, t in unwrap(it.chunks[0]).state_dict().items() if isinstance(t, torch.Tensor)}


def mains_of(it) -> dict[str, torch.Tensor]:
    """Of one process: whole, in the shapes of the model's weights."""
    from maniple.engines.megatron.model import unwrap

    named = unwrap(it.chunks[0]).named_parameters()
    return {name: p.main_param.detach().view(p.shape) for name, p in named if p.dtype == torch.bfloat16}


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def prefixed(mains: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"main.{key}": tensor for key, tensor in mains.items()}


def _from_bf16(folder: Path) -> dict[str, Any]:
    """What an fp32 and a bf16 job begin with, of weights that are stored as bf16."""
    stored = str(folder / "stored-as-bf16")
    wide = trainer_of(job_of(folder, "widened", {}, init_from=stored), card_of())
    report = {"widened": copied(weights_of(wide))}
    same = trainer_of(job_of(folder, "same", KINDS["bf16-sharded"], init_from=stored), card_of())
    return report | {"same": copied(weights_of(same)), "mains": copied(mains_of(same))}


def _resume_wins(folder: Path) -> dict[str, Any]:
    gone = shutil.copytree(trained(folder, "source"), folder / "gone")
    job = job_of(folder, "resumes", ONE_STEP, init_from=str(gone), resume="auto", save_at_end=True)
    trainer_of(job, card_of()).run()
    report = {"begun": json.loads((job.run_dir / "summary.json").read_text())["weights_from"]}
    shutil.rmtree(gone)  # a run that goes on does not ask for it
    it = trainer_of(job.model_copy(update={"train": job.train.model_copy(update={"steps": 2})}), card_of())
    report["step"] = it.progress.step
    it.run()
    return report | {"went on": json.loads((job.run_dir / "summary.json").read_text())["weights_from"]}


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    from tests.engines import jobs

    from maniple.engines.megatron.checkpoint import weights

    whole = trained(folder, "source")
    damaged = shutil.copytree(whole, folder / "damaged")
    spoiled = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(spoiled.read_bytes())
    data[len(data) // 2] ^= 1
    spoiled.write_bytes(data)
    no_card = shutil.copytree(whole, folder / "no-card")
    written.write_manifest(no_card, card={"name": "a-model"})
    without = trainer_of(job_of(folder, "left-out", {}, init_from=str(whole)), card_of(num_mtp_layers=0))
    log = (without.job.run_dir / "logs" / "rank_0.log").read_text()
    plain = write_weights(without, folder / "left-out" / "weights")
    more = shutil.copytree(plain, folder / "more")
    written.write_manifest(more, card=card_of(num_mtp_layers=0, num_layers=3).model_dump(mode="json"), holds="weights")
    report: dict[str, Any] = {"log": log, "left out": plain}
    damage = job_of(folder, "refused-damaged", {}, init_from=str(damaged))
    report["damaged"] = refusal(weights.choose, damage)
    other = job_of(folder, "refused-vocabulary", {"model": {"vocab_size_multiple": 16}}, init_from=str(whole))
    report["vocabulary"] = refusal(trainer_of, other, card_of())
    report["resumed"] = refusal(trainer_of, job_of(folder, "refused-resume", {}, resume=str(plain)), card_of())
    put_there = job_of(folder, "put-there", {}, resume="auto")
    shutil.copytree(plain, put_there.run_dir / "checkpoints" / "step_00000000")
    it = trainer_of(put_there, card_of())
    report["put there"] = is_fresh(it)
    before = copied(weights_of(it))
    smaller = trainer_of(job_of(folder, "smaller", {}), card_of(num_mtp_layers=0, num_layers=3))
    for name, (into, wanted, card) in {
        "foreign": (it, whole, jobs.tiny_card("qwen3-30b-a3b")),
        "rope": (it, whole, card_of(rope={"base": 5e5})),
        "mtp": (it, plain, card_of()),
        "no-card": (it, no_card, card_of()),
        "lacks": (it, plain, card_of(num_mtp_layers=0)),
        "more": (smaller, more, smaller.card),
    }.items():
        report[name] = refusal(weights.load, wanted, into.chunks, into.optimizer, card=card, job=into.job)
    after = weights_of(it)
    report["untouched"] = not [key for key, tensor in before.items() if not tensor.equal(after[key])]
    mine = card_of(name="mine", init_std=0.5, max_position=999, moe={"router": {"aux_loss": 0.5}})
    report["alike"] = refusal(weights.load, whole, it.chunks, it.optimizer, card=mine, job=it.job)
    return report


# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("begin")


@pytest.fixture(scope="module")
def losses(folder) -> dict[str, float]:
    return run_ranks(source, 2, folder, timeout=300)[0]


@pytest.fixture(scope="module")
def pair(folder, losses) -> list[dict[str, Any]]:
    first = run_ranks(chain, 2, folder, PAIR, trained(folder, "source"), timeout=300)
    second = run_ranks(chain, 2, folder, TIED, trained(folder, "tied"), timeout=300)
    return [a | b for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def one(folder, pair) -> dict[str, Any]:
    return run_ranks(alone, 1, folder, folder / list(PAIR)[-1] / "weights", timeout=400)[0]


@pytest.fixture(scope="module")
def refused(folder, losses) -> dict[str, Any]:
    return run_ranks(refusals, 1, folder, timeout=300)[0]


@pytest.mark.parametrize("name", [*PAIR, *TIED, *ALONE])
def test_weights_are_those_of_the_source_in_any_layout(one, pair, folder, losses, name):
    before = "tied" if name in TIED else "source"
    wanted = contents(trained(folder, before))
    got = contents(folder / name / "weights")
    assert set(got) == set(wanted)
    assert len(wanted) > 50
    assert sum(key.endswith("expert_bias") for key in wanted) == 4
    assert not [key for key, tensor in wanted.items() if not tensor.equal(got[key])]
    assert all(rank[name] for rank in pair) if name not in ALONE else one["fresh"][name]
    record = next(record for record in read_metrics(folder / name / "metrics.jsonl") if "loss" in record)
    assert record["step"] == 1
    assert record["loss"] == pytest.approx(losses[before], rel=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_as_one_whose_weights_were_set_by_hand(one, folder, name):
    report = one["begun"][name]
    assert report["told"]
    assert report["fresh"]
    begun, by_hand = report["ends"]
    assert begun.keys() == by_hand.keys()
    assert not [key for key, tensor in begun.items() if not tensor.equal(by_hand[key])]
    assert [key for key, tensor in report["weights"].items() if not tensor.equal(begun[key])]  # it has learnt
    begun, by_hand = (
        [(r["loss"], r["mtp_loss"], r["grad_norm"], r["learning_rate"], r["expert_counts"]) for r in found]
        for found in (
            [r for r in read_metrics(folder / f"{name}-{kind}" / "metrics.jsonl") if "loss" in r]
            for kind in ("begun", "by-hand")
        )
    )
    assert begun == by_hand
    assert len(begun) == LAST


@pytest.mark.parametrize("name", ["bf16", "bf16-sharded"])
def test_main_weights_of_a_bf16_job_begin_as_the_fp32_that_is_stored(one, name):
    exact, rounded, mains = (
        one["begun"]["fp32-sharded"]["weights"],
        one["begun"][name]["weights"],
        one["begun"][name]["mains"],
    )
    assert len(mains) > 50
    for key, weight in rounded.items():
        assert weight.equal(exact[key].to(weight.dtype)), key
        assert (weight.dtype == torch.float32) == (key not in mains), key
        assert not key.endswith("expert_bias") or weight.dtype == torch.float32
    assert all(main.dtype == torch.float32 and main.equal(exact[key]) for key, main in mains.items())
    assert any(not main.equal(rounded[key].float()) for key, main in mains.items())


def test_bf16_weights_are_not_changed_in_an_fp32_job_nor_in_a_bf16_one(one):
    stored, widened = one["begun"]["bf16"]["weights"], one["bf16"]["widened"]
    assert all(tensor.dtype == torch.float32 for tensor in widened.values())
    for got in (widened, one["bf16"]["same"]):
        assert got.keys() == stored.keys()
        assert not [key for key, tensor in stored.items() if not tensor.float().equal(got[key].float())]
    assert all(main.equal(stored[key].float()) for key, main in one["bf16"]["mains"].items())


def test_resume_wins_and_the_summary_says_where_weights_are_from(one, folder):
    report = one["resume"]
    assert report["step"] == 1
    assert report["begun"] == f"{folder / 'gone'} (step {LAST} of run source)"
    assert report["went on"] == report["begun"]
    assert json.loads((folder / "source" / "summary.json").read_text())["weights_from"] is None


def test_mtp_layers_that_a_job_has_not_are_left_out(refused, folder):
    said, whole = refused["log"], trained(folder, "source")
    assert said.count(f"weights from {whole} (step {LAST} of run source)\n") == 1
    assert "its MTP layers are left out: this job has none (num_mtp_layers 0)\n" in said
    wanted, got = contents(whole), contents(refused["left out"])
    assert set(got) == {key for key in wanted if not key.startswith("mtp.")} < set(wanted)
    assert all(tensor.equal(wanted[key]) for key, tensor in got.items())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("alike", "not refused"),
        ("foreign", "is of another model (deepseek-v3-tiny) than "),
        ("rope", "is of another model (deepseek-v3-tiny) than deepseek-v3-tiny: rope.base differ"),
        ("mtp", "has 0 MTP layers and this job 1: set model.overrides.num_mtp_layers=0"),
        ("vocabulary", "has a vocabulary padded to 300, this job pads it to 304: set model.vocab_size_multiple=300"),
        ("damaged", ".distcp is not as it was written"),
        ("no-card", "its model card is none: 'family' is not as it should be"),
        ("lacks", "does not fit this model: it lacks mtp.layers.0."),
        ("more", "does not fit this model: it also has decoder.layers.3."),
        ("resumed", "holds weights alone, which no run goes on from: to begin one with them set checkpoint.init_from="),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(refused, folder, name, says):
    assert says in refused[name]
    assert refused["untouched"]
    assert not (folder / f"refused-{name}" / "checkpoints").exists()


def test_resume_auto_does_not_take_weights_alone(refused):
    assert refused["put there"]


# --- without an engine ------------------------------------------------------------------------------------------------


def checked(folder: Path, **checkpoint: Any) -> str:
    job = TrainConfig(name="run", output_dir=folder, checkpoint=checkpoint)
    return refusal(check_checkpoints, job, load_card("mixtral-8x7b"))


def test_a_start_looks_for_the_weights_before_torch_is_loaded(tmp_path):
    given = written.make(tmp_path / "given")
    assert "its model card is none" in checked(tmp_path, init_from=str(given))
    for name, said in (
        ("mixtral-8x22b", "is of another model (mixtral-8x22b) than mixtral-8x7b: "),
        ("mixtral-8x7b", ""),
    ):
        written.write_manifest(given, card=load_card(name).model_dump(mode="json"))
        assert (said or "not refused") in checked(tmp_path, init_from=str(given))
    assert "there is no such folder" in checked(tmp_path, init_from="nowhere")
    assert "there is no such folder" in checked(tmp_path, init_from="nowhere", resume="auto")
    assert "there is no such folder" in checked(tmp_path, init_from=str(given), resume="nowhere")
    written.make(tmp_path / "run")
    assert checked(tmp_path, init_from="nowhere", resume="auto") == "not refused"


def test_weights_alone_are_known_by_name(tmp_path, capsys):
    folder = written.make(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text("{}")
    written.write_manifest(folder, holds="weights", step=0)
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    assert ", weights alone\n" in capsys.readouterr().out
    assert cli.main(["checkpoint", "inspect", str(folder)]) == 0
    assert "weights alone, for checkpoint.init_from" in capsys.readouterr().out
    assert cli.main(["checkpoint", "inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] == "weights"
    with pytest.raises(UserError, match="holds weights alone"):
        files.find(tmp_path, str(folder))
    (folder / "tokenizer.json").write_text("{ }")
    assert "tokenizer.json is too long" in refusal(files.read_whole, folder)
    written.write_manifest(folder, holds="something")
    assert "has no proper holds" in refusal(files.read_manifest, folder)
