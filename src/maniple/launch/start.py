"""From the words of `maniple train` to running processes. What can be refused is refused before torch is loaded, which
takes seconds, and before a process starts."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from maniple.config.check import check
from maniple.config.schema import TrainConfig
from maniple.data import sources
from maniple.engines.megatron.checkpoint import files as checkpoint_files
from maniple.engines.megatron.checkpoint.saved_card import check_forward
from maniple.errors import UserError
from maniple.launch import torchrun
from maniple.launch.room import check_memory
from maniple.launch.torchrun import Launch
from maniple.models.card import ModelCard


def start(job: TrainConfig, card: ModelCard, launch: Launch, arguments: list[str], *, nproc: int | None) -> int:
    """Runs `maniple arguments...` as every rank of this node and returns the job's exit code.

    launch: all but its `nproc`, which is as many as there are GPUs where `nproc` is None, and one without any. Raises
    UserError, in one line, for what cannot work.
    """
    check_checkpoints(job, card)
    check_folder(job.run_dir)
    launch = replace(launch, nproc=1 if nproc is None else nproc)
    launch.check()
    if nproc is not None:
        check(job, card, launch.world_size, gpus_per_node=nproc)
    sources.check_files(job.data)
    launch = replace(launch, nproc=_processes(nproc, job.train.device))
    if nproc is None:
        check(job, card, launch.world_size, gpus_per_node=launch.nproc)
    launch = replace(launch, fits=_fitting_nodes(job, card, launch))
    if job.train.device == "cpu" or (job.train.device == "auto" and not torchrun.visible_gpus()):
        check_memory(card, job.precision.dtype, launch.node_range[1])
    began = time.time()
    code = torchrun.run(launch, "maniple", arguments)
    if code and (step := _step_to_go_on_from(job, began)) is not None:
        print(f"maniple: go on with --resume auto (step {step})", file=sys.stderr)
    return code


def check_checkpoints(job: TrainConfig, card: ModelCard) -> None:
    """Raises UserError unless what the run goes on from, or else what its weights are from, is a whole checkpoint as
    far as names and sizes tell, and the weights are of this model. What `resume: auto` alone means is looked for by the
    run itself; so is whether vocabularies agree, which the data decide."""
    resume, init_from = job.checkpoint.resume, job.checkpoint.init_from
    if resume is not None and (resume != "auto" or init_from is not None):
        found, _ = checkpoint_files.find(job.run_dir, resume)
        if found:
            return
    if init_from is not None:
        folder = Path(init_from)
        check_forward(folder, checkpoint_files.read_whole(folder), card, but=frozenset({"vocab_size"}))


def check_folder(run_dir: Path) -> None:
    """Raises UserError if the run's folder is not there and cannot be made, or cannot be written."""
    there = run_dir
    while not os.path.exists(there) and there != there.parent:  # Path's own would raise for what it may not look at
        there = there.parent
    if not os.path.isdir(there):
        raise UserError(f"{there} is no folder: set output_dir (and name) to a folder that can be written")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there}: Permission denied; set output_dir (and name) to a folder that can be written")


def _processes(nproc: int | None, device: str) -> int:
    """Processes to start on this node: what was asked, else one a GPU; UserError where the GPUs do not suffice."""
    if device == "cpu":
        return 1 if nproc is None else nproc
    gpus = torchrun.visible_gpus()
    if device == "gpu" and not gpus:
        raise UserError("train.device is gpu and torch sees no GPU: check the driver, or set train.device=cpu")
    if nproc is None:
        return max(1, gpus)
    if gpus and nproc > gpus:
        raise UserError(f"--nproc {nproc} and {gpus} visible GPUs: lower --nproc, or set train.device=cpu")
    return nproc


def _fitting_nodes(job: TrainConfig, card: ModelCard, launch: Launch) -> frozenset[int]:
    """The numbers of nodes that the job fits. UserError, naming them, if the least that it may go on with is none."""
    fewest, most = launch.node_range
    fits, refusals = [], {}
    for nodes in range(fewest, most + 1):
        try:
            check(job, card, nodes * launch.nproc, gpus_per_node=launch.nproc)
            fits.append(nodes)
        except UserError as error:
            refusals[nodes] = str(error)
    said = ", ".join(map(str, fits))
    if fewest in refusals:
        raise UserError(
            f"--nnodes {launch.nnodes}: with {fewest} node{'s' if fewest > 1 else ''} {refusals[fewest]}; the job fits "
            f"{said}"
        )
    if refusals:
        print(f"maniple: the job fits {said} nodes: left with another number it ends", file=sys.stderr)
    return frozenset(fits)


def _step_to_go_on_from(job: TrainConfig, began: float) -> int | None:
    """The step that `--resume auto` would go on from, if it is this job's: saved since `began` (seconds since 1970), or
    what it has itself gone on from in this way."""
    try:
        whole, _ = checkpoint_files.newest_first(checkpoint_files.all_of(job.run_dir))
    except UserError:
        return None
    for _, manifest in whole[:1]:
        if job.checkpoint.resume == "auto" or manifest["saved"] >= began:
            return int(manifest["step"])
    return None
