"""Released weights through conversion, training's own checkpoints in many layouts, and back: not a bit changes.

The weights are bf16, as releases are. Each layout loads what the one before has saved and saves it again; what comes
back from the last is compared tensor by tensor with the first files, and transformers generates the same tokens from
both. A run that begins with the weights has transformers' loss on its first batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(1200)
SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert_tensor"}
MODELS: dict[str, tuple[str, dict[str, Any], list[dict[str, int]]]] = {
    "deepseek-v3": ("deepseek-v3", {}, [{"ep": 4}, {"ep": 2}, {"ep": 1}, {"pp": 2}, {"tp": 2, "etp": 2}]),
    "gpt-oss": ("gpt-oss-20b", {}, [{"ep": 4}, {"tp": 2}, {"pp": 2}, {"ep": 1}]),
    "qwen3-tied": ("qwen3-30b-a3b", {"tied_embeddings": True}, [{"ep": 4}, {"pp": 2}, {"ep": 2}]),
}


def layout_of(sizes: dict[str, int], card) -> tuple[int, dict[str, Any]]:
    world = max(sizes.get("ep", 1), sizes.get("tp", 1) * sizes.get("pp", 1))
    parallel: dict[str, Any] = {f"{SIZES[key]}_parallel_size": n for key, n in sizes.items()}
    if sizes.get("pp", 1) > 1:
        parallel["pipeline_layout"] = "Et|" + "t" * (card.num_layers - 1) + "m" * card.num_mtp_layers + "L"
    return world, parallel


def prepare(rank: int, world_size: int, folder: Path, name: str) -> dict:
    from tests.oracles import transformers_model

    from maniple.engines.megatron.huggingface.from_hf import from_hf

    torch.set_num_threads(1)
    card_name, overrides, _ = MODELS[name]
    source = transformers_model.save(
        load_card(card_name).tiny().with_overrides(overrides), folder / "hf", torch.bfloat16
    )
    return from_hf(source, folder / "weights").card.model_dump(mode="json")


def make_trainer(folder: Path, name: str, card: dict, source: Path, **sections: Any):
    """A run, in this process's group, that begins with the weights of `source`."""
    from tests.engines import jobs

    from maniple.engines.megatron import parallel as groups
    from maniple.engines.megatron import trainer
    from maniple.models.card import ModelCard

    sections = {"precision": {"dtype": "bf16"}, **sections}
    job = jobs.make_job(
        folder,
        name,
        model={"vocab_size_multiple": 1},
        train={"steps": 1, "micro_batch_size": 1},
        checkpoint={"init_from": str(source)},
        **sections,
    )
    device = groups.pick_device(job)
    groups.start(job, device)
    return trainer.Trainer(job, ModelCard.model_validate(card), device)


def hand_on(
    rank: int, world_size: int, folder: Path, card: dict, parallel: dict, before: str | None, name: str
) -> None:
    """Loads the converted weights, or the checkpoint of the layout before, and saves them."""
    source = folder / "weights" if before is None else saved(folder, before)
    it = make_trainer(folder, name, card, source, parallel=parallel)
    with it.saver:
        it.saver.save(it.chunks, it.optimizer, it.scheduler, step=0, samples=0)
    it.writer.close()


def saved(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / "step_00000000"


def look_back(rank: int, world_size: int, folder: Path, card: dict, last: str) -> dict[str, Any]:
    """Converts back; what transformers generates from the first files and from the last; the first loss of a run."""
    from tests.oracles import transformers_model

    from maniple.engines.megatron.huggingface.to_hf import to_hf
    from maniple.metrics import read_metrics
    from maniple.models.card import ModelCard

    torch.set_num_threads(1)
    to_hf(saved(folder, last), folder / "back", like=folder / "hf", shard_bytes=100_000)
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {each: transformers_model.greedy(folder / each, ids, 20) for each in ("hf", "back")}
    it = make_trainer(folder, "run", card, folder / "weights", precision={"dtype": "fp32"})
    batches = it._training_batches()[0]
    batches = [next(batches) for _ in range(it.job.train.global_batch_size)]
    theirs = transformers_model.objective(ModelCard.model_validate(card), folder / "hf", batches, 0.0)[0]
    it.run()
    losses = [record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in record]
    return found | {"losses": (*losses, theirs)}


@pytest.fixture(scope="module", params=MODELS)
def ends(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    card = run_ranks(prepare, 1, folder, request.param, timeout=200)[0]
    before = None
    for number, sizes in enumerate(MODELS[request.param][2]):
        name = f"{number}-" + "-".join(f"{key}{n}" for key, n in sizes.items())
        world, parallel = layout_of(sizes, load_card(MODELS[request.param][0]).with_overrides({}).model_validate(card))
        run_ranks(hand_on, world, folder, card, parallel, before, name, timeout=200)
        before = name
    return folder, run_ranks(look_back, 1, folder, card, before, timeout=200)[0]


def test_not_a_bit_of_the_weights_changes(ends):
    folder, _ = ends
    wanted = load_file(folder / "hf" / "model.safetensors")
    shards = sorted((folder / "back").glob("*.safetensors"))
    assert len(shards) > 2
    got: dict[str, torch.Tensor] = {}
    for shard in shards:
        got |= load_file(shard)
    assert got.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(wanted[name], got[name])]
    assert not [name for name in wanted if wanted[name].dtype != got[name].dtype]
    assert not [name for name, tensor in wanted.items() if not tensor.isfinite().all()]


def test_transformers_generates_the_same_tokens(ends):
    _, found = ends
    assert found["hf"].shape == (2, 20)
    assert torch.equal(found["hf"], found["back"])
    assert len(found["hf"].unique()) > 5


def test_a_run_begins_with_the_loss_that_transformers_has(ends):
    _, found = ends
    ours, theirs = found["losses"]
    assert ours == pytest.approx(theirs, rel=1e-5)
