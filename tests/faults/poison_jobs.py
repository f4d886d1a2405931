"""Jobs in which one rank meets a NaN or an infinity at one step. Import it inside a spawned process only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.engines.jobs import make_job, tiny_card

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import parallel, step, trainer
from maniple.engines.megatron.model import routers, unwrap
from maniple.errors import UserError

LAYER = 1
Poison = Callable[[list], None]


def weight(name: str, value: float, layer: int = LAYER) -> Poison:
    """A weight becomes `value`, for good."""

    def apply(chunks: list) -> None:
        for parameter in _of_layer(chunks, layer, name, "named_parameters"):
            parameter.data.fill_(value)

    return apply


def bias(value: float, layer: int = LAYER) -> Poison:
    """A router's balancing bias becomes `value`, for good."""

    def apply(chunks: list) -> None:
        if (router := routers(chunks).get(layer)) is not None:
            router.expert_bias.fill_(value)

    return apply


def output(name: str, value: float, layer: int = LAYER) -> Poison:
    """One value of a module's output becomes `value`, in every pass from now on."""

    def apply(chunks: list) -> None:
        for module in _of_layer(chunks, layer, name, "named_modules"):
            HOOKS.append(module.register_forward_hook(lambda module, inputs, result: _spoiled(result, value)))

    return apply


def gradient(name: str, value: float, layer: int = LAYER) -> Poison:
    """A parameter's whole gradient becomes `value`, in every pass from now on."""

    def apply(chunks: list) -> None:
        for parameter in _of_layer(chunks, layer, name, "named_parameters"):
            HOOKS.append(parameter.register_hook(lambda grad: torch.full_like(grad, value)))

    return apply


def loud(factor: float) -> Poison:
    """Logits are `factor` times what they were: the model is sure, and mostly wrong. All stays finite."""

    def apply(chunks: list) -> None:
        for chunk in chunks:
            head = unwrap(chunk).output_layer
            HOOKS.append(head.register_forward_hook(lambda module, inputs, result: (factor * result[0], result[1])))

    return apply


HOOKS: list = []


def _of_layer(chunks: list, layer: int, name: str, which: str) -> list:
    found = []
    for chunk in chunks:
        for held in unwrap(chunk).decoder.layers:
            if held.layer_number - 1 == layer:
                found += [item for known, item in getattr(held, which)() if known == name]
    return found


def _spoiled(result: Any, value: float) -> Any:
    first = result[0] if isinstance(result, tuple) else result
    mask = torch.zeros_like(first)
    mask.view(-1)[0] = value
    return (first + mask, *result[1:]) if isinstance(result, tuple) else first + mask


def run(
    folder: Path,
    name: str,
    at: dict[int, Poison],
    *,
    on: int,
    once: bool = False,
    after: bool = False,
    card: str = "deepseek-v3",
    **sections,
) -> dict[str, Any]:
    """Runs a job of six steps, saved each two, on which `at[step]` is applied on rank `on` just before that step.

    once: it is taken back before the next step. after: it is applied just after that step. Returns the error (None if
    the job came to its end), the steps that are saved, the records of metrics.jsonl, by step whether weights and
    biases stayed as they were, the summary, and whether there is a picture.
    """
    sections = {"train": {"steps": 6}, "checkpoint": {"save_interval": 2}, **sections}
    sections["train"] = {"steps": 6, **sections["train"]}
    job = make_job(folder, name, **sections)
    unchanged: dict[int, bool] = {}
    real, passed = step.train_step, set()

    def poisoned(chunks, *args, **options):
        number = running[0].progress.step + 1
        hit = number in at and number not in passed and dist.get_rank() == on
        passed.add(number)
        if hit and not after:
            at[number](chunks)
        while once and number not in at and HOOKS:
            HOOKS.pop().remove()
        before = _state(chunks)
        stats = real(chunks, *args, **options)
        unchanged[number] = all(torch.equal(a, b) for a, b in zip(before, _state(chunks), strict=True))
        if hit and after:
            at[number](chunks)
        return stats

    error = None
    running: list[trainer.Trainer] = []
    step.train_step = poisoned
    try:
        device = parallel.pick_device(job)
        parallel.start(job, device)
        running.append(trainer.Trainer(job, tiny_card(card), device))
        running[0].run()
    except UserError as caught:
        error = str(caught)
        running[0].writer.close()
    finally:
        step.train_step = real
        HOOKS.clear()
        parallel.stop_groups()
    dist.barrier()
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    saved = sorted(int(path.name[5:]) for path in (job.run_dir / "checkpoints").glob("step_????????"))
    return {
        "error": error,
        "saved": saved,
        "records": [json.loads(line) for line in lines],
        "unchanged": unchanged,
        "summary": json.loads((job.run_dir / "summary.json").read_text()),
        "drawn": (job.run_dir / "curves.png").exists(),
    }


def _state(chunks: list) -> list[torch.Tensor]:
    """Weights and biases as bits, so that a NaN equals itself."""
    tensors = [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    tensors += [router.expert_bias for router in routers(chunks).values() if router.expert_bias is not None]
    return [tensor.clone().view(torch.int32) for tensor in tensors]


def two_jobs_alike(folder: Path, job: TrainConfig, card) -> list[list[torch.Tensor]]:
    """Final weights of the same job by this package's two halves of an update and by upstream's `step`, both from the
    norm that upstream finds, of which this package's is a rounding away."""
    real = step.prepare_update, step.apply_update, step.norm_of
    found = []

    def norm_of(optimizer) -> float:
        norm = float(optimizer.get_grad_norm())
        assert abs(real[2](optimizer) - norm) <= 1e-6 * norm
        return norm

    for upstream in (False, True):
        step.norm_of = norm_of
        if upstream:
            step.apply_update = lambda optimizer, norm: optimizer.step()  # prepares and takes the norm once more
        try:
            device = parallel.pick_device(job)
            parallel.start(job, device)
            done = trainer.Trainer(job.model_copy(update={"name": f"{job.name}-{upstream}"}), card, device)
            done.run()
            found.append([parameter.detach().clone() for chunk in done.chunks for parameter in chunk.parameters()])
        finally:
            step.prepare_update, step.apply_update, step.norm_of = real
            parallel.stop_groups()
    return found
