"""transformers' own config classes as witness: they read the released files, and what is written, as the cards say."""

from __future__ import annotations

import json

import pytest
from tests.models.hf_configs import hf_config
from tests.models.released_configs import RELEASED

from maniple.models import list_cards, load_card
from maniple.models.huggingface import card_of, config_of, forward_differences, read_config

NAMES = list_cards()
FAMILIES = {load_card(name).family: name for name in NAMES}
SAID_OTHERWISE = ("bos_token_id", "eos_token_id", "architectures", "dtype", "transformers_version", "_name_or_path")


def unlike(ours, by_hand) -> set[str]:
    """Names of the attributes of `by_hand` that `ours` has not, or has otherwise."""
    width = (
        {"intermediate_size"} if by_hand.model_type == "qwen3_moe" else set()
    )  # of dense layers, which there are not
    values = {key: value for key, value in by_hand.to_dict().items() if key not in {*SAID_OTHERWISE, *width}}
    return {key for key, value in values.items() if not hasattr(ours, key) or getattr(ours, key) != value}


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_transformers_reads_a_released_file_as_the_card_says(name):
    from transformers import AutoConfig

    config = RELEASED[name] | {"model_type": load_card(name).family}  # kimi_k2 is not a type that transformers knows
    theirs, by_hand = AutoConfig.for_model(**config).to_dict(), hf_config(load_card(name)).to_dict()
    for values in (theirs, by_hand):
        rope = values["rope_parameters"]
        rope.pop("type", None)
        if rope["rope_type"] == "yarn":
            values["rope_parameters"] = {"mscale": 1.0, "mscale_all_dim": 0.0, "truncate": True} | rope
        if values["model_type"] == "mixtral":
            values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    unlike = {key for key, value in by_hand.items() if key not in SAID_OTHERWISE and theirs.get(key, "none") != value}
    unused = {"qwen3_moe": {"intermediate_size"}, "gpt_oss": {"router_aux_loss_coef"}}  # 0.9 there: see the card
    assert unlike - unused.get(load_card(name).family, set()) - {"initializer_range", "pad_token_id"} == set()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_what_transformers_writes_of_a_card_is_the_card(name, size, tmp_path):
    card = load_card(name).tiny() if size == "tiny" else load_card(name)
    by_hand = hf_config(card)
    assert forward_differences(card_of(by_hand.to_dict(), name="mine"), card) == []
    by_hand.save_pretrained(tmp_path)
    assert forward_differences(card_of(read_config(tmp_path), name="mine"), card) == []


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_is_written_as_its_own(name, tmp_path):
    """Every attribute that the family's class was given by hand has the same value when it reads our file."""
    import torch
    from transformers import AutoConfig

    for card in (load_card(name).tiny(), load_card(name)):
        (tmp_path / "config.json").write_text(json.dumps(config_of(card, dtype="float16"), allow_nan=False))
        ours, by_hand = AutoConfig.from_pretrained(tmp_path), hf_config(card)
        assert type(ours) is type(by_hand)
        assert ours.dtype == torch.float16
        assert unlike(ours, by_hand) == set()
        assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (None, None, None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_named_architecture_is_the_class_that_transformers_builds(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(load_card(FAMILIES[family]).tiny(), dtype="float32")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert type(model).__name__ == config["architectures"][0]


VARIANTS = [
    ("deepseek-v3", {"rope": {"interleaved": False}}),
    ("deepseek-v3", {"rope": {"yarn": None}, "mla": {"q_lora_rank": None}, "tied_embeddings": True}),
    (
        "deepseek-v3",
        {"moe": {"router": {"num_groups": 1, "group_topk": 1, "renormalize": False}, "num_dense_layers": 0}},
    ),
    ("deepseek-v3", {"num_mtp_layers": 0, "moe": {"num_shared_experts": 2, "shared_ffn_size": 96}}),
    ("deepseek-v2", {"moe": {"router": {"num_groups": 1, "group_topk": 1}}, "rope": {"yarn": {"truncate": False}}}),
    ("glm-4.5", {"rope": {"partial": 0.25}, "qk_norm": "none", "qkv_bias": False, "num_mtp_layers": 0}),
    ("glm-4.5", {"moe": {"router": {"num_groups": 4, "group_topk": 2, "group_score": "sum_top2"}}}),
    ("minimax-m2", {"rope": {"partial": 0.25}, "norm_eps": 1e-5}),
    ("qwen3-30b-a3b", {"qkv_bias": True, "output_bias": True, "moe": {"router": {"renormalize": False}}}),
    ("qwen3-30b-a3b", {"rope": {"yarn": {"factor": 4.0, "original_max_position": 64}}, "tied_embeddings": True}),
    ("gpt-oss-20b", {"sliding_layers": "all", "moe": {"activation_alpha": 1.5, "activation_limit": 5.0}}),
    ("gpt-oss-20b", {"sliding_layers": "none", "sliding_window": None, "rope": {"yarn": None}}),
    ("gpt-oss-20b", {"qkv_bias": False, "output_bias": False, "num_layers": 1}),
    ("mixtral-8x7b", {"sliding_layers": "all", "sliding_window": 32, "head_dim": 32}),
]


@pytest.mark.parametrize(("name", "change"), VARIANTS)
def test_models_that_nobody_released_are_written_as_transformers_reads_them(name, change):
    from transformers import AutoConfig

    card = load_card(name).tiny().with_overrides(change)
    assert forward_differences(card, load_card(name).tiny()) != []
    config = config_of(card)
    assert unlike(AutoConfig.for_model(**config), hf_config(card)) == set()
    assert forward_differences(card_of(config, name="mine"), card) == []
    assert forward_differences(card_of(hf_config(card).to_dict(), name="mine"), card) == []
