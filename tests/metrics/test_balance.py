import numpy as np
import pytest
import torch

from maniple.metrics import expert_balance


def test_values_of_a_hand_made_case():
    balance = expert_balance([[4, 4, 4, 4], [10, 6, 0, 0]])
    assert balance.per_layer == (1.0, 2.5)
    assert balance.overall == 10 / (32 / 8)
    assert balance.empty_fraction == 2 / 8


def test_everything_on_one_expert_is_the_number_of_experts():
    assert expert_balance([[0, 0, 7, 0]]).per_layer == (4.0,)


def test_a_layer_without_tokens_is_finite():
    balance = expert_balance([[0, 0], [1, 3]])
    assert balance.per_layer == (1.0, 1.5)
    assert expert_balance([[0, 0]]).overall == 1.0


def test_sums_do_not_overflow_the_counts_own_type():
    most = 2**31 - 1
    assert expert_balance(np.array([[most, most, most, 0]], dtype=np.int32)).per_layer == (4 / 3,)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_arrays_and_lists_agree(kind):
    counts = [[5, 1, 0], [2, 2, 2]]
    assert expert_balance(kind(counts)) == expert_balance(counts)


@pytest.mark.parametrize("bad", [[1, 2], [], [[]], [[1, -1]], [[0.5, 1]], [[float("nan"), 1]]])
def test_what_is_no_matrix_of_counts_is_refused(bad):
    with pytest.raises(ValueError, match="expert counts"):
        expert_balance(bad)
