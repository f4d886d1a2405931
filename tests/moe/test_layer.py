"""One process: the composed layer equals the loop over tokens, with every gradient, through poisoned memory."""

import pytest
import torch
from tests.moe.oracle import GPT_OSS, SPEC, D, E, F, K, Weights, dense_moe_oracle
from tests.poison import relative_error

from maniple.kernels.routing import RouterSpec, route, router_logits
from maniple.models.card import MoE
from maniple.moe.dispatch import LocalDispatcher
from maniple.moe.experts import ExpertActivation, expert_mlp
from maniple.moe.layer import moe_forward


@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("activation", [None, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("spec", [SPEC, RouterSpec(E, K), RouterSpec(E, K, score_before_topk=False)])
def test_the_layer_is_the_loop_over_tokens(tokens, activation, biases, spec):
    torch.manual_seed(0)
    x_TD, grad_TD, expert_bias_E = torch.randn(tokens, D), torch.randn(tokens, D), 0.1 * torch.randn(E)
    weights = Weights.random(biases=biases)

    theirs, x64_TD = weights.leaves(torch.float64), x_TD.double().requires_grad_()
    routing = route(router_logits(x_TD, weights.router_ED), spec, expert_bias_E)
    # the router once more in fp64, at the ids that fp32 chose
    logits_TE = x64_TD @ theirs.router_ED.t()
    scores_TE = logits_TE.sigmoid() if spec.score == "sigmoid" else logits_TE.softmax(-1)
    chosen_TK = scores_TE.gather(1, routing.ids_TK)
    probs_TK = spec.route_scale * chosen_TK / chosen_TK.sum(1, keepdim=True)
    expected_TD = dense_moe_oracle(x64_TD, theirs, routing.ids_TK, probs_TK, activation)
    expected_TD.backward(grad_TD.double())

    mine, x_TD = weights.leaves(), x_TD.requires_grad_()
    for _ in range(2):
        for tensor in (x_TD, *mine.named().values()):
            tensor.grad = None
        out_TD, _ = moe_forward(
            x_TD,
            spec=spec,
            dispatcher=LocalDispatcher(E),
            expert_bias_E=expert_bias_E,
            activation=activation,
            **mine.named(),
        )
        out_TD.backward(grad_TD)
        assert relative_error(out_TD, expected_TD) < 1e-6
        assert relative_error(x_TD.grad, x64_TD.grad) < 2e-6
        for name, tensor in mine.named().items():
            want = getattr(theirs, name).grad
            # renormalised weights give the router a difference of near numbers
            bound = 5e-6 if name == "router_ED" else 2e-6
            assert relative_error(tensor.grad, torch.zeros_like(tensor) if want is None else want) < bound, name


def test_dropped_ids_leave_a_tail_that_reaches_nothing():
    torch.manual_seed(1)
    ids_TK = torch.tensor([[0, -1], [E, 3], [-1, -1], [7, 3]])
    x_TD, probs_TK = torch.randn(4, D, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    weights = Weights.random().leaves()
    expected_TD = dense_moe_oracle(x_TD, weights, ids_TK, probs_TK, GPT_OSS)
    inputs = [x_TD, probs_TK, *list(weights.named().values())[1:]]
    wanted = torch.autograd.grad(expected_TD.square().sum(), inputs)
    dispatcher = LocalDispatcher(E)
    rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, ids_TK, probs_TK)
    rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs, handle), handle)
    assert (rows_SD.shape, int(ends_G[-1])) == ((8, D), 4)
    tail_S = torch.arange(8) >= 4
    rows_SD = torch.where(tail_S[:, None], torch.nan, rows_SD)
    probs_S = torch.where(tail_S, torch.nan, probs_S)
    args = (weights.w13_GFD, weights.w2_GDF)
    out_SD = expert_mlp(rows_SD, probs_S, ends_G, *args, b13_GF=weights.b13_GF, b2_GD=weights.b2_GD, activation=GPT_OSS)
    assert out_SD[4:].isnan().all()
    out_SD = dispatcher.token_combine(dispatcher.combine_preprocess(out_SD, handle), handle)
    out_TD = dispatcher.combine_postprocess(out_SD, handle)
    torch.testing.assert_close(out_TD, expected_TD, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(out_TD.square().sum(), inputs)
    for mine, theirs in zip(got, wanted, strict=True):
        assert relative_error(mine, theirs) < 1e-6


def test_bf16_layer_is_near_the_fp64_loop():
    torch.manual_seed(2)
    weights = Weights.random(biases=False).leaves(torch.bfloat16)
    x_TD = torch.randn(32, D).bfloat16().requires_grad_()
    out_TD, routing = moe_forward(x_TD, spec=SPEC, dispatcher=LocalDispatcher(E), **weights.named())
    assert out_TD.dtype == torch.bfloat16
    assert routing.probs_TK.dtype == torch.float32
    theirs = weights.leaves(torch.float64)
    expected_TD = dense_moe_oracle(x_TD.double(), theirs, routing.ids_TK, routing.probs_TK.double())
    assert relative_error(out_TD, expected_TD) < 6e-3
    out_TD.sum().backward()
    assert all(t.grad.dtype == torch.bfloat16 and t.grad.isfinite().all() for t in weights.named().values())


def test_activation_comes_from_a_card():
    moe = MoE(num_experts=4, topk=1, expert_ffn_size=8)
    assert ExpertActivation.from_card(moe) == ExpertActivation()
    oss = moe.model_copy(
        update=dict(activation="clamped_swiglu", activation_alpha=1.702, activation_limit=7.0, activation_up_offset=1.0)
    )
    assert ExpertActivation.from_card(oss) == GPT_OSS


def test_interleaved_and_stacked_experts_agree():
    torch.manual_seed(3)
    weights = Weights.random()
    order = torch.arange(2 * F).view(2, F).t().reshape(-1)  # gate 0, up 0, gate 1, up 1, ...
    x_TD = torch.randn(9, D)
    stacked, _ = moe_forward(x_TD, spec=SPEC, dispatcher=LocalDispatcher(E), **weights.named())
    weights.w13_GFD, weights.b13_GF = weights.w13_GFD[:, order], weights.b13_GF[:, order]
    activation = ExpertActivation(layout="interleaved")
    mixed, _ = moe_forward(x_TD, spec=SPEC, dispatcher=LocalDispatcher(E), activation=activation, **weights.named())
    torch.testing.assert_close(mixed, stacked, rtol=1e-6, atol=1e-6)


def test_rows_that_are_let_go_change_nothing():
    """Output and every gradient, twice through one graph."""
    generator = torch.Generator().manual_seed(5)
    results = []
    for lets_go in (False, True):
        generator.manual_seed(5)
        shapes = {"x": (30, 16), "router": (4, 16), "w13": (4, 24, 16), "w2": (4, 16, 12)}
        leaves = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
        dispatcher = LocalDispatcher(4)
        dispatcher.lets_go = lets_go
        out_TD, _ = moe_forward(*leaves.values(), RouterSpec(4, 2), dispatcher)
        out_TD.square().sum().backward(retain_graph=True)
        out_TD.square().sum().backward()
        results.append([out_TD.detach(), *(leaf.grad for leaf in leaves.values())])
    for kept, let_go in zip(*results, strict=True):
        assert torch.equal(kept, let_go)
