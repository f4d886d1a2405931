"""Beginning a run with the weights of a checkpoint: of another run, or of weights alone (`checkpoint.init_from`).

The model's tensors are read, and nothing else: optimizer, schedule, data order, random states and step are those of a
new run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import agreement, files, tensors
from maniple.engines.megatron.checkpoint import state as checkpoint_state
from maniple.engines.megatron.checkpoint.agreement import agree, from_rank_0
from maniple.engines.megatron.checkpoint.index import Index
from maniple.engines.megatron.checkpoint.saved_card import check_forward
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")
_OPTIMIZER, _MTP = "optimizer.", "mtp."  # of the tensors' names
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def choose(job: TrainConfig) -> Path | None:
    """The checkpoint that `checkpoint.init_from` names, looked through as one that a run goes on from would be; None if
    it names none. Collective. Raises UserError."""
    if job.checkpoint.init_from is None:
        return None
    folder = Path(job.checkpoint.init_from)
    manifest = from_rank_0(lambda: files.read_whole(folder))
    agreement.verify(folder, manifest, digests=job.checkpoint.verify_on_load)
    return folder


def load(folder: Path, chunks, optimizer, *, card: ModelCard, job: TrainConfig) -> str:
    """Fills the model, and the main weights of an optimizer that has made no step. Collective.

    Any layout reads any other's. Weights may be stored as bf16 where the job has fp32 and the other way round; main
    weights begin as what is stored, unrounded. Returns where they are from, in words. Raises UserError, before anything
    is changed, if the checkpoint's card computes another forward pass or its vocabulary is padded otherwise, and for
    missing, extra or unwritten tensors; MTP layers that this job has not are left out.
    """
    manifest = agree(lambda: files.read_manifest(folder))
    without_mtp = check_forward(folder, manifest, card)
    index = agree(lambda: files.check_index(folder, manifest))
    left_out = (_OPTIMIZER, checkpoint_state.RNG, *((_MTP,) if without_mtp else ()))
    state = checkpoint_state.weights(chunks)
    loaded = tensors.read(folder, index, state, job, ignored=lambda key: key.startswith(left_out), casts=lambda _: True)
    checkpoint_state.start_from(loaded, chunks, optimizer)
    said = f"{folder} ({_origin(manifest)})"
    log.info("weights from %s", said)
    if without_mtp:
        log.info("its MTP layers are left out: this job has none (num_mtp_layers 0)")
    _say_type(index, job)
    return said


def _origin(manifest: dict[str, Any]) -> str:
    if files.holds_weights_alone(manifest):
        return f"{manifest['card'].get('name')}, weights alone"
    return f"step {manifest['step']} of run {manifest['job'].get('name', '?')}"


def _say_type(index: Index, job: TrainConfig) -> None:
    """The embedding's type stands for all: what is fp32 in a bf16 model, as the balancing bias, is so in each."""
    stored = _SHORT[index.tensors[tensors.EMBEDDING].dtype]
    if stored == "bf16" and job.precision.dtype == "fp32":
        log.info("they are stored as bf16 and read as fp32 (precision.dtype), which changes none")
    elif stored == "fp32" and job.precision.dtype == "bf16":
        log.info("they are stored as fp32: the model's are rounded to bf16 (precision.dtype), main weights are not")
