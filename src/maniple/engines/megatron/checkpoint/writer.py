"""Saves a run's checkpoints while it goes on.

`save` costs the step a snapshot in host memory; a thread of each rank writes its part, digesting as it writes, and puts
a report (what it wrote, or what was wrong) into the job's key-value store. When all reports are there, rank 0's thread
writes the index and the manifest, gives the folder its name and says the outcome under another key. No collective is
entered outside `save`, and no step waits for another rank.

A checkpoint that cannot be written (full disk, no permission) is a warning; the run goes on, and the next `save` tries
again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import shutil
import threading
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import WriteItem

import maniple
from maniple.config.schema import TrainConfig
from maniple.engines.megatron.checkpoint import files
from maniple.engines.megatron.checkpoint import state as checkpoint_state
from maniple.engines.megatron.checkpoint.assembly import DigestingFile, write_last_files
from maniple.engines.megatron.model import settle
from maniple.errors import UserError
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")

_POLL_SECONDS = 0.05
_SAY_SECONDS = 10.0
_ON_ERROR_SECONDS = 20.0  # a job that fails waits so long for what is being written, well within torchrun's own 30
Bucket = tuple[str, list[tuple[WriteItem, io.BytesIO | torch.Tensor]]]


class Saver:
    """Writes the checkpoints of one run; every rank has one and calls it alike.

    Rank 0 first removes what a killed job of the same run left half-written. origin: rank 0's, of what it writes.
    """

    def __init__(self, job: TrainConfig, card: ModelCard, origin: files.Origin | None = None) -> None:
        self._job, self._card = job, card
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("maniple/checkpoint", dist.distributed_c10d._get_default_store())
        self._token = ""  # of the save: its keys in the store, which no other save of this process group has
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: str | None = None  # of the last save
        self._checked = False
        self._plan = _Plan()
        # data-parallel ranks hold copies: each writes a share
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._spread = FullyParallelSaveStrategyWrapper(self._plan, group, do_cache_distribution=True)
        self.last: Path | None = None  # the newest that is whole; rank 0's
        self._bytes, self._bytes_written = 0, 0
        self._origin = origin or files.Origin()
        if self._rank == 0:
            files.clean(job.run_dir)
            if job.checkpoint.keep is not None:
                _say_others(files.by_lineage(job.run_dir, self._origin.lineage)[1])

    def save(
        self, chunks, optimizer, scheduler, *, step: int, samples: int, extra: dict[str, Any] | None = None
    ) -> None:
        """Saves one checkpoint; collective. Waits for the one before, and for this one unless
        `checkpoint.asynchronous`.

        extra: plain numbers, texts, lists and dicts of them, which `reader.load` gives back.
        """
        self.wait()
        self._step = step
        partial = files.folder_of(self._job.run_dir, step).with_suffix(files.PARTIAL)
        if (failure := self._make(partial)) is not None:
            self._fail(failure)
            return
        settle(chunks)
        state, _ = checkpoint_state.collect(chunks, optimizer, is_loading=False)
        _collect_results_in_this_process()
        dist_checkpointing.save(
            state,
            str(partial),
            self._spread,
            validate_access_integrity=not self._checked,  # that each part is written once; the cut stays the same
            async_sharded_save=True,
            async_strategy="mcore",
        )
        self._checked = True
        buckets = _on_host(self._plan.buckets)
        self._bytes = sum(item.nbytes for _, bucket in buckets for _, item in bucket if isinstance(item, torch.Tensor))
        self._bytes_written = 0
        manifest = {
            "format": files.FORMAT,
            "step": step,
            "samples": samples,
            "updates": scheduler.num_steps,
            "job_id": self._origin.job_id,
            "lineage": self._origin.lineage,
            "saved": time.time(),
            "world_size": self._world,
            "versions": {"maniple": maniple.__version__, "torch": torch.__version__}
            | {"megatron-core": version("megatron-core")},
            "card": self._card.model_dump(mode="json"),
            "job": self._job.model_dump(mode="json"),
            "extra": extra or {},
        }
        arguments = (self._token, partial, buckets, self._plan.metadata, manifest)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        if not self._job.checkpoint.asynchronous:
            self.wait()

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits until the last save is done on all ranks; returns why it failed, the same on every rank, or None.

        timeout: seconds; after them None is returned though it is not done.
        """
        if self._thread is None:
            return self._failure
        started = said = time.monotonic()
        outcome = f"{self._token}/outcome"
        while self._thread.is_alive() or not self._store.check([outcome]):
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if timeout is not None and now - started > timeout:
                return None
            if now - said > _SAY_SECONDS:
                said = now
                log.info(
                    "waiting for the checkpoint of step %d: %.1f of %.1f GB of this rank are written",
                    *(self._step, self._bytes_written / 1e9, self._bytes / 1e9),
                )
        self._thread = None
        self._failure = self._store.get(outcome).decode() or None
        return self._failure

    def check(self) -> None:
        """Raises UserError if the last save failed: a job that ends so must not look as if it had gone well."""
        if (failure := self.wait()) is not None:
            raise UserError(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for what is being written; where the job has failed, not long, since peers may be gone."""
        if kind is None:
            self.wait()
        elif self._thread is not None:
            if self._thread.is_alive():
                log.info("waiting at most %.0f s for the checkpoint of step %d", _ON_ERROR_SECONDS, self._step)
            self.wait(timeout=_ON_ERROR_SECONDS)

    def _make(self, partial: Path) -> str | None:
        """Rank 0 makes the folder; why it could not, on every rank, with the name of this save."""
        failure = None
        if self._rank == 0:
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
            except OSError as error:
                failure = _reason(error)
        told = [failure, uuid.uuid4().hex]
        dist.broadcast_object_list(told, src=0)
        self._token = str(told[1])
        return told[0]

    def _fail(self, failure: str) -> None:
        self._failure = f"the checkpoint of step {self._step} cannot be written: {failure}; make room, or mend it"
        if self._rank == 0:
            log.warning("%s; training goes on", self._failure)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, token: str, partial: Path, buckets: list[Bucket], metadata: Metadata | None, manifest) -> None:
        report = json.dumps(self._write(partial, buckets))
        self._store.set(f"{token}/{self._rank}", report)
        if self._rank != 0:
            return
        assert metadata is not None  # rank 0 is the one that plans
        outcome = ""
        try:
            reports = self._reports(token)
            failures = {rank: report["failure"] for rank, report in enumerate(reports) if report["failure"]}
            if failures:
                rank = min(failures)
                raise _NotWritten(failures[rank] + (f" (rank {rank})" if self._world > 1 else ""))
            number = files.next_number(self._job.run_dir)
            write_last_files(partial, metadata, reports, {**manifest, "sequence": number})
            final = files.publish(partial)
            self.last = final
            log.info("saved %s", final)
            self._prune(final)
        except Exception as error:  # whatever it is, ranks wait for an outcome
            if not isinstance(error, OSError | _NotWritten):
                log.exception("checkpoint of step %d", manifest["step"])
            shutil.rmtree(partial, ignore_errors=True)
            self._fail(_reason(error))
            outcome = self._failure or ""
        self._store.set(f"{token}/outcome", outcome)

    def _prune(self, newest: Path) -> None:
        keep = self._job.checkpoint
        try:
            for gone in files.prune(self._job.run_dir, newest, keep.keep, keep.keep_every):
                log.info("removed %s", gone)
        except (OSError, UserError) as error:
            log.warning("an old checkpoint cannot be removed: %s", _reason(error))

    def _write(self, partial: Path, buckets: list[Bucket]) -> dict[str, Any]:
        """Writes this rank's files. The report: digests and places of what was written, or why it was not."""
        report: dict[str, Any] = {"failure": None, "files": {}, "places": []}
        try:
            for name, items in buckets:
                with open(partial / name, "xb") as raw:
                    file = DigestingFile(raw)
                    for item, data in items:
                        start = file.tell()
                        file.save(data)
                        index, length = item.index, file.tell() - start
                        offset = None if index.offset is None else list(index.offset)
                        report["places"].append([index.fqn, offset, index.index, name, start, length])
                        self._bytes_written += length
                    raw.flush()
                    os.fsync(raw.fileno())
                report["files"][name] = {"bytes": file.tell(), "sha256": file.digest.hexdigest()}
        except (OSError, RuntimeError) as error:  # torch's: it was told of an OSError, and says something else
            return {"failure": _reason(error)}
        return report

    def _reports(self, token: str) -> list[dict[str, Any]]:
        keys = [f"{token}/{rank}" for rank in range(self._world)]
        while not self._store.check(keys):
            time.sleep(_POLL_SECONDS)
        reports = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return reports


class _NotWritten(Exception):
    """A rank could not write its part."""


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron-Core's own planning, stopped where writing would begin."""

    buckets: list
    metadata: Metadata | None  # rank 0's

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy) -> AsyncRequest:
        self.buckets, self.metadata = writer.write_buckets, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


def _collect_results_in_this_process() -> None:
    """Megatron-Core (filesystem_async.py, `get_write_results_queue`) starts a process on each rank to hold the queue by
    which a writer reports, as soon as it plans. That queue is not used here: a plain one costs nothing, and a job that
    is killed leaves no process behind."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _on_host(buckets: list) -> list[Bucket]:
    """Copies of what is to be written, in host memory, by file name: training changes the originals."""
    return [
        (name, [*data, *((item, tensor.clone() if tensor.is_cpu else tensor.cpu()) for item, tensor in tensors)])
        for _, name, (data, tensors) in buckets
    ]


def _say_others(others: list[tuple[Path, dict[str, Any]]]) -> None:
    if others:
        one = len(others) == 1
        log.info(
            "%d checkpoint%s of another start of this run %s and %s not counted by checkpoint.keep: %s",
            *(len(others), "" if one else "s", "stays" if one else "stay", "is" if one else "are"),
            ", ".join(sorted(folder.name for folder, _ in others)),
        )


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror + (f" ({cause.filename})" if cause.filename else "")
    return str(error) or type(error).__name__
