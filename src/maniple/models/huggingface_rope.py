"""Rotary embedding as a `config.json` says it: `rope_theta` and `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from typing import Any

from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.models.config_json import Fields, shown


def read_rope(
    fields: Fields,
    *,
    partial: float | None = 1.0,
    head_dim: int = 0,
    rotary_dim: int = 0,
    interleaved: bool = False,
    typed: bool = False,
) -> dict[str, Any]:
    """The card's `rope`, from the file's fields.

    `partial` is the only share of a head that the family rotates; None: any share of `head_dim`, but it must be said,
    here or as `rotary_dim` (0: it was not). `typed`: the file must say which kind of scaling it has. Raises UserError
    for every kind but YaRN.
    """
    said = _said(fields, {"partial_rotary_factor": rotary_dim / head_dim} if rotary_dim else {})
    rope = Fields(said, "config.json's rope_parameters (or rope_scaling)")
    kind = rope.choice("rope_type", "default", "yarn") if typed or rope.has("rope_type") else "default"
    rope.ignore(("rope_type",))
    base = rope.number("rope_theta")
    if partial is None:
        share = rope.number("partial_rotary_factor")
        if not (share <= 1.0 and (turned := share * head_dim).is_integer() and turned % 2 == 0):
            raise rope.refuse("partial_rotary_factor", f"a share that is an even part of head_dim {head_dim}")
    else:
        share = partial
        rope.only(partial_rotary_factor=partial)
    yarn = _yarn(rope) if kind == "yarn" else None
    rope.finish()
    return {"base": base, "partial": share, "interleaved": interleaved, "yarn": yarn}


def _said(fields: Fields, said: dict[str, Any]) -> dict[str, Any]:
    """`said`, and both manners of writing it, as one dictionary. What is written twice must agree."""
    scaled = bool(fields.take("rope_scaling"))
    for source in ("rope_scaling", "rope_theta", "partial_rotary_factor", "rope_parameters"):
        value = fields.take(source)
        if value is None:
            continue
        if source in ("rope_theta", "partial_rotary_factor"):
            value = {source: value}
        elif not isinstance(value, dict):
            raise fields.refuse(source, "an object, or null")
        more = value.keys() - said.keys() - {"type"}
        if source == "rope_parameters" and scaled and more:  # transformers 5 would not look at them
            raise UserError(f"config.json has {shown(min(more, key=str))} in rope_parameters and not in rope_scaling")
        for key, item in value.items():
            key = "rope_type" if key == "type" else key
            if key in said and said[key] != item:
                raise UserError(f"config.json has two values of {shown(key)}: {shown(said[key])} and {shown(item)}")
            said[key] = item
    return said


def _yarn(rope: Fields) -> dict[str, Any]:
    rope.only(attention_factor=None)
    factor = rope.number("factor")
    fast, slow = rope.number("beta_fast", default=32.0), rope.number("beta_slow", default=1.0)
    if factor < 1.0:
        raise rope.refuse("factor", "1 or more")
    if fast < slow:
        raise rope.refuse("beta_fast", f"beta_slow ({slow:g}) or more")
    mscale = rope.number("mscale", default=1.0)
    all_dim = rope.number("mscale_all_dim", or_zero=True, default=0.0)
    # With one of the two alone, DeepSeek's code and transformers' scale differently.
    if (mscale, all_dim) != (1.0, 0.0) and not (rope.has("mscale") and all_dim):
        alone = "mscale" if rope.has("mscale") else "mscale_all_dim"
        raise rope.refuse(alone, "mscale and mscale_all_dim together, or neither")
    return {
        "factor": factor,
        "original_max_position": rope.integer("original_max_position_embeddings"),
        "beta_fast": fast,
        "beta_slow": slow,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
        "truncate": rope.flag("truncate", default=True),
    }


def write_rope(card: ModelCard) -> dict[str, Any]:
    """Both manners, which say the same."""
    rope, yarn = card.rope, card.rope.yarn
    share = {"partial_rotary_factor": rope.partial} if card.family in ("glm4_moe", "minimax_m2") else {}
    scaling: dict[str, Any] = {"rope_type": "default"}
    if yarn is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
            "truncate": yarn.truncate,
        }
    theta = {"rope_theta": rope.base}
    return {
        **theta,
        **share,
        "rope_scaling": None if yarn is None else dict(scaling),
        "rope_parameters": scaling | theta | share,
    }
