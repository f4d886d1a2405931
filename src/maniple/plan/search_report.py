"""What a search found, in words: as JSON, as a table, and why the winner wins; and the winner as a job file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.units import binary_size, three_digits
from maniple.models.counting import count
from maniple.plan import search_fewer, states
from maniple.plan.report import MemoryPlan, band, host_line, kinds_of, memory_plan
from maniple.plan.search import Costed, Found
from maniple.plan.search_fewer import Fewer
from maniple.plan.search_groups import ILLEGAL
from maniple.plan.time import estimate
from maniple.plan.whole_file import write_new

HEADINGS = [
    *("GPUs", "TP", "PP", "chunks", "CP", "EP", "ETP", "DP", "MBS", "recompute"),
    *("seconds", "tokens/s", "TGS", "*", "MFU", "GiB", "of GPU", "stages"),
]
WORDS = ("recompute", "*", "stages")  # columns that are no numbers
# that a narrow terminal does without; 80 columns have CP and ETP, in which alone layouts may differ
_SPARE = (
    *("stages", "MFU", "tokens/s", "of GPU", "DP", "*", "chunks", "MBS", "recompute", "TGS"),
    *("CP", "ETP", "EP", "PP", "TP"),
)
_PARTS = 4  # of a difference, the largest that are named
_NOTHING = 1e-4  # share of the whole
_WORTH = 0.02  # share of a GPU's memory from which a way to free it is named


def settings(costed: Costed) -> dict[str, Any]:
    """What the search chose, by dotted key of the job; keys that are None are left out."""
    config = costed.config
    chosen = {
        "parallel": (
            *("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size", "pipeline_layout"),
            *("context_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"),
        ),
        "train": ("micro_batch_size", "global_batch_size"),
        "data": ("sequence_length",),
        "recompute": ("granularity",),
    }
    values = {
        f"{section}.{key}": getattr(getattr(config, section), key) for section, keys in chosen.items() for key in keys
    }
    if config.moe.overlap_exchange:
        values |= {"moe.overlap_exchange": True, "parallel.overlap_param_gather": False}
    recompute = config.recompute
    values["recompute.num_layers"] = recompute.num_layers
    values["recompute.layers"] = recompute.layers or None
    values["recompute.modules"] = recompute.modules or None
    return {key: value for key, value in values.items() if value is not None}


def as_json(found: Found, others: Sequence[Fewer] = ()) -> dict[str, Any]:
    """Plain data; sizes in bytes, times in seconds. others: the same job on fewer GPUs."""
    table = search_fewer.table(found, others)
    return {
        "model": found.card.name,
        "gpus": found.world_size,
        "gpu": found.gpu.name,
        "gpu_memory": found.gpu.memory_bytes,
        "ceiling": found.ceiling,
        "error_band": None if found.best is None else band(found.best.memory.total),
        "load_factor": None if found.best is None else found.best.time.load_factor,
        "fits": found.best is not None,
        "looked_at": found.looked_at,
        "costed": found.costed,
        "pruned": dict(found.pruned),
        "best": _costed(found.best),
        "host_per_node": None if found.best is None else _plan(found, found.best).host_per_node,
        "second": _costed(found.second),
        "pareto": [
            {**_present(one), "most_tokens_per_second_per_gpu": search_fewer.has_most_tgs(one, table)} for one in table
        ],
        "fewer_gpus": [
            {"gpus": one.world_size, "best": _costed(one.found.best if one.found else None), "why": one.why or None}
            for one in others
        ],
        "nearest": _costed(found.nearest),
        "programs": _programs(found),
        "explanation": explanation(found),
    }


def _programs(found: Found) -> dict[str, Any] | None:
    if found.programs is None:
        return None
    tried, before = found.programs.tried, found.programs.before
    model = None if found.best is None else found.programs.models.get(found.best.layout)
    return {
        "relaxed": tried.relaxed,
        "infeasible": tried.infeasible,
        "solved": tried.solved,
        "found": len(tried.fits),
        "misfits": tried.misfits,
        "best": model and {"pipeline_seconds": model[0], "memory": round(model[1])},
        "before": _costed(before),
    }


def _costed(one: Costed | None) -> dict[str, Any] | None:
    return None if one is None else _present(one)


def _present(one: Costed) -> dict[str, Any]:
    return {
        "gpus": one.where.world_size,
        "settings": settings(one),
        "data_parallel": one.where.data,
        "micro_batches": one.where.micro_batches,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_gpu": one.tgs,
        "seconds": one.time.seconds,
        "pipeline_seconds": one.time.pipeline_seconds,
        "mfu": one.time.mfu,
        "components": one.time.components,
        "memory": one.memory.total,
        "memory_parts": kinds_of(one.memory),
        "tightest_rank": one.memory.rank,
    }


def rows(found: Found, others: Sequence[Fewer] = ()) -> list[list[str]]:
    """One a layout of the Pareto table, the winner first, fewer GPUs after more; `HEADINGS` names the columns."""
    table = search_fewer.table(found, others)
    several = len({one.where.world_size for one in table}) > 1
    return [
        [
            f"{one.where.world_size:,}",
            *map(str, (one.layout.tensor, one.layout.pipeline, one.layout.chunks, one.where.context)),
            f"{one.layout.expert}" + (" +" if one.config.moe.overlap_exchange else ""),
            *map(str, (one.layout.expert_tensor, one.where.data)),
            str(one.layout.micro_batch),
            _recompute(one.config),
            three_digits(one.time.seconds),
            f"{one.tokens_per_second:,.0f}",
            f"{one.tgs:,.0f}",
            "*" if several and search_fewer.has_most_tgs(one, table) else "",
            f"{one.time.mfu:.1%}",
            f"{one.memory.total / 2**30:,.1f}",
            f"{one.memory.total / found.gpu.memory_bytes:.0%}",
            one.layout.stages or "even",
        ]
        for one in table
    ]


def spare(table: Sequence[Sequence[str]]) -> list[str]:
    """Headings of `rows` that a narrow terminal does without, in that order; sizes that are 1 in every row first."""
    ones = [h for h in _SPARE if h not in WORDS and all(row[HEADINGS.index(h)] == "1" for row in table)]
    return [*ones, *(heading for heading in _SPARE if heading not in ones)]


def of_fewer(found: Found, others: Sequence[Fewer]) -> list[str]:
    """What the table's marks mean, and what it does not say of fewer GPUs: lines beneath it."""
    table = search_fewer.table(found, others)
    marks = ["+: exchange overlapped (moe.overlap_exchange)"] * any(one.config.moe.overlap_exchange for one in table)
    if not others:
        return marks
    wrong = itertools.groupby((one for one in others if one.why), lambda one: one.why)
    lines = [f"{', '.join(f'{one.world_size:,}' for one in alike)} GPUs: {why}" for why, alike in wrong]
    if len({one.where.world_size for one in table}) > 1:
        lines.insert(0, "*: most tokens/s a GPU (TGS) of the rows on as few GPUs with as little memory")
    if found.best is not None and found.best not in table:
        lines.append(f"the best on {found.world_size:,} GPUs is left out: fewer with no more memory take no longer")
    return [*marks, *lines]


