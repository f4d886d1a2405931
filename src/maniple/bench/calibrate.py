"""`maniple plan calibrate`: short measurements of this machine's GPU, and the file that a plan takes in place of a
card's figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from maniple.bench.calibrate_work import CPU, GPU, QUICK, CannotMeasureError, Work, all_of
from maniple.bench.facts import of_run
from maniple.bench.timing import Times, interleaved
from maniple.errors import UserError
from maniple.hardware import GPU as Card
from maniple.hardware import load_gpu, lookup
from maniple.hardware.calibration import MOST, PASSES, RECIPES, Calibration, Measurement, peak
from maniple.kernels import sources
from maniple.plan import operators
from maniple.plan.whole_file import write_new

ROUNDS, QUICK_ROUNDS, CPU_ROUNDS = 20, 7, 2
_DRIVERS = "/proc/driver/nvidia/version", "/sys/module/amdgpu/version"


def card_of(device: torch.device, name: str | None) -> Card | None:
    """The card that a GPU is calibrated for, None on a CPU. Raises UserError where no card is certainly about it and
    none was named, or another than the device's was."""
    if device.type != "cuda":
        if name is not None:
            raise UserError(f"--gpu {name}: a CPU is measured, which no GPU card is about; leave one of the two out")
        return None
    here = torch.cuda.get_device_name(device)
    found, named = lookup(here), None if name is None else load_gpu(name)
    if found is None and named is None:
        raise UserError(f"no GPU card is about {here}: name one whose peaks are to be used, such as --gpu h200-sxm")
    if found is not None and named is not None and found.name != named.name:
        raise UserError(f"--gpu {named.name}: this is a {here}, whose card is {found.name}; leave --gpu out")
    return named or found


def run(
    device: torch.device, card: Card | None, *, quick: bool, command: str, progress: Callable[[str], None]
) -> Calibration:
    """Measures everything once. What cannot run here is in `not_measured`, with the reason."""
    on_gpu = device.type == "cuda"
    sizes = CPU if not on_gpu else QUICK if quick else GPU
    rounds = CPU_ROUNDS if not on_gpu else QUICK_ROUNDS if quick else ROUNDS
    measured: list[Measurement] = []
    missing: dict[str, str] = {}
    copy: float | None = None  # bytes a millisecond
    for work in all_of(sizes, device):
        key = f"{work.group} {work.name}"
        if key in missing:
            continue
        progress(f"{key}: {work.sizes}")
        try:
            measured.append(row := _measured(work, card, device, rounds, copy))
        except CannotMeasureError as why:
            missing[key] = str(why)
            measured = [row for row in measured if (row.group, row.name) != (work.group, work.name)]
            continue
        if work.name == "copy":
            copy = row.work / row.milliseconds
    measured, missing = _together(measured, missing)
    if not measured:
        raise UserError(f"nothing could be measured: {': '.join(next(iter(missing.items())))}")
    about = of_run(device, 0, command, ())
    return Calibration(
        format=1,
        gpu=torch.cuda.get_device_name(device) if on_gpu else f"CPU, {about['hardware']['cpu']}",
        card=card.name if card else None,
        date=about["date"],
        command=command,
        versions=about["versions"] | {"driver": _driver() if on_gpu else None},
        sources=sources.digests(),
        measured=tuple(measured),
        not_measured=missing,
    )


def _measured(work: Work, card: Card | None, device: torch.device, rounds: int, copy: float | None) -> Measurement:
    if work.added and copy is None:
        raise CannotMeasureError("needs the speed of a copy")
    try:
        ready = work.make()
        error = ready.error() if ready.error else 0.0
        if not error <= ready.bound:  # NaN is wrong too
            raise CannotMeasureError(f"{ready.by} is wrong: its error is {error:.1e}, and {ready.bound:.1e} the bound")
        try:
            times = interleaved({"it": ready.call}, device, rounds)["it"]
        finally:
            ready.close()
    except CannotMeasureError:
        raise
    except Exception as failure:  # a kernel may fail in any way, and the others are still measured
        raise CannotMeasureError(f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}") from failure
    return _row(work, ready.by, times, card, copy)


def _row(work: Work, by: str, times: Times, card: Card | None, copy: float | None) -> Measurement:
    beside = operators.ADDED_BYTES * work.added / copy if work.added and copy else 0.0
    if card is not None and work.group != "launch":
        least = work.work / peak(card, work.group, work.name) * 1e3
        if times.median * MOST < least:
            raise CannotMeasureError(f"came to {least / times.median:.0%} of the peak of {card.name}, more than it has")
        # a kernel that adds to gradients while it multiplies is planned as if it did all it could, and then added
        beside = min(beside, max(0.0, times.median - least))
    elif times.median <= beside:
        raise CannotMeasureError(f"took {times.median:.3g} ms, less than its traffic alone at the speed of a copy")
    return Measurement(
        group=work.group,
        name=work.name,
        what=f"{work.sizes}, {by}",
        work=work.work,
        milliseconds=times.median,
        milliseconds_p20=times.low,
        milliseconds_p80=times.high,
        beside_milliseconds=beside,
        rounds=times.rounds,
    )


def _together(measured: list[Measurement], missing: dict[str, str]) -> tuple[list[Measurement], dict[str, str]]:
    """Of passes that are planned together either all or none."""
    sets = [[f"grouped {recipe}_{which}" for which in PASSES] for recipe in RECIPES]
    sets += [[f"attention {prefix}{which}" for which in ("forward", "backward")] for prefix in ("", "latent_")]
    for keys in sets:
        if why := [key for key in keys if key in missing]:
            missing |= {key: missing.get(key, f"{why[0]} was not") for key in keys}
    return [row for row in measured if f"{row.group} {row.name}" not in missing], missing


def _driver() -> str | None:
    """The GPU driver's version, where the kernel says it."""
    for path in map(Path, _DRIVERS):
        if path.is_file():
            words = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].split()
            return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None


def write(calibration: Calibration, file: Path) -> None:
    """Writes it whole or not at all, and over nothing. Raises UserError if it cannot."""
    head = f"# {calibration.provenance}; for `maniple plan ... --calibration`\n"
    text = head + yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False, width=120, allow_unicode=True)
    write_new("--out", file, text)


HEADINGS = ["operation", "attained", "of the peak", "the card has", "ms", "measured with"]


def table(calibration: Calibration, card: Card | None, known: dict[str, dict[str, float]]) -> list[list[str]]:
    """Lines for a reader. known: the card's own shares."""
    lines = []
    shares = calibration.shares(card) if card else {}
    for group, name in dict.fromkeys((row.group, row.name) for row in calibration.measured):
        each = [row for row in calibration.measured if (row.group, row.name) == (group, name)]
        speed = calibration.attained(group, name) or 0.0
        own = known.get(group, {}).get(name)
        lines.append(
            [
                f"{group} {name}".replace("_", " "),
                _speed(group, speed),
                f"{shares[group][name]:.1%}" if name in shares.get(group, {}) else "",
                f"{own:.1%}" if own is not None else "",
                ", ".join(f"{row.milliseconds:.3f}" for row in each),
                "; ".join(row.what for row in each),
            ]
        )
    return lines


def _speed(group: str, speed: float) -> str:
    if group == "launch":
        return f"{1e6 / speed:.2f} us each"
    return f"{speed / 1e9:,.1f} GB/s" if group == "memory" else f"{speed / 1e12:,.2f} TFLOP/s"
