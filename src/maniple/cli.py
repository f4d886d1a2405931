"""The command line: train · plan · bench · preflight · models · convert · data · checkpoint · config.

Everything heavy is imported inside the command that needs it, so that `maniple --help` answers at once. Exit codes:
0, 2 for a user's mistake (one line on standard error), 130 for Ctrl-C, and whatever a job's workers ended with.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from maniple import __version__
from maniple.commands import AsJson, Command, Group, convert, models, plan, plan_calibrate, plan_scale, plan_search
from maniple.errors import UserError
from maniple.launch import worker
from maniple.terminal import in_one_line, prepare_output

app = typer.Typer(
    name="maniple",
    cls=Group,
    help="Trains mixture-of-experts language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(cls=Group, help="Datasets for training.")
config_app = typer.Typer(cls=Group, help="Job files.")
checkpoint_app = typer.Typer(cls=Group, help="Checkpoints of runs.")
bench_app = typer.Typer(cls=Group, help="Speeds of kernels on this machine.")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")
app.add_typer(models.app, name="models")
plan.app.command("search", cls=Command)(plan_search.search)
plan.app.command("scale", cls=Command)(plan_scale.scale)
plan.app.command("calibrate", cls=Command)(plan_calibrate.calibrate)
app.add_typer(plan.app, name="plan")
app.add_typer(convert.app, name="convert")

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="job file (YAML)")]
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="job file (YAML); none: the defaults")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="overrides, as with --set")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one value: train.steps=50")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        print(f"maniple {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=Command)
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
        from maniple.launch import dry_run as dry

        return dry.run(job, card, nproc=nproc, rank=rank, all_ranks=all_ranks, world_size=world_size, as_json=as_json)
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

    from maniple.launch.start import start
    from maniple.launch.torchrun import Launch

    launch = Launch(
        nproc=1 if nproc is None else nproc,
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
    words = ["train", *(f"--set={text}" for text in sets), "--", str(config)]
    return start(job, card, launch, words, nproc=nproc)


@bench_app.command("grouped-gemm", cls=Command)
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


@bench_app.command("moe-layer", cls=Command)
def moe_layer(
    model: Annotated[str, typer.Option(help="model card whose layer is measured")] = "qwen3-30b-a3b",
    variant: Annotated[
        str | None, typer.Option(metavar="full|tiny", help="the model's sizes; default: full on a GPU, tiny on a CPU")
    ] = None,
    expert_parallel_size: Annotated[int, typer.Option(help="ranks that the experts are spread over")] = 1,
    tokens: Annotated[int | None, typer.Option(help="tokens a rank; default: 16,384 on a GPU, 64 on a CPU")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="bf16, fp8, fp8_block or mxfp8, may be repeated; default: all")
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|gpu", help="what to measure")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds")] = False,
    liger: Annotated[bool, typer.Option(help="--no-liger: without the minutes that it takes to choose kernels")] = True,
    seed: Annotated[int, typer.Option(help="of the operands")] = 0,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the rows there too, as JSON lines")] = None,
) -> int:
    """Measure a model's MoE layer, router to combine, beside transformers' and Liger's, in turns in one process."""
    from maniple.bench import layer_command

    return layer_command.main(
        layer_command.Options(
            model=model,
            variant=variant,
            tokens=tokens,
            expert_parallel_size=expert_parallel_size,
            recipes=recipe or (),
            device=device,
            quick=quick,
            liger=liger,
            seed=seed,
            as_json=as_json,
            out=out,
        )
    )


@app.command(cls=Command)
def preflight(
    config: OptionalConfig = None, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False
) -> int:
    """Say what this machine lacks for training, or for one job: devices, libraries, limits, disk."""
    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.launch import preflight as machine
    from maniple.models import counting
    from maniple.plan.states import states

    job = load(config, [*(set_ or []), *(overrides or [])]).config
    if config is None:
        return machine.run(job.output_dir, as_json=as_json)
    each = sum(size for kind, size in states(job).items() if kind != "gradients")
    size = each * counting.count(resolve_card(job)).total_with_mtp
    return machine.run(job.run_dir, checkpoint_bytes=size, as_json=as_json)


@data_app.command(cls=Command)
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


@data_app.command(cls=Command)
def tokenizer(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="files or folders: JSON lines, or text")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="the tokenizer.json to write; must not exist")],
    vocab_size: Annotated[int, typer.Option(help="tokens, the end token and the 256 bytes among them")] = 32768,
    key: Annotated[str, typer.Option(help="JSON lines: the field that holds the text")] = "text",
    max_bytes: Annotated[
        int | None, typer.Option(help="of larger input, read evenly chosen pieces of so many bytes in all")
    ] = None,
) -> None:
    """Make a tokenizer.json from text: a byte-level BPE, which encodes any text."""
    from maniple.data.new_tokenizer import make_tokenizer

    made = make_tokenizer(inputs, output, vocab_size, key=key, max_bytes=max_bytes)
    fewer = "" if made.vocab_size == vocab_size else f" (the text has no more pairs; {vocab_size:,} were asked for)"
    read = f"{made.documents:,} documents, {made.characters:,} characters in {made.seconds:.1f} s"
    print(f"{made.path}: {made.vocab_size:,} tokens{fewer}, from {read}", file=sys.stderr)


@checkpoint_app.command(cls=Command)
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="RUN/checkpoints/step_…")], as_json: AsJson = False
) -> None:
    """Say what a checkpoint holds: step, model, layout, sizes, versions; with --json every tensor too."""
    from maniple.engines.megatron.checkpoint import report as checkpoint_report

    checkpoint_report.inspect(folder, as_json=as_json)


@checkpoint_app.command(cls=Command)
def verify(folder: Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint, or a run: all of its")]) -> None:
    """Read every file and compare it with its digest; exit code 2, and what is damaged, if one differs."""
    from maniple.engines.megatron.checkpoint import report as checkpoint_report

    checkpoint_report.verify(folder)


@config_app.command(cls=Command)
def show(config: OptionalConfig = None, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False) -> None:
    """Print every effective value of a job and where it came from."""
    from maniple.config.check import resolve_card
    from maniple.config.load import load
    from maniple.config.show import show as print_job

    loaded = load(config, [*(set_ or []), *(overrides or [])])
    resolve_card(loaded.config)  # overrides that make no model are refused here as they are by `train`
    print_job(loaded, as_json=as_json)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; a user's mistake becomes one line on standard error."""
    if sys.stdout is None:  # closed by who started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    prepare_output()
    try:
        code = app(arguments, prog_name="maniple", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except UserError as error:
        if worker.is_launched():
            worker.record(error, 2)  # the launcher prints it, once for all ranks
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
        if _is_output(error) and not worker.is_launched() and not worker.is_worker():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _complain(f"the output cannot be written: {error.strerror}")  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):  # a usage error of typer's
            context = getattr(error, "ctx", None)
            help_of = context.command_path if context else "maniple"
            _complain(f"{error.format_message().rstrip('.')} (see {help_of} --help)")
            return 2
        if isinstance(error, typer.Abort):
            return 130
        if worker.is_launched():  # the launcher prints it, if it was the first
            worker.record(error, 1)
            worker.leave(1)
        if worker.is_worker():
            worker.record(error, 1)
        raise


def _is_output(error: Exception) -> bool:
    """A full disk behind standard output: what fails at a file names it."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def _complain(message: str) -> None:
    print(f"maniple: error: {in_one_line(message)}", file=sys.stderr)
