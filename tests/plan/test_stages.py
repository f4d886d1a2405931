"""Where layers live: each once, in the order of the schedule, and the sizes of all groups."""

from __future__ import annotations

import pytest

from maniple import cli
from maniple.config.check import resolve_card
from maniple.config.load import load
from maniple.errors import UserError
from maniple.plan.stages import MOST_GPUS, place


def placed(world: int, *words: str):
    job = load(None, [*words]).config
    return place(job, resolve_card(job), world)


LAYOUT = ["model.card=deepseek-v3", "parallel.pipeline_parallel_size=4", "train.global_batch_size=16"]


def test_a_layout_deals_stages_to_ranks_in_turn():
    where = placed(4, *LAYOUT, "parallel.pipeline_layout='Et*3|(tttt|)*14,ttmL'")
    assert (where.pipeline, where.chunks, where.data, where.micro_batches) == (4, 4, 1, 16)
    first, last = where.of_rank(0), where.of_rank(3)
    assert [stage.layers for stage in first] == [(0, 1, 2), (15, 16, 17, 18), (31, 32, 33, 34), (47, 48, 49, 50)]
    assert [stage.embedding for stage in first] == [True, False, False, False]
    assert last[-1].layers == (59, 60)
    assert last[-1].mtp == (0,)
    assert last[-1].head
    assert last[-1].embeds
    assert not last[-1].embedding
    assert where.holder(61) == last[-1]
    assert where.holder(15) == first[1]
    assert [layer for stage in where.stages for layer in stage.layers] == list(range(61))


def test_without_a_layout_layers_are_dealt_evenly():
    where = placed(
        4,
        "model.card=qwen3-30b-a3b",
        "parallel.pipeline_parallel_size=4",
        "parallel.virtual_pipeline_size=2",
        "train.global_batch_size=8",
    )
    assert [stage.layers[0] for stage in where.of_rank(1)] == [6, 30]
    assert {len(stage.layers) for stage in where.stages} == {6}
    assert where.stages[0].embedding
    assert where.stages[-1].head


def test_dense_and_expert_groups_are_each_their_own():
    where = placed(
        64,
        "model.card=qwen3-30b-a3b",
        *("parallel.tensor_parallel_size=2", "parallel.context_parallel_size=2", "parallel.pipeline_parallel_size=2"),
        *("parallel.expert_parallel_size=8", "train.global_batch_size=16"),
    )
    assert where.data == 8
    assert where.dense_replicas == 16
    assert where.expert_data == 4
    assert where.micro_batches == 2


def test_what_cannot_run_is_refused():
    with pytest.raises(UserError, match="12 processes, one a GPU, are not a multiple of 8"):
        placed(12, "model.card=qwen3-30b-a3b", "parallel.expert_parallel_size=8")


@pytest.mark.parametrize(
    "words",
    [
        ["qwen3-30b-a3b", "--gpus", "{}"],
        ["search", "qwen3-30b-a3b", "--gpus", "{}"],
        ["scale", "qwen3-30b-a3b", "--from", "8", "--to", "{}"],
        ["scale", "qwen3-30b-a3b", "--from", "{}", "--to", "{}"],
    ],
)
def test_more_gpus_than_a_job_has_are_refused_at_once(words, capsys):
    assert cli.main(["plan", *(word.format(300_000_000) for word in words), "--gpu", "h200"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "maniple: error: 300,000,000 GPUs: the planner answers for at most 131,072 of a job\n"


def test_the_most_gpus_are_placed():
    job = ["model.card=qwen3-30b-a3b", f"train.global_batch_size={MOST_GPUS}"]
    assert placed(MOST_GPUS, *job).data == MOST_GPUS
    with pytest.raises(UserError, match="131,073 GPUs: "):
        placed(MOST_GPUS + 1, *job)
