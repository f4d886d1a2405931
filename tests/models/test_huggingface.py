"""`config.json` and cards: the released files, transformers' own config objects, and everything that is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.released_configs import RELEASED

from maniple.errors import UserError
from maniple.models import ModelCard, list_cards, load_card
from maniple.models.huggingface import (
    card_of,
    config_of,
    forward_differences,
    matching_card,
    quantization_of,
)

NAMES = list_cards()
YARN = RELEASED["deepseek-v3"]["rope_scaling"]


def refusal(config: object, name: str = "mine") -> str:
    with pytest.raises(UserError) as caught:
        card_of(config, name=name)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert len(said) < 400
    return said


def outcome(config: dict) -> tuple[ModelCard | None, str]:
    """The card, or the one line that refuses it."""
    try:
        return card_of(config, name="a"), ""
    except UserError as error:
        return None, str(error)


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_released_file_is_the_shipped_card(name):
    config = copy.deepcopy(RELEASED[name])
    card = card_of(config, name="mine")
    assert forward_differences(card, load_card(name)) == []
    assert card.max_position == load_card(name).max_position
    assert card.name == "mine"
    assert matching_card(card) == name
    assert config == RELEASED[name]  # read, not changed


def test_every_shipped_card_finds_itself_and_a_changed_one_nothing():
    for name in NAMES:
        assert matching_card(load_card(name)) == name
    assert matching_card(load_card("glm-4.6").with_overrides({"name": "mine"})) == "glm-4.6"  # 4.7 is the same model
    assert matching_card(load_card("deepseek-v3").with_overrides({"num_layers": 60})) is None


@pytest.mark.parametrize("name", NAMES)
def test_writing_reading_and_writing_again_changes_nothing(name):
    for card in (load_card(name), load_card(name).tiny()):
        config = config_of(card)
        again = config_of(card_of(json.loads(json.dumps(config)), name="mine"))
        assert again == config


def test_both_manners_of_writing_rotary_parameters_are_one():
    old = RELEASED["deepseek-v3"]
    rest = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new = rest | {"rope_parameters": {"rope_theta": 10000, **YARN, "rope_type": "yarn"}}
    del new["rope_parameters"]["type"]
    assert card_of(new, name="a") == card_of(old, name="a") == card_of(new | {"rope_theta": 10000}, name="a")
    assert "two values" in refusal(new | {"rope_theta": 20000})
    assert "two values" in refusal(old | {"rope_parameters": {"factor": 32}})
    twice = new["rope_parameters"] | {"type": "yarn"}
    assert card_of(old | {"rope_parameters": twice}, name="a") == card_of(old, name="a")
    assert '"truncate" in rope_parameters' in refusal(old | {"rope_parameters": {"truncate": False}})
    oss = RELEASED["gpt-oss-20b"] | {"initial_context_length": None}
    for nothing in (None, {}):  # transformers would put a YaRN of its own
        assert "lacks rope_type" in refusal(oss | {"rope_scaling": nothing})
    assert card_of(oss | {"rope_scaling": {"rope_type": "default"}}, name="a").rope.yarn is None
    glm = card_of(RELEASED["glm-4.5"] | {"partial_rotary_factor": 0.25}, name="mine")
    assert glm.rope.partial == 0.25
    minimax = dict(RELEASED["minimax-m2"])
    assert "two values" in refusal(minimax | {"partial_rotary_factor": 1.0})
    assert card_of(minimax | {"rotary_dim": 32}, name="mine").rope.partial == 0.25
    del minimax["rotary_dim"]
    assert "partial_rotary_factor" in refusal(minimax)  # transformers would silently rotate the whole head
    assert card_of(minimax | {"partial_rotary_factor": 0.5}, name="mine").rope.partial == 0.5


def test_what_a_yarn_says_and_leaves_out():
    def yarn(**change):
        scaling = {key: value for key, value in (YARN | change).items() if value != "absent"}
        return card_of(RELEASED["deepseek-v3"] | {"rope_scaling": scaling}, name="mine").rope.yarn

    plain = yarn(mscale="absent", mscale_all_dim="absent", beta_fast="absent", beta_slow=None)
    assert (plain.mscale, plain.mscale_all_dim, plain.beta_fast, plain.beta_slow) == (1.0, 0.0, 32.0, 1.0)
    assert plain.truncate
    assert yarn(mscale_all_dim=0) == yarn(mscale="absent", mscale_all_dim="absent")
    for alone in (
        {"mscale": 0.707, "mscale_all_dim": "absent"},
        {"mscale": "absent"},
        {"mscale": 0.5, "mscale_all_dim": 0},
    ):
        with pytest.raises(UserError, match="together, or neither"):
            yarn(**alone)
    for wrong in ({"attention_factor": 1.2}, {"factor": 0.5}, {"beta_fast": 0.5}, {"mscale": True}, {"new": 1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            yarn(**wrong)
    for needed in ("factor", "original_max_position_embeddings"):
        with pytest.raises(UserError, match=f"lacks {needed}"):
            yarn(**{needed: "absent"})


def test_windows_biases_and_heads_are_read():
    assert card_of(RELEASED["mixtral-8x7b"] | {"sliding_window": 4096}, name="a").sliding_layers == "all"
    assert card_of(RELEASED["mixtral-8x7b"] | {"head_dim": 64}, name="a").head_dim == 64
    assert card_of(RELEASED["mixtral-8x7b"] | {"hidden_size": 2048}, name="a").head_dim == 64
    oss = RELEASED["gpt-oss-20b"]
    assert card_of(oss | {"layer_types": ["full_attention"] * 24}, name="a").sliding_window is None
    assert card_of(oss | {"layer_types": ["sliding_attention"] * 24}, name="a").sliding_layers == "all"
    for types in (["full_attention", "sliding_attention"] * 12, ["full_attention"] * 23, None, "full_attention"):
        assert "layer_types" in refusal(oss | {"layer_types": types})
    card = card_of(RELEASED["qwen3-30b-a3b"] | {"attention_bias": True}, name="a")
    assert (card.qkv_bias, card.output_bias) == (True, True)
    card = card_of(RELEASED["glm-4.5"], name="a")
    assert (card.qkv_bias, card.output_bias) == (True, False)
    assert card_of(RELEASED["qwen3-30b-a3b"] | {"norm_topk_prob": False}, name="a").moe.router.renormalize is False
    greedy = card_of(RELEASED["deepseek-v2"] | {"topk_method": "greedy"}, name="a").moe.router
    assert greedy.num_groups == 1  # n_group is there, and transformers does not look at it
    assert card_of(RELEASED["deepseek-v3"] | {"rope_interleave": False}, name="a").rope.interleaved is False


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = [
    ("deepseek-v3", {"model_type": "deepseek_v32"}, "DSA"),
    ("glm-4.5", {"model_type": "glm_moe_dsa"}, "DSA"),
    ("minimax-m2", {"model_type": "minimax"}, "lightning attention"),
    ("minimax-m2", {"model_type": "minimax_text_01"}, "lightning attention"),
    ("minimax-m2", {"attn_type_list": [1] * 61 + [0]}, "attn_type_list"),
    ("minimax-m2", {"scoring_func": "softmax"}, '"sigmoid"'),
    ("minimax-m2", {"use_routing_bias": False}, "true"),
    ("minimax-m2", {"shared_intermediate_size": 8192}, "shared_intermediate_size = 8192; supported: 0"),
    ("minimax-m2", {"qk_norm_type": "per_head"}, "per_layer"),
    ("minimax-m2", {"rotary_dim": 63}, "even part"),
    ("minimax-m2", {"layernorm_mlp_alpha": 3.5}, "layernorm_mlp_alpha"),
    ("glm-4.5", {"model_type": "glm4v_moe"}, "images"),
    ("glm-4.5", {"vision_config": {}}, "vision_config"),
    ("kimi-k2", {"model_type": "kimi_k25", "text_config": {}}, "text_config"),
    ("kimi-k2", {"qk_layernorm": True}, "qk_layernorm = true, which maniple does not know"),
    ("qwen3-30b-a3b", {"model_type": "qwen2_moe"}, '"qwen2_moe"; supported: deepseek_v2'),
    ("qwen3-30b-a3b", {"model_type": "llama"}, "supported"),
    ("qwen3-30b-a3b", {"model_type": ["qwen3_moe"]}, "supported"),
    ("qwen3-30b-a3b", {"model_type": None}, "supported"),
    ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]; supported: []"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window = true; supported: false"),
    ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_experts = 128 and num_local_experts = 64, which are one thing"),
    ("qwen3-30b-a3b", {"architectures": ["Qwen3MoeForSequenceClassification"]}, "Qwen3MoeForCausalLM"),
    ("qwen3-30b-a3b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3-30b-a3b", {"n_shared_experts": 1}, "n_shared_experts = 1, which maniple does not know"),
    ("qwen3-30b-a3b", {"a b\n": 1}, "which maniple does not know"),
    ("deepseek-v3", {"architectures": ["InstellaMoEForCausalLM"]}, "DeepseekV3ForCausalLM"),
    ("deepseek-v3", {"index_topk": 2048}, "index_topk = 2048, which maniple does not know"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias = true; supported: false"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek-v3", {"pretraining_tp": 2}, "pretraining_tp"),
    ("deepseek-v3", {"pretraining_tp": True}, "pretraining_tp"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek-v3", {"num_key_value_heads": 1}, "num_key_value_heads = 1; supported: 128"),
    ("deepseek-v3", {"head_dim": 128}, "head_dim"),
    ("deepseek-v3", {"hidden_act": "gelu"}, 'hidden_act = "gelu"; supported: "silu"'),
    ("deepseek-v3", {"attention_dropout": 0.1}, "attention_dropout"),
    ("deepseek-v3", {"num_mtp_layers": 2}, "num_nextn_predict_layers = 1 and num_mtp_layers = 2"),
    ("deepseek-v3", {"num_experts_per_tok": 300}, "moe.topk 300"),
    ("deepseek-v3", {"n_group": 7}, "does not divide into 7 groups"),
    ("deepseek-v3", {"vocab_size": 10**5000}, "integer of"),
    ("deepseek-v3", {"hidden_size": 7168.0}, "hidden_size = 7168.0; supported: a whole number, 1 or more"),
    ("deepseek-v3", {"hidden_size": "7168"}, "hidden_size"),
    ("deepseek-v3", {"hidden_size": True}, "hidden_size"),
    ("deepseek-v3", {"num_hidden_layers": 10**9}, "num_layers"),
    ("deepseek-v3", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    ("deepseek-v3", {"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
    ("deepseek-v3", {"norm_topk_prob": 1}, "norm_topk_prob = 1; supported: true or false"),
    ("deepseek-v3", {"rope_scaling": [1]}, "rope_scaling"),
    ("deepseek-v3", {"rope_theta": 0}, "rope_theta"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob = true; supported: false"),
    ("deepseek-v2", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, '"greedy" or "group_limited_greedy"'),
    ("deepseek-v2", {"n_group": None}, "lacks n_group"),
    ("gpt-oss-20b", {"initial_context_length": 8192}, "initial_context_length"),
    ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token = 2"),
    ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("mixtral-8x7b", {"num_attention_heads": 24}, "head_dim"),
    *(
        ("deepseek-v3", {"rope_scaling": YARN | {"type": kind}}, '"default" or "yarn"')
        for kind in ("dynamic", "longrope", "llama3", "linear", "su")
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "said"), REFUSED, ids=[f"{n}-{next(iter(c))}-{i}" for i, (n, c, _) in enumerate(REFUSED)]
)
def test_refused_in_one_line_that_names_it(name, change, said):
    assert said in refusal(RELEASED[name] | change)


def test_a_bad_name_is_refused_in_one_line():
    assert "name" in refusal(RELEASED["deepseek-v3"], name="../mine")


# Fields of the releases that change neither a forward pass nor the weights it needs.
NO_EFFECT = (
    "auto_map bos_token_id eos_token_id pad_token_id ep_size seq_aux torch_dtype transformers_version use_cache"
    " aux_loss_alpha router_aux_loss_coef output_router_logits initializer_range max_position_embeddings"
    " quantization_config max_window_layers mtp_transformer_layers num_mtp_modules use_mtp"
)


# Qwen3 says a width of dense layers and a window without having either; V2-Lite has groups, and chooses among all.
UNUSED = {
    "deepseek-v2-lite": ("n_group", "topk_group"),
    "qwen3-30b-a3b": ("intermediate_size", "sliding_window"),
    "qwen3-235b-a22b": ("intermediate_size", "sliding_window"),
}


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_no_field_goes_unread(name):
    """Each field, changed to another value of its type, changes the card or is refused by name."""
    config = RELEASED[name]
    silent = []
    for key, value in config.items():
        match value:
            case bool():
                other = not value
            case int() | float():
                other = value * 3 + 1
            case str():
                other = value + "x"
            case list():
                other = [*value, "x"]
            case dict():
                other = value | {"x": 1}
            case _:
                other = {"x": 1}
        card, said = outcome(config | {key: other})
        assert card is None or said == ""
        if card is not None and not forward_differences(card, load_card(name)):
            silent.append(key)
    assert set(silent) <= {*NO_EFFECT.split(), *UNUSED.get(name, ())}


# What transformers' class puts in the place of a missing field, in every release.
DEFAULTED = (
    "architectures attention_dropout hidden_act tie_word_embeddings pretraining_tp"
    " experts_per_token num_experts_per_tok initial_context_length"  # GPT-OSS says these twice
    " decoder_sparse_step mlp_only_layers use_sliding_window sliding_window moe_layer_freq scoring_func topk_method"
    " attention_bias rope_scaling attn_type_list qk_norm_type shared_intermediate_size use_qk_norm use_routing_bias"
    " num_key_value_heads norm_topk_prob"
)


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_a_missing_field_is_named_or_has_one_meaning(name):
    config = RELEASED[name]
    for key in config:
        less = {other: value for other, value in config.items() if other != key}
        card, said = outcome(less)
        if card is None:
            assert {"rotary_dim": "partial_rotary_factor"}.get(key, key) in said
            assert len(said.splitlines()) == 1
        else:
            assert key in NO_EFFECT.split() or key in DEFAULTED.split() or key in UNUSED.get(name, ())
            # Only rope_scaling means another model if it is not there.
            assert (forward_differences(card, load_card(name)) == []) == (key != "rope_scaling" or config[key] is None)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_make_a_card_or_one_line(data):
    config = copy.deepcopy(RELEASED[data.draw(st.sampled_from(sorted(RELEASED)))])
    for _ in range(data.draw(st.integers(1, 3))):
        place = config
        if config.get("rope_scaling") and isinstance(config["rope_scaling"], dict) and data.draw(st.booleans()):
            place = config["rope_scaling"]
        key = data.draw(st.sampled_from(sorted(place)) | st.text(max_size=5))
        if data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
        else:
            place.pop(key, None)
    card, said = outcome(config)
    if card is not None:
        assert forward_differences(card_of(config_of(card), name="a"), card) == []
    else:
        assert len(said.splitlines()) == 1
        assert len(said) < 400
    with contextlib.suppress(UserError):
        quantization_of(config)


# --- comparing cards, and cards that a family cannot express --------------------------------------------------------


def test_differences_name_the_fields_that_matter_and_no_other():
    card = load_card("deepseek-v3")
    silent = {"name": "b", "huggingface": None, "published": None, "init_std": 0.5, "max_position": 7}
    silent |= {"moe": {"router": {"aux_loss": 0.5}, "num_shared_experts": 2}}
    assert forward_differences(card, card.with_overrides(silent)) == []
    for change, name in [
        ({"family": "deepseek_v2"}, "family"),
        ({"rope": {"yarn": None}}, "rope.yarn"),
        ({"rope": {"yarn": {"mscale": 0.5}}}, "rope.yarn.mscale"),
        ({"mla": {"kv_lora_rank": 256}}, "mla.kv_lora_rank"),
        ({"norm_eps": 1e-5}, "norm_eps"),
        ({"num_mtp_layers": 0}, "num_mtp_layers"),
        ({"tied_embeddings": True}, "tied_embeddings"),
        ({"moe": {"router": {"route_scale": 2.0}}}, "moe.router.route_scale"),
        ({"moe": {"router": {"group_score": "max"}}}, "moe.router.group_score"),
        ({"dense_ffn_size": 96}, "dense_ffn_size"),
    ]:
        assert forward_differences(card, card.with_overrides(change)) == [name]
    kimi = load_card("kimi-k2")  # one group: no choice among groups
    assert forward_differences(kimi, kimi.with_overrides({"moe": {"router": {"group_score": "sum_top2"}}})) == []
    air = load_card("mixtral-8x7b")  # no dense layers: their width says nothing
    assert forward_differences(air, air.with_overrides({"dense_ffn_size": 96})) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mixtral-8x7b", {"moe": {"router": {"renormalize": False}}}, "moe.router.renormalize"),
        ("mixtral-8x7b", {"qk_norm": "per_head"}, "qk_norm"),
        ("minimax-m2", {"num_mtp_layers": 3}, "num_mtp_layers"),
        ("qwen3-30b-a3b", {"moe": {"num_shared_experts": 1, "shared_ffn_size": 768}}, "shared_ffn_size"),
        ("qwen3-30b-a3b", {"qkv_bias": True}, "output_bias"),
        ("gpt-oss-20b", {"attention_sinks": False}, "attention_sinks"),
        ("deepseek-v2", {"moe": {"router": {"expert_bias": True}}}, "moe.router.expert_bias"),
        ("deepseek-v3", {"moe": {"shared_ffn_size": 2049}}, "shared_ffn_size"),
        ("glm-4.5", {"rope": {"interleaved": True}}, "rope.interleaved"),
        ("glm-4.5", {"family": "deepseek_v3"}, "qk_nope_head_dim"),
        ("glm-4.5", {"family": "llama"}, "no config.json is known"),
    ],
)
def test_a_card_that_the_family_cannot_express_is_not_written(name, change, said):
    with pytest.raises(UserError) as caught:
        config_of(load_card(name).with_overrides(change))
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_dtypes():
    assert config_of(load_card("kimi-k2"), dtype="float32")["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match="choose one of bfloat16"):
        config_of(load_card("kimi-k2"), dtype="fp8")


def test_a_leaf_without_torch_or_transformers():
    code = "import sys, maniple.models.huggingface; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
