"""Parameter counts: the gathered table, arithmetic by hand, and `transformers`' own classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.models.hf_configs import hf_config

from maniple.models import list_cards, load_card
from maniple.models.counting import count

FACTS = yaml.safe_load((Path(__file__).parents[1] / "data" / "model_counts.yaml").read_text(encoding="utf-8"))


def billions(parameters: int) -> float:
    return round(parameters / 1e9, 3)


def test_every_row_of_the_table_has_a_card_and_no_card_is_without_a_row():
    assert sorted(FACTS) == list_cards()


@pytest.mark.parametrize("name", sorted(FACTS))
def test_counts_equal_the_table_to_its_last_digit(name):
    counts, facts = count(load_card(name)), FACTS[name]
    assert billions(counts.total) == facts["total"]
    assert billions(counts.mtp) == facts["mtp"]
    active = (counts.active, counts.active_no_embedding, counts.active_no_embedding_and_head)
    assert [billions(number) for number in active] == facts["active"]


@pytest.mark.parametrize("name", sorted(FACTS))
def test_router_facts_equal_the_table(name):
    moe, facts = load_card(name).moe, FACTS[name]
    assert (moe.num_experts, moe.topk) == (facts["experts"], facts["topk"])
    assert (moe.router.score, moe.router.renormalize) == (facts["score"], facts["renormalize"])
    assert moe.router.route_scale == facts["scale"]
    assert [moe.router.num_groups, moe.router.group_topk, moe.router.group_score] == facts["groups"]
    assert moe.num_dense_layers == facts["dense_first"]
    assert moe.shared_ffn_size == facts["shared"]
    assert moe.router.expert_bias == (facts["score"] == "sigmoid")  # the aux-free family, and only it


@pytest.mark.parametrize("name", sorted(FACTS))
def test_published_figures_follow_from_the_counting_that_the_card_names(name):
    card = load_card(name)
    counts, published = count(card), card.published
    totals = {
        "all": counts.total,
        "no_embedding": counts.total - counts.embedding,
        "no_embedding_and_head": counts.total - counts.embedding - counts.head,
        "base_plus_mtp_minus_embedding_and_head": counts.total_with_mtp - counts.embedding - counts.head,
    }
    active = {
        "all": counts.active,
        "no_embedding": counts.active_no_embedding,
        "no_embedding_and_head": counts.active_no_embedding_and_head,
    }
    # Within one unit of the last digit printed: figures are cut (2.451 to 2.4) as often as they are rounded.
    total_unit = {"kimi-k2": 100, "minimax-m2": 10}.get(name, 1 if published.total == int(published.total) else 0.1)
    active_unit = 1 if published.active == int(published.active) else 0.1
    assert abs(totals[published.total_counting] / 1e9 - published.total) < total_unit
    assert abs(active[published.active_counting] / 1e9 - published.active) < active_unit


def test_deepseek_v3_by_hand():
    counts = count(load_card("deepseek-v3"))
    # q down + its norm, q up (128 heads of 192), kv down (512 + 64), its norm, kv up (128 heads of 128 + 128), output
    attention = 7168 * 1536 + 1536 + 1536 * 24576 + 7168 * 576 + 512 + 512 * 32768 + 16384 * 7168
    assert attention == 187_107_328
    dense = attention + 2 * 7168 + 3 * 7168 * 18432  # two norms, gate + up + down
    assert dense == 583_483_392
    moe = attention + 2 * 7168 + 256 * 7168 + 257 * 3 * 7168 * 2048  # router, 256 routed + 1 shared expert
    assert moe == 11_507_286_016
    assert counts.total == 3 * dense + 58 * moe + 2 * 129280 * 7168 + 7168 == 671_026_404_352
    # one MoE layer, norms of both inputs, their projection, the norm before the shared head
    assert counts.mtp == moe + 2 * 7168 + 2 * 7168 * 7168 + 7168 == 11_610_067_968
    # of 256 experts of 3 x 7168 x 2048, 248 stay idle
    active = 671_026_404_352 - 58 * 248 * 44_040_192
    assert counts.active == active == 37_552_282_624
    assert counts.active_no_embedding == active - 926_679_040
    assert counts.active_no_embedding_and_head == active - 2 * 926_679_040
    assert counts.routed_experts == 58 * 256 * 44_040_192
    assert (len(counts.layers), len(counts.mtp_layers)) == (61, 1)
    assert [sum(layer.values()) for layer in counts.layers] == [dense] * 3 + [moe] * 58


def test_qwen3_30b_by_hand():
    counts = count(load_card("qwen3-30b-a3b"))
    # q of 32 heads, k and v of 4, output; norms of q and k over a head
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048 + 2 * 128
    assert attention == 18_874_624
    layer = attention + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768
    assert layer == 623_120_640
    assert counts.total == 48 * layer + 2 * 151936 * 2048 + 2048 == 30_532_122_624
    assert counts.active == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768 == 3_353_032_704
    assert counts.mtp == 0


def test_mixtral_8x7b_by_hand():
    counts = count(load_card("mixtral-8x7b"))
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    assert attention == 41_943_040
    layer = attention + 2 * 4096 + 8 * 4096 + 8 * 3 * 4096 * 14336
    assert layer == 1_451_270_144
    assert counts.total == 32 * layer + 2 * 32000 * 4096 + 4096 == 46_702_792_704
    assert counts.active == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336 == 12_879_925_248


def test_gpt_oss_layer_by_hand():
    layer = count(load_card("gpt-oss-20b")).layers[0]
    # projections, biases of q (4096), k and v (512 each) and output (2880), one sink for each of 64 heads
    assert layer["attention"] == 2880 * 5120 + 4096 * 2880 + 5120 + 2880 + 64
    assert layer["router"] == 32 * 2880 + 32
    assert layer["routed_experts"] == 32 * (3 * 2880 * 2880 + 2 * 2880 + 2880)
    assert layer["shared_experts"] == layer["dense_mlp"] == 0


def test_tied_embeddings_are_counted_once():
    card = load_card("mixtral-8x7b")
    untied, tied = count(card), count(card.with_overrides({"tied_embeddings": True}))
    assert tied.head == 0
    assert untied.total - tied.total == 32000 * 4096
    assert tied.active_no_embedding == tied.active_no_embedding_and_head


@pytest.mark.parametrize("size", ["tiny", "full"])
@pytest.mark.parametrize("name", sorted(FACTS))
def test_transformers_builds_as_many_parameters(name, size):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    card = load_card(name).tiny() if size == "tiny" else load_card(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(card))
    assert model.num_parameters() == count(card).total
    assert model.lm_head.weight.numel() == count(card).head
    rotated = 2 * model.model.rotary_emb.inv_freq.numel()
    assert rotated == (card.mla.qk_rope_head_dim if card.mla else card.head_dim * card.rope.partial)


# Fields in which the class's default is not the release: positions, rope, and the init std of DeepSeek's report.
_NOT_RELEASED = {
    ("deepseek-v3", "DeepseekV3Config"): {"max_position_embeddings", "rope_parameters", "initializer_range"},
    ("gpt-oss-120b", "GptOssConfig"): {"rope_parameters"},
    ("mixtral-8x7b", "MixtralConfig"): {"max_position_embeddings", "router_aux_loss_coef"},
    ("minimax-m2", "MiniMaxM2Config"): {"rope_parameters"},
}


@pytest.mark.parametrize(("name", "config"), sorted(_NOT_RELEASED))
def test_card_equals_the_class_defaults_where_those_are_the_release(name, config):
    transformers = pytest.importorskip("transformers")
    given, default = hf_config(load_card(name)), getattr(transformers, config)()
    ignored = {"bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "architectures", "sliding_window", "dtype"}
    keys = set(default.to_dict()) - ignored - _NOT_RELEASED[name, config]
    assert {key: getattr(given, key) for key in keys} == {key: getattr(default, key) for key in keys}
    if name == "gpt-oss-120b":
        expected = default.rope_parameters | {"mscale": 1.0, "mscale_all_dim": 0.0}
        assert given.rope_parameters == expected
