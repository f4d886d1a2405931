import itertools

import pytest
import torch

from maniple.data.batches import iterate
from maniple.data.synthetic import FOLLOW_PROBABILITY, SyntheticDataset, SyntheticTokenizer


class Numbered(torch.utils.data.Dataset):
    """Sample i holds the number i; the extra key is what Megatron-Core's blends add."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        row = torch.full((3,), index)
        return {"dataset_id": 1, "tokens": row, "labels": row, "loss_mask": row.float(), "position_ids": row}


def rows(micro_batch_size, rank, size, start=0, **other):
    batches = iterate(
        Numbered(),
        start_sample=start,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        global_batch_size=12,
        **other,
    )
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def test_rank_takes_its_rows_of_each_micro_step():
    assert rows(2, 0, 2)[:3] == [[0, 1], [4, 5], [8, 9]]
    assert rows(2, 1, 2)[:3] == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize(("micro_batch_size", "size"), [(1, 1), (3, 1), (1, 2), (2, 3), (1, 12)])
def test_a_step_holds_the_same_samples_in_any_layout(micro_batch_size, size):
    steps = 12 // (micro_batch_size * size)
    for step in range(4):
        seen = []
        for rank in range(size):
            mine = rows(micro_batch_size, rank, size)[step * steps : (step + 1) * steps]
            seen += [index for batch in mine for index in batch]
        assert sorted(seen) == list(range(12 * step, 12 * step + 12))


def test_every_rank_ends_after_the_same_number_of_batches():
    assert {len(rows(2, rank, 2)) for rank in range(2)} == {12}  # 50 samples: two are left over


def test_resumes_where_it_stopped():
    assert rows(2, 1, 2, start=24) == rows(2, 1, 2)[6:]


def test_loader_processes_change_nothing():
    assert rows(2, 1, 2, num_workers=2) == rows(2, 1, 2)


def test_batches_hold_the_four_tensors():
    batch = next(
        iterate(
            Numbered(),
            start_sample=0,
            micro_batch_size=4,
            data_parallel_rank=0,
            data_parallel_size=1,
            global_batch_size=4,
        )
    )
    assert {key: (tuple(x.shape), x.dtype) for key, x in batch.items()} == {
        "tokens": ((4, 3), torch.int64),
        "labels": ((4, 3), torch.int64),
        "loss_mask": ((4, 3), torch.float32),
        "position_ids": ((4, 3), torch.int64),
    }


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rows(2, 0, 2)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(("micro", "rank", "size", "start"), [(5, 0, 1, 0), (1, 0, 5, 0), (2, 0, 1, -1), (2, 2, 2, 0)])
def test_sizes_that_do_not_fit(micro, rank, size, start):
    with pytest.raises(ValueError, match=r"rank|multiple|negative"):
        rows(micro, rank, size, start)


def test_synthetic_samples_depend_on_seed_split_and_index_alone():
    def text(seed, split, index):
        return SyntheticDataset(10, 64, 100, seed, split).tokens(index).tolist()

    assert text(1, 0, 3) == text(1, 0, 3)
    assert len({tuple(text(*key)) for key in [(1, 0, 3), (1, 0, 4), (1, 1, 3), (2, 0, 3)]}) == 4
    sample = SyntheticDataset(10, 64, 100, 1, 0)[3]
    assert sample["tokens"].tolist() == text(1, 0, 3)[:-1]
    assert sample["labels"].tolist() == text(1, 0, 3)[1:]
    assert sample["position_ids"].tolist() == list(range(64))
    assert sample["loss_mask"].tolist() == [1.0] * 64
    with pytest.raises(IndexError):
        SyntheticDataset(10, 64, 100, 1, 0)[10]


def test_synthetic_chain_can_be_learnt():
    train, valid = (SyntheticDataset(40, 255, 500, 7, split) for split in (0, 1))
    successor = {token: train.successor(token) for token in range(1, 500)}
    assert sorted(successor.values()) == list(range(1, 500))
    for dataset in (train, valid):
        texts = [dataset.tokens(index).tolist() for index in range(40)]
        pairs = [pair for text in texts for pair in itertools.pairwise(text)]
        followed = sum(successor[first] == second for first, second in pairs) / len(pairs)
        assert FOLLOW_PROBABILITY - 0.02 < followed < FOLLOW_PROBABILITY + 0.03
        assert min(min(text) for text in texts) >= 1
        assert max(max(text) for text in texts) < 500


def test_synthetic_tokenizer():
    tokenizer = SyntheticTokenizer(300)
    ids = tokenizer.encode("def é")
    assert all(0 < i < 300 for i in ids)
    assert tokenizer.decode([1, 2]) == "<1> <2>"
