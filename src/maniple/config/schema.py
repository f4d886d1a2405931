"""The training job as typed data. Every key a job file may hold is declared here, with its unit and its default.

Loading, `extends`, overrides and provenance live in `load.py`; checks that need more than one section (world size,
layouts, kernels) in `check.py`. Field names are the field's own, and no section knows an engine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _weights_as_text(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in value]


def _nameable[T: (Path, str, list[str], None)](value: T) -> T:
    """Refuses what no file system takes for a name."""
    for text in map(str, value if isinstance(value, list) else [value]):
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
            raise ValueError(f"{text[:80]!a} holds a control character: write the path without")
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in text.split("/")):
            raise ValueError(f"{text[:20]}... has a name of more than {_LONGEST_NAME} bytes: shorten it")
    return value


# No honest job meets these bounds. What lies beyond them would end later, where no one looks: in an overflow, or a host
# that is short of memory.
_MANY = 2**31 - 1
_STEPS = 2**40
_RANKS = 2**20
_TOKENS = 2**24
_SECONDS = 30 * 24 * 3600
_MINUTES = 10 * 365 * 24 * 60
_RATE = 1e3
_WEIGHT = 1e6
_LONGEST_NAME = 240  # bytes; file systems take 255, and `.idx` or `.partial` may follow

Folder = Annotated[Path, AfterValidator(_nameable)]
FolderOrNone = Annotated[Path | None, AfterValidator(_nameable)]
Name = Annotated[str, AfterValidator(_nameable)]
NameOrNone = Annotated[str | None, AfterValidator(_nameable)]
# [0.7, a, 0.3, b]: YAML reads the weights as numbers
Blend = Annotated[list[str], BeforeValidator(_weights_as_text), AfterValidator(_nameable)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=(), allow_inf_nan=False)


class ModelConfig(Section):
    """Which architecture. `overrides` has the shape of the card, e.g. `{num_layers: 4, moe: {num_experts: 8}}`."""

    card: Name = "deepseek-v3"
    variant: Literal["full", "tiny"] = "full"
    overrides: dict[str, Any] = {}
    vocab_size_multiple: int = Field(
        128, ge=1, le=_TOKENS, description="the vocabulary is padded to a multiple of this and of TP"
    )


class ParallelConfig(Section):
    """How the job is cut. Data parallelism is what is left of the world."""

    tensor_parallel_size: int = Field(1, ge=1, le=_RANKS)
    sequence_parallel: bool | None = Field(None, description="None: on where tensor_parallel_size > 1 (MoE needs it)")
    pipeline_parallel_size: int = Field(1, ge=1, le=_RANKS)
    virtual_pipeline_size: int | None = Field(None, ge=1, le=_RANKS, description="model chunks a pipeline rank")
    pipeline_layout: str | None = Field(None, description="e.g. `Et|(tt|)*29,tmL`: stages of the pipeline, by layer")
    context_parallel_size: int = Field(1, ge=1, le=_RANKS)
    expert_parallel_size: int = Field(1, ge=1, le=_RANKS)
    expert_tensor_parallel_size: int = Field(1, ge=1, le=_RANKS)
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed_optimizer: bool = True
    collective_timeout_seconds: float = Field(
        600.0, gt=0, le=_SECONDS, description="a collective that hangs longer ends the job"
    )


class MoEConfig(Section):
    """How the experts are run and balanced (what the architecture fixes is in the model card)."""

    dispatcher: Literal["auto", "local", "all_to_all"] = Field("auto", description="auto: local where EP x ETP = 1")
    kernels: Literal["auto", "reference"] = Field("auto", description="auto: the registry's best for the device")
    overlap_exchange: bool = Field(
        False, description="one micro-batch's tokens are exchanged while another's backward pass computes"
    )
    buffer_factor: float | None = Field(
        None,
        ge=1,
        le=_RANKS,
        description="buffers of expert exchange for so many times the balanced load, at most for the worst case; a "
        "step that needs more is run again with larger ones, and the host waits for no count. None: exact sizes",
    )
    pages_factor: float | None = Field(
        None,
        ge=1,
        le=_RANKS,
        description="with buffer_factor: what experts keep for backward is kept in pages, for so many times what the "
        "balanced load needs over all layers; None: as it is, at the buffers' size",
    )
    aux_loss_type: Literal["none", "sequence", "micro_batch", "global_batch"] = "sequence"
    aux_loss_coefficient: float | None = Field(None, ge=0, le=_WEIGHT, description="None: the card's own")
    z_loss_coefficient: float = Field(0.0, ge=0, le=_WEIGHT)
    expert_bias_update_rate: float = Field(
        1e-3, ge=0, le=_RATE, description="step of the aux-free bias, if the card has one"
    )


class PrecisionConfig(Section):
    dtype: Literal["bf16", "fp32"] = Field(
        "bf16", description="of parameters and activations; main parameters: `optimizer.main_params_dtype`"
    )
    recipe: Literal["bf16", "fp8", "fp8_block", "mxfp8"] = Field(
        "bf16", description="of the layers' matrix products: see [precision.md](precision.md)"
    )
    bf16_first_layers: int = Field(0, ge=0, le=_RANKS, description="so many decoder layers at the bottom stay bf16")
    bf16_last_layers: int = Field(
        0, ge=0, le=_RANKS, description="and so many at the top; MTP layers are as the last decoder layer is"
    )

    def recipe_of(self, layer: int, num_layers: int) -> str:
        """Of decoder layer `layer`, from 0, of `num_layers`; MTP layers come after them."""
        layer = min(layer, num_layers - 1)
        inside = self.bf16_first_layers <= layer < num_layers - self.bf16_last_layers
        return self.recipe if inside else "bf16"


class RecomputeConfig(Section):
    granularity: Literal["none", "full", "selective"] = "none"
    num_layers: int | None = Field(
        None, ge=1, le=_RANKS, description="with full: layers a pipeline stage to recompute; None: all"
    )
    layers: list[int] = Field([], description="with full: these layers only, from 0; MTP depth d is num_layers + d")
    modules: list[str] = Field([], description="with selective: e.g. [core_attn, moe]")


class DataConfig(Section):
    """What the model reads. `megatron` takes `.bin/.idx` prefixes (see `maniple data prepare`)."""

    source: Literal["python", "megatron", "synthetic"] = Field(
        "python", description="python: source and documentation of the running Python installation"
    )
    sequence_length: int = Field(256, ge=2, le=_TOKENS, description="tokens a sample")
    attend_across_documents: bool = Field(
        True, description="false: tokens see their own document only, and no loss crosses its end"
    )
    train: Blend = Field([], description="dataset prefixes, each optionally after a weight: [0.7, a, 0.3, b]")
    validation: Blend = []
    split: str = Field("949,50,1", description="train, validation, test parts of `train` if `validation` is empty")
    tokenizer: NameOrNone = Field(None, description="tokenizer.json, or a folder that transformers can read")
    tokenizer_vocab_size: int = Field(4096, ge=300, le=_TOKENS, description="python source: size of the BPE to train")
    corpus_bytes: int = Field(24_000_000, ge=1, le=2**40, description="python source: bytes of text to read at most")
    cache_dir: FolderOrNone = Field(None, description="None: `cache/` inside the output folder")
    num_workers: int = Field(0, ge=0, le=256)
    on_change: Literal["refuse", "continue"] = Field(
        "refuse",
        description="a resumed run finds other data than its checkpoint's; continue: at the same sample number",
    )


class OptimizerConfig(Section):
    learning_rate: float = Field(3e-4, gt=0, le=_RATE)
    min_learning_rate: float = Field(3e-5, ge=0, le=_RATE)
    warmup_steps: int = Field(20, ge=0, le=_STEPS)
    decay_style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"
    weight_decay: float = Field(0.1, ge=0, le=_RATE)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0, le=1)
    clip_grad: float = Field(1.0, ge=0, le=1e12, description="global gradient norm; 0: no clipping")
    main_params_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="what is updated, of a bf16 model; bf16: the model's own weights, rounded stochastically"
    )
    moments_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="of both moments; bf16 is rounded stochastically: see [training.md](training.md)"
    )
    offload_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of main parameters and moments kept in host memory, and brought to the device a chunk at a "
        "time to be updated; 1: all. See [training.md](training.md#states-in-host-memory)",
    )


class TrainSection(Section):
    steps: int = Field(100, ge=1, le=_STEPS)
    max_minutes: float | None = Field(None, gt=0, le=_MINUTES, description="save and stop after this much wall time")
    stop_grace_seconds: float = Field(
        300.0,
        gt=0,
        le=_SECONDS,
        description="time to finish the step and save after SIGTERM or Ctrl-C, and before Slurm's limit",
    )
    micro_batch_size: int = Field(1, ge=1, le=_MANY, description="sequences a data-parallel rank and forward pass")
    global_batch_size: int = Field(8, ge=1, le=_MANY, description="sequences an optimizer step, over all ranks")
    seed: int = Field(1234, ge=0)
    deterministic: bool = False
    eval_interval: int = Field(50, ge=0, le=_STEPS, description="steps between validations; 0: only at the end")
    eval_batches: int = Field(8, ge=1, le=_MANY, description="global batches a validation reads")
    mtp_loss_coefficient: float = Field(0.1, ge=0, le=_WEIGHT)
    loss: Literal["logits", "fused", "fused_kept"] = Field(
        "logits",
        description="fused: a chunk of logits at a time, computed again in backward; fused_kept: all at once, kept for "
        "backward in the model's dtype; neither ever in fp32",
    )
    device: Literal["auto", "cpu", "gpu"] = "auto"
    sample_tokens: int = Field(0, ge=0, le=_TOKENS, description="length of the sample generated at the end; 0: none")
    sample_prompt: str = "def "


class CheckpointConfig(Section):
    save_interval: int = Field(0, ge=0, le=_STEPS, description="steps; 0: only at the end")
    save_at_end: bool = True
    asynchronous: bool = Field(True, description="files are written while training goes on, from a copy in host memory")
    keep: int | None = Field(
        None, ge=1, le=_MANY, description="so many of the run's checkpoints stay, the newest; None: all"
    )
    keep_every: int | None = Field(
        None, ge=1, le=_STEPS, description="with keep: steps that are multiples of this stay as well"
    )
    resume: NameOrNone = Field(None, description="a checkpoint folder, or `auto`: the newest whole one of this run")
    init_from: NameOrNone = Field(
        None,
        description="a checkpoint folder: the run begins with its weights, and with fresh optimizer, schedule, data "
        "order and step 0; where `resume` finds a checkpoint it is not read",
    )
    verify_on_load: bool = Field(
        True, description="all files are compared with their digests before a run resumes or begins from them"
    )


class GuardConfig(Section):
    """What happens when a step's loss or gradients cannot be right. All ranks decide alike, before the update."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop", description="loss or gradient norm is NaN or infinite; the place where it began is named"
    )
    spike: Literal["off", "warn", "skip", "rollback", "stop"] = Field(
        "warn", description="loss far above the median of the last ones"
    )
    spike_sigmas: float = Field(8.0, gt=0, le=1e9, description="how far: in robust standard deviations (1.4826 x MAD)")
    spike_window: int = Field(
        64, ge=8, le=2**20, description="losses that the median is taken of; as many come before any alarm"
    )
    max_skips: int = Field(
        10, ge=0, le=_MANY, description="updates left out in a row, or rollbacks in the whole run, before the run stops"
    )
    skip_steps: int = Field(
        0, ge=0, le=_MANY, description="with rollback: batches before and after the bad one to leave out too"
    )


class LogConfig(Section):
    interval: int = Field(1, ge=1, le=_STEPS, description="steps between metric records")
    tensorboard: bool = True
    figure: bool = Field(True, description="write curves.png at the end")
    progress: bool = True


class TrainConfig(Section):
    """One training job."""

    name: str = Field("run", max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: Folder = Path("runs")
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    moe: MoEConfig = MoEConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name
