"""The reference of a job file as Markdown, made from the schema: what docs/configuration.md shows between its marks.

A key's meaning is the schema's own description; keys whose name says it there are put in words here.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from maniple.config.schema import TrainConfig
from maniple.models.card import ModelCard

MEANING = {
    "name": "the run's name; its folder is `output_dir/name`",
    "output_dir": "where the folders of runs are; relative to where the command is called",
    "model.card": "name of a model card, or path of its YAML file: see [models.md](models.md)",
    "model.variant": "`tiny`: the same architecture at toy sizes",
    "model.overrides": "fields of the card to change, in the card's shape: see [below](#modeloverrides)",
    "parallel.tensor_parallel_size": "TP: ranks that share each matrix outside the experts",
    "parallel.pipeline_parallel_size": "PP: ranks that share the layers",
    "parallel.context_parallel_size": "CP: ranks that share a sequence; sequence_length is a multiple of 2 x CP",
    "parallel.expert_parallel_size": "EP: ranks that share the experts of a layer",
    "parallel.expert_tensor_parallel_size": "ETP: ranks that share each expert's matrices",
    "parallel.overlap_grad_reduce": "gradients are reduced while the backward pass goes on",
    "parallel.overlap_param_gather": "updated parameters are gathered while the forward pass goes on",
    "parallel.distributed_optimizer": "optimizer state is sharded over data-parallel ranks",
    "moe.aux_loss_type": "over which tokens the load-balance loss is taken",
    "moe.z_loss_coefficient": "weight of the router's z-loss; 0: none",
    "recompute.granularity": "which activations are computed again in the backward pass",
    "data.validation": "dataset prefixes, weighted as `train`; empty: a part of `train`, by `split`",
    "data.num_workers": "loader processes a rank; 0: read in the training process",
    "optimizer.learning_rate": "peak, reached after the warm-up",
    "optimizer.min_learning_rate": "where the decay ends",
    "optimizer.warmup_steps": "steps of linear rise from 0",
    "optimizer.decay_style": "`WSD`: constant, then linear over the last fifth of the steps",
    "optimizer.weight_decay": "decoupled; not for vectors, biases and norms",
    "optimizer.beta1": "Adam's first moment",
    "optimizer.beta2": "Adam's second moment",
    "optimizer.epsilon": "Adam's epsilon",
    "train.steps": "optimizer steps of the whole run, a resumed one's earlier steps included",
    "train.seed": "of initialisation, data order and samples",
    "train.deterministic": "torch's deterministic algorithms; an operation without one is an error",
    "train.mtp_loss_coefficient": "weight of the multi-token-prediction loss, if the model has MTP layers",
    "train.device": "`auto`: a GPU where torch sees one, else the CPU",
    "train.sample_prompt": "what the sample continues",
    "checkpoint.save_at_end": "also after the last step",
    "log.tensorboard": "write `tensorboard/`",
    "log.progress": "a progress bar where the output is a terminal",
}
_WORDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Path: "path"}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
# The schema is Python, a job file is YAML.
_YAML_WORDS = {"None:": "`null`:", "False:": "`false`:", "|": "\\|"}


def markdown() -> str:
    """One table a section, in the schema's order, and one of the keys under `model.overrides`. Ends with a newline."""
    sections: dict[str, list[str]] = {}
    for key, field in keys(TrainConfig):
        section = key.partition(".")[0] if "." in key else ""
        if field.default is PydanticUndefined:
            default = "none: needed"
        else:
            default = f"`{json.dumps(_plain(field.default), ensure_ascii=False)}`"
        row = f"| `{key}` | {_value(field)} | {default} | {meaning(key, field)} |"
        sections.setdefault(section, []).append(row)
    out = []
    for section, rows in sections.items():
        out.append(f"### {section or 'The job'}\n")
        if intro := TrainConfig.model_fields[section].annotation.__doc__ if section else None:
            out.append(" ".join(intro.split()) + "\n")
        out += ["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    out += ["### model.overrides\n", "The defaults are the card's own values (`maniple models NAME`).\n"]
    out += ["| key under `model.overrides` | value | meaning |", "|---|---|---|"]
    out += [f"| `{key}` | {_value(field)} | {_in_yaml(field.description or '')} |" for key, field in keys(ModelCard)]
    return "\n".join(out) + "\n"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every plain value of a schema by dotted key; sections themselves are left out."""
    for name, field in model.model_fields.items():
        section = next((kind for kind in _kinds(field.annotation) if _is_section(kind)), None)
        if section is None:
            yield f"{prefix}{name}", field
        else:
            yield from keys(section, f"{prefix}{name}.")


def meaning(key: str, field: FieldInfo) -> str:
    """What a key of a job file means. Raises ValueError unless exactly one of schema and `MEANING` says it."""
    said = [words for words in (field.description, MEANING.get(key)) if words]
    if len(said) != 1:
        raise ValueError(f"{key} has {len(said)} descriptions: give it one, in config/schema.py or config/reference.py")
    return _in_yaml(said[0])


def _value(field: FieldInfo) -> str:
    """What a field takes, in words: `whole number ≥ 1, or null`."""
    words = []
    for kind in _kinds(field.annotation):
        if kind is types.NoneType:
            words.append("or `null`")
        elif typing.get_origin(kind) is typing.Literal:
            words.append(", ".join(f"`{choice}`" for choice in typing.get_args(kind)))
        elif typing.get_origin(kind) is list:
            words.append("list of numbers" if typing.get_args(kind) == (int,) else "list of text")
        elif typing.get_origin(kind) is dict:
            words.append("mapping of keys")
        else:
            limits = [
                f" {sign} {_number(bound)}"
                for limit in field.metadata
                for name, sign in _LIMITS.items()
                if (bound := getattr(limit, name, None)) is not None
            ]
            words.append(_WORDS[kind] + " and".join(limits))
    return ", ".join(words)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _in_yaml(text: str) -> str:
    for word, ours in _YAML_WORDS.items():
        text = text.replace(word, ours)
    return text


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _plain(default: Any) -> Any:
    return str(default) if isinstance(default, Path) else default
