"""The command line: `maniple train · bench · preflight · models · data prepare · checkpoint … · config show`.

Everything heavy is imported inside the command that needs it, so that `maniple --help` answers at once. Exit codes:
0, 2 for a user's mistake (one line on standard error), 130 for Ctrl-C, and whatever a job's workers ended with.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maniple import __version__
from maniple.errors import UserError
from maniple.launch import worker

if TYPE_CHECKING:
    from maniple.config.schema import TrainConfig
    from maniple.launch.torchrun import Launch
    from maniple.models.card import ModelCard

app = typer.Typer(
    name="maniple",
    help="Trains mixture-of-experts language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Datasets for training.")
config_app = typer.Typer(help="Job files.")
checkpoint_app = typer.Typer(help="Checkpoints of runs.")
bench_app = typer.Typer(help="Speeds of kernels on this machine.")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="job file (YAML)")]
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="job file (YAML); none: the defaults")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="overrides, as with --set")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one value: train.steps=50")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        print(f"maniple {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    set_: Set = None,
    nproc: Annotated[
        int | None, typer.Option(help="processes on this node; default: one a visible GPU, else 1")
    ] = None,
    name: Annotated[str | None, typer.Option(help="the run's name: its folder is runs/NAME")] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|DIR", help="go on from a checkpoint")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="one step of one rank, without a GPU or memory")] = False,
    rank: Annotated[int | None, typer.Option(help="with --dry-run: which rank (default 0)")] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="with --dry-run: every distinct rank, and whether they fit together")
    ] = False,
    world_size: Annotated[int | None, typer.Option(help="with --dry-run: ranks of the whole job")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --dry-run: JSON on standard output")] = False,
    nnodes: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="nodes; run the same command on each; MIN:MAX: go on with fewer")
    ] = "1",
    node_rank: Annotated[int | None, typer.Option(help="this node's number, from 0")] = None,
    master_addr: Annotated[str | None, typer.Option(help="host of node 0")] = None,
    master_port: Annotated[int | None, typer.Option(help="a free port of node 0")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="rendezvous instead of --master-*, as in torchrun")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="where the nodes meet")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="the job's name at the rendezvous")] = None,
    rdzv_conf: Annotated[str | None, typer.Option(help="as in torchrun, e.g. join_timeout=600")] = None,
    max_restarts: Annotated[int, typer.Option(help="start the processes again after a failure, so often")] = 0,
) -> int:
    """Train a model: starts one process a GPU through torchrun, or is one of them where torchrun started it."""
    from maniple.config.check import check, resolve_card
    from maniple.config.load import load

    sets = [*(set_ or []), *(overrides or [])]
    sets += [] if name is None else [f"name={json.dumps(name, ensure_ascii=False)}"]
    sets += [] if resume is None else [f"checkpoint.resume={json.dumps(resume, ensure_ascii=False)}"]
    job = load(config, sets).config
    card = resolve_card(job)

    if dry_run:
        if world_size is None:
            raise UserError("--dry-run needs --world-size: the number of ranks of the job it stands for")
        check(job, card, world_size)
        if not 0 <= (rank or 0) < world_size:
            raise UserError(f"--rank {rank}: expected 0 to {world_size - 1} for --world-size {world_size}")
        if all_ranks:
            if rank is not None:
                raise UserError("--all-ranks runs every distinct rank: leave --rank out")
            from maniple.engines.megatron.dry_run import all_ranks as every

            return every.run(job, card, world_size, as_json=as_json)
        from maniple.engines.megatron.dry_run import one_rank as dry

        return dry.run(job, card, rank or 0, world_size, as_json=as_json)
    if rank is not None or world_size is not None or all_ranks or as_json:
        raise UserError(
            "--rank, --all-ranks, --world-size and --json belong to --dry-run; --nproc sets how many processes train"
        )

    if worker.is_worker():
        if nproc is not None:
            raise UserError("--nproc starts torchrun, and torchrun has already started this process: leave --nproc out")
        if worker.is_launched():
            worker.end_with_launcher()
        check(job, card, worker.world_size())
        faulthandler.enable(file=2)
        from maniple.engines.megatron import trainer

        return trainer.main(job, card, restarted=worker.is_restarted(), report=worker.report)

    from maniple.launch import torchrun

    launch = torchrun.Launch(
        nproc=_processes(nproc, job.train.device),
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        rdzv_conf=rdzv_conf,
        max_restarts=max_restarts,
        stop_grace_seconds=job.train.stop_grace_seconds,
    )
    launch.check()
    check(job, card, launch.world_size, gpus_per_node=launch.nproc)
    launch = replace(launch, fits=_fitting_nodes(job, card, launch))
    from maniple.data.sources import check_files

    check_files(job.data)
    return torchrun.run(launch, "maniple", ["train", *(f"--set={text}" for text in sets), "--", str(config)])


def _fitting_nodes(job: TrainConfig, card: ModelCard, launch: Launch) -> frozenset[int]:
    """The numbers of nodes that the job fits. UserError, naming them, if the least that it may go on with is none."""
    from maniple.config.check import check

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


def _processes(nproc: int | None, device: str) -> int:
    """Processes to start on this node: what was asked, else one a GPU; UserError where the GPUs do not suffice."""
    if device == "cpu":
        return 1 if nproc is None else nproc
    from maniple.launch.torchrun import visible_gpus

    gpus = visible_gpus()
    if device == "gpu" and not gpus:
        raise UserError("train.device is gpu and torch sees no GPU: check the driver, or set train.device=cpu")
    if nproc is None:
        return max(1, gpus)
    if gpus and nproc > gpus:
        raise UserError(f"--nproc {nproc} and {gpus} visible GPUs: lower --nproc, or set train.device=cpu")
    return nproc


@bench_app.command("grouped-gemm")
def grouped_gemm(
    model: Annotated[str, typer.Option(help="model card whose experts are measured")] = "qwen3-30b-a3b",
    variant: Annotated[
        str | None, typer.Option(metavar="full|tiny", help="the model's sizes; default: full on a GPU, tiny on a CPU")
    ] = None,
    expert_parallel_size: Annotated[int, typer.Option(help="ranks that the experts are spread over")] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="tokens a rank; rows are tokens times top-k; default: 8,192 on a GPU")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="rows of a product instead of --tokens; default on a CPU: 256")
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="bf16, fp8, fp8_block or mxfp8, may be repeated; default: all")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="one of our implementations, of bf16 if no --recipe; default: all")
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|gpu", help="what to measure")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds")] = False,
    seed: Annotated[int, typer.Option(help="of group sizes and operands")] = 0,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the rows there too, as JSON lines")] = None,
) -> int:
    """Measure the expert products of a model beside torch, DeepGEMM and a dense product, in turns in one process."""
    from maniple.bench import command

    return command.main(
        command.Options(
            model=model,
            variant=variant,
            tokens=tokens,
            rows=rows,
            expert_parallel_size=expert_parallel_size,
            recipes=recipe or (),
            kernels=kernels,
            device=device,
            quick=quick,
            seed=seed,
            as_json=as_json,
            out=out,
        )
    )


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="one model: its whole card")] = None, as_json: AsJson = False
) -> None:
    """List the model cards, with exact parameter counts."""
    from maniple.models import load_card
    from maniple.models.table import row, rows

    if name is None:
        every = rows()
        if as_json:
            print(json.dumps(every, indent=2))
        else:
            _print_table(
                ["model", "total", "active", "layers", "experts", "top-k", "attention", "router"],
                [
                    [
                        facts["name"],
                        f"{facts['total_parameters'] / 1e9:.2f}B",
                        f"{facts['active_parameters'] / 1e9:.2f}B",
                        f"{facts['layers']}" + (f" + {facts['mtp_layers']} MTP" if facts["mtp_layers"] else ""),
                        *(str(facts[key]) for key in ("experts", "topk", "attention", "router")),
                    ]
                    for facts in every
                ],
                numbers=range(1, 6),
            )
        return
    card = load_card(name)
    facts = row(card) | {"card": card.model_dump(mode="json")}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        lines = [[key, f"{value:,}" if type(value) is int else str(value)] for key, value in _flat(facts)]
        _print_table(["fact", "value"], lines)


def _print_table(headings: list[str], lines: list[list[str]], numbers: Iterable[int] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in numbers else "left")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def _flat(facts: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@app.command()
def preflight(
    config: OptionalConfig = None, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False
) -> int:
    """Say what this machine lacks for training, or for one job: devices, libraries, limits, disk."""
    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.launch import preflight as machine
    from maniple.models import counting

    job = load(config, [*(set_ or []), *(overrides or [])]).config
    if config is None:
        return machine.run(job.output_dir, as_json=as_json)
    # weights, and Adam's two moments in fp32; beside bf16 weights their fp32 originals
    each = 12 if job.precision.dtype == "fp32" else 14
    size = each * counting.count(resolve_card(job)).total_with_mtp
    return machine.run(job.run_dir, checkpoint_bytes=size, as_json=as_json)


@data_app.command()
def prepare(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="files or folders: JSON lines, or text")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a folder that transformers can read")],
    key: Annotated[str, typer.Option(help="JSON lines: the field that holds the text")] = "text",
    workers: Annotated[int | None, typer.Option(help="processes; default: one a core")] = None,
    append_eod: Annotated[bool, typer.Option(help="end each document with the tokenizer's end token")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing dataset")] = False,
) -> None:
    """Tokenize text into a dataset that `data.source: megatron` reads."""
    from maniple.data.prepare import prepare as run

    done = run(
        inputs,
        output,
        tokenizer,
        key=key,
        workers=len(os.sched_getaffinity(0)) if workers is None else workers,
        append_eod=append_eod,
        resume=resume,
        overwrite=overwrite,
    )
    print(f"{output}: {done.documents:,} documents, {done.tokens:,} tokens in {done.seconds:.1f} s", file=sys.stderr)


@checkpoint_app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="RUN/checkpoints/step_…")], as_json: AsJson = False
) -> None:
    """Say what a checkpoint holds: step, model, layout, sizes, versions; with --json every tensor too."""
    from maniple.engines.megatron.checkpoint import report as checkpoint_report

    checkpoint_report.inspect(folder, as_json=as_json)


@checkpoint_app.command()
def verify(folder: Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint, or a run: all of its")]) -> None:
    """Read every file and compare it with its digest; exit code 2, and what is damaged, if one differs."""
    from maniple.engines.megatron.checkpoint import report as checkpoint_report

    checkpoint_report.verify(folder)


@config_app.command()
def show(config: OptionalConfig = None, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False) -> None:
    """Print every effective value of a job and where it came from."""
    from maniple.config.load import load
    from maniple.config.show import show as print_job

    print_job(load(config, [*(set_ or []), *(overrides or [])]), as_json=as_json)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; a user's mistake becomes one line on standard error."""
    try:
        code = app(arguments, prog_name="maniple", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except UserError as error:
        if worker.is_launched():
            worker.record(error)  # the launcher prints it, once for all ranks
            worker.leave(2)
        else:
            _complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `maniple models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer's
            context = getattr(error, "ctx", None)
            help_of = context.command_path if context else "maniple"
            _complain(f"{error.format_message().rstrip('.')} (see {help_of} --help)")
            return 2
        if isinstance(error, typer.Abort):
            return 130
        if worker.is_launched():  # the launcher prints it, if it was the first
            worker.record(error)
            worker.leave(1)
        if worker.is_worker():
            worker.record(error)
        raise


def _complain(message: str) -> None:
    print(f"maniple: error: {' '.join(message.splitlines())}", file=sys.stderr)
