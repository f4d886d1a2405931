"""What a job reads over its whole life: stopped, made longer, with another batch size, with other data."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.pairs import write_pair, write_tokenizer
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the process that does the work


def run_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    import multiprocessing

    from tests.engines import jobs

    multiprocessing.current_process().daemon = False  # so that it may have loader processes
    from maniple.data import datasets
    from maniple.errors import UserError

    lengths = [(5 * i) % 23 for i in range(100)]
    prefixes = [
        write_pair(folder, lengths, name=name, tokens=[(7 * i + shift) % 290 for i in range(sum(lengths))])[0]
        for name, shift in (("a", 0), ("b", 3))
    ]
    tokenizer = write_tokenizer(folder, jobs.VOCABULARY)
    card = jobs.tiny_card("qwen3-30b-a3b")
    read: list[int] = []
    take = datasets.BlendedDataset.__getitem__

    def noted(self, index):
        if self.is_for_training:
            read.append(index)
        return take(self, index)

    def train(name: str, resume: str | None, *, data: dict | None = None, **sections: dict) -> list[int] | str:
        read.clear()
        data = {"source": "megatron", "train": ["0.7", prefixes[0], "0.3", prefixes[1]], "tokenizer": tokenizer} | (
            data or {}
        )
        data.setdefault("validation", [prefixes[0]])
        sections["train"] = {"eval_interval": 1, "steps": 3} | sections.get("train", {})
        checkpoint = {"save_at_end": True, "resume": resume}
        job = jobs.make_job(folder, name, data=data, checkpoint=checkpoint, **sections)
        try:
            done = jobs.run(job, card)
        except UserError as error:
            return str(error)
        return [done.progress.step, done.progress.samples, *read]

    original = datasets.BlendedDataset.__init__

    def marked(self, *args, split, **options):
        original(self, *args, split=split, **options)
        self.is_for_training = split == "train"

    datasets.BlendedDataset.__init__, datasets.BlendedDataset.__getitem__ = marked, noted
    try:
        out: dict[str, Any] = {"first": train("run", None)}
        start = str(folder / "run" / "checkpoints" / "step_00000003")
        out["longer"] = train("longer", start, train={"steps": 9})
        out["larger batch"] = train("larger", start, train={"steps": 5, "global_batch_size": 10})
        out["with loaders"] = train("loaders", start, data={"num_workers": 2}, train={"steps": 5})[:2]
        out["never validates"] = train("calm", None, train={"eval_interval": 0})
        out["losses"] = [losses(folder / name) for name in ("run", "calm")]
        out["seed"] = train("seed", start, train={"steps": 5, "seed": 7})
        out["blend"] = train("blend", start, data={"train": [prefixes[0]]}, train={"steps": 5})
        change = {"train": [prefixes[0]], "on_change": "continue"}
        out["blend, continued"] = train("continued", start, data=change, train={"steps": 5})
        out["warned"] = (folder / "continued" / "logs" / "rank_0.log").read_text()
    finally:
        datasets.BlendedDataset.__init__, datasets.BlendedDataset.__getitem__ = original, take
    return out


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    return run_ranks(run_all, 1, tmp_path_factory.mktemp("resume"), timeout=300)[0]


def test_reads_on_where_it_stopped(runs):
    assert runs["first"] == [3, 12, *range(12)]
    assert runs["longer"] == [9, 36, *range(12, 36)]
    assert runs["with loaders"] == [5, 20]


def test_validations_change_nothing(runs):
    validated, calm = runs["losses"]
    assert len(calm) == 3
    assert validated == calm  # to the bit
    assert runs["never validates"] == runs["first"]


def test_another_batch_size_reads_on(runs):
    assert runs["larger batch"] == [5, 32, *range(12, 32)]


def test_other_data_are_refused_in_one_line(runs):
    assert "(seed 1234 -> 7)" in runs["seed"]
    assert "(2 training datasets -> 1)" in runs["blend"]
    for case in ("seed", "blend"):
        assert "data.on_change=continue" in runs[case]
        assert "\n" not in runs[case]


def test_other_data_are_read_if_asked_and_said(runs):
    assert runs["blend, continued"] == [5, 20, *range(12, 20)]
    assert "the data are not the checkpoint's (2 training datasets -> 1)" in runs["warned"]
