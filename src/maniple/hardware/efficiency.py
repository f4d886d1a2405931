"""What a GPU attains of its vendor's peaks, and what software costs on it: `efficiencies.yaml`, read and resolved."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from maniple.errors import UserError

_GROUPS = ("matmul", "grouped", "attention", "memory", "link", "scale_out", "latency")


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shares(_Figures):
    """Shares of a peak, 0 to 1, by name, and where they come from."""

    shares: dict[str, float] = Field(min_length=1)
    source: str = Field(min_length=1)
    with_quantization: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.shares[name]

    def first(self, *names: str) -> float:
        """Of the first of these names that has a share. Raises KeyError if none has."""
        return self.shares[next((name for name in names if name in self.shares), names[-1])]


class Latency(_Figures):
    """Microseconds of a collective beside its bytes: once, and for each hop that a ring takes one after another."""

    base: float = Field(ge=0)
    link: float = Field(ge=0)
    scale_out: float = Field(ge=0)
    source: str = Field(min_length=1)


class Efficiency(_Figures):
    """One GPU's shares; `borrowed` names, by group, the card whose shares stand in where it has none of its own."""

    gpu: str
    matmul: Shares
    grouped: Shares
    attention: Shares
    memory: Shares
    link: Shares
    scale_out: Shares
    latency: Latency
    borrowed: dict[str, str] = {}


class Software(_Figures):
    """What runs on the GPU: how tokens are exchanged, and what its host costs."""

    name: str
    dispatch: Literal["all_to_all", "dispatch"] = Field(
        description="which of the links' shares: `dispatch` sends no copy twice"
    )
    grad_bytes: Literal[2, 4] = Field(description="of a gradient as it is reduced")
    launches: dict[str, tuple[int, int]] = Field(
        description="of a layer, forward and backward; experts: of a MoE layer's exchange and experts alone"
    )
    gap_microseconds: float = Field(ge=0)
    host_microseconds: float = Field(
        0.0, ge=0, description="that the host needs for one of a layer's kernels; 0: it is always ahead of the GPU"
    )
    elementwise: float | None = Field(None, gt=0, le=1)
    permutation: float | None = Field(None, gt=0, le=1)
    torch_attention: bool = Field(
        False, description="windows and sinks by torch's flash kernels, documents by a bias that leaves no score out"
    )
    grouped_slowdown: dict[str, float] = Field({}, description="by architecture")
    clamp_passes: float = Field(1.0, ge=1)
    hidden: float = Field(ge=0, le=1)
    grouped: dict[str, Shares] = Field({}, description="by GPU, where its expert products are not those of the card")
    source: str


@cache
def _tables() -> dict:
    return yaml.safe_load((files(__package__) / "efficiencies.yaml").read_text(encoding="utf-8"))


def load_efficiency(gpu: str) -> Efficiency:
    """The shares of a card of that name in gpus.yaml. Raises UserError for one that has none."""
    cards = _tables()["gpus"]
    if gpu not in cards:
        raise UserError(f"no efficiencies are known of GPU {gpu}: choose one of {', '.join(cards)}")
    found: dict = {}
    borrowed: dict[str, str] = {}
    name: str | None = gpu
    while name is not None:
        for group in _GROUPS:
            if group in cards[name] and group not in found:
                found[group] = cards[name][group]
                if name != gpu and group != "latency":  # the library's, whatever the card
                    borrowed[group] = name
        name = cards[name].get("like")
    return Efficiency(gpu=gpu, borrowed=borrowed, **found)


def load_software(name: str) -> Software:
    """Raises UserError for a name that is not in the file."""
    known = _tables()["software"]
    if name not in known:
        raise UserError(f"no software is named {name!r}: choose one of {', '.join(known)}")
    found: dict = {}
    after: str | None = name
    while after is not None:
        found = known[after] | found
        after = known[after].get("like")
    return Software(name=name, **{key: value for key, value in found.items() if key != "like"})
