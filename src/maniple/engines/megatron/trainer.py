"""The training loop: data, model, optimizer, steps, validation, metrics, checkpoints, and what a run leaves behind.

`main` is what every rank runs under torchrun. It is a loop over Megatron-Core's parts and keeps no global arguments.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from maniple.config.schema import TrainConfig
from maniple.data import datasets
from maniple.engines.megatron import checkpoint, model, parallel, sample, step
from maniple.engines.megatron.optimizer import build_optimizer
from maniple.errors import UserError
from maniple.hardware import lookup, measure_cpu_peak
from maniple.kernels import registry
from maniple.metrics import (
    MetricsWriter,
    TrainProgress,
    draw_curves,
    expert_balance,
    peak_memory_bytes,
    setup_logging,
    write_summary,
)
from maniple.models import flops
from maniple.models.card import ModelCard

log = logging.getLogger("maniple")

# A run's folder that cannot be written is the user's to mend: a full disk, no permission, a file in a folder's place.
_CANNOT_WRITE = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "ENOTDIR", "EEXIST", "ENAMETOOLONG")
)


def main(job: TrainConfig, card: ModelCard) -> int:
    """Runs this process's part of the job and returns the exit code. Raises UserError for the user's mistakes."""
    device = parallel.pick_device(job)
    parallel.start(job, device)
    try:
        Trainer(job, card, device).run()
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise UserError(
            f"{error.filename or job.run_dir}: {error.strerror}; mend that, or set output_dir, and go on with "
            "--resume auto"
        ) from error
    finally:
        parallel.stop()
    return 0


@dataclass
class Progress:
    """How far the run is: what a checkpoint restores beside tensors."""

    step: int = 0
    samples: int = 0


class Trainer:
    """One rank of one job, from data to summary."""

    def __init__(self, job: TrainConfig, card: ModelCard, device: torch.device) -> None:
        if job.data.source == "synthetic" and job.data.tokenizer is None:
            # made-up tokens fill the model's own vocabulary
            job = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer_vocab_size": card.vocab_size})})
        self.job, self.device = job, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if job.train.deterministic:
            torch.use_deterministic_algorithms(True)
        resume = self._agree(lambda: checkpoint.find(job.run_dir, job.checkpoint.resume))
        self.source = datasets.prepare_source(job, job.run_dir, self.rank == 0, dist.barrier)
        self.card = _with_vocabulary(card, self.source.tokenizer.vocab_size, trained_here=job.data.source == "python")
        setup_logging(job.run_dir, self.rank)  # makes the run's folder, once nothing of the user's is left to refuse
        self.train_data, self.validation_data = datasets.build_datasets(
            job,
            self.source,
            train_samples=job.train.steps * job.train.global_batch_size,
            valid_samples=job.train.eval_batches * job.train.global_batch_size,
            is_writer=self.rank == 0,
            barrier=dist.barrier,
        )
        self.chunks = model.wrap(model.build_chunks(self.card, job), job, device)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, job)
        step.connect(self.chunks, self.optimizer, job)
        self.progress = Progress()
        if resume is not None:
            self.progress = Progress(
                *checkpoint.load(resume, self.chunks, self.optimizer, self.scheduler, card=self.card, job=job)
            )
            log.info("resumed from %s at step %d", resume, self.progress.step)
        self.writer = MetricsWriter(
            job.run_dir,
            self.rank,
            tensorboard=job.log.tensorboard,
            resumed_step=self.progress.step if resume is not None else None,
        )
        self.flops_a_token = flops.training_flops_per_token(self.card, job.data.sequence_length)
        self.peak_flops = self._peak_flops()
        self.tokens_timed, self.seconds_timed = 0, 0.0
        self.validation_loss: float | None = None
        self._said_kernels = False
        self.started = time.monotonic()
        self._describe()

    def run(self) -> None:
        job = self.job
        batches = [self._batches(self.train_data, self.progress.samples) for _ in self.chunks]
        stopped = False
        with TrainProgress(
            job.train.steps, start_step=self.progress.step, rank=self.rank, enabled=job.log.progress
        ) as bar:
            while self.progress.step < job.train.steps and not stopped:
                stopped = self._step(batches, bar)
                at_end = stopped or self.progress.step == job.train.steps
                every = job.train.eval_interval
                if at_end or (every and self.progress.step % every == 0):
                    self._validate()
                every = job.checkpoint.save_interval
                if (at_end and job.checkpoint.save_at_end) or (every and self.progress.step % every == 0):
                    self._save()
        self._finish()

    def _step(self, batches: list[Iterator], bar: TrainProgress) -> bool:
        """One optimizer step, its record, and whether the job is to end after it."""
        job = self.job
        started = time.monotonic()
        late = job.train.max_minutes is not None and started - self.started > 60 * job.train.max_minutes
        learning_rate = max(group["lr"] for group in self.optimizer.param_groups)  # of this step: its end sets the next
        stats = step.train_step(
            self.chunks, self.optimizer, self.scheduler, batches, job, self.device, ask_stop=late and self.rank == 0
        )
        seconds = time.monotonic() - started
        if not math.isfinite(stats.loss):
            raise UserError(
                f"loss is {stats.loss} at step {self.progress.step + 1}: stopped before it is saved; lower "
                "optimizer.learning_rate, or resume from an earlier checkpoint"
            )
        if not self._said_kernels:
            # said after the first step, when it is what ran and not what was meant to
            for op, recipe, kind, name in registry.used():
                dtype = self.job.precision.dtype
                log.info("kernels: %s on %s: %s (%s tensors, recipe %s)", op, kind, name, dtype, recipe)
            self._said_kernels = True
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
                    "learning_rate": learning_rate,
                    "tokens_per_second_per_gpu": tgs,
                    "tflops_per_gpu": tgs * self.flops_a_token / 1e12,
                    "mfu": self._mfu(tgs),
                    "step_seconds": seconds,
                    "peak_memory_bytes": peak_memory_bytes(self.device),
                    "imbalance": balance.overall if balance else None,
                    "expert_counts": counts,
                    "data": self.source.description,
                },
            )
        return stats.stop

    @property
    def _first_timed(self) -> int:
        """The first steps warm up caches and compilers and are left out of the mean speed, where there are enough."""
        return min(2, self.job.train.steps - 1)

    def _validate(self) -> None:
        if self.validation_data is None:
            return
        batches = [self._batches(self.validation_data, 0) for _ in self.chunks]
        self.validation_loss = step.evaluate(self.chunks, batches, self.job, self.device)
        self.writer.log(self.progress.step, {"validation_loss": self.validation_loss, "data": self.source.description})

    def _save(self) -> None:
        folder = checkpoint.save(
            self.job.run_dir,
            self.chunks,
            self.optimizer,
            self.scheduler,
            step=self.progress.step,
            samples=self.progress.samples,
            card=self.card,
            job=self.job,
        )
        log.info("saved %s", folder)

    def _finish(self) -> None:
        job, run_dir = self.job, self.job.run_dir
        text = None
        if job.train.sample_tokens and job.data.source != "synthetic":
            tokenizer = self.source.tokenizer
            prompt = tokenizer.encode(job.train.sample_prompt)
            ids = sample.generate(self.chunks, prompt, job.train.sample_tokens, self.card.vocab_size, job, self.device)
            text = tokenizer.decode(ids)
        peak = torch.tensor(peak_memory_bytes(self.device), dtype=torch.int64, device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.writer.close()
        if self.rank != 0:
            return
        tgs = self.tokens_timed / self.seconds_timed / self.world if self.seconds_timed else None
        entropy = self.source.unigram_entropy_nats
        summary = write_summary(
            run_dir,
            validation_loss=self.validation_loss,
            unigram_entropy=entropy,
            steps=self.progress.step,
            tokens_per_second_per_gpu=tgs,
            mfu=None if tgs is None else self._mfu(tgs),
            peak_memory_bytes=int(peak.item()),
            world_size=self.world,
            device=self.device,
            model=self.card.name,
            data=self.source.description,
            seconds=time.monotonic() - self.started,
            sample=text,
        )
        figure = None
        if job.log.figure and self.progress.step:
            figure = draw_curves(
                run_dir / "metrics.jsonl", run_dir / "curves.png", unigram_entropy=entropy, title=job.name
            )
        self._report(text, summary, figure)

    def _report(self, text: str | None, summary, figure) -> None:
        lines = []
        if self.validation_loss is not None:
            line = f"validation loss {self.validation_loss:.3f} nats a token"
            if entropy := self.source.unigram_entropy_nats:
                below = 1 - self.validation_loss / entropy
                word = "below" if below >= 0 else "above"
                line += f"; unigram entropy of the same text {entropy:.3f} ({abs(below):.1%} {word})"
            lines.append(line)
        if text is not None:
            lines += ["sample:", *("  | " + row for row in text.splitlines())]
        lines.append(f"summary      {summary}")
        lines.append(f"metrics      {self.job.run_dir / 'metrics.jsonl'}")
        if self.job.log.tensorboard:
            lines.append(f"tensorboard  {self.job.run_dir / 'tensorboard'}")
        if figure is not None:
            lines.append(f"curves       {figure}")
        if self.job.checkpoint.save_at_end:
            lines.append(f"checkpoint   {checkpoint.find(self.job.run_dir, 'auto')}")
        print("\n".join(lines), flush=True)

    def _batches(self, dataset, start_sample: int) -> Iterator[step.Batch]:
        return datasets.iterate(
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

    def _mfu(self, tgs: float) -> float | None:
        return None if self.peak_flops is None else tgs * self.flops_a_token / self.peak_flops

    def _describe(self) -> None:
        """Says once what this job really is: sizes, layout, data, and the kernels each operation runs on."""
        p = self.job.parallel
        own = torch.tensor(
            [sum(q.numel() for c in self.chunks for q in c.parameters())], dtype=torch.int64, device=self.device
        )
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        log.info(
            "%s on %d x %s: TP %d PP %d EP %d ETP %d DP %d, at most %s parameters a rank, %s",
            self.card.name,
            self.world,
            "CPU process" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            p.tensor_parallel_size,
            p.pipeline_parallel_size,
            p.expert_parallel_size,
            p.expert_tensor_parallel_size,
            parallel_state.get_data_parallel_world_size(),
            f"{int(own.item()):,}",
            self.job.precision.dtype,
        )
        log.info("data: %s", self.source.description)

    def _agree(self, find):
        """What rank 0 finds, on every rank: ranks must not read a folder at different moments and differ."""
        found = [find() if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]


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
