"""Cards load, say what they must, shrink without losing a feature, and cost nothing to list."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from maniple.errors import UserError
from maniple.models import list_cards, load_card
from maniple.models.card import ModelCard
from maniple.models.counting import count
from maniple.models.flops import forward_flops_per_token
from maniple.models.table import markdown, rows

NAMES = list_cards()


@pytest.mark.parametrize("name", NAMES)
def test_card_is_named_like_its_file_and_names_its_source(name):
    card = load_card(name)
    assert card.name == name == name.lower()
    assert card.huggingface is not None
    assert len(card.huggingface.split("/")) == 2
    assert card.published is not None


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("deepseek-v4", "deepseek-v"),
        ("Qwen3_30B_A3B", "qwen3-30b-a3b"),
        ("mixtral", "mixtral-8x7b"),
        ("glm45", "glm-4.5"),
    ],
)
def test_unknown_name_gets_the_nearest(asked, nearest):
    with pytest.raises(UserError) as error:
        load_card(asked)
    assert nearest in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_like_no_other_lists_them_all():
    with pytest.raises(UserError, match="choose one of deepseek-v2, "):
        load_card("zzz")


def test_listing_models_imports_no_framework():
    code = (
        "import sys; from maniple.models.table import rows; import maniple.hardware; rows();"
        "print([m for m in ('torch', 'transformers', 'numpy', 'megatron', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_tiny_keeps_every_feature(name):
    card = load_card(name)
    tiny = card.tiny()
    assert ModelCard.model_validate(tiny.model_dump()) == tiny
    assert count(tiny).total_with_mtp < 3_000_000
    for field in (
        "family",
        "qk_norm",
        "qkv_bias",
        "output_bias",
        "attention_sinks",
        "sliding_layers",
        "num_mtp_layers",
        "tied_embeddings",
        "norm_eps",
    ):
        assert getattr(tiny, field) == getattr(card, field), field
    for field in ("linear_bias", "num_shared_experts", "activation", "activation_alpha", "activation_limit"):
        assert getattr(tiny.moe, field) == getattr(card.moe, field), field
    for field in ("score", "score_before_topk", "renormalize", "group_score", "expert_bias", "route_scale", "aux_loss"):
        assert getattr(tiny.moe.router, field) == getattr(card.moe.router, field), field
    assert (tiny.rope.base, tiny.rope.partial, tiny.rope.interleaved) == (
        card.rope.base,
        card.rope.partial,
        card.rope.interleaved,
    )
    assert (tiny.mla is None) == (card.mla is None)
    if card.mla is not None:
        assert (tiny.mla.q_lora_rank is None) == (card.mla.q_lora_rank is None)
    assert (tiny.rope.yarn is None) == (card.rope.yarn is None)
    assert (tiny.moe.num_dense_layers > 0) == (card.moe.num_dense_layers > 0)
    assert (tiny.num_kv_heads < tiny.num_heads) == (card.num_kv_heads < card.num_heads)
    assert tiny.moe.topk < tiny.moe.num_experts
    # Groups that would all be kept, or of one expert each, would not test group-limited routing.
    router = tiny.moe.router
    assert (router.num_groups > 1) == (card.moe.router.num_groups > 1)
    assert (router.group_topk < router.num_groups) == (card.moe.router.group_topk < card.moe.router.num_groups)
    kinds = {tiny.window(layer) for layer in range(tiny.num_layers)}
    assert len(kinds) == len({card.window(layer) for layer in range(card.num_layers)})
    assert {tiny.is_moe_layer(layer) for layer in range(tiny.num_layers)} == {
        card.is_moe_layer(layer) for layer in range(card.num_layers)
    }


def test_an_mtp_layer_is_as_the_last_decoder_layer_is():
    card = load_card("deepseek-v3")
    assert card.is_moe_layer(card.num_layers)
    dense = card.with_overrides({"num_layers": card.moe.num_dense_layers})
    assert not any(dense.is_moe_layer(layer) for layer in range(dense.num_layers + dense.num_mtp_layers))


@pytest.mark.parametrize("name", NAMES)
def test_tiny_of_tiny_and_overrides_stay_valid(name):
    tiny = load_card(name).tiny()
    assert tiny.tiny().model_dump(exclude={"name"}) == tiny.model_dump(exclude={"name"})
    wider = tiny.with_overrides({"hidden_size": 128, "moe": {"router": {"aux_loss": 0.5}}})
    assert (wider.hidden_size, wider.moe.router.aux_loss) == (128, 0.5)
    assert wider.moe.router.score == tiny.moe.router.score
    assert tiny.hidden_size == 64


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    layers=st.integers(1, 6),
    dense=st.integers(0, 8),
    experts=st.integers(1, 24),
    topk=st.integers(1, 8),
    groups=st.sampled_from([1, 2, 4]),
)
def test_any_valid_change_counts_consistently_and_any_other_is_refused(name, layers, dense, experts, topk, groups):
    changes = {
        "num_layers": layers,
        "dense_ffn_size": 96,
        "moe": {
            "num_experts": experts,
            "topk": topk,
            "num_dense_layers": dense,
            "router": {"num_groups": groups, "group_topk": 1},
        },
    }
    tiny = load_card(name).tiny()
    router = tiny.moe.router
    fits = (
        dense <= layers
        and experts % groups == 0
        and topk <= experts // groups
        and not (router.group_score == "sum_top2" and groups > 1 and experts // groups < 2)
    )
    if not fits:
        with pytest.raises(ValidationError):
            tiny.with_overrides(changes)
        return
    counts = count(card := tiny.with_overrides(changes))
    assert counts.total == counts.embedding + counts.head + counts.final_norm + sum(
        sum(layer.values()) for layer in counts.layers
    )
    assert counts.active <= counts.total
    assert (counts.active == counts.total) == (topk == experts or dense == layers)
    assert counts.routed_experts == (layers - dense) * counts.layers[-1]["routed_experts"]
    parts = forward_flops_per_token(card, 64)
    assert all(flops >= 0 for flops in parts.values())
    assert (parts["routed_experts"] > 0) == (dense < layers)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe": {"topk": 300}}, "topk 300 is more than"),
        ({"moe": {"router": {"num_groups": 7}}}, "does not divide into 7 groups"),
        ({"moe": {"num_dense_layers": 62}}, "num_dense_layers 62 is more than"),
        ({"num_heads": 64}, "num_kv_heads"),
        ({"head_dim": 128}, "qk_nope_head_dim"),
        ({"sliding_window": 128}, "sliding_layers and sliding_window go together"),
        ({"moe": {"activation": "clamped_swiglu"}}, "activation_limit"),
        ({"moe": {"experts": 8}}, "Extra inputs are not permitted"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValidationError, match=message):
        load_card("deepseek-v3").with_overrides(overrides)


def test_the_facts_that_public_presets_get_wrong():
    oss = load_card("gpt-oss-20b")
    assert oss.moe.num_shared_experts == 0
    assert oss.attention_sinks
    assert oss.qkv_bias
    assert oss.output_bias
    assert oss.moe.linear_bias
    assert oss.moe.router.linear_bias
    assert [oss.window(layer) for layer in range(4)] == [128, None, 128, None]
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        assert load_card(name).moe.router.aux_loss == 1e-3
    assert load_card("glm-4.5-air").qk_norm == "none"
    assert load_card("glm-4.5").qk_norm == "per_head"
    assert load_card("minimax-m2").qk_norm == "full_width"
    assert load_card("minimax-m2").rope.partial * load_card("minimax-m2").head_dim == 64
    assert [load_card(f"glm-4.{minor}").max_position for minor in (5, 6, 7)] == [131072, 202752, 202752]
    yarn = {name: load_card(name).rope.yarn for name in NAMES}
    assert {name: (y.factor, y.beta_fast, y.mscale, y.mscale_all_dim, y.truncate) for name, y in yarn.items() if y} == {
        "deepseek-v2": (40, 32, 0.707, 0.707, True),
        "deepseek-v2-lite": (40, 32, 0.707, 0.707, True),
        "deepseek-v3": (40, 32, 1, 1, True),
        "kimi-k2": (32, 1, 1, 1, True),
        "gpt-oss-20b": (32, 32, 1, 0, False),
        "gpt-oss-120b": (32, 32, 1, 0, False),
    }
    for name, y in yarn.items():
        if y:
            assert y.factor * y.original_max_position == load_card(name).max_position


def test_table_rows_survive_json_and_agree_with_the_counts():
    table = rows()
    assert json.loads(json.dumps(table)) == table
    assert [row["name"] for row in table] == NAMES
    assert len({tuple(row) for row in table}) == 1
    v3 = next(row for row in table if row["name"] == "deepseek-v3")
    assert v3["total_parameters"] == 671_026_404_352
    assert v3["mtp_parameters"] == 11_610_067_968
    assert (v3["layers"], v3["hidden_size"], v3["experts"], v3["topk"]) == (61, 7168, 256, 8)
    assert v3["router"] == "sigmoid + bias, 4 of 8 groups, renormalised, x2.5"
    assert v3["published_active_counting"] == "without the input embedding"
    oss = next(row for row in table if row["name"] == "gpt-oss-20b")
    assert oss["attention"] == "GQA 64/8 x 64, biases, sinks, sliding 128 (even layers)"
    assert oss["router"] == "softmax after top-k"


def test_the_guide_shows_this_very_table():
    guide = Path(__file__).parents[2] / "docs" / "models.md"
    assert markdown() in guide.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "override",
    [
        {"num_layers": 10**9},
        {"num_mtp_layers": 10**9},
        {"hidden_size": 10**9},
        {"num_heads": 10**8, "num_kv_heads": 10**8},
        {"head_dim": 10**9},
        {"vocab_size": 10**12},
        {"dense_ffn_size": 10**9},
        {"moe": {"num_experts": 10**9}},
        {"moe": {"expert_ffn_size": 10**9}},
        {"moe": {"num_shared_experts": 1, "shared_ffn_size": 10**9}},
    ],
    ids=lambda override: next(iter(override)),
)
def test_sizes_that_would_hang_or_fill_memory_are_refused(override):
    with pytest.raises(ValidationError, match="less than or equal to"):
        load_card("qwen3-30b-a3b").with_overrides(override)
