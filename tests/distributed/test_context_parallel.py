"""Sequences cut over ranks: four or eight Gloo processes compute what one does, every other parallelism beside.

With documents kept apart, rows hold some documents and end in padding of different lengths, so that ranks have unequal
numbers of tokens that count. The balance and z losses are on, and the expert bias where the model has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.parity import Case, Outcome, compare
from tests.distributed_utils import run_ranks

from maniple.metrics.records import read_metrics

pytestmark = pytest.mark.timeout(900)  # the first test waits for all processes
TOLERANCE = 1e-5  # of the largest magnitude in the tensor
TP2, EP2, EP4 = {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
PP2 = {"pipeline_parallel_size": 2}
WITH_MTP = {**PP2, "pipeline_layout": "Ett|tmL"}
INTERLEAVED, ETP2 = {**PP2, "pipeline_layout": "Et|t|t|mL"}, {"expert_tensor_parallel_size": 2}
EVEN = {"num_layers": 2}
DEEPSEEK, QWEN, GPT_OSS = "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b"


def case(card: str, size: int, *layouts: dict[str, Any], world: int = 4, **others: Any) -> Case:
    """A job with context parallelism of that size; the rest of the world is data-parallel."""
    parallel = {"context_parallel_size": size}
    for layout in layouts:
        parallel |= layout
    return Case(card, world, parallel, micro_batch_size=2, steps=1, **others)


CASES = {
    "deepseek-cp2-dp2": case(DEEPSEEK, 2),
    "deepseek-cp4": case(DEEPSEEK, 4),
    "deepseek-cp2-tp2": case(DEEPSEEK, 2, TP2),
    "deepseek-cp2-ep4": case(DEEPSEEK, 2, EP4),
    "deepseek-cp2-pp2": case(DEEPSEEK, 2, WITH_MTP),
    "deepseek-two-mtp": case(DEEPSEEK, 4, overrides={"num_layers": 2, "num_mtp_layers": 2}),
    "deepseek-overlapped": case(DEEPSEEK, 2, EP2, {"overlap_grad_reduce": True}),
    "deepseek-optimizer": case(DEEPSEEK, 2, EP2, {"distributed_optimizer": True}),
    "qwen-cp2-tp2-ep4": case(QWEN, 2, TP2, EP4),
    "qwen-cp2-pp2-ep2": case(QWEN, 2, PP2, EP2, overrides=EVEN),
    "qwen-micro-batch": case(QWEN, 2, EP2, aux="micro_batch"),
    "qwen-global-batch": case(QWEN, 2, EP2, aux="global_batch"),
    "gpt-oss-cp4": case(GPT_OSS, 4),
    "gpt-oss-cp2-tp2": case(GPT_OSS, 2, TP2),
    "gpt-oss-cp2-pp2": case(GPT_OSS, 2, PP2, overrides=EVEN),
    "kimi-cp2": case("kimi-k2", 2),  # YaRN inside MLA
    "glm-cp2": case("glm-4.5", 2, EP2),
    "deepseek-documents-cp4": case(DEEPSEEK, 4, documents=True),
    "deepseek-documents-cp2-tp2": case(DEEPSEEK, 2, TP2, documents=True),
    "deepseek-documents-cp2-pp2-ep2": case(DEEPSEEK, 2, WITH_MTP, EP2, documents=True),
    "deepseek-documents-tp2-pp2": case(DEEPSEEK, 1, TP2, WITH_MTP, documents=True),
    "gpt-oss-documents-cp2-tp2": case(GPT_OSS, 2, TP2, documents=True),
    "gpt-oss-documents-cp4": case(GPT_OSS, 4, documents=True),
    "qwen-documents-micro-batch": case(QWEN, 2, TP2, aux="micro_batch", documents=True),
    # everything at once
    "deepseek-documents-cp2-tp2-pp2-ep4": case(DEEPSEEK, 2, TP2, WITH_MTP, EP4, world=8, documents=True),
    "deepseek-cp2-tp2-vpp2-ep2-etp2": case(DEEPSEEK, 2, TP2, INTERLEAVED, EP2, ETP2, world=8),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return compare(CASES)


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(outcomes, name):
    outcome = outcomes[name]
    assert not outcome.too_far(TOLERANCE)
    assert outcome.counts_agree
    assert not outcome.missing
    assert not outcome.unequal
    gradients = CASES[name].parallel.get("distributed_optimizer", False) or outcome.gradients
    assert gradients
    assert outcome.weights


def train(rank: int, world_size: int, folder: Path) -> list[int]:
    """A whole run of the trainer on synthetic text, whose most frequent token is taken for the end of documents."""
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, sample, trainer

    job = jobs.make_job(
        folder,
        f"cp{world_size}",
        data={"attend_across_documents": False},
        parallel={"context_parallel_size": world_size, "distributed_optimizer": True},
    )
    card = jobs.tiny_card(GPT_OSS)
    device = parallel.pick_device(job)
    parallel.start(job, device)
    try:
        running = trainer.Trainer(job, card, device)
        running.source.tokenizer.eod = int(running.train_data[0]["tokens"].mode().values)
        running.run()
        return sample.generate(running.chunks, [5, 6, 7], 4, card.vocab_size, job, device)
    finally:
        parallel.stop_groups()


def test_a_run_of_the_trainer(tmp_path):
    """Records, validation and a sample of the trained model are those of one process; 4 of 32 tokens end documents."""
    samples = [run_ranks(train, size, tmp_path, timeout=200) for size in (1, 2)]
    assert samples[1] == [samples[0][0]] * 2
    alone, cut = (read_metrics(tmp_path / f"cp{size}" / "metrics.jsonl") for size in (1, 2))
    assert len(alone) == len(cut) == 5
    for got, wanted in zip(cut, alone, strict=True):
        assert got.get("expert_counts") == wanted.get("expert_counts")
        for key in {"loss", "grad_norm", "aux_loss", "validation_loss"} & set(wanted):
            assert got[key] == pytest.approx(wanted[key], rel=1e-4)  # Adam's first steps are all sign


def trace(rank: int, world_size: int) -> dict[int, int]:
    """In a process of its own: bytes of activations of one rank of eight, by context-parallel size."""
    from tests.engines import jobs

    from maniple.engines.megatron.dry_run import one_rank

    found = {}
    with jobs.no_process_group():
        for size in (1, 2, 4):
            job = jobs.make_job(
                Path("unused"),
                "job",
                parallel={"context_parallel_size": size, "pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"},
                data={"sequence_length": 512},
                train={"micro_batch_size": 1, "global_batch_size": 16},
            )
            found[size] = one_rank.trace(job, jobs.tiny_card(DEEPSEEK), 5, 8).activation_bytes
    return found


def test_a_dry_run_shows_less_to_keep():
    found = run_ranks(trace, 1, timeout=200)[0]
    assert 0.3 < found[2] / found[1] < 0.7
    assert 0.3 < found[4] / found[2] < 0.7
