"""One GPU's figures: vendor peaks, and beside them what was really attained, never mixed."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from maniple.errors import UserError
from maniple.hardware.calibration import Calibration

Dtype = Literal["bf16", "fp16", "fp8", "mxfp8"]


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Figures):
    """The links of a GPU to the others of its node."""

    kind: Literal["nvlink", "infinity_fabric"]
    links: int = Field(ge=1, description="links a GPU; Infinity Fabric joins each pair of 8 GPUs with one of its 7")
    gb_per_s: PositiveFloat = Field(description="10^9 bytes a second, one direction, all links together")


class Attained(_Figures):
    """Measured on the device, so the planner can tell what is possible from what is printed."""

    tflops: dict[Dtype, PositiveFloat]
    memory_gb_per_s: PositiveFloat = Field(description="of a copy, bytes read plus bytes written")
    link_gb_per_s: PositiveFloat = Field(description="one direction")
    provenance: str


class Fabric(_Figures):
    """A cluster's network beyond nodes. Inside a pod every NIC has its full rate, and out of it a share of that."""

    pod_gpus: int = Field(ge=1)
    taper: float = Field(ge=1e-3, le=1, description="share of a pod's NICs that its way out carries at once")

    @classmethod
    def parse(cls, text: str) -> Fabric:
        """`256:0.5`, pods of 256 GPUs that half of their NICs' rate leaves. Raises UserError."""
        try:
            if (found := re.fullmatch(r"([0-9]{1,9}):([0-9.e-]+)", text)) is None:
                raise ValueError(text)
            return cls(pod_gpus=int(found[1]), taper=float(found[2]))
        except ValueError:
            raise UserError(
                f"--fabric {text}: expected GPUS:SHARE, such as 256:0.5 for pods of 256 GPUs between which half of "
                "the NICs' rate is there; SHARE is 0.001 to 1"
            ) from None

    def __str__(self) -> str:
        """As `parse` takes it."""
        return f"{self.pod_gpus}:{self.taper:g}"


class GPU(_Figures):
    """A GPU card. Units are in the fields' names; the properties give plain bytes and FLOP/s."""

    name: str
    vendor: Literal["nvidia", "amd"]
    architecture: str = Field(description="as compilers name it: sm_90, gfx950, ...")
    device_token: str = Field(description="the word of `torch.cuda.get_device_name()` that means this GPU")
    peak_tflops: dict[Dtype, PositiveFloat] = Field(description="dense matrix products, never with sparsity")
    fp8_format: Literal["ocp", "fnuz"]
    mxfp8_native: bool = Field(description="block-scaled (1x32, E8M0) products in hardware")
    memory_gb: PositiveFloat
    memory_gb_per_s: PositiveFloat
    link: Link
    gpus_per_node: int = Field(ge=1, description="GPUs that `link` joins")
    scale_out_gb_per_s: PositiveFloat = Field(description="to other nodes, one direction, a GPU")
    host_gb_per_s: PositiveFloat = Field(description="to host memory, one direction, a GPU")
    source: str
    attained: Attained | None = None
    calibration: Calibration | None = Field(None, description="of the user's own such GPU; no card has one")
    memory_share: float = Field(1.0, gt=0, le=1, description="of the memory that a searched layout may need")
    fabric: Fabric | None = Field(None, description="of the user's own cluster; without it all nodes are one pod")

    @model_validator(mode="after")
    def _native_formats(self) -> GPU:
        if ("mxfp8" in self.peak_tflops) != self.mxfp8_native:
            raise ValueError(f"{self.name}: a peak for mxfp8 and mxfp8_native go together")
        return self

    def peak_flops(self, dtype: str = "bf16") -> float:
        """Dense vendor peak in FLOP/s. Raises UserError for a dtype this GPU has no hardware for."""
        for known, tflops in self.peak_tflops.items():
            if known == dtype:
                return tflops * 1e12
        raise UserError(f"{self.name} has no {dtype} matrix products: choose one of {', '.join(self.peak_tflops)}")

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1e9)

    @property
    def usable_bytes(self) -> int:
        return round(self.memory_share * self.memory_bytes)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        return self.link.gb_per_s * 1e9

    @property
    def scale_out_bytes_per_s(self) -> float:
        return self.scale_out_gb_per_s * 1e9

    @property
    def host_bytes_per_s(self) -> float:
        return self.host_gb_per_s * 1e9
