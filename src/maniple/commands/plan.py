"""`maniple plan`: what a job will need, before it starts."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from maniple.commands import AsJson, Command, Group, check_targets, file_named, given, print_table, waiting
from maniple.commands.planned import (
    BATCH,
    EVEN_ENOUGH,
    SEQUENCE,
    Load,
    Measured,
    Model,
    Pods,
    for_search,
    gpu_named,
    is_layout,
    job_to_plan,
    model_asked_for,
    one_key_each,
    say_long,
    search_command,
)
from maniple.errors import UserError
from maniple.terminal import in_one_line


class _Plans(Group):
    """A word that is no command is the name of a card: `maniple plan deepseek-v3 --gpus 1024 --gpu mi355x`."""

    def parse_args(self, ctx, args):
        first = args[0] if args else "--help"
        if first in (*self.commands, "--help"):
            return super().parse_args(ctx, args or [first])
        if first and not first.startswith("-"):
            self._check_model(first)
            if args[1:] and not args[1].startswith("-"):
                raise UserError(f"maniple plan {first} {args[1]}: one MODEL is planned: leave {args[1]!r} out")
        return super().parse_args(ctx, ["job", *args])

    def _check_model(self, word: str) -> None:
        """UserError for a word that is neither a command nor a card: before options that it may need are missed."""
        from maniple.models import list_cards

        cards = list_cards()
        if word in cards or "/" in word or word.endswith((".yaml", ".yml")):  # a file, as `load_card` has it
            return
        meant, names = word.lower().replace("_", "-"), [*self.commands, *cards]
        near = [name for name in names if name.startswith(meant)] or get_close_matches(meant, names, n=2, cutoff=0.5)
        hint = f"commands are {', '.join(self.commands)}, and `maniple models` lists the cards"
        if near:
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        raise UserError(f"no command of maniple plan and no model card is named {word!r}: {hint}")


app = typer.Typer(
    cls=_Plans,
    help=(
        "What a job will need: `maniple plan MODEL --gpus N --gpu NAME` says whether it fits, and where it is tight; "
        "its options: `maniple plan job --help`."
    ),
)


@app.command(cls=Command)
def job(
    gpus: Annotated[int, typer.Option(help="GPUs of the whole job")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU card: h200, mi355x, ...")],
    model: Model = None,
    config: Annotated[
        Path | None, typer.Option(parser=file_named, metavar="FILE", help="job file (YAML); none: the defaults")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override one value: parallel.expert_parallel_size=8"),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="also run a step of the tightest rank without a GPU, and compare")
    ] = False,
    imbalance: Load = EVEN_ENOUGH,
    calibration: Measured = None,
    fabric: Pods = None,
    trace_rank: Annotated[
        list[int] | None, typer.Option(metavar="RANK", help="the same of this rank of the job; may be repeated")
    ] = None,
    pipeline_trace: Annotated[
        Path | None,
        typer.Option(
            parser=file_named, metavar="FILE", help="write the simulated pipeline there, for Perfetto or Chrome"
        ),
    ] = None,
    report_: Annotated[
        Path | None,
        typer.Option(
            "--report",
            parser=file_named,
            metavar="FILE",
            help="write a page there, with plans around this one: HTML, one file",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="what if the pipeline ran zb-h1 or zbv: simulated only, the engine runs 1f1b, interleaved",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what each rank of a job needs of its GPU, whether it fits, and how long a step takes."""
    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.hardware.units import binary_size
    from maniple.plan import report, time_report
    from maniple.plan.advice import advice
    from maniple.plan.imbalance import Imbalance
    from maniple.plan.schedules import SPLIT
    from maniple.plan.time import estimate

    simulated = schedule in SPLIT
    for option, asked_for in (("--trace", trace or bool(trace_rank)), ("--report", report_ is not None)):
        if simulated and asked_for:
            raise UserError(f"--schedule {schedule} is simulated only, and {option} is of the engine's: leave one out")
    uneven = Imbalance.parse(imbalance)
    card_of_gpu = gpu_named(gpu, gpus, calibration, fabric)
    check_targets(("--report", report_), ("--pipeline-trace", pipeline_trace))
    sets = one_key_each(set_ or [])
    model = model_asked_for(model, config, sets)
    loaded = load(config, [*sets, f"model.card={json.dumps(model, ensure_ascii=False)}"])
    config_, assumed = _with_batch(loaded, gpus)
    card = resolve_card(config_)
    say_long(config_, card)
    plan = report.memory_plan(config_, card, card_of_gpu, gpus, uneven, schedule)
    time = estimate(config_, card, card_of_gpu, gpus, imbalance=uneven, schedule=schedule)
    help_ = (
        None
        if simulated
        else advice(plan, uneven, schedule, for_search(config, calibration, fabric, imbalance, sets, config_))
    )
    best = None
    if config is None and gpus > 1 and not simulated and not any(is_layout(text) for text in sets):
        with waiting("looking for the best layout"):
            best = _best(model, sets, config_, card_of_gpu, gpus, imbalance, calibration)
    ranks: list[int | None] = [*(trace_rank or [])] or ([None] if trace else [])
    traced = [_traced(plan, rank) for rank in ranks]
    if report_ is not None:  # before the trace, since it takes longer: whoever interrupts it finds neither
        from maniple.plan import html_report

        words = ["maniple", "plan", model, "--gpus", str(gpus), "--gpu", gpu]
        words += given(("--config", config), ("--calibration", calibration), ("--fabric", fabric))
        words += given(*(("--set", text) for text in sets))
        words += given(*(("--set", f"{key}={value}") for key, value in assumed.items()))
        more = tuple(line for line in (help_, best) if line is not None)
        asked = html_report.Asked(config_, card, card_of_gpu, gpus, imbalance, words, assumed, more)
        html_report.write(asked, report_)
    if pipeline_trace is not None:
        number = time_report.write_timeline(
            config_, card, card_of_gpu, gpus, pipeline_trace, imbalance=uneven, schedule=schedule
        )
        written = f"{number} micro-batches of the pipeline; the optimizer comes after"
        print(f"maniple: {in_one_line(str(pipeline_trace))}: {written}", file=sys.stderr)
    if as_json:
        said = report.as_json(plan) | {"time": time_report.as_json(time), "assumed": assumed}
        said |= {"advice": help_, "best_layout": best}
        said |= {"simulated_only": True} if simulated else {}
        print(json.dumps(said | ({"trace": traced[0], "traces": traced} if traced else {}), indent=2))
        return
    where = plan.placement
    print(f"{card.name} on {gpus:,} x {card_of_gpu.name}: {report.layout_of(where, config_)}")
    if assumed:
        print("assumed: " + ", ".join(f"{key}={value}" for key, value in assumed.items()))
    headings, unit = report.rank_headings(plan), report.unit_of(plan)
    print_table(headings, report.rank_rows(plan), range(2, len(headings)), report.SPARE)
    print()
    print_table([f"rank {plan.tightest.rank}", "", unit], report.component_rows(plan), numbers=[2])
    print()
    for one in traced:
        off = round(one["difference"], 3) or 0.0  # not -0.0
        print(
            f"trace of rank {one['rank']} of the job, which is in pipeline rank {one['pipeline_rank']}, evenly loaded: "
            f"{binary_size(one['peak'])} of tensors in {one['phase']}, by formula {binary_size(one['formula'])} "
            f"({off:+.1%}); there then, beside the states: "
            + ", ".join(f"{module} {binary_size(size)}" for module, size in list(one["at_peak"].items())[:_PARTS])
        )
        print()
    print_table(time_report.headings(time), time_report.rows(time), numbers=[1, 2])
    for note in time_report.notes(time):
        print(note)
    print()
    print(time_report.headline(time))
    if simulated:
        print(f"schedule {schedule}: simulated only; the engine runs 1f1b and interleaved")
    for line in (report.host_line(plan), plan.verdict, plan.band, help_, best):
        if line is not None:
            print(line)


