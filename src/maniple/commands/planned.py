"""What commands under `maniple plan` share: options, the GPU that a name means, the job whose layout is looked for."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maniple.commands import file_named, given
from maniple.errors import UserError

if TYPE_CHECKING:
    from maniple.config.schema import TrainConfig
    from maniple.models.card import ModelCard

SEQUENCE = 4096  # tokens, where no length is asked for
EVEN_ENOUGH = "dirichlet:8"  # a router's load, likewise
BATCH = ("train.global_batch_size", "data.sequence_length")
_SAMPLES = 8  # sequences a step and GPU, likewise

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="name of a model card, or its file; left out: the one that --config names"),
]
Load = Annotated[
    str,
    typer.Option(
        help="load of the fullest rank over the mean: a factor, or a router: balanced, dirichlet:8, lognormal:0.3"
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        parser=file_named, metavar="FILE", help="what `maniple plan calibrate` measured, in place of the card's figures"
    ),
]
Pods = Annotated[
    str | None,
    typer.Option(
        metavar="GPUS:SHARE",
        help="the cluster's pods and the share of their NICs' rate that leaves them: 256:0.5; default: all nodes alike",
    ),
]


def gpu_named(name: str, count: int = 1, calibration: Path | None = None, fabric: str | None = None):
    """A card by its name, or by its first words where only one has them (`h200`, but not `h20`: another GPU), of which
    a job has `count`; with a calibration of it, and the fabric between nodes (`Pods`)."""
    from maniple.hardware import list_gpus, load_gpu, with_calibration
    from maniple.hardware.card import Fabric

    meant = [known for known in list_gpus() if known.startswith(f"{name.lower()}-")]
    card = load_gpu(meant[0] if len(meant) == 1 and name.lower() not in list_gpus() else name)
    if count < 1:
        raise UserError(f"--gpus {count}: a job has at least one GPU")
    if fabric is not None:
        pods = Fabric.parse(fabric)
        if pods.pod_gpus % card.gpus_per_node:
            raise UserError(f"--fabric {fabric}: a pod holds whole nodes, which have {card.gpus_per_node} {card.name}")
        card = card.model_copy(update={"fabric": pods})
    return card if calibration is None else with_calibration(card, calibration)


def one_key_each(sets: list[str]) -> list[str]:
    """Overrides of whole sections as those of their keys, so that rules about a key see it: `data={sequence_length:
    64}` is `data.sequence_length=64`."""
    from maniple import yamlfile
    from maniple.config.schema import TrainConfig

    every: list[str] = []
    for text in sets:
        section, _, value = text.partition("=")
        section = section.strip()
        content = None
        if section in TrainConfig.model_fields:
            content = yamlfile.parse(value, f"command line: {section}").data
        if isinstance(content, dict):
            every += [f"{section}.{key}={json.dumps(each, ensure_ascii=False)}" for key, each in content.items()]
        else:
            every.append(text)
    return every


def model_asked_for(model: str | None, config: Path | None, sets: list[str]) -> str:
    """MODEL, or the one that the job file names; says on standard error where they differ. UserError if neither is
    given, if MODEL is a job file, or if an override names a model too.

    A file whose name begins with a dash is `./-card.yaml`: in commands to copy it is no option.
    """
    from maniple.config.load import load
    from maniple.models import load_card

    if any(text.partition("=")[0].strip() == "model.card" for text in sets):
        raise UserError("--set model.card=...: name the model as MODEL, before the options")
    loaded = None if config is None else load(config, [])
    named = None
    if loaded is not None and loaded.origin["model.card"].kind != "default":
        named = loaded.config.model.card
    if model == "":
        raise UserError(
            "MODEL is empty: name a model card (`maniple models` lists them), or leave it out with --config"
        )
    if model is None:
        if named is not None:
            return _no_option(named)
        if config is not None:
            raise UserError(f"{config} has no model.card: set it there, or name MODEL (`maniple models` lists them)")
        raise UserError("which MODEL? name a model card (`maniple models` lists them), or a job file with --config")
    if _is_job(model):
        raise UserError(f"{model} is a job file, and MODEL a model card: give it with --config {model}")
    if loaded is not None and named not in (None, model):
        load_card(model)  # one line where there is none
        changes = ", ".join(loaded.config.model.overrides)
        theirs = f", with its model.overrides ({changes})" if changes else ""
        print(f"maniple: {model} is planned in place of {config}'s own {named}{theirs}", file=sys.stderr)
    return _no_option(model)


def _no_option(model: str) -> str:
    return f"./{model}" if model.startswith("-") and Path(model).exists() else model


def _is_job(model: str) -> bool:
    if not model.endswith((".yaml", ".yml")) or not Path(model).is_file():
        return False
    from maniple import yamlfile

    content = yamlfile.read(Path(model), "model card").data
    return isinstance(content, dict) and bool({"extends", "model", "train", "parallel"} & set(content))


def say_long(config: TrainConfig, card: ModelCard) -> None:
    """Says on standard error that sequences are longer than the model was made for."""
    length, most = config.data.sequence_length, card.max_position
    if length > most:
        print(
            f"maniple: {length:,} tokens a sequence, and {card.name} has {most:,} positions: planned as if it had more",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Asked:
    """A job whose layout is looked for. model: as it was named; assumed: keys that nobody gave; held: those of the
    command line."""

    model: str
    config: TrainConfig
    card: ModelCard
    assumed: dict[str, int]
    held: set[str]


def job_to_plan(
    model: str | None, config: Path | None, sets: list[str], gpus: int, batch: int | None, length: int | None
) -> Asked:
    """The job of a file, or of the preset `pretrain`, on so many GPUs, with a batch and a sequence."""
    from maniple.config.check import resolve_card
    from maniple.config.load import PRESETS, load

    sets = one_key_each(sets)
    model = model_asked_for(model, config, sets)
    _only_once(sets, ("--global-batch-size", batch, "train.global_batch_size"))
    _only_once(sets, ("--sequence-length", length, "data.sequence_length"))
    every = [f"model.card={json.dumps(model, ensure_ascii=False)}"]
    every += [] if config is not None else ["train.steps=100000"]
    every += sets
    every += [] if batch is None else [f"train.global_batch_size={batch}"]
    every += [] if length is None else [f"data.sequence_length={length}"]
    loaded = load(config or PRESETS / "pretrain.yaml", every)
    job, assumed = loaded.config, {}
    card = resolve_card(job)
    held = {key for key, origin in loaded.origin.items() if origin.kind == "cli"}
    # the preset's sequence is no one's wish
    known = {key for key, origin in loaded.origin.items() if origin.kind != "default"} if config else held
    data, train = job.data, job.train
    if "data.sequence_length" not in known:
        assumed["data.sequence_length"] = min(SEQUENCE, card.max_position)
        data = data.model_copy(update={"sequence_length": assumed["data.sequence_length"]})
    if "train.global_batch_size" not in known:
        assumed["train.global_batch_size"] = _SAMPLES * gpus
        train = train.model_copy(update={"global_batch_size": assumed["train.global_batch_size"]})
    job = job.model_copy(update={"data": data, "train": train})
    return Asked(model, job, card, assumed, held)


def _only_once(sets: list[str], asked_for: tuple[str, int | None, str]) -> None:
    option, value, key = asked_for
    if value is not None and any(text.partition("=")[0].strip() == key for text in sets):
        raise UserError(f"{option} {value} and --set {key}=... say the same twice: leave one out")


def is_layout(text: str) -> bool:
    """Whether an override is of what the search chooses: sizes, stages, recomputation, overlapped exchange."""
    key = text.partition("=")[0].strip()
    sizes = ("_parallel_size", ".virtual_pipeline_size", ".pipeline_layout")
    return key.startswith("recompute") or key == "moe.overlap_exchange" or key.endswith(sizes)


def for_search(
    config: Path | None, calibration: Path | None, fabric: object, imbalance: str, sets: list[str], job
) -> list[str]:
    """Options of `maniple plan search` for the same tokens: without those of the layout."""
    some = [text for text in sets if text.partition("=")[0].strip() not in BATCH and not is_layout(text)]
    words = given(("--config", config), ("--calibration", calibration), ("--fabric", fabric))
    words += ["--global-batch-size", str(job.train.global_batch_size)]
    if config is not None or job.data.sequence_length != SEQUENCE:
        words += ["--sequence-length", str(job.data.sequence_length)]
    words += ["--imbalance", imbalance] if imbalance != EVEN_ENOUGH else []
    return words + given(*(("--set", text) for text in some))


def search_command(model: str, gpus: int, gpu: str, options: list[str]) -> str:
    """`maniple plan search ...`, to copy."""
    return shlex.join(["maniple", "plan", "search", model, "--gpus", str(gpus), "--gpu", gpu, *options])
