"""Compiles Triton and Gluon kernels for GPUs that are not there, and reads what came out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

TARGETS = {
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100a": GPUTarget("cuda", 100, 32),
}
SHARED_MEMORY = {"gfx950": 160 * 1024, "gfx942": 64 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}  # bytes


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor's type: element as Triton spells it, block."""

    element: str
    block: tuple[int, ...]


def compile_for(
    target: str, kernel, arguments: dict[str, Any], *, num_warps: int, num_stages: int = 3, maxnreg: int | None = None
):
    """The compiled kernel. `arguments`: by name, a type ("*bf16", "i32"), a `Descriptor`, or a constant (`("=", v)`).

    Pointers and i32 sizes are taken as multiples of 16, as the launcher finds them for sizes in use.
    """
    gluon = hasattr(kernel, "is_gluon") and kernel.is_gluon()
    signature, constants, attributes = {}, {}, {}
    for name in kernel.arg_names:
        value = arguments[name]
        if isinstance(value, tuple):
            signature[name] = "constexpr"
            constants[(kernel.arg_names.index(name),)] = value[1]
        elif isinstance(value, Descriptor):
            signature[name] = _descriptor(value, gluon)
        else:
            signature[name] = value
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if gluon else ASTSource)(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps} if gluon else {"num_warps": num_warps, "num_stages": num_stages}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    return triton.compile(source, target=TARGETS[target], options=options)


def _descriptor(value: Descriptor, gluon: bool) -> str:
    block = list(value.block)
    if not gluon:
        return f"tensordesc<{value.element}{block}>"
    elements = {"bf16": gl.bfloat16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5}
    layout = gl.NVMMASharedLayout.get_default_for(block, elements[value.element])
    return f"tensordesc<{value.element}{block},{layout!r}>"


def spills(target: str, compiled) -> int:
    """Bytes a thread that the registers could not hold."""
    if target.startswith("gfx"):
        found = re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s+(\d+)", compiled.asm["amdgcn"])
        assert found, "the assembly names no spill counts"
        return 4 * sum(map(int, found))
    usage = _usage(compiled)
    return usage["LOCAL"] + usage["STACK"]  # a kernel without calls has a stack for spilled registers only


def _usage(compiled) -> dict[str, int]:
    """What NVIDIA's tools say of a kernel: REG, STACK, LOCAL, SHARED."""
    import subprocess
    import tempfile
    from pathlib import Path

    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
