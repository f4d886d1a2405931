"""How long a training step takes: stages' passes, through the pipeline simulator, then gradients and optimizer.

Seconds are those of the whole job: every rank waits for the slowest when the gradients' norm is taken. Model FLOPs are
`maniple.models.flops`, MFU is of the card's dense bf16 peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.hardware.efficiency import Software, load_efficiency, load_software
from maniple.models.card import ModelCard
from maniple.models.flops import training_flops_per_token
from maniple.plan import parameters, schedules
from maniple.plan.exchange import Network
from maniple.plan.imbalance import Imbalance, in_words
from maniple.plan.operators import Machine, Parts, host_seconds, optimizer_seconds
from maniple.plan.simulator import Simulation, StageCost, simulate
from maniple.plan.stage_time import MODULES, Graphs, Job, stage_time
from maniple.plan.stages import folded
from maniple.plan.stages import place as place_stages
from maniple.plan.states import hosted

# groups, of as many micro-batches as there are pipeline ranks, that are simulated at first
_GROUPS = 5
# parameters in a bucket at least: megatron/core/distributed/distributed_data_parallel.py
_BUCKET, _BUCKET_A_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class StepTime:
    """An estimated step.

    components: seconds of the rank that computes longest, `busiest`, by what it does, all micro-batches together;
    `bubble` is its idle time, and all add up to `seconds`. bubbles: each pipeline rank's idle share of the pipeline's
    time.
    in_flight: the most micro-batches (chunks count one each) whose activations each pipeline rank holds.
    assumptions: what stands in for what is not known of this card.
    """

    seconds: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    pipeline_seconds: float
    schedule: str
    micro_batches: int
    bubbles: tuple[float, ...]
    in_flight: tuple[float, ...]
    busiest: int
    components: dict[str, float]
    load_factor: float
    assumptions: tuple[str, ...]

    def as_json(self) -> dict:
        return asdict(self)


def estimate(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    *,
    software: str | Software = "maniple",
    imbalance: Imbalance | None = None,
    schedule: str | None = None,
    graphs: Graphs = "none",
    recompute_modules: Sequence[str] = (),
) -> StepTime:
    """The time of one step of the job on `world_size` GPUs.

    software: whose layers run, or its name in `hardware/efficiencies.yaml`. schedule: one of `schedules.SCHEDULES`;
    None is the engine's own. graphs: what is replayed from graphs (`stage_time.Graphs`). recompute_modules: run again
    in backward besides those of the config, from `stage_time.MODULES`. Raises UserError for a job that cannot run, a
    GPU without efficiencies, an unknown module, and a schedule that does not fit the chunks.
    """
    job = make_job(
        config,
        card,
        gpu,
        world_size,
        software=software,
        imbalance=imbalance,
        graphs=graphs,
        recompute_modules=recompute_modules,
    )
    if schedule == "zbv":
        job = replace(job, place=folded(job.place))
    times = [stage_time(job, stage) for stage in job.place.stages]
    costs = [time.cost(job) for time in times]
    seconds, busy, run = _pipeline(job, costs, schedule)
    place = job.place
    grads, gathers, updates = [], [], []
    for rank in range(place.pipeline):
        counts = parameters.of_rank(config, card, place, rank)
        mine = [cost for stage, cost in zip(place.stages, costs, strict=True) if stage.rank == rank]
        reduce, gather, update = data_parallel(job, sum(counts.dense.values()), sum(counts.experts.values()), mine)
        early = run.seconds - run.spans[rank][-1].end  # this rank has run its last backward before the others
        grads.append(reduce - early)
        gathers.append(gather)
        updates.append(update)
    ends = max(0.0, *grads)
    total = seconds + ends + max(updates) + max(gathers)
    busiest = max(range(place.pipeline), key=busy.__getitem__)
    spent = Parts()
    for stage, time in zip(place.stages, times, strict=True):
        if stage.rank == busiest:
            spent.merge({part: value * place.micro_batches for part, value in time.total.items()})
    spent["exchange"] -= spent.total - busy[busiest]  # what overlap hides
    spent["bubble"] = seconds - busy[busiest]
    spent["gradient_reduction"] = ends
    spent["optimizer"] = max(updates)
    spent["parameter_gathering"] = max(gathers)
    tokens = config.train.global_batch_size * config.data.sequence_length / world_size
    flops = training_flops_per_token(card, config.data.sequence_length)
    return StepTime(
        seconds=total,
        tokens_per_second_per_gpu=tokens / total,
        tflops_per_gpu=tokens / total * flops / 1e12,
        mfu=tokens / total * flops / gpu.peak_flops("bf16"),
        pipeline_seconds=seconds,
        schedule=run.schedule.name,
        micro_batches=place.micro_batches,
        bubbles=tuple(1 - worked / seconds for worked in busy),
        in_flight=tuple(run.peak_in_flight(rank) for rank in range(place.pipeline)),
        busiest=busiest,
        components={
            part: spent[part]
            for part in sorted(spent, key=spent.__getitem__, reverse=True)
            if spent[part] > 1e-12 * total
        },
        load_factor=job.imbalance.factor(card.moe.num_experts, place.expert),
        assumptions=tuple(_assumptions(job)),
    )


def _assumptions(job: Job) -> Iterator[str]:
    if job.config.precision.dtype != "bf16":
        yield f"precision.dtype {job.config.precision.dtype}: timed as bf16"
    if job.config.precision.recipe == "mxfp8" and not job.machine.gpu.mxfp8_native:
        yield f"mxfp8: emulated in bf16, since {job.machine.gpu.name} has no such products"
    if (calibration := job.machine.gpu.calibration) is not None:
        yield f"calibration {calibration.file}: {calibration.provenance}; links are the card's"
        if calibration.not_measured:
            yield f"calibration: not measured, and as without it: {', '.join(calibration.not_measured)}"
    asked, ranks = job.imbalance, job.place.expert
    if asked.kind == "factor" and asked.parameter > ranks:
        why = (
            "no rank can have more than all"
            if ranks > 1
            else "every rank has all experts, and an uneven router costs it nothing"
        )
        yield f"imbalance {in_words(asked.parameter)}: planned at {ranks}, since with EP {ranks} {why}"
    if (fabric := job.machine.gpu.fabric) is not None:
        yield f"fabric: pods of {fabric.pod_gpus:,} GPUs, {fabric.taper:.0%} of their NICs' rate between them"
    for group, other in job.machine.efficiency.borrowed.items():
        yield f"{group}: {job.machine.gpu.name} has no figures of its own, and takes the shares of {other}"


def make_job(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    *,
    software: str | Software = "maniple",
    imbalance: Imbalance | None = None,
    graphs: Graphs = "none",
    recompute_modules: Sequence[str] = (),
) -> Job:
    for module in recompute_modules:
        if module not in MODULES:
            raise UserError(f"recompute_modules: unknown {module!r}; it knows {', '.join(MODULES)}")
    efficiency = load_efficiency(gpu.name)
    runs = load_software(software) if isinstance(software, str) else software
    if gpu.name in runs.grouped:
        efficiency = efficiency.model_copy(update={"grouped": runs.grouped[gpu.name]})
    if gpu.calibration is not None:
        efficiency, runs = gpu.calibration.apply(efficiency, runs, gpu)
    return Job(
        config=config,
        card=card,
        place=place_stages(config, card, world_size),
        machine=Machine(gpu, efficiency, runs),
        network=Network(gpu, efficiency),
        software=runs,
        imbalance=imbalance or Imbalance(),
        graphs=graphs,
        modules=tuple(recompute_modules),
    )


def simulated_step(job: Job, schedule: str | None = None, micro_batches: int | None = None) -> Simulation:
    """The pipeline of one step, all of its micro-batches or so many, for a timeline."""
    costs = [stage_time(job, stage).cost(job) for stage in job.place.stages]
    return simulate(_schedule(job, schedule, micro_batches or job.place.micro_batches), costs)


def _schedule(job: Job, name: str | None, micro_batches: int) -> schedules.Schedule:
    place = job.place
    if name is None:
        name = "1f1b" if place.chunks == 1 else "interleaved"
    return schedules.build(name, place.pipeline, micro_batches, place.chunks, overlap=job.config.moe.overlap_exchange)


def _pipeline(job: Job, costs: list[StageCost], schedule: str | None) -> tuple[float, list[float], Simulation]:
    """Seconds of all micro-batches and each rank's busy ones, and the simulation: where there are many, of the first
    groups of them, and of twice as many until all that are left take as long as the last."""
    place, number = job.place, job.place.micro_batches
    group = place.pipeline
    most = max(8, _GROUPS * group)
    while number >= most + group:
        most += (number - most) % group  # whole groups are left
        run = simulate(_schedule(job, schedule, most), costs)
        if (seconds := run.seconds_a_group) is not None:
            more = (number - most) // group
            busy = [
                run.busy(rank) + more * sum(span.end - span.start for span in run.group(rank)) for rank in range(group)
            ]
            return run.seconds + more * seconds, busy, run
        most *= 2
    run = simulate(_schedule(job, schedule, number), costs)
    return run.seconds, [run.busy(rank) for rank in range(group)], run


def _buckets(job: Job, parameters: int) -> int:
    """In how many collectives a rank's gradients are reduced, or its parameters gathered: as Megatron-Core cuts them,
    one for each chunk of the pipeline, and the first chunk's in buckets if the reduction is overlapped."""
    chunks = job.place.chunks
    if not parameters or not job.config.parallel.overlap_grad_reduce:
        return chunks
    size = max(_BUCKET, _BUCKET_A_RANK * job.place.dense_replicas)
    return ceil(parameters / chunks / size) + chunks - 1