def searched(found: Found) -> str:
    """How many layouts there were, and what became of them."""
    out = "; ".join(f"{number:,} {reason}" for reason, number in found.pruned.items())
    return f"{found.looked_at:,} layouts: {found.costed:,} costed in full" + (f"; left out: {out}" if out else "")


def explanation(found: Found) -> list[str]:
    """Lines: what won, what came second and why; or what does not fit, and by how much."""
    if found.best is None:
        return _too_large(found)
    best, second = found.best, found.second
    lines = [f"best: {said(best)}: {_speed(best)}", *_cut(best), *_of_programs(found)]
    least, most = band(best.memory.total)
    if most > found.gpu.memory_bytes:
        lines.append(
            f"by the error band it needs {binary_size(least)} to {binary_size(most)}, which may be more than there is: "
            "rows further down are safer, and --memory-share 0.97 searches, and writes, one that is"
        )
    if (in_host := host_line(_plan(found, best))) is not None:
        lines.append(in_host)
    lines += [*_with_fused_loss(found, best), *best.time.assumptions]
    if second is None:
        return [*lines, "no layout of another shape fits"]
    lines.append(f"second: {said(second)}: {_speed(second)}, {second.tgs / best.tgs - 1:+.1%}")
    times = _differences(best.time.components, second.time.components, best.time.seconds)
    sizes = _differences(kinds_of(best.memory), kinds_of(second.memory), best.memory.total)
    more = best.memory.total - second.memory.total
    lines.append(
        f"the best takes {three_digits(second.time.seconds - best.time.seconds)} s less"
        + _listed(f"{part} {three_digits(value, '+')} s" for part, value in times)
    )
    lines.append(
        f"and needs {binary_size(abs(more))} {'more' if more >= 0 else 'less'} on its fullest rank"
        + _listed(f"{part} {'-' if value < 0 else '+'}{binary_size(round(abs(value)))}" for part, value in sizes)
    )
    return lines


