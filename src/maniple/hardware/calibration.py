"""What one machine's GPU attains, as `maniple plan calibrate` measured it: a file that replaces a card's shares.

A file keeps raw medians and the work that they did, in the planner's own count, so that a share follows from them and
from the card's peaks. Nothing in it is believed before it fits the schema, the GPU, and what a GPU can do at most.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from maniple import explain, yamlfile
from maniple.errors import UserError
from maniple.hardware.efficiency import Efficiency, Shares, Software

if TYPE_CHECKING:
    from maniple.hardware.card import GPU

RECIPES = ("bf16", "fp8", "fp8_block", "mxfp8")
PASSES = ("forward", "dgrad", "wgrad")
NAMES = {
    "matmul": RECIPES,
    "grouped": tuple(f"{recipe}_{which}" for recipe in RECIPES for which in PASSES),
    "attention": ("forward", "backward", "latent_forward", "latent_backward"),
    "memory": (
        *("copy", "gather", "elementwise", "adamw_fp32", "adamw_bf16"),
        *(f"quantize_{recipe}" for recipe in RECIPES[1:]),
    ),
    "launch": ("kernel", "host"),
}
MOST = 1.05  # of a peak: vendors' peaks are at a nominal clock, which some devices exceed a little
LEAST = 0.01  # of a peak: a GPU that does less in a large operation does something else at the time
LONGEST = 1000.0  # microseconds of a kernel that has nothing to do, or of the host for one; they take a few
_BUSY = "measured in other units, or beside other work: calibrate again with the GPU idle"
Group = Literal["matmul", "grouped", "attention", "memory", "launch"]


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Measurement(_Figures):
    """The median time of one operation of one size."""

    group: Group
    name: str
    what: str = Field(min_length=1, description="sizes, and the implementation, in words")
    work: float = Field(gt=0, description="FLOPs, or bytes read and written, as the planner counts them; kernels")
    milliseconds: float = Field(gt=0, description="the median")
    milliseconds_p20: float = Field(gt=0)
    milliseconds_p80: float = Field(gt=0)
    beside_milliseconds: float = Field(0.0, ge=0, description="of the median: what the planner adds by itself")
    rounds: int = Field(ge=1)

    @model_validator(mode="after")
    def _known_and_positive(self) -> Measurement:
        if self.name not in NAMES[self.group]:
            raise ValueError(f"{self.group} has no {self.name!r}: it has {', '.join(NAMES[self.group])}")
        if self.beside_milliseconds >= self.milliseconds:
            raise ValueError(
                f"{self.group} {self.name}: {self.milliseconds} ms, and {self.beside_milliseconds} ms of it beside"
            )
        return self


class Calibration(_Figures):
    """A file's content. card: the GPU card that `gpu`, as torch calls it, was measured for; None for a CPU."""

    format: Literal[1]
    gpu: str = Field(min_length=1)
    card: str | None
    date: str
    command: str
    versions: dict[str, str | None]
    sources: dict[str, str] = Field(description="SHA-256 of each operation's kernels")
    measured: tuple[Measurement, ...] = Field(min_length=1)
    not_measured: dict[str, str] = Field({}, description="`group name`, and why not")
    file: str = Field("", exclude=True, description="where it was read")

    @model_validator(mode="after")
    def _whole(self) -> Calibration:
        """Passes that are planned together were measured together."""
        for group, names in (("grouped", PASSES), ("attention", ("forward", "backward"))):
            found = {row.name for row in self.measured if row.group == group}
            for prefix in {name.rpartition("_")[0] for name in found}:
                wanted = {f"{prefix}_{name}" if prefix else name for name in names}
                if wanted - found:
                    raise ValueError(f"{group}: {', '.join(sorted(wanted - found))} is missing beside the others")
        return self

    def attained(self, group: str, name: str) -> float | None:
        """Work a second over all sizes together; None where it was not measured."""
        rows = [row for row in self.measured if (row.group, row.name) == (group, name)]
        if not rows:
            return None
        return sum(row.work for row in rows) / sum(row.milliseconds - row.beside_milliseconds for row in rows) * 1e3

    def shares(self, gpu: GPU) -> dict[str, dict[str, float]]:
        """Of the GPU's peaks, by group and name. Raises UserError for more than a GPU can do."""
        found: dict[str, dict[str, float]] = {}
        for group, names in NAMES.items():
            for name in names if group != "launch" else ():
                speed = self.attained(group, name)
                if speed is None:
                    continue
                share = speed / peak(gpu, group, name)
                if share > MOST:
                    raise UserError(
                        f"{group} {name} is {share:.0%} of what {gpu.name} has at most: no measurement of that GPU"
                    )
                found.setdefault(group, {})[name] = share
        return found

    def check(self, gpu: GPU) -> None:
        """Raises UserError for more than a GPU can do, or next to nothing."""
        for group, shares in self.shares(gpu).items():
            for name, share in shares.items():
                if share < LEAST:
                    raise UserError(
                        f"{group} {name} is {share:.2g} of what {gpu.name} has at most, less than {LEAST:g}; {_BUSY}"
                    )
        for name in NAMES["launch"]:
            if (each := self.microseconds(name) or 0.0) > LONGEST:
                raise UserError(
                    f"launch {name} is {each:,.0f} microseconds a kernel, more than {LONGEST:,.0f}; {_BUSY}"
                )

    def microseconds(self, name: str) -> float | None:
        """Of `launch`: what a kernel costs that has nothing to do, and what the host needs for one of a layer's."""
        speed = self.attained("launch", name)
        return None if speed is None else 1e6 / speed

    @property
    def provenance(self) -> str:
        """Where its figures are from, in one line."""
        versions = ", ".join(
            f"{name} {self.versions[name]}"
            for name in ("maniple", "torch", "triton", "driver")
            if self.versions.get(name)
        )
        return f"measured on {self.gpu}, {self.date}, {versions}"

    def apply(self, efficiency: Efficiency, software: Software, gpu: GPU) -> tuple[Efficiency, Software]:
        """Both with what was measured in the place of a card's figures; links stay the card's."""
        changed: dict[str, Any] = {}
        for group, shares in self.shares(gpu).items():
            old: Shares = getattr(efficiency, group)
            # a card's figure may hold the quantization of operands, and these do not
            apart = tuple(recipe for recipe in old.with_quantization if f"{recipe}_forward" not in shares)
            changed[group] = Shares(
                shares=old.shares | shares,
                source=self.provenance,
                with_quantization=apart if group == "grouped" else (),
            )
        changed["borrowed"] = {group: card for group, card in efficiency.borrowed.items() if group not in changed}
        found = {"gap_microseconds": self.microseconds("kernel"), "host_microseconds": self.microseconds("host")}
        launch = {field: each for field, each in found.items() if each is not None}
        return efficiency.model_copy(update=changed), software.model_copy(update=launch)