def data_parallel(job: Job, dense: int, experts: int, mine: list[StageCost]) -> tuple[float, float, float]:
    """Exposed seconds of a rank's gradient reduction, of its parameter gathering, and its optimizer's seconds."""
    parallel, place, network = job.config.parallel, job.place, job.network
    weight = 2 if job.config.precision.dtype == "bf16" else 4

    def ring(size: int) -> float:
        """Over all parameters, of so many bytes each, in the buckets that are sent one by one."""
        seconds = 0.0
        for number, ranks, stride in (
            (dense, place.dense_replicas, place.tensor),
            (experts, place.expert_data, place.expert_tensor * place.expert),
        ):
            seconds += network.ring_seconds(size * number, ranks, stride, _buckets(job, number))
        return seconds

    reduce, gather = ring(job.software.grad_bytes), ring(weight)
    if parallel.distributed_optimizer:
        owned = dense / place.dense_replicas + experts / place.expert_data
    else:
        owned, reduce, gather = dense + experts, reduce + gather * job.software.grad_bytes / weight, 0.0
    if parallel.overlap_grad_reduce:  # under the last micro-batch's backward passes
        reduce = max(0.0, reduce - sum(cost.backward + cost.weight for cost in mine))
    if parallel.overlap_param_gather:  # under the first micro-batch's forward passes
        gather = max(0.0, gather - sum(cost.forward for cost in mine))
    optimizer = job.config.optimizer
    main, moment = (4 if dtype == "fp32" else 2 for dtype in (optimizer.main_params_dtype, optimizer.moments_dtype))
    update = optimizer_seconds(job.machine, owned, job.software.grad_bytes, main, moment)
    if share := optimizer.offload_fraction:  # of those parameters the kernel runs while others are on their way
        way = host_seconds(job.machine, owned * sum(hosted(job.config).values()))
        update = (1 - share) * update + max(share * update, way)
    return reduce, gather, update