def _plan(found: Found, one: Costed) -> MemoryPlan:
    return memory_plan(one.config, found.card, found.gpu, one.where.world_size, found.bounds.imbalance)


def of_contexts(found: Mapping[int, Found]) -> list[str]:
    """What the search found at each size of context parallelism, where it tried several."""
    if len(found) < 2:
        return []
    each = []
    for size, one in found.items():
        if one.best is not None:
            each.append(f"CP {size} {three_digits(one.best.time.seconds)} s")
        else:
            each.append(
                f"CP {size} does not fit" + (f" ({binary_size(one.nearest.memory.total)})" if one.nearest else "")
            )
    return ["context parallelism: " + ", ".join(each)]


def contexts_as_json(found: Mapping[int, Found]) -> dict[str, Any]:
    """By size: seconds a step of the best layout, None where nothing fits."""
    return {str(size): one.best and one.best.time.seconds for size, one in found.items()}


def said(one: Costed) -> str:
    """`TP 1, PP 8 x 3, EP 8, DP 32, micro-batch 1, recompute moe_act`."""
    layout = one.layout
    words = [
        f"TP {layout.tensor}",
        f"PP {layout.pipeline}" + (f" x {layout.chunks}" if layout.chunks > 1 else ""),
        *([f"CP {one.where.context}"] if one.where.context > 1 else []),
        f"EP {layout.expert}",
        *([f"ETP {one.where.expert_tensor}"] if one.where.expert_tensor > 1 else []),
        f"DP {one.where.data}",
        f"micro-batch {layout.micro_batch}",
        recomputed(one.config),
        *(["exchange overlapped"] if one.config.moe.overlap_exchange else []),
    ]
    return ", ".join(words)


def _cut(one: Costed) -> list[str]:
    """`its stages hold 3·2×29·1·0m layers, 0-14, 17 computed again`: a number each, MTP layers as m."""
    layers = one.config.recompute.layers
    if one.layout.pipeline == 1 and not layers:
        return []
    held = [f"{len(stage.layers)}{'m' * len(stage.mtp)}" for stage in one.where.stages]
    said = []
    for number, alike in itertools.groupby(held):
        times = len(list(alike))
        said.append(number if times == 1 else f"{number}×{times}")
    again = f"; recompute layers {_spans(layers)}" if layers else ""
    return [f"stages {'·'.join(said)}{again}"]


def _spans(numbers: Iterable[int]) -> str:
    """`0-14, 17`"""
    out = []
    for _, span in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        group = [number for _, number in span]
        out.append(f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}")
    return ", ".join(out)


def _of_programs(found: Found) -> list[str]:
    """What integer programs changed of the answer."""
    programs, best = found.programs, found.best
    if programs is None or best is None:
        return []
    tried, before = programs.tried, programs.before
    counts = f"{_many(tried.relaxed, 'shape')} relaxed, {_many(tried.solved, 'integer program')} solved"
    if best.layout not in programs.models:
        return [f"stages and layers by integer program: {counts}, none is faster"]
    seconds, size = programs.models[best.layout]
    full = f"{three_digits(best.time.pipeline_seconds)} s and {binary_size(best.memory.total)}"
    without = "nothing fits" if before is None else f"{three_digits(before.time.seconds)} s a step ({said(before)})"
    return [
        f"stages and layers by integer program: {counts}; the best's pipeline alone (no optimizer) and fullest rank: "
        f"{three_digits(seconds)} s and {binary_size(round(size))} by its linear model, {full} by the full plan",
        f"without programs: {without}",
    ]


def recomputed(config: TrainConfig) -> str:
    return f"recompute {_recompute(config)}"


def _recompute(config: TrainConfig) -> str:
    recompute = config.recompute
    if recompute.granularity == "full":
        if recompute.layers:
            return _many(len(recompute.layers), "layer")
        return "all" if recompute.num_layers is None else f"{recompute.num_layers} a chunk"
    return ", ".join(recompute.modules) or "none"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _speed(one: Costed) -> str:
    return f"{three_digits(one.time.seconds)} s a step, {one.tgs:,.0f} tokens/s a GPU, {binary_size(one.memory.total)}"


def _differences(one: dict[str, Any], other: dict[str, Any], whole: float) -> list[tuple[str, float]]:
    """The largest parts of one less other, those left out that are nothing beside the whole."""
    parts = {part: one.get(part, 0) - other.get(part, 0) for part in [*one, *other]}
    largest = sorted(parts, key=lambda part: -abs(parts[part]))[:_PARTS]
    return [(part.replace("_", " "), parts[part]) for part in largest if abs(parts[part]) > _NOTHING * whole]


