"""Sizes that exchanges with compiled-in lists do not take, and routing at its most skewed."""

import pytest
import torch
from tests.moe.oracle import Weights, dense_moe_oracle
from tests.poison import relative_error

from maniple.kernels.routing import RouterSpec, route, router_logits
from maniple.moe.dispatch import LocalDispatcher
from maniple.moe.layer import moe_forward


def random_weights(hidden, width, experts):
    shapes = [(experts, hidden), (experts, 2 * width, hidden), (experts, hidden, width)]
    return Weights(*(torch.randn(*shape) / shape[-1] ** 0.5 for shape in shapes))


@pytest.mark.parametrize(
    ("hidden", "experts", "topk"),
    [(3584, 48, 16), (7168, 12, 11), (33, 36, 36), (1, 1, 1), (160, 160, 1), (17, 384, 8)],
)
def test_any_width_number_of_experts_and_choices(hidden, experts, topk):
    torch.manual_seed(0)
    weights, x_TD = random_weights(hidden, 6, experts), torch.randn(5, hidden)
    routing = route(router_logits(x_TD, weights.router_ED), spec := RouterSpec(experts, topk))
    expected_TD = dense_moe_oracle(x_TD.double(), weights.leaves(torch.float64), routing.ids_TK, routing.probs_TK)
    out_TD, _ = moe_forward(x_TD, spec=spec, dispatcher=LocalDispatcher(experts), **weights.named())
    assert relative_error(out_TD, expected_TD) < 1e-5


@pytest.mark.parametrize("favourite", [0, 5, 7])
def test_all_tokens_on_few_experts_take_no_more_rows_than_an_even_load(favourite):
    """The buffer of rows is T x K however the tokens are spread: skew cannot exhaust memory."""
    tokens, hidden, experts, topk = 64, 16, 8, 2
    torch.manual_seed(0)
    x_TD = torch.randn(tokens, hidden)
    dispatcher = LocalDispatcher(experts)
    sizes = []
    for skewed in (False, True):
        logits_TE = torch.randn(tokens, experts)
        if skewed:
            logits_TE[:, favourite] += 100.0
            logits_TE[:, (favourite + 1) % experts] += 50.0
        routing = route(logits_TE, RouterSpec(experts, topk))
        rows, ends_G = dispatched(dispatcher, x_TD, routing)
        sizes.append(rows.shape)
        assert int(ends_G[-1]) == tokens * topk
    assert sizes[0] == sizes[1] == (tokens * topk, hidden)


def dispatched(dispatcher, x_TD, routing):
    rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
    rows_SD, _, ends_G = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs, handle), handle)
    return rows_SD, ends_G
