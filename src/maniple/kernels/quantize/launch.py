"""Tiles, grids and constants of the quantization kernels. No torch here: JAX launches them too.

S rows and G groups, K columns; weights `[G, N, K]`. P, the padded rows, is in `quantized.py`.
"""

from __future__ import annotations

from typing import Any

from maniple.kernels.quantize.formats import FORMATS, RECIPES

ROWS = COLUMNS = 128  # of a tile: a multiple of every block, and where groups start in transposed rows
SLAB = 128  # rows of a tile that a program holds at once, a multiple of 32
WARPS = {"nvidia": 8, "amd": 4}  # of a program: 16 numbers that a thread loads at once, four times
WARPS_TALL = {"nvidia": 4, "amd": 4}  # of `rows_kernel` with blocks of 128 rows: fewer meet at each maximum
TILES = 16  # that a program of `tiles_kernel` places
AMAX_ROWS, AMAX_COLUMNS = 32, 512
HOPPER_WARPS = 4  # of a program of `hopper_kernels.py`: 16 rows and 8 columns of a tile for each thread
HOPPER_REGISTERS = 128  # of a thread of its `rows_kernel`: four programs on each multiprocessor
HOPPER_SWIGLU_WARPS = 8  # of a program of `swiglu/hopper_kernels.py`: 16 rows and 4 columns for each thread
# of a thread, forward and backward: three programs and two, as shared memory has room
HOPPER_SWIGLU_REGISTERS = 80, 128


def rows_grid(padded: int, k: int) -> int:
    """Programs of `rows_kernel`: one a tile of padded rows, and one at least, which writes the scale of `fp8`."""
    return max(-(-padded // ROWS) * -(-k // COLUMNS), 1)


def weight_grid(groups: int, n: int, k: int) -> int:
    """Programs of `weight_kernel`: one a tile."""
    return groups * -(-n // ROWS) * -(-k // COLUMNS)


def amax_grid(matrices: int, rows: int, columns: int) -> int:
    """Programs of `amax_kernel`."""
    return matrices * -(-rows // AMAX_ROWS) * -(-columns // AMAX_COLUMNS)


def tiles_grid(padded: int) -> int:
    """Programs of `tiles_kernel`: one at least, which writes the padded ends."""
    return max(-(-(padded // ROWS) // TILES), 1)


def group_width(groups: int) -> int:
    """Lanes that look at all groups at once: a power of two."""
    return 1 << max(groups - 1, 0).bit_length()


def cast(target: str, form: str) -> str:
    """How fp32 becomes this format: "saturating" and "plain" by the chip, "none" by the kernel, with integers.

    A saturating cast takes what is beyond the largest number to it, and NaN to the one NaN. target: "interpreter", an
    AMD name ("gfx950") or "sm_" and NVIDIA's number ("sm_90").
    """
    if target.startswith("sm_"):
        return "saturating" if FORMATS[form].ocp and int(target[3:].rstrip("a")) >= 89 else "none"
    return "plain" if form in {"gfx950": ("e4m3fn", "e5m2"), "gfx942": ("e4m3fnuz",)}.get(target, ()) else "none"


def warps(target: str, *, tall: bool = False) -> int:
    """Warps of a program, as Triton counts them: of 32 lanes on NVIDIA, of 64 on AMD. Measured on one H200."""
    return (WARPS_TALL if tall else WARPS)["amd" if target.startswith("gfx") else "nvidia"]


def constants(target: str, recipe: str, form: str, rounding: str, *, weight: bool, emulate: bool) -> dict[str, Any]:
    """The constants that `rows_kernel` and `weight_kernel` share, and the warps of a program."""
    return {
        "BLOCK": RECIPES[recipe].weight if weight else RECIPES[recipe].rows,
        "E8M0": RECIPES[recipe].e8m0,
        "FORMAT": FORMATS[form],
        "ROUNDING": rounding,
        "CAST": "none" if emulate else cast(target, form),
        "EMULATE": emulate,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "SLAB": SLAB,
        "num_warps": warps(target, tall=RECIPES[recipe].rows == ROWS and not weight),
    }


def hopper_constants(groups: int) -> dict[str, int]:
    """The constants of the Hopper kernels that search for their rows, and the warps of a program."""
    return {"GROUPS": groups, "WIDTH": max(group_width(groups), 32), "WARPS": HOPPER_WARPS, "num_warps": HOPPER_WARPS}


def hopper_format(recipe: str, form: str, rounding: str) -> dict[str, Any]:
    """The other constants of its `rows_kernel`, and the registers of a thread."""
    return {
        "BLOCK": RECIPES[recipe].rows,
        "E8M0": RECIPES[recipe].e8m0,
        "FORMAT": FORMATS[form],
        "ROUNDING": rounding,
        "maxnreg": HOPPER_REGISTERS,
    }


def hopper_swiglu_constants(groups: int, recipe: str, form: str, rounding: str) -> dict[str, Any]:
    """The constants of `swiglu/hopper_kernels.py`, and the warps of a program."""
    constants = hopper_constants(groups) | hopper_format(recipe, form, rounding)
    del constants["maxnreg"]
    return constants | {"WARPS": HOPPER_SWIGLU_WARPS, "num_warps": HOPPER_SWIGLU_WARPS}