def _best(model: str, sets: list[str], config, gpu, gpus: int, imbalance: str, calibration: Path | None) -> str:
    """A line for a job of which no layout was given: what `maniple plan search` finds for the same tokens."""
    from maniple.hardware.units import binary_size, three_digits
    from maniple.plan import search_report
    from maniple.plan.imbalance import Imbalance
    from maniple.plan.report import certain
    from maniple.plan.search_context import search_contexts

    batch, length = config.train.global_batch_size, config.data.sequence_length
    rest = [text for text in sets if text.partition("=")[0].strip() not in BATCH]
    asked = job_to_plan(model, None, rest, gpus, batch, length)
    uneven = Imbalance.parse(imbalance)
    best = search_contexts(asked.config, asked.card, gpu, gpus, held=asked.held, imbalance=uneven)[0].best
    options = for_search(None, calibration, gpu.fabric, imbalance, sets, config)
    if best is None:
        command = search_command(model, gpus, gpu.name, options)
        return f"no layout was given, and none fits: `{command}` says what is missing"
    command = search_command(model, gpus, gpu.name, [*options, "--write", "job.yaml"])
    doubt = "" if certain(best.memory.total, gpu) else ", which is not certain to fit"
    return (
        f"no layout was given; the best is {search_report.said(best)}: {three_digits(best.time.seconds)} s for as many "
        f"tokens, {binary_size(best.memory.total)}{doubt}: `{command}` says why, and writes it"
    )


