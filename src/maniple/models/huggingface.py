"""From a Hugging Face `config.json` to a model card, and back.

Read are the files of the releases (transformers 4: `rope_theta`, `rope_scaling`, `num_nextn_predict_layers`) and those
that transformers 5 writes (`rope_parameters`, `num_mtp_layers`). Nothing is guessed. Each field is read, or is known to
change nothing, or must have the one value that is supported; any other is refused by name, since it could change the
model. A field may be missing only where every release of transformers' class puts the same value in its place.

`config_of` writes what transformers' class of the family reads, in both manners of naming rotary parameters, so that
other readers of a released file find them too. It reads back what it wrote before it returns, so a card that a family's
`config.json` cannot describe is refused instead of written wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from maniple.errors import UserError
from maniple.models import list_cards, load_card
from maniple.models.card import ModelCard
from maniple.models.config_json import Fields, Quantization, quantization_of, read_config, shown
from maniple.models.huggingface_families import FAMILIES

__all__ = [
    "Quantization",
    "card_of",
    "config_of",
    "forward_differences",
    "matching_card",
    "quantization_of",
    "read_config",
]

_DTYPES = ("bfloat16", "float16", "float32")

_NO_EFFECT = (
    # who wrote the file, how weights are stored and loaded, what a call returns
    "_name_or_path name_or_path transformers_version auto_map torch_dtype dtype use_bfloat16 torchscript use_cache"
    " quantization_config unsloth_fixed unsloth_version _attn_implementation _attn_implementation_autoset"
    " attn_implementation _experts_implementation return_dict output_attentions output_hidden_states"
    " output_router_logits output_scores return_dict_in_generate tokenizer_class prefix finetuning_task"
    " task_specific_params id2label label2id num_labels problem_type tf_legacy_loss"
    # special tokens, and sampling: a forward pass knows neither
    " bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id"
    " decoder_start_token_id bad_words_ids begin_suppress_tokens suppress_tokens forced_bos_token_id"
    " forced_eos_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size"
    " exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups"
    " num_beams num_return_sequences remove_invalid_values repetition_penalty temperature top_k top_p typical_p"
    # how the releases were trained
    " seq_aux ep_size"
)
_REFUSED = {
    "deepseek_v32": "its attention is sparse (DSA)",
    "glm_moe_dsa": "its attention is sparse (DSA)",
    "minimax": "its attention is linear (lightning attention)",
    "minimax_text_01": "its attention is linear (lightning attention)",
    "minimax_m1": "its attention is linear (lightning attention)",
    "glm4v_moe": "it reads images",
    "kimi_k25": "it reads images",
    "kimi_vl": "it reads images",
}


def card_of(config: dict[str, Any], *, name: str) -> ModelCard:
    """The card, called `name`, of the model that a `config.json` describes; `config` is not changed.

    Raises UserError, in one line, for a model, a field or a value that is not supported, and for a missing field.
    """
    fields = Fields(config)
    family = fields.take("model_type")
    for part in ("vision_config", "audio_config", "text_config"):
        if fields.has(part):
            raise UserError(f"config.json has {part}: models that read more than text are not supported")
    if family == "kimi_k2":  # DeepSeek-V3's code under a name of its own
        family = "deepseek_v3"
    if not isinstance(family, str) or family not in FAMILIES:
        why = f", but {_REFUSED[family]}" if isinstance(family, str) and family in _REFUSED else ""
        supported = ", ".join([*FAMILIES, "kimi_k2"])
        raise UserError(f"config.json has model_type = {shown(config.get('model_type'))}{why}; supported: {supported}")
    of = FAMILIES[family]
    fields.only(architectures=[of.architecture], hidden_act="silu", attention_dropout=0, pretraining_tp=1)
    fields.only(is_encoder_decoder=False, is_decoder=False, add_cross_attention=False, tie_encoder_decoder=False)
    fields.only(pruned_heads={}, chunk_size_feed_forward=0, cross_attention_hidden_size=None, per_layer_config=None)
    fields.ignore(_NO_EFFECT.split())
    facts = {
        "name": name,
        "family": family,
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": fields.integer("hidden_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "vocab_size": fields.integer("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings", default=False),
        "norm_eps": fields.number("rms_norm_eps"),
        "init_std": fields.number("initializer_range", default=0.02),
        "max_position": fields.integer("max_position_embeddings"),
    }
    facts |= of.read(fields)
    fields.finish()
    try:
        return ModelCard.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        said = " ".join(said.split())
        raise UserError(f"config.json describes no possible model: {place + ': ' if place else ''}{said}") from None


def config_of(card: ModelCard, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """What `config.json` says of a model of this card whose weights are stored as `dtype`.

    Ids of special tokens are null: a card does not know them. Raises UserError if the card's family is unknown, or if
    its `config.json` cannot say what the card says; ValueError for another dtype than bfloat16, float16 or float32.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(_DTYPES)}")
    if card.family not in FAMILIES:
        raise UserError(f"no config.json is known for cards of family {card.family!r}; known: {', '.join(FAMILIES)}")
    of = FAMILIES[card.family]
    config = {
        "architectures": [of.architecture],
        "model_type": card.family,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "num_hidden_layers": card.num_layers,
        "hidden_size": card.hidden_size,
        "num_attention_heads": card.num_heads,
        "num_key_value_heads": card.num_kv_heads,
        "num_experts_per_tok": card.moe.topk,
        "vocab_size": card.vocab_size,
        "tie_word_embeddings": card.tied_embeddings,
        "rms_norm_eps": card.norm_eps,
        "initializer_range": card.init_std,
        "max_position_embeddings": card.max_position,
    }
    config |= of.write(card)
    try:
        lost = forward_differences(card, card_of(config, name=card.name))
    except UserError as error:
        raise UserError(f"card {card.name}: transformers' {card.family} cannot be this model ({error})") from None
    if lost:
        raise UserError(f"card {card.name}: transformers' {card.family} cannot express its {', '.join(lost)}")
    return config


def matching_card(card: ModelCard) -> str | None:
    """The shipped card that is the same model, or None.

    Where several are (GLM-4.5, 4.6 and 4.7), that of the same name comes first, then those of as many positions.
    """
    same = [name for name in list_cards() if not forward_differences(card, load_card(name))]
    return min(
        same,
        key=lambda name: (name != card.name, load_card(name).max_position != card.max_position, name),
        default=None,
    )


def forward_differences(a: ModelCard, b: ModelCard) -> list[str]:
    """Dotted names of the fields in which `a` and `b` differ and that change a forward pass or the weights it needs.

    Names, published figures, the balance-loss coefficient, `init_std` and `max_position` do neither. Nor does a field
    that another one switches off: the ways of choosing among groups if all are kept, the dense width without dense
    layers, the number of shared experts beside their width together.
    """
    return list(_differing(_forward_facts(a), _forward_facts(b), ""))


def _forward_facts(card: ModelCard) -> dict[str, Any]:
    facts = card.model_dump(exclude={"name", "published", "huggingface", "init_std", "max_position"})
    moe, router = facts["moe"], facts["moe"]["router"]
    del router["aux_loss"], moe["num_shared_experts"]
    if router["group_topk"] == router["num_groups"]:
        router.update(num_groups=1, group_topk=1, group_score="max")
    if not moe["num_dense_layers"]:
        facts["dense_ffn_size"] = 0
    if card.num_layers == 1 and card.sliding_layers == "even":
        facts["sliding_layers"] = "all"
    return facts


def _differing(a: Any, b: Any, name: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:
            yield from _differing(a[key], b[key], f"{name}.{key}" if name else key)
    elif a != b:
        yield name
