"""What a run leaves at its end: sample, summary, picture, and a few lines on the screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from maniple.config.schema import TrainConfig
from maniple.data.datasets import Source
from maniple.engines.megatron import sample
from maniple.metrics import MetricsWriter, NothingToDraw, draw_curves, peak_memory_bytes, write_summary
from maniple.models.card import ModelCard

BY_GUARD = "by guard"  # a run that ends so says more in its error


class Run(Protocol):
    """What is told of a run here: a trainer that has come to its end. Times in seconds."""

    job: TrainConfig
    card: ModelCard
    chunks: list
    device: torch.device
    source: Source
    writer: MetricsWriter
    rank: int
    world: int
    progress: Any  # has `step`
    saver: Any  # has `last`
    started: float
    tokens_timed: int
    seconds_timed: float
    validation_loss: float | None
    precision: dict[str, str] | None
    weights_from: str | None

    def mfu(self, tgs: float) -> float | None: ...


def leave(run: Run, *, stopped: str | None, hurry: bool) -> None:
    """Writes summary.json and curves.png and says where everything is. Collective.

    stopped: why the run ended early. hurry: little time is left, so no sample is drawn.
    """
    job, run_dir = run.job, run.job.run_dir
    text = None
    if job.train.sample_tokens and job.data.source != "synthetic" and not hurry:
        tokenizer = run.source.tokenizer
        prompt = tokenizer.encode(job.train.sample_prompt)
        ids = sample.generate(run.chunks, prompt, job.train.sample_tokens, run.card.vocab_size, job, run.device)
        text = tokenizer.decode(ids)
    peak = torch.tensor(peak_memory_bytes(run.device), dtype=torch.int64, device=run.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    run.writer.close()
    if run.rank != 0:
        return
    tgs = run.tokens_timed / run.seconds_timed / run.world if run.seconds_timed else None
    entropy = run.source.unigram_entropy_nats
    summary = run_dir / "summary.json"
    # no step was left to run: what the run had come to still holds
    kept = run.precision is None and stopped is None and summary.exists()
    if not kept:
        write_summary(
            run_dir,
            validation_loss=run.validation_loss,
            unigram_entropy=entropy,
            steps=run.progress.step,
            tokens_per_second_per_gpu=tgs,
            mfu=None if tgs is None else run.mfu(tgs),
            peak_memory_bytes=int(peak.item()),
            world_size=run.world,
            device=run.device,
            model=run.card.name,
            data=run.source.description,
            precision=run.precision,
            weights_from=run.weights_from,
            seconds=time.monotonic() - run.started,
            sample=text,
            stopped=stopped,
        )
    figure = _draw(run, entropy) if job.log.figure and run.progress.step else None
    _say(run, text, summary, figure, stopped, kept)


def _draw(run: Run, entropy: float | None) -> Path | None:
    folder = run.job.run_dir
    try:
        return draw_curves(
            folder / "metrics.jsonl",
            folder / "curves.png",
            unigram_entropy=entropy,
            title=run.job.name,
            layers=layer_names(run.card),
        )
    except NothingToDraw:  # it ended before log.interval steps
        return None


def layer_names(card: ModelCard) -> list[str]:
    """Of the layers with experts, as errors count them: from 0, those of MTP last."""
    layers = card.num_layers
    decoder = [f"layer {number}" for number in range(card.moe.num_dense_layers, layers)]
    return decoder + [f"layer {layers + depth} (MTP)" for depth in range(card.num_mtp_layers)]


def _say(run: Run, text: str | None, summary: Path, figure: Path | None, stopped: str | None, kept: bool) -> None:
    lines = []
    if stopped is not None:
        on = "" if stopped == BY_GUARD else "; go on with --resume auto"
        lines.append(f"stopped after step {run.progress.step} ({stopped}){on}")
    if run.validation_loss is not None:
        line = f"validation loss {run.validation_loss:.3f} nats a token"
        if entropy := run.source.unigram_entropy_nats:
            below = 1 - run.validation_loss / entropy
            word = "below" if below >= 0 else "above"
            line += f"; unigram entropy of the same text {entropy:.3f} ({abs(below):.1%} {word})"
        lines.append(line)
    if text is not None:
        lines += ["sample:", *("  | " + row for row in text.splitlines())]
    lines.append(f"summary      {summary}" + (" (as it was: no step was run)" if kept else ""))
    lines.append(f"metrics      {run.job.run_dir / 'metrics.jsonl'}")
    if run.job.log.tensorboard:
        lines.append(f"tensorboard  {run.job.run_dir / 'tensorboard'}")
    if figure is not None:
        lines.append(f"curves       {figure}")
    if run.saver.last is not None:
        lines.append(f"checkpoint   {run.saver.last}")
    print("\n".join(lines), flush=True)
