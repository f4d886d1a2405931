"""A checkpoint of any layout goes on in any other: not a bit of it changes, and the next losses are the same.

One job is handed on from layout to layout. Each of them reads the checkpoint that the one before wrote, writes it again
at once, and trains on for two steps. What it wrote again must hold the very tensors of the first checkpoint, and the
losses of its two steps must be those of the first job, which was never interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all processes
SAVED, STEPS = 2, 4
Layout = tuple[int, dict[str, Any]]


def cut(world: int, **sizes: Any) -> Layout:
    names = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert_tensor", "cp": "context"}
    parallel: dict[str, Any] = {f"{names[key]}_parallel_size": n for key, n in sizes.items() if key in names}
    stages = {2: "Ett|ttmL", 4: "Et|t|t|tmL"}
    if pipeline := sizes.get("pp", 1) * sizes.get("vpp", 1):
        parallel["pipeline_layout"] = stages.get(pipeline)
    if sizes.get("overlapped", False):
        parallel |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return world, parallel | {"distributed_optimizer": sizes.get("sharded", True)}


FP32: dict[str, Layout] = {
    "ep2": cut(2, ep=2),
    "ep1-plain-optimizer": cut(1, sharded=False),
    "ep2-dp2": cut(4, ep=2),
    "pp4": cut(4, pp=4),
    "ep4-plain-optimizer": cut(4, ep=4, sharded=False),
    "etp2": cut(2, tp=2, etp=2),
    "pp2-vpp2": cut(2, pp=2, vpp=2),
    "tp2-etp2-pp2": cut(4, tp=2, etp=2, pp=2),
    "etp2-ep2": cut(4, tp=2, etp=2, ep=2),
    "cp2-ep2": cut(4, cp=2, ep=2),
    "ep2-overlapped": cut(4, ep=2, overlapped=True),
    "alone": cut(1),
}
# biases of experts, router and attention, and sinks, which no layout may cut otherwise than their matrices
SINKS: dict[str, Layout] = {
    "sinks-ep2": cut(2, ep=2),
    "sinks-alone": cut(1),
    "sinks-tp2-overlapped": cut(4, tp=2, overlapped=True),
    "sinks-pp2": cut(2, pp=2),
}
BF16: dict[str, Layout] = {
    "ep2-bf16": cut(2, ep=2),
    "pp2-bf16-plain-optimizer": cut(2, pp=2, sharded=False),
    "tp2-etp2-bf16": cut(2, tp=2, etp=2),
    "alone-bf16": cut(1, sharded=False),
}


# of which there are moments, not zero
PARTS = {
    "deepseek-v3": (".experts.", "mtp.layers.0", "linear_kv_up_proj"),
    "gpt-oss-20b": (
        "experts.linear_fc1.bias",
        "experts.linear_fc2.bias",
        "softmax_offset",
        "linear_qkv.bias",
        "router.",
    ),
}
GROUPS = {"deepseek-v3 fp32": FP32, "gpt-oss-20b fp32": SINKS, "deepseek-v3 bf16": BF16}


def run(rank: int, world_size: int, folder: Path, name: str, layout: Layout, kind: str, before: str | None) -> None:
    """In each process: the first job, saved in mid-course, or one that goes on from the checkpoint of another."""
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, trainer

    model, dtype = kind.split()
    card = jobs.tiny_card(model, num_layers=4)
    stages = layout[1]["pipeline_layout"]
    if stages and not card.num_mtp_layers:
        stages = stages.replace("m", "")
    job = jobs.make_job(
        folder,
        name,
        parallel=layout[1] | {"pipeline_layout": stages},
        precision={"dtype": dtype},
        train={"steps": STEPS, "micro_batch_size": 1},
        checkpoint={"save_interval": SAVED} if before is None else {"resume": str(checkpoint(folder, before))},
    )
    device = parallel.pick_device(job)
    parallel.start(job, device)
    it = trainer.Trainer(job, card, device)
    if before is not None:
        with it.saver:
            it.saver.save(it.chunks, it.optimizer, it.scheduler, step=SAVED, samples=it.progress.samples)
    it.run()
    parallel.stop_groups()


def checkpoint(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / f"step_{SAVED:08d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    for kind, layouts in GROUPS.items():
        before = None
        for name, layout in layouts.items():
            run_ranks(run, layout[0], folder, name, layout, kind, before, timeout=600)
            before = name
    return folder


def contents(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random states, whole."""
    from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata, load

    reader = FileSystemReader(path)
    index = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, torch.nan).to(entry.properties.dtype)
        for key, entry in index.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("rng.")
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, group in GROUPS.items() for name in group])
def test_not_a_bit_changes(folder, kind, name):
    wanted, got = contents(checkpoint(folder, next(iter(GROUPS[kind])))), contents(checkpoint(folder, name))
    assert set(got) == set(wanted)
    model, dtype = kind.split()
    # three MoE layers and the MTP layer's own
    assert sum(key.endswith("expert_bias") for key in wanted) == (4 if model == "deepseek-v3" else 0)
    for moment in ("exp_avg.", "exp_avg_sq.") + (("param.",) if dtype == "bf16" else ()):
        moments = [key for key in wanted if key.startswith(f"optimizer.state.{moment}")]
        for part in PARTS[model]:
            found = [key for key in moments if part in key]
            assert found, part
            assert all(wanted[key].abs().sum() > 0 for key in found), part
    assert not [key for key, tensor in wanted.items() if not tensor.equal(got[key])]
    assert all(tensor.isfinite().all() for tensor in got.values())


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, group in GROUPS.items() if "fp32" in kind for name in group]
)
def test_the_next_losses_are_those_of_the_uninterrupted_job(folder, kind, name):
    from maniple.metrics import read_metrics

    def records(name: str) -> list[dict[str, Any]]:
        found = [record for record in read_metrics(folder / name / "metrics.jsonl") if "loss" in record]
        return [record for record in found if record["step"] > SAVED]

    wanted, got = records(next(iter(GROUPS[kind]))), records(name)
    assert [record["step"] for record in got] == [3, 4]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["expert_counts"] == theirs["expert_counts"]
        assert ("mtp_loss" in mine) == ("deepseek" in kind)
        for key in ("loss", "aux_loss", "learning_rate", *(["mtp_loss"] if "mtp_loss" in theirs else [])):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
