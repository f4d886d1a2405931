"""Documents are told apart by the end token that closes each."""

import torch

from maniple.data.documents import keep_apart

EOD = 9


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    tokens_BS = torch.tensor(rows)
    mask_BS = torch.ones(tokens_BS.shape)
    mask_BS[:, 1] = 0  # one label of each row does not count anyway
    return {"tokens": tokens_BS, "labels": tokens_BS + 1, "loss_mask": mask_BS}


def test_an_end_token_is_its_documents_last():
    given = batch([1, 2, EOD, 3, EOD, EOD, 4], [EOD, 1, 1, 1, 1, 1, EOD], [1, 2, 3, 4, 5, 6, 7])
    before = {key: value.clone() for key, value in given.items()}
    found = keep_apart(given, EOD)
    assert found["documents"].tolist() == [[1, 1, 1, 2, 2, 3, 4], [1, 2, 2, 2, 2, 2, 2], [1] * 7]
    assert found["documents"].dtype == torch.int32
    assert found["loss_mask"].tolist() == [[1, 0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1, 1]]
    assert found["loss_mask"].dtype == torch.float32
    assert all(torch.equal(given[key], value) for key, value in before.items())  # the loader's batch is not touched
    assert found["tokens"] is given["tokens"]
