"""What quantization yields: low-precision numbers with the scales that multiply them back.

G experts of this rank · S slots of the expert-sorted buffer · N rows of a weight · K what a GEMM sums over in forward ·
P = ((S + 127 G) // 128) * 128, room for every group's rows when each group starts at a multiple of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz,)


@dataclass(frozen=True)
class Quantized:
    """`data * scales`, scales spread over their blocks, is the value.

    data: float8_e4m3fn, float8_e5m2 or (gfx942's) float8_e4m3fnuz, `[..., R, C]`, contiguous, C (the contraction) last.
    scales: fp32, or uint8 E8M0 bytes for mxfp8 (byte b is 2^(b - 127), 255 is NaN), `[..., ceil(R / block[0]),
    ceil(C / block[1])]`. They may have any strides: read them.
    block: rows, columns that share a scale; (0, 0): the whole matrix, scales `[..., 1, 1]`.

    A block that holds NaN or infinity has the scale NaN (255). Raises ValueError for parts that do not fit each other.
    """

    data: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.data.dtype not in OCP + FNUZ or not self.data.is_contiguous():
            raise ValueError(
                f"Quantized needs contiguous float8 data, not {self.data.dtype} of strides {self.data.stride()}"
            )
        if self.scales.dtype not in (torch.float32, torch.uint8):
            raise ValueError(f"Quantized needs fp32 or uint8 (E8M0) scales, not {self.scales.dtype}")
        *outer, rows, columns = self.data.shape
        down, across = self.block
        wanted = [*outer, -(-rows // down), -(-columns // across)] if down else [*outer, 1, 1]
        if list(self.scales.shape) != wanted:
            raise ValueError(
                f"data {list(self.data.shape)} in blocks of {down} x {across} needs scales {wanted}, "
                f"not {list(self.scales.shape)}"
            )

    @property
    def e8m0(self) -> bool:
        return self.scales.dtype == torch.uint8


@dataclass(frozen=True)
class Rows:
    """Expert-sorted rows `x[S, K]`, quantized along K and, transposed, along the rows of each group.

    rowwise: `[S, K]`, blocks (1, b) or (0, 0); rows at or past `ends_G[-1]` are unwritten, their scales too.
    columnwise: `[K, P]`; group g has the columns from `padded_ends_G[g - 1]` (0 for the first) to `padded_ends_G[g]`,
    all multiples of 128: first its rows in their order, then data of zero, so that a weight gradient needs no mask (the
    scales there are finite, but where the group's own are NaN). An empty group has no columns. Columns at or past
    `padded_ends_G[-1]` are unwritten, their scales too.
    padded_ends_G: int32 `[G]` on the device.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None
    padded_ends_G: torch.Tensor


@dataclass(frozen=True)
class Weight:
    """A weight for both of its GEMMs. The blocks are square, so that both see the same values.

    forward: `[G, N, K]`. dgrad: its transpose `[G, K, N]`, its scales a transposed view of forward's; or None.
    """

    forward: Quantized
    dgrad: Quantized | None


def padded_size(slots: int, groups: int) -> int:
    """P: columns of `Rows.columnwise`, enough for any sizes of `groups` groups in `slots` rows."""
    return (slots + 127 * groups) // 128 * 128


def as_fnuz(q: Quantized) -> Quantized:
    """The same values in FNUZ, for gfx942's matrix instructions: e4m3fn's bytes stand for half there, so scales double.

    Exact, but for the sign of zeros. Raises ValueError unless q is float8_e4m3fn with fp32 scales.
    """
    if q.data.dtype != torch.float8_e4m3fn or q.e8m0:
        raise ValueError(f"FNUZ is made of float8_e4m3fn with fp32 scales, not {q.data.dtype} and {q.scales.dtype}")
    bytes_ = q.data.view(torch.uint8)
    nan = (bytes_ & 0x7F) == 0x7F
    bytes_ = torch.where(nan | (bytes_ == 0x80), torch.where(nan, 0x80, 0).to(torch.uint8), bytes_)
    return Quantized(bytes_.view(torch.float8_e4m3fnuz), q.scales * 2, q.block)


def require_one_encoding(*operands: Quantized) -> None:
    """Raises ValueError unless all are OCP or all are FNUZ: the same byte is another number in the other."""
    kinds = {operand.data.dtype in FNUZ for operand in operands}
    if len(kinds) > 1:
        dtypes = ", ".join(str(operand.data.dtype) for operand in operands)
        raise ValueError(f"operands of one product must all be OCP or all FNUZ, not {dtypes}: convert with as_fnuz")