def _listed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f": {text}" if text else ""


def _too_large(found: Found) -> list[str]:
    nearest = found.nearest
    assert nearest is not None
    missing, legal = nearest.memory.total - found.ceiling, found.looked_at - found.pruned.get(ILLEGAL, 0)
    lines = [
        f"does not fit: the smallest of {legal:,} legal layouts, {said(nearest)}, "
        f"needs {binary_size(nearest.memory.total)} of {binary_size(found.ceiling)} on pipeline rank "
        f"{nearest.memory.rank}: {binary_size(missing)} are missing",
        "of these "
        + ", ".join(f"{part} {size / 2**30:,.2f} GiB" for part, size in kinds_of(nearest.memory).items() if size),
    ]
    programs = found.programs
    if programs is not None:
        tried = programs.tried
        others = tried.shapes - tried.too_large
        said_of = [f"all {tried.shapes:,} shapes of stages are too large by states alone"]
        if others:
            tries = f"{tried.infeasible:,} of the {tried.relaxed:,} that were tried are too large too"
            said_of = [
                f"of {tried.shapes:,} shapes of stages {tried.too_large:,} are too large by states alone, and {tries}"
            ]
        lines.append("nor does another cut of layers: " + said_of[0] + _missing(programs.missing, missing))
    lines += _with_fused_loss(found, nearest)
    config = nearest.config
    each = sum(states.states(config).values()) - sum(states.hosted(config).values())
    one = each * count(found.card).total_with_mtp
    enough = math.ceil(one / found.ceiling)
    if enough > found.world_size:
        lines.append(
            f"one copy of weights, gradients and optimizer states, {each:g} bytes a parameter, is {binary_size(one)}: "
            f"at least {enough:,} GPUs"
        )
    if config.optimizer.offload_fraction < 1:
        more = sum(nearest.memory.states[kind] for kind in states.hosted(config))
        node = more * min(found.gpu.gpus_per_node, found.world_size)
        then = "more than is missing: search with it" if more > missing else "less than is missing"
        lines.append(
            f"--set optimizer.offload_fraction=1 would keep {binary_size(more)} of these in host memory, up to "
            f"{binary_size(node)} of a node, {then}"
        )
    return lines


def _with_fused_loss(found: Found, one: Costed) -> list[str]:
    """What the layout would need and take if the logits were never whole, where that is a hundredth less."""
    if one.config.train.loss != "logits":
        return []
    train = one.config.train.model_copy(update={"loss": "fused"})
    config = one.config.model_copy(update={"train": train})
    job, uneven = (config, found.card, found.gpu, one.where.world_size), found.bounds.imbalance
    try:
        total = memory_plan(*job, uneven).tightest.total
        seconds = estimate(*job, imbalance=uneven).seconds
    except UserError:  # this layout cannot
        return []
    freed = one.memory.total - total
    if freed < _WORTH * found.ceiling:
        return []
    if found.best is None:
        enough = "which is enough: search with it" if total <= found.ceiling else "less than is missing"
        return [f"--set train.loss=fused would free {binary_size(freed)} of these, {enough}"]
    takes = f"{three_digits(seconds)} s a step and {binary_size(total)}"
    return [f"with --set train.loss=fused this layout takes {takes}: search with it, others may then fit"]


def _missing(least: float | None, missing: int) -> str:
    """By the linear model of the smallest layout, if that is less than what it lacks."""
    if not least or least >= (1 - _NOTHING) * missing:
        return ""
    return f"; with other stages the smallest would still lack {binary_size(round(least))}"


def write_job(found: Found, file: Path, command: str) -> None:
    """The winner as a job file: everything that is not the schema's default, and all that the search chose.

    Raises UserError if the file cannot be written; a file that is there stays.
    """
    assert found.best is not None
    remark = f"Found by `{command}`: planned {_speed(found.best)}."  # in which a quoted value may hold new lines
    job = yaml.safe_dump(job_of(found.best), sort_keys=False, width=120, allow_unicode=True)
    write_new("--write", file, "".join(f"# {line}\n" for line in remark.splitlines()) + job)


def job_of(costed: Costed) -> dict[str, Any]:
    """The job as a nested mapping of a job file."""
    out = costed.config.model_dump(mode="json", exclude_defaults=True)
    out["model"] = {"card": costed.config.model.card} | out.get("model", {})  # the default's name may change
    for key, value in settings(costed).items():
        section, name = key.split(".")
        out.setdefault(section, {})[name] = value
    return out
