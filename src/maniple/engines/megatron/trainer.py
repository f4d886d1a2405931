"""The training loop: data, model, optimizer, steps, validation, metrics, checkpoints, and what a run leaves behind.

`main` is what every rank runs under torchrun. It is a loop over Megatron-Core's parts and keeps no global arguments.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from maniple.config.schema import TrainConfig
from maniple.data import datasets
from maniple.data.documents import keep_apart
from maniple.data.identity import check_identity, identity
from maniple.engines.megatron import model, parallel, precision, results, step
from maniple.engines.megatron.checkpoint import reader, weights
from maniple.engines.megatron.checkpoint.writer import Saver
from maniple.engines.megatron.faults import nonfinite, recovery
from maniple.engines.megatron.faults.guard import Guard, Verdict
from maniple.engines.megatron.faults.stop import StopRequest
from maniple.engines.megatron.faults.watch import Watch, margin
from maniple.engines.megatron.headline import headline, kernel_lines
from maniple.engines.megatron.optimizer import build_optimizer
from maniple.errors import UserError
from maniple.hardware import lookup, measure_cpu_peak
from maniple.kernels import registry
from maniple.metrics import MetricsWriter, TrainProgress, expert_balance, peak_memory_bytes, pulse, setup_logging
from maniple.metrics.folder import RunLock, cannot_write
from maniple.models import flops
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")


def main(
    job: TrainConfig,
    card: ModelCard,
    *,
    restarted: bool = False,
    report: Callable[[BaseException, int], None] | None = None,
) -> int:
    """Runs this process's part of the job and returns the exit code. Raises UserError for the user's mistakes.

    restarted: it takes the place of a process that was there before. report: takes the reason and the exit code of an
    end that this function does not return from, just before it; without it a hanging job is left to the collectives'
    own timeout.
    """
    device = parallel.pick_device(job)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pulse.start(rank)
    timeout = job.parallel.collective_timeout_seconds
    watch = None if report is None else Watch(rank, world, timeout, report)
    if watch is not None:
        watch.start()
    trainer = None
    try:
        parallel.start(job, device, slack=0.0 if watch is None else margin(timeout))
        trainer = Trainer(job, card, device, restarted=restarted)
        trainer.run()
        pulse.enter(pulse.END)
        # After a failure it is left alone: to close it would break the connections of ranks that can still say more.
        parallel.stop()
    except OSError as error:
        if not cannot_write(error, job.run_dir):
            raise
        on = "" if trainer is None else ", and go on with --resume auto"
        raise UserError(
            f"{error.filename or job.run_dir}: {error.strerror}; mend that, or set output_dir{on}"
        ) from error
    finally:
        if watch is not None:
            watch.stop()
    return 0


@dataclass
class Progress:
    """How far the run is: what a checkpoint restores beside tensors."""

    step: int = 0
    samples: int = 0


_FOLLOWS = {"warn": "going on", "skip": "its update is left out", "rollback": "going back to the newest checkpoint"}


class Trainer:
    """One rank of one job, from data to summary."""

    def __init__(self, job: TrainConfig, card: ModelCard, device: torch.device, *, restarted: bool = False) -> None:
        if job.data.source == "synthetic" and job.data.tokenizer is None:
            # made-up tokens fill the model's own vocabulary
            job = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer_vocab_size": card.vocab_size})})
        self.job, self.device = job, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # before anything in the run's folder is touched, which may be another job's
        self._lock = RunLock(job.run_dir) if self.rank == 0 else None
        try:
            self._build(card, restarted=restarted)
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise

    def _build(self, card: ModelCard, *, restarted: bool) -> None:
        job, device = self.job, self.device
        if job.train.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # what cuBLAS needs for it; read at its first use
            torch.use_deterministic_algorithms(True)
        resume = self._begun_from = recovery.starting_point(job, device, restarted=restarted)
        init_from = weights.choose(job) if resume is None else None
        self.source = datasets.prepare_source(job, job.run_dir, self.rank == 0, dist.barrier)
        self.card = _with_vocabulary(card, self.source.tokenizer.vocab_size, trained_here=job.data.source == "python")
        setup_logging(job.run_dir, self.rank)  # makes the run's folder, once nothing of the user's is left to refuse
        if self._lock is not None:
            self._lock.take()
        if self.rank == 0 and resume is None and not restarted and (said := recovery.earlier_run(job.run_dir)):
            log.warning("%s", said)
        self.train_data, self.validation_data = datasets.build_datasets(
            job,
            self.source,
            train_samples=job.train.steps * job.train.global_batch_size,
            valid_samples=job.train.eval_batches * job.train.global_batch_size,
            is_writer=self.rank == 0,
            barrier=dist.barrier,
        )
        self.chunks = model.wrap(model.build_chunks(self.card, job), job, device)
        precision.check_kernels(self.chunks)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, job)
        step.connect(self.chunks, self.optimizer, job)
        self.peak_flops = self._peak_flops()  # draws random numbers, so before their states are restored
        self.progress = Progress()
        self.data_identity = identity(job, self.source)
        self.guard = Guard(job.guard)
        self.weights_from: str | None = None
        if resume is not None:
            self._load(resume)
        elif init_from is not None:
            self.weights_from = weights.load(init_from, self.chunks, self.optimizer, card=self.card, job=job)
            precision.weights_loaded(self.chunks)
        self.writer = MetricsWriter(
            job.run_dir,
            self.rank,
            tensorboard=job.log.tensorboard,
            resumed_step=self.progress.step if resume is not None else None,
            lock=self._lock,
        )
        self.saver = Saver(job, self.card, recovery.begin(job, resumed=resume))
        self.flops_a_token = flops.training_flops_per_token(self.card, job.data.sequence_length)
        self.tokens_timed, self.seconds_timed = 0, 0.0
        self.validation_loss: float | None = None
        self.validation_batches: datasets.Batches | None = None
        self.precision: dict[str, str] | None = None  # layers by the recipe that they ran in; known after a step
        self.started = time.monotonic()
        self._describe()

    def run(self) -> None:
        job = self.job
        batches = self._training_batches()
        late = hurry = False
        progress = TrainProgress(
            job.train.steps, start_step=self.progress.step, rank=self.rank, enabled=job.log.progress
        )
        with StopRequest(job, self.started) as stop, self.saver, progress as bar:
            while self.progress.step < job.train.steps and not (late or hurry):
                if (last := self.guard.end_of_window(self.progress.step + 1)) is not None:
                    batches = self._leave_out(last)
                if self.progress.step < job.train.steps:
                    stats, verdict = self._step(batches, stop)
                    if verdict.kind:
                        self._act(verdict)
                    if verdict.action == "rollback":
                        batches = self._training_batches()
                        continue
                    self._count(stats, bar)
                    late, hurry = stats.stop and not stats.hurry, stats.hurry
                at_end = late or self.progress.step == job.train.steps
                every = job.train.eval_interval
                if not hurry and (at_end or (every and self.progress.step % every == 0)):
                    self._validate()
                    if not at_end and self.validation_loss is not None:  # the end says it in a line of its own
                        bar.message(f"step {self.progress.step} · validation loss {self.validation_loss:.3f}")
                every = job.checkpoint.save_interval
                at_interval = every and self.progress.step % every == 0
                if late or hurry or (at_end and job.checkpoint.save_at_end) or at_interval:
                    self._save()
        by = "a signal to another rank" if stop.signal is None else signal.Signals(stop.signal).name
        why = f"asked by {by}" if hurry else "its time is up" if late else None
        pulse.enter(pulse.RESULTS)
        results.leave(self, stopped=why, hurry=hurry)
        self.saver.check()

    def _step(self, batches: list[Iterator], stop: StopRequest) -> tuple[step.StepStats, Verdict]:
        """One optimizer step, and what the guard said of it before its update."""
        verdict = Verdict()

        def may_update(loss: float, grad_norm: float) -> bool:
            nonlocal verdict
            verdict = self.guard.judge(loss, grad_norm)
            return verdict.updates

        pulse.enter(pulse.DATA, self.progress.step + 1)
        self._step_started = time.monotonic()
        self._learning_rate = self._rate()  # of this step: its end sets the next
        stats = step.train_step(
            self.chunks,
            self.optimizer,
            self.scheduler,
            batches,
            self.job,
            self.device,
            ask_stop=stop.signal is not None or (self.rank == 0 and stop.is_late),
            ask_hurry=stop.signal is not None,
            may_update=may_update,
        )
        for overflow in stats.overflows:
            why = "; ".join(map(str, overflow))
            if self.rank == 0:
                log.warning("step %d: run again with larger buffers: %s", self.progress.step + 1, why)
            event = {"event": "overflow", "action": "rerun", "why": why, "where": None}
            self.writer.log(self.progress.step + 1, event)
        return stats, verdict

    def _act(self, verdict: Verdict) -> None:
        """Says what is wrong with the step that was just run, where it began, and what follows."""
        number, where = self.progress.step + 1, None
        if verdict.kind == "nonfinite":
            where = nonfinite.trace(self.chunks, self.optimizer, self._training_batches(), self.job, self.device)
        said = f"step {number}: {verdict.why}" + (f"; {where}" if where else "")
        event = {"event": verdict.kind, "action": verdict.action, "why": verdict.why, "where": where}
        if verdict.action == "stop":
            self.saver.wait()  # the checkpoint before it is to be whole
            last = [self.saver.last]
            dist.broadcast_object_list(last, src=0)
            kept = f"; {last[0]} is the last before it" if last[0] else ""
            self.writer.log(number, event)
            self._give_up(f"{said}. Nothing of this step is in the weights{kept}")
        if self.rank == 0:
            log.warning("%s; %s", said, _FOLLOWS[verdict.action])
        if verdict.action == "rollback":
            self._roll_back()
        self.writer.log(number, event)

    def _give_up(self, said: str) -> NoReturn:
        """Ends the run as a mistake, with summary and picture of what it was until then. Collective."""
        pulse.enter(pulse.RESULTS)
        results.leave(self, stopped=results.BY_GUARD, hurry=True)
        raise UserError(said)

    def _roll_back(self) -> None:
        """Goes back to this run's newest checkpoint and will leave out the batch that was just read."""
        number = self.progress.step + 1
        self.saver.wait()
        folder = recovery.newest_of_this_job(self.job) or self._begun_from
        if folder is None:
            self._give_up(
                f"step {number}: guard asks for a rollback, and this run has no checkpoint yet: set "
                "checkpoint.save_interval, or another policy than rollback"
            )
        left_out = self.guard.left_out
        self._load(folder)
        self.guard.left_out = left_out
        self.guard.leave_out(number, self.progress.step)
        self.writer.go_back(self.progress.step)

    def _leave_out(self, last: int) -> list[Iterator]:
        """Goes past the batches of the steps up to `last` without a step. A step's number is its batch's."""
        left = min(last, self.job.train.steps) - self.progress.step
        log.info("leaving out the batches of steps %d to %d", self.progress.step + 1, self.progress.step + left)
        self.progress.step += left
        self.progress.samples += left * self.job.train.global_batch_size
        return self._training_batches()

    def _load(self, folder: Path) -> None:
        restored = reader.load(folder, self.chunks, self.optimizer, self.scheduler, card=self.card, job=self.job)
        precision.weights_loaded(self.chunks)
        self.progress = Progress(restored.step, restored.samples)
        self.guard.load_state(restored.extra.get("guard", {}))
        self.weights_from = restored.extra.get("weights_from")
        if "data" in restored.extra:
            warning = check_identity(restored.extra["data"], self.data_identity, self.job.data.on_change)
            if warning and self.rank == 0:
                log.warning("%s", warning)
        log.info("resumed from %s at step %d", folder, self.progress.step)
        if self.rank == 0 and self.progress.step >= self.job.train.steps:
            log.warning("train.steps is %d: no step is left; set more to go on", self.job.train.steps)

    def _rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def _count(self, stats: step.StepStats, bar: TrainProgress) -> None:
        """Counts the step that was just run, and records it."""
        job = self.job
        seconds = time.monotonic() - self._step_started
        if self.precision is None:
            # said after the first step, when it is what ran and not what was meant to
            for line in kernel_lines(registry.used(), job.precision.dtype):
                log.info("%s", line)
            self.precision = precision.in_short(precision.by_layer(self.chunks))
            log.info("layers: %s", "; ".join(f"{recipe}: {layers}" for recipe, layers in self.precision.items()))
        self.progress.step += 1
        self.progress.samples += job.train.global_batch_size
        tokens = job.train.global_batch_size * job.data.sequence_length
        if self.progress.step > self._first_timed:
            self.tokens_timed += tokens
            self.seconds_timed += seconds
        tgs = tokens / seconds / self.world
        counts = list(stats.expert_counts.values())
        balance = expert_balance(counts) if counts else None
        bar.update(
            self.progress.step,
            loss=stats.loss,
            tokens_per_second=tokens / seconds,
            imbalance=balance.overall if balance else None,
        )
        if self.progress.step % job.log.interval == 0 or self.progress.step == job.train.steps:
            self.writer.log(
                self.progress.step,
                {
                    "loss": stats.loss,
                    **({} if stats.mtp_loss is None else {"mtp_loss": stats.mtp_loss}),
                    "aux_loss": stats.aux_loss,
                    "z_loss": stats.z_loss,
                    "grad_norm": stats.grad_norm,
                    "learning_rate": self._learning_rate,
                    "tokens_per_second_per_gpu": tgs,
                    "tflops_per_gpu": tgs * self.flops_a_token / 1e12,
                    "mfu": self.mfu(tgs),
                    "step_seconds": seconds,
                    "peak_memory_bytes": peak_memory_bytes(self.device),
                    "imbalance": balance.overall if balance else None,
                    "expert_counts": counts,
                    "data": self.source.description,
                },
            )

    @property
    def _first_timed(self) -> int:
        """The first steps warm up caches and compilers and are left out of the mean speed, where there are enough."""
        return min(2, self.job.train.steps - 1)

    def _validate(self) -> None:
        if self.validation_data is None:
            return
        pulse.enter(pulse.VALIDATION)
        if self.validation_batches is None:
            self.validation_batches = self._batches(self.validation_data, 0)
        batches = self._for_chunks(self.validation_batches)
        self.validation_loss = step.evaluate(self.chunks, batches, self.job, self.device)
        self.writer.log(self.progress.step, {"validation_loss": self.validation_loss, "data": self.source.description})

    def _save(self) -> None:
        pulse.enter(pulse.SAVING)
        model.settle(self.chunks)
        if (bad := nonfinite.check_weights(self.chunks)) is not None:
            # one that no token has met, an expert's for instance, shows in no loss
            self._give_up(f"step {self.progress.step}: {bad}: it is not saved; go on from the checkpoint before it")
        self.saver.save(
            self.chunks,
            self.optimizer,
            self.scheduler,
            step=self.progress.step,
            samples=self.progress.samples,
            extra={"guard": self.guard.state(), "data": self.data_identity, "weights_from": self.weights_from},
        )

    def _training_batches(self) -> list[Iterator]:
        """From the first sample that is not yet counted."""
        return self._for_chunks(self._batches(self.train_data, self.progress.samples))

    def _for_chunks(self, batches: datasets.Batches) -> list[Iterator[step.Batch]]:
        """The same micro-batches for each model chunk of this rank, read once."""
        read: Iterator[step.Batch] = iter(batches)
        if not self.job.data.attend_across_documents:
            read = map(partial(keep_apart, eod=self.source.tokenizer.eod), read)
        return list(itertools.tee(read, len(self.chunks)))

    def _batches(self, dataset, start_sample: int) -> datasets.Batches:
        return datasets.Batches(
            dataset,
            start_sample=start_sample,
            micro_batch_size=self.job.train.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            global_batch_size=self.job.train.global_batch_size,
            num_workers=self.job.data.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def _peak_flops(self) -> float | None:
        if self.device.type == "cpu":
            return measure_cpu_peak()
        gpu = lookup(torch.cuda.get_device_name(self.device))
        return None if gpu is None else gpu.peak_flops("bf16")

    def mfu(self, tgs: float) -> float | None:
        return None if self.peak_flops is None else tgs * self.flops_a_token / self.peak_flops

    def _describe(self) -> None:
        """Says once what this job really is: sizes, layout, data, and the kernels each operation runs on."""
        own = torch.tensor(
            [sum(q.numel() for c in self.chunks for q in c.parameters())], dtype=torch.int64, device=self.device
        )
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        line = headline(
            self.job,
            self.card,
            world=self.world,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            chunks=len(self.chunks),
            device="CPU process" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            largest=int(own.item()),
        )
        log.info("%s", line)
        log.info("data: %s", self.source.description)


def _with_vocabulary(card: ModelCard, vocab_size: int, *, trained_here: bool) -> ModelCard:
    """The card with the vocabulary that the data needs: the tokenizer's own where it was trained for this run, else the
    card's, which published models round up. Raises UserError for a tokenizer with more tokens than the model."""
    if trained_here:
        return card.with_overrides({"vocab_size": vocab_size})
    if vocab_size > card.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size} tokens, {card.name} only {card.vocab_size}: use the model's tokenizer, "
            f"or set model.overrides.vocab_size={vocab_size}"
        )
    return card
