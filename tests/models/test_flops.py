"""Model FLOPs against arithmetic by hand. Nothing here calls a helper of the formula to find what to expect."""

from __future__ import annotations

import pytest

from maniple.models import list_cards, load_card
from maniple.models.counting import count
from maniple.models.flops import average_keys, forward_flops_per_token, mfu, training_flops_per_token


def test_deepseek_v3_at_4096_by_hand():
    # Multiply-adds of one layer's attention projections:
    #   q down 7168 x 1536 = 11,010,048     q up 1536 x (128 heads x 192) = 37,748,736
    #   kv down 7168 x (512 + 64) = 4,128,768     kv up 512 x (128 heads x (128 + 128)) = 16,777,216
    #   output (128 x 128) x 7168 = 117,440,512     together 187,105,280
    # Core: 4096 / 2 keys x 128 heads x (192 + 128) = 83,886,080
    # Router 7168 x 256 = 1,835,008     one expert 3 x 7168 x 2048 = 44,040,192 (8 routed, 1 shared)
    # Dense MLP 3 x 7168 x 18432 = 396,361,728     head 7168 x 129280 = 926,679,040
    expected = {
        "attention_projections": 2 * 61 * 187_105_280,
        "attention_core": 2 * 61 * 83_886_080,
        "router": 2 * 58 * 1_835_008,
        "routed_experts": 2 * 58 * 8 * 44_040_192,
        "shared_experts": 2 * 58 * 44_040_192,
        "dense_mlp": 2 * 3 * 396_361_728,
        "head": 2 * 926_679_040,
        # one MoE layer, the projection 14336 x 7168 = 102,760,448, the head again
        "mtp": 2 * (187_105_280 + 83_886_080 + 1_835_008 + 9 * 44_040_192 + 102_760_448 + 926_679_040),
    }
    card = load_card("deepseek-v3")
    assert forward_flops_per_token(card, 4096) == expected
    assert sum(expected.values()) == 86_880_550_912
    assert training_flops_per_token(card, 4096) == 260_641_652_736
    assert training_flops_per_token(card, 4096, with_mtp=False) == 250_449_887_232


def test_qwen3_30b_at_4096_by_hand():
    # q 2048 x 4096, k and v 2048 x 512 each, output 4096 x 2048: 18,874,368 multiply-adds
    # Core: 2048 keys x 32 heads x (128 + 128) = 16,777,216     router 2048 x 128 = 262,144
    # 8 experts x 3 x 2048 x 768 = 37,748,736     head 2048 x 151936 = 311,164,928
    card = load_card("qwen3-30b-a3b")
    assert forward_flops_per_token(card, 4096) == {
        "attention_projections": 2 * 48 * 18_874_368,
        "attention_core": 2 * 48 * 16_777_216,
        "router": 2 * 48 * 262_144,
        "routed_experts": 2 * 48 * 37_748_736,
        "shared_experts": 0,
        "dense_mlp": 0,
        "head": 2 * 311_164_928,
        "mtp": 0,
    }
    assert training_flops_per_token(card, 4096) == 3 * 7_693_926_400 == 23_081_779_200


def test_mixtral_8x7b_at_4096_by_hand():
    # q 4096 x 4096, k and v 4096 x 1024 each, output 4096 x 4096: 41,943,040 multiply-adds
    # Core: 2048 keys x 32 heads x (128 + 128) = 16,777,216     router 4096 x 8 = 32,768
    # 2 experts x 3 x 4096 x 14336 = 352,321,536     head 4096 x 32000 = 131,072,000
    card = load_card("mixtral-8x7b")
    assert forward_flops_per_token(card, 4096) == {
        "attention_projections": 2 * 32 * 41_943_040,
        "attention_core": 2 * 32 * 16_777_216,
        "router": 2 * 32 * 32_768,
        "routed_experts": 2 * 32 * 352_321_536,
        "shared_experts": 0,
        "dense_mlp": 0,
        "head": 2 * 131_072_000,
        "mtp": 0,
    }
    assert training_flops_per_token(card, 4096) == 3 * 26_570_915_840 == 79_712_747_520


def test_gpt_oss_alternates_windows():
    # 12 layers see 128 keys at most: (1 + 2 + ... + 128 + 3968 x 128) / 4096 = 516,160 / 4096; 12 see 2048 on average
    expected = 2 * 64 * (64 + 64) * (12 * 516_160 / 4096 + 12 * 2048)
    assert forward_flops_per_token(load_card("gpt-oss-20b"), 4096)["attention_core"] == pytest.approx(
        expected, rel=1e-12
    )


def test_v2_lite_has_no_query_bottleneck():
    # q 2048 x 3072, kv down 2048 x 576, kv up 512 x 4096, output 2048 x 2048: 13,762,560 multiply-adds
    parts = forward_flops_per_token(load_card("deepseek-v2-lite"), 4096)
    assert parts["attention_projections"] == 2 * 27 * 13_762_560


@pytest.mark.parametrize("window", [1, 3, 16, 17])
def test_average_keys_of_a_window_is_the_exact_average(window):
    seen = [min(i, window) for i in range(1, 33)]
    assert average_keys(32, window) == pytest.approx(sum(seen) / 32, rel=1e-12)


def test_average_keys_grows_with_the_window_up_to_half_of_the_sequence():
    keys = [average_keys(64, window) for window in range(1, 70)]
    assert keys == sorted(keys)
    assert keys[-1] == average_keys(64, None) == 32


@pytest.mark.parametrize("name", list_cards())
def test_flops_without_attention_core_are_two_for_each_active_matrix_element(name):
    """The usual 2N estimate, from the independent count: biases, norms, sinks and the embedding do no products."""
    card = load_card(name)
    parts = forward_flops_per_token(card, 4096)
    flops = sum(parts.values()) - parts["attention_core"] - parts["mtp"]
    assert flops == pytest.approx(2 * count(card).active_no_embedding, rel=4e-4)
    assert flops < 2 * count(card).active_no_embedding


def test_idle_experts_cost_nothing():
    card = load_card("mixtral-8x7b")
    more = forward_flops_per_token(card.with_overrides({"moe": {"num_experts": 64}}), 4096)
    fewer = forward_flops_per_token(card, 4096)
    assert more["routed_experts"] == fewer["routed_experts"]
    assert more["router"] == 8 * fewer["router"]


def test_mfu_of_a_known_speed():
    # 1,000 tokens/s x 260.641652736 GFLOP = 260.6 TFLOP/s of 989
    card = load_card("deepseek-v3")
    assert mfu(1000.0, card, 4096, 989e12) == pytest.approx(260.641652736 / 989, rel=1e-12)
    assert mfu(1000.0, card, 4096, 989e12, with_mtp=False) == pytest.approx(250.449887232 / 989, rel=1e-12)
    with pytest.raises(ValueError, match="peak_flops"):
        mfu(1000.0, card, 4096, 0.0)
    with pytest.raises(ValueError, match="sequence_length"):
        training_flops_per_token(card, 0)
