"""Which GPU this process has, as reasons why a kernel cannot run here."""

from __future__ import annotations

import importlib.util

import torch


def chip() -> str:
    """This process's GPU as its compiler calls it: "sm_90", "gfx950"; "" without one."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def target(tensor: torch.Tensor) -> str:
    """What launch descriptions call the place where a kernel of `tensor` runs."""
    if tensor.device.type == "cpu":
        return "interpreter"
    return "amd" if torch.version.hip else "nvidia"


def no_triton() -> str | None:
    """Why Triton's kernels cannot run; None if they can."""
    return None if importlib.util.find_spec("triton") else "needs the triton package, and it is not installed"


def not_on(*chips: str, what: str) -> str | None:
    """Why Triton's kernels for these chips cannot run; None if they can. what: a name for the chips."""
    if (reason := no_triton()) is not None:
        return reason
    here = chip()
    return None if here in chips else f"needs {what} ({', '.join(chips)}), and this is {here or 'no GPU'}"


def no_hopper() -> str | None:
    return not_on("sm_90", what="a Hopper GPU")