def peak(gpu: GPU, group: str, name: str) -> float:
    """What a share is of: FLOP/s or bytes a second. Raises UserError for a format that the GPU does not multiply."""
    if group == "memory":
        return gpu.memory_bytes_per_s
    recipe = {"matmul": name, "grouped": name.rpartition("_")[0]}.get(group, "bf16")
    return gpu.peak_flops("fp8" if recipe == "fp8_block" else recipe)


def read(file: Path) -> Calibration:
    """Raises UserError, in one line that begins with the file, for anything else than a calibration."""
    data = yamlfile.read(file, "calibration").data
    if not isinstance(data, dict) or "measured" not in data:
        raise UserError(f"{file}: no calibration: give a file that `maniple plan calibrate --out` wrote")
    try:
        return Calibration.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{file}: {explain.explained(error)}") from None


def with_calibration(gpu: GPU, file: Path) -> GPU:
    """The card with what was measured on such a GPU. Raises UserError for a calibration of another, or a wrong one."""
    calibration = read(file)
    if calibration.card != gpu.name:
        of = f"for {calibration.card}" if calibration.card else "for no GPU card"
        raise UserError(
            f"--calibration {file}: measured on {calibration.gpu}, {of}, and this plan is for {gpu.name}: give that "
            "GPU's own, or leave --calibration out"
        )
    try:
        calibration.check(gpu)
    except UserError as error:
        raise UserError(f"--calibration {file}: {error}") from None
    return gpu.model_copy(update={"calibration": calibration.model_copy(update={"file": str(file)})})
