"""Published training runs against the planner's time: `python -m tests.plan.published` prints every row, misses too.

A row's missing fields take what its source documents as default; `_defaults` says what, and each row prints it. Nothing
is fitted to a row. The measured figure is tokens a second and GPU, else seconds a step, else TFLOP/s by our FLOPs.

Rows of H800, B300 and GB300 are held out: no constant was chosen with them in sight, and their cards take the attained
shares of H200 and B200. `--refit` chooses anew the two constants of `hardware/efficiencies.yaml` that were chosen on
these runs, without the runs of each family in turn.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path

from maniple.config.schema import TrainConfig
from maniple.hardware import GPU, load_gpu
from maniple.hardware.efficiency import load_software
from maniple.models import load_card
from maniple.models.card import ModelCard
from maniple.models.flops import training_flops_per_token
from maniple.plan.imbalance import BALANCED, Imbalance
from maniple.plan.time import StepTime, estimate

DATA = Path(__file__).parent / "data" / "published_runs.csv"
_MODELS = {
    "deepseekv3": "deepseek-v3",
    "deepseekv2": "deepseek-v2",
    "gptoss120b": "gpt-oss-120b",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3235b": "qwen3-235b-a22b",
    "kimik2": "kimi-k2",
    "mixtral8x22b": "mixtral-8x22b",
}
_GPUS = {"H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200", "GB200": "gb200-nvl72", "MI355X": "mi355x"}
_HELD_OUT = {"H800": "h800-sxm", "B300": "b300", "GB300": "gb300-nvl72"}
_SAME_RECIPES = {"gb300-nvl72": "gb200-nvl72"}  # GPUs that a source trains alike
_RECIPES = {"BF16": "bf16", "BF16?": "bf16", "": "bf16", "MXFP8": "mxfp8", "FP8-MX": "mxfp8"}
_RECIPES |= {"FP8": "fp8", "FP8-CS": "fp8", "FP8-blockwise": "fp8_block"}


@dataclass(frozen=True)
class Run:
    line: int
    source: str
    model: str
    hardware: str  # as the source calls it
    gpu: GPU
    world: int
    measured: float  # tokens a second and GPU
    job: dict
    card: ModelCard
    options: dict
    assumed: tuple[str, ...]
    layout: str  # in words
    config: str = field(compare=False)  # all that makes two rows runs of one configuration

    @property
    def family(self) -> tuple[str, str, str]:
        return self.card.name, self.hardware, self.job["precision"]["recipe"]

    @property
    def held_out(self) -> bool:
        return self.hardware in _HELD_OUT

    def estimate(self, **changed) -> StepTime:
        """changed: of the run's software."""
        config = TrainConfig.model_validate(self.job)
        software = load_software(self.options["software"])
        options = self.options | {"software": software.model_copy(update=changed)}
        return estimate(config, self.card, self.gpu, self.world, **options)