def _with_batch(loaded, gpus: int) -> tuple[Any, dict[str, Any]]:
    """The job, with the batch that it does not give: (it, what was assumed). A job without a file has the defaults of a
    laptop, whose batch and sequence would say nothing of many GPUs."""
    from maniple.config.check import data_parallel_size, resolve_card

    config, assumed = loaded.config, {}

    def is_default(key: str) -> bool:
        return loaded.origin[key].kind == "default"

    data, train, parallel = config.data, config.train, config.parallel
    if is_default("data.sequence_length"):
        length = min(SEQUENCE, resolve_card(config).max_position)
        data = data.model_copy(update={"sequence_length": length})
        assumed["data.sequence_length"] = length
    if is_default("train.global_batch_size"):
        ranks = max(1, data_parallel_size(config, gpus))
        size = ranks * train.micro_batch_size * _PASSES * parallel.pipeline_parallel_size
        train = train.model_copy(update={"global_batch_size": size})
        assumed["train.global_batch_size"] = size
    return config.model_copy(update={"data": data, "train": train}), assumed


_PARTS = 4  # modules that a line names
_PASSES = 4  # micro-batches for each pipeline rank: enough to fill it


def _traced(plan, rank: int | None) -> dict[str, Any]:
    """A dry run of a rank, None: the tightest, beside what the formulas say of tensors there."""
    from maniple.plan import memory
    from maniple.plan.imbalance import BALANCED
    from maniple.plan.profile import DRY_RUN

    where = plan.placement
    # ranks are numbered tensor first, then context, ..., the pipeline last
    a_stage = where.world_size // where.pipeline
    if rank is None:
        rank = plan.tightest.rank * a_stage + min(1, where.context - 1) * where.tensor
    if not 0 <= rank < where.world_size:
        raise UserError(f"--trace-rank {rank}: the job's ranks are 0 to {where.world_size - 1}")
    place_in_pipeline, context_rank = rank // a_stage, rank // where.tensor % where.context
    print(f"maniple: dry run of rank {rank}; with many layers it takes minutes", file=sys.stderr, flush=True)
    from maniple.engines.megatron.dry_run import one_rank

    result = one_rank.trace(plan.config, plan.card, rank, where.world_size)
    formula = memory.of_job(
        plan.config, plan.card, where.world_size, DRY_RUN, imbalance=BALANCED, context_rank=context_rank
    )
    expected = formula[place_in_pipeline].peak
    return {
        "rank": rank,
        "pipeline_rank": place_in_pipeline,
        "peak": result.peak_bytes,
        "formula": expected,
        "difference": expected / result.peak_bytes - 1,
        "phase": result.phase,
        "peaks": result.peaks,
        "at_peak": result.at_peak,
        "parameters": result.parameters,
        "seconds": result.seconds,
    }