@cache
def runs() -> tuple[tuple[Run, ...], tuple[tuple[int, str, str], ...]]:
    """The rows that can be estimated, and those that cannot: (line, what it is, why)."""
    good, left = [], []
    with DATA.open(encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                good.append(_run(line, row))
            except _LeftOutError as why:
                left.append((line, f"{row['model']} {row['hw']} {row['gpus']} {row['precision']}", str(why)))
    return tuple(good), tuple(left)


class _LeftOutError(Exception):
    pass


def _run(line: int, row: dict[str, str]) -> Run:
    name = re.sub(r"\(.*?\)|[^a-z0-9]", "", row["model"].lower())
    card_name = next((card for prefix, card in _MODELS.items() if name.startswith(prefix)), None)
    if card_name is None:
        raise _LeftOutError("no model card")
    hardware = row["hw"].removesuffix(" class")
    gpu = (_GPUS | _HELD_OUT).get(hardware)
    if gpu is None:
        raise _LeftOutError("no GPU card")
    if row["precision"] not in _RECIPES:
        raise _LeftOutError(f"precision {row['precision']} is not a recipe")
    if not row["ep"]:
        raise _LeftOutError("its layout was not published")
    source, assumed = row["source"], []
    card, recipe = load_card(card_name), _RECIPES[row["precision"]]
    if not row["precision"]:
        assumed.append("bf16")
    cut = re.search(r"(\d+)-layer", row["model"])
    if cut:
        dense = 1
        card = card.with_overrides({"num_layers": int(cut[1]), "num_mtp_layers": 0, "moe": {"num_dense_layers": dense}})
    if "w/o MTP" in row["model"] or "automodel" in source:
        card = card.with_overrides({"num_mtp_layers": 0})
    world = int(row["gpus"])
    sizes = {key: int(row[key] or 1) for key in ("tp", "pp", "ep", "cp", "etp")}
    chunks = int(row["vpp"] or 0) or 1
    overlap, graphs, modules, granular, more = _defaults(row, card_name, gpu)
    assumed += more
    if overlap and sizes["pp"] > 1 and chunks == 1:
        chunks = 2
        assumed.append("VPP 2, as exchange overlap needs several chunks")
    sequence = int(row["seq"] or (4096 if not row["seq"] else 0))
    micro = int(row["mbs"] or (4 if "Primus" in source else 1))
    data = world // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    batch = int(row["gbs"] or (micro * data * 64 if sizes["pp"] > 1 else micro * data * 4))
    for key, value in (("seq", sequence), ("mbs", micro), ("gbs", batch)):
        if not row[key]:
            assumed.append(f"{key} {value}")
    if batch % (micro * data):
        raise _LeftOutError(f"global batch {batch} is not a multiple of {micro} x {data} ranks")
    if chunks > 1 and batch // (micro * data) % sizes["pp"]:
        raise _LeftOutError("micro-batches do not divide over the pipeline, which interleaving needs")
    stages = sizes["pp"] * chunks
    layout = _layout(card, stages)
    job = {
        "parallel": {
            "tensor_parallel_size": sizes["tp"],
            "pipeline_parallel_size": sizes["pp"],
            "context_parallel_size": sizes["cp"],
            "expert_parallel_size": sizes["ep"],
            "expert_tensor_parallel_size": sizes["etp"],
            "pipeline_layout": layout,
            "overlap_grad_reduce": True,
            "overlap_param_gather": not overlap,
        },
        "moe": {"overlap_exchange": overlap},
        "precision": {"recipe": recipe},
        "recompute": granular,
        "data": {"sequence_length": sequence},
        "train": {"micro_batch_size": micro, "global_batch_size": batch, "steps": 1000},
    }
    measured = _measured(row, card, sequence, batch, world)
    software = "primus-unfused" if "Primus" in source else "megatron-te"
    natural = "natural" in row["overlap/dispatcher"] or "automodel" in source or "pytorch.org" in source
    if graphs == "full" and "Megatron-Bridge" in source:
        software = "megatron-te-fused"
    options = {
        "software": "megatron-te-alltoall" if "alltoall" in source + row["overlap/dispatcher"] else software,
        "imbalance": Imbalance() if natural else BALANCED,
        "graphs": graphs,
        "recompute_modules": tuple(modules),
        "schedule": {"zero-bubble": "zb-h1", "zbv": "zbv"}.get(row["overlap/dispatcher"]),
    }
    if row["overlap/dispatcher"] == "v-half":
        raise _LeftOutError(f"schedule {row['overlap/dispatcher']}: chunks placed as a V, which no layout here is")
    words = " ".join(f"{key}{value}" for key, value in {**sizes, "vpp": chunks}.items() if value > 1)
    return Run(
        line,
        source,
        row["model"],
        hardware,
        load_gpu(gpu),
        world,
        measured,
        job,
        card,
        options,
        tuple(assumed),
        f"{words} mbs{micro} gbs{batch} seq{sequence}",
        f"{card_name} {card.num_layers} {card.num_mtp_layers} {hardware} {world} {recipe} {words} {micro} {batch} "
        f"{sequence} {natural} {overlap}",
    )


def _defaults(row: dict[str, str], card: str, gpu: str) -> tuple[bool, str, list[str], dict, list[str]]:
    """Exchange overlap, graphs, extra recomputed modules, recompute section, and in words what of it was assumed."""
    source, text, gpu = row["source"], row["overlap/dispatcher"].lower(), _SAME_RECIPES.get(gpu, gpu)
    release = re.search(r"\[(\d+)\.(\d+)", source)
    version = (int(release[1]), int(release[2])) if release else (26, 4)
    overlap, graphs, modules, assumed = "ep overlap" in text or "1f1b overlap" in text, "none", [], []
    if "no ep overlap" in text:
        overlap = False
    section: dict = {}
    known = row["recompute"].split(",") if row["recompute"] not in ("", "none") else []
    if known == ["full"]:
        section = {"granularity": "full"}
    elif known:
        modules = known
    if "full cg" in text:
        graphs = "full"
    elif "cg" in text or "graph" in text:
        graphs = "attention"
    if "Megatron-Bridge docs" in source:
        # the recipes of release 0.7, perf_recipes/*/*.py
        if card in ("deepseek-v3", "kimi-k2"):
            modules = ["mla_up_proj"] + (["mlp"] if gpu == "h100-sxm" else [])
        if card == "gpt-oss-120b":
            modules = ["layernorm", "moe_act"]
        if gpu == "gb200-nvl72":
            graphs = "full" if version >= (26, 6) else "attention"
        elif card == "qwen3-30b-a3b" and version >= (26, 2):
            graphs = "attention"
        overlap = (card, gpu) in (("qwen3-235b-a22b", "h100-sxm"), ("gpt-oss-120b", "gb200-nvl72"))
        assumed.append("recompute, graphs and overlap of Megatron-Bridge's recipe")
    if "moe_recipes" in source:
        modules = {"deepseek-v3": ["mla_up_proj"]}.get(card, ["moe_act", "layernorm"] if "moe_act" in text else [])
    return overlap, graphs, modules, section, assumed


def _layout(card: ModelCard, stages: int) -> str | None:
    """As the sources say: DeepSeek's and Kimi's 16 stages of 4 layers; else embedding and loss count as a layer each if
    that divides, else layers alone; else as even as can be, the rest at the front."""
    layers, ahead = card.num_layers, card.num_mtp_layers
    if stages == 1:
        return None
    if layers == 61 and stages == 16:
        return f"Et*4|(tttt|)*14t{'m' * ahead}L"
    if layers % stages == 0 and not ahead:
        return None
    if (layers + 2) % stages == 0 and not ahead:
        each = (layers + 2) // stages
        return "|".join(["E" + "t" * (each - 1), *["t" * each] * (stages - 2), "t" * (each - 1) + "L"])
    if layers == 61 and stages == 32:
        return "Et*3|(tt|)*29m|L" if ahead else "Et|(tt|)*30L"
    each, more = divmod(layers + 1 + ahead, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[-1] -= 1 + ahead
    texts = ["t" * size for size in sizes]
    return "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "m" * ahead + "L"])


def _measured(row: dict[str, str], card: ModelCard, sequence: int, batch: int, world: int) -> float:
    def number(key: str) -> float | None:
        found = re.match(r"[\d.]+", row[key])
        return float(found[0]) if found else None

    if tokens := number("tok_s_gpu"):
        return tokens
    if seconds := number("step_s"):
        return batch * sequence / seconds / world
    if tflops := number("tflops_per_gpu"):
        return tflops * 1e12 / training_flops_per_token(card, sequence)
    raise _LeftOutError("no figure was published")


@cache
def ratios(**changed: float) -> tuple[tuple[Run, float], ...]:
    """Every run, and its estimated speed over the measured one."""
    return tuple((run, run.estimate(**changed).tokens_per_second_per_gpu / run.measured) for run in runs()[0])


def median_error(some: Iterable[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in some)


def by_configuration(rows: Sequence[tuple[Run, float]], which: Callable[[list[float]], float]) -> list[float]:
    """Estimated over measured speed, once a configuration: of its runs `which` measured speed counts (max, median)."""
    same = defaultdict(list)
    for run, ratio in rows:
        same[run.config].append((run.measured * ratio, run.measured))
    return [which([planned for planned, _ in group]) / which([seen for _, seen in group]) for group in same.values()]


def misordered() -> tuple[int, list[str]]:
    """Pairs of runs of one source that differ in layout alone, and by more than 2 %; which of them we rank wrongly."""
    families = defaultdict(list)
    for run, ratio in ratios():
        job = run.job
        what = run.source, run.card, run.hardware, run.world, job["precision"]["recipe"], job["data"]["sequence_length"]
        families[repr(what)].append((run, run.measured * ratio))
    pairs, wrong = 0, []
    for family in families.values():
        for (one, planned), (other, its) in combinations(family, 2):
            if one.config == other.config or abs(one.measured / other.measured - 1) < 0.02:
                continue
            pairs += 1
            if (one.measured > other.measured) != (planned > its):
                wrong.append(f"lines {one.line} and {other.line}")
    return pairs, wrong


def report() -> str:
    seen = [(run, ratio) for run, ratio in ratios() if not run.held_out]
    held = [(run, ratio) for run, ratio in ratios() if run.held_out]
    lines = ["line model, GPU, GPUs, recipe, layout; tokens a second and GPU, measured and planned; what was assumed"]
    for title, rows in (("", seen), ("held out:", held)):
        lines += [title] if title else []
        for run, ratio in rows:
            lines.append(
                f"{run.line:4} {run.model[:26]:26} {run.hardware:7} {run.world:5} {run.job['precision']['recipe']:9} "
                f"{run.layout:48} {run.measured:8,.0f} {run.measured * ratio:8,.0f} {ratio - 1:+7.1%}  "
                f"{run.options['software']}, graphs {run.options['graphs']}; {'; '.join(run.assumed)} "
                f"({run.source[:40]})"
            )
    lines += ["left out:", *(f"{line:4} {what}: {why}" for line, what, why in runs()[1])]
    for title, rows in (("rows", seen), ("held-out rows", held)):
        each = [ratio for _, ratio in rows]
        best, middle = (by_configuration(rows, which) for which in (max, statistics.median))
        lines.append(
            f"{len(each)} {title}, {len(best)} configurations: median |error| {median_error(each):.1%}, of the best "
            f"runs {median_error(best):.1%}, of the median runs {median_error(middle):.1%}"
        )
    pairs, wrong = misordered()
    lines.append(f"{pairs} pairs that differ in layout alone, ranked wrongly: {', '.join(wrong) or 'none'}")
    families = defaultdict(list)
    for run, ratio in seen:
        families[run.family].append(ratio)
    lines += [
        f"  {' '.join(family):40} {len(some):3} rows, planned over measured {statistics.median(some):.2f}, "
        f"median |error| {median_error(some):.1%}"
        for family, some in families.items()
    ]
    return "\n".join(lines)


def refitted() -> str:
    """The two chosen constants without one family at a time, and the errors of the family that was left out."""
    grid = [{"gap_microseconds": gap, "permutation": share} for gap in (6, 8, 10, 12) for share in (0.2, 0.3, 0.45)]
    tables = []
    for point in grid:
        rows = []
        for run in runs()[0]:
            own = load_software(run.options["software"])
            changed = point if own.permutation == 0.3 else {"gap_microseconds": point["gap_microseconds"]}
            ratio = run.estimate(**changed).tokens_per_second_per_gpu / run.measured
            if not run.held_out:
                rows.append((run.family, ratio))
        tables.append(rows)
    lines, left = [], []
    for family in dict.fromkeys(family for family, _ in tables[0]):
        kept = [median_error(ratio for other, ratio in rows if other != family) for rows in tables]
        chosen = kept.index(min(kept))
        errors = [ratio for other, ratio in tables[chosen] if other == family]
        left += errors
        lines.append(
            f"without {' '.join(family):40} chosen {grid[chosen]}: its median |error| {median_error(errors):.1%}"
        )
    return "\n".join([*lines, f"all families, each left out: median |error| {median_error(left):.1%}"])


if __name__ == "__main__":
    print(refitted() if "--refit" in sys.argv else report())
