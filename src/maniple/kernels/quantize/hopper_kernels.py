"""The kernels of `hopper.py`: Gluon alone, no torch, so that another framework can launch them.

Two numbers of bf16, neighbours in a row, are a word of 32 bits, and a thread holds 16 rows of 4 words: the largest
magnitudes along the rows and down the columns are found two at a time, 16 numbers down a column are one store.
`triton_kernels.py` is the portable version.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INFINITY = gl.constexpr(0x7F800000)
QUIET_NAN = gl.constexpr(0x7FC00000)
DEEP = gl.constexpr(16)  # rows that a thread holds
QUARTERS = gl.constexpr(DEEP // 4)
STACK = gl.constexpr(8)  # threads down a tile of 128 rows
WORDS = gl.constexpr(64)  # across a tile of 128 columns

_SCALED = "mov.b32 v{i}, t{i}; mul.f32 v{i}, v{i}, {inverse}; "
_LOW = "shl.b32 t{i}, {word}, 16; " + _SCALED
_HIGH = "and.b32 t{i}, {word}, 0xffff0000; " + _SCALED
_CAST = "cvt.rn.satfinite.{form}x2.f32 low, v1, v0; cvt.rn.satfinite.{form}x2.f32 high, v3, v2; "


def _four(form: str, *numbers: tuple[str, str, str]):
    """Assembly: four numbers, (half, word, inverse) each, as float8 bytes of a word, the first lowest."""
    lines = "".join(half.format(i=i, word=word, inverse=inverse) for i, (half, word, inverse) in enumerate(numbers))
    registers = ".reg .b32 t<4>; .reg .f32 v<4>; .reg .b16 low, high; "
    return gl.constexpr("{ " + registers + lines + _CAST.format(form=form) + "mov.b32 $0, {low, high}; }")


def _along(form: str):
    return _four(form, (_LOW, "$1", "$3"), (_HIGH, "$1", "$3"), (_LOW, "$2", "$4"), (_HIGH, "$2", "$4"))


def _down(form: str, half: str):
    return _four(form, *((half, f"${1 + i}", "$5") for i in range(4)))


ALONG_E4M3, ALONG_E5M2 = _along("e4m3"), _along("e5m2")
EVEN_E4M3, EVEN_E5M2 = _down("e4m3", _LOW), _down("e5m2", _LOW)
ODD_E4M3, ODD_E5M2 = _down("e4m3", _HIGH), _down("e5m2", _HIGH)


@gluon.jit
def _larger(a, b):
    """The larger magnitudes of two words, NaN where one is NaN; their signs say nothing."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _even(word):
    """Bits of fp32 of the magnitude of a word's first number, that of the even column."""
    return (word << 16) & 0x7FFF0000


@gluon.jit
def _odd(word):
    return word & 0x7FFF0000


@gluon.jit
def _scale_of(amax, E8M0: gl.constexpr, FORMAT: gl.constexpr, ROUNDING: gl.constexpr):
    """(scale as it is stored, its inverse) for the bits of amax: the portable kernel's, with fewer instructions."""
    # one is carried into the exponent if the mantissa is above that of the largest number
    carry: gl.constexpr = 0x7FFFFF - FORMAT.extra if ROUNDING == "rceil" else 0
    bad = amax >= INFINITY
    top = gl.minimum(gl.maximum((amax + carry) >> 23, FORMAT.top + (0 if E8M0 else 1)), 254)
    inverse = gl.where(bad, QUIET_NAN, (254 + FORMAT.top - top) << 23).to(gl.float32, bitcast=True)
    if E8M0:
        return gl.where(bad, 255, top - FORMAT.top).to(gl.uint8), inverse
    else:
        return gl.where(bad, QUIET_NAN, (top - FORMAT.top) << 23).to(gl.float32, bitcast=True), inverse


@gluon.constexpr_function
def tall(warps):
    """The layout of a tile `[STACK, DEEP, WORDS]`: 16 rows of 4 words a thread, or of fewer for more than 4 warps."""
    words = 16 // warps
    threads = 64 // words
    return gl.BlockedLayout([1, 16, words], [32 // threads, 1, threads], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def place(first, ends_ptr, padded_ptr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """(first row, end of its group) of the tile at `first` when all groups start at multiples of 128; (0, 0): none.

    Every warp looks at all groups by itself. The first program writes where each then ends.
    """
    layout: gl.constexpr = gl.BlockedLayout([WIDTH // 32], [32], [WARPS], [0])
    g = gl.arange(0, WIDTH, layout)
    ends = gl.load(ends_ptr + g, mask=g < GROUPS, other=0)
    starts = gl.load(ends_ptr + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    sizes = gl.where(g < GROUPS, (ends - starts + 127) // 128 * 128, 0)
    padded = gl.associative_scan(sizes, 0, _add)
    if gl.program_id(0) == 0:
        gl.store(padded_ptr + g, padded, mask=g < GROUPS)
    inside = (first >= padded - sizes) & (first < padded)
    top = gl.sum(gl.where(inside, first + starts - padded + sizes, 0), 0)
    return top, gl.sum(gl.where(inside, ends, 0), 0)


@gluon.jit
def along_rows(
    x,
    ptr,
    scale_ptr,
    top,
    rows,
    column_tile,
    K,
    S,
    BLOCK: gl.constexpr,
    E8M0: gl.constexpr,
    FORMAT: gl.constexpr,
    ROUNDING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Rows of words `[STACK, DEEP, WORDS]` as float8 in `[S, K]`, and their scales."""
    BLOCKS: gl.constexpr = 2 * WORDS // BLOCK
    layout: gl.constexpr = x.type.layout
    blocks = x.reshape(STACK, DEEP, BLOCKS, BLOCK // 2)
    amax = gl.reduce(blocks, 3, _larger)
    stored, inverse = _scale_of(gl.maximum(_even(amax), _odd(amax)), E8M0, FORMAT, ROUNDING)

    # a row's scales to one thread, neighbouring rows to neighbouring threads
    lines: gl.constexpr = gl.BlockedLayout([1, 1, BLOCKS], [32 // DEEP, DEEP, 1], [WARPS, 1, 1], [2, 1, 0])
    stored = gl.convert_layout(stored, lines)
    q = gl.arange(0, STACK, gl.SliceLayout(1, gl.SliceLayout(2, lines)))[:, None, None]
    i = gl.arange(0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, lines)))[None, :, None]
    b = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, lines)))[None, None, :]
    row = q * DEEP + i
    base = scale_ptr + (column_tile.to(gl.int64) * BLOCKS * S + top)
    inside = row < rows
    if BLOCKS > 1:
        inside &= b < gl.cdiv(K, BLOCK) - column_tile * BLOCKS
    gl.store(base + (b * S + row), stored, mask=inside)

    inverse = gl.convert_layout(inverse, gl.SliceLayout(3, blocks.type.layout), assert_trivial=True)
    blocks, inverse = gl.broadcast(blocks, inverse.expand_dims(3))
    inverse = gl.convert_layout(inverse.reshape(STACK, DEEP, WORDS), layout, assert_trivial=True)
    ASSEMBLY: gl.constexpr = ALONG_E5M2 if FORMAT.name == "e5m2" else ALONG_E4M3
    pairs = gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,f,f", [x, inverse], dtype=gl.int16, is_pure=True, pack=2)
    q = gl.arange(0, STACK, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    i = gl.arange(0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    w = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = q * DEEP + i
    base = ptr + (top.to(gl.int64) * (K // 2) + column_tile * WORDS)
    gl.store(base + (row * (K // 2) + w), pairs, mask=(row < rows) & (w < K // 2 - column_tile * WORDS))


@gluon.jit
def down_columns(
    x,
    ptr,
    scale_ptr,
    first,
    column_tile,
    K,
    P,
    BLOCK: gl.constexpr,
    E8M0: gl.constexpr,
    FORMAT: gl.constexpr,
    ROUNDING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The same turned, as float8 in words of 4 rows, `[K, P / 4]`, and the scales."""
    BLOCKS: gl.constexpr = 128 // BLOCK
    words = K // 2 - column_tile * WORDS
    amax = gl.reduce(x, 1, _larger)
    amax = gl.reduce(amax.reshape(BLOCKS, STACK // BLOCKS, WORDS), 1, _larger)
    even, even_inverse = _scale_of(_even(amax), E8M0, FORMAT, ROUNDING)
    odd, odd_inverse = _scale_of(_odd(amax), E8M0, FORMAT, ROUNDING)

    stored = gl.join(even, odd).reshape(BLOCKS, 2 * WORDS)
    if not E8M0:  # bytes lie as they are stored: a warp has a block's
        stored = gl.convert_layout(stored, gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0]))
    b = gl.arange(0, BLOCKS, gl.SliceLayout(1, stored.type.layout))[:, None]
    c = gl.arange(0, 2 * WORDS, gl.SliceLayout(0, stored.type.layout))[None, :]
    base = scale_ptr + ((first // BLOCK).to(gl.int64) * K + column_tile * (2 * WORDS))
    gl.store(base + (b * K + c), stored, mask=c < K - column_tile * (2 * WORDS))

    fours = x.reshape(STACK, QUARTERS, 2, 2, WORDS).permute(0, 1, 4, 2, 3)
    zero_two, one_three = gl.split(fours)
    zero, two = gl.split(zero_two)
    one, three = gl.split(one_three)
    even_inverse = _each_quarter(even_inverse, zero)
    odd_inverse = _each_quarter(odd_inverse, zero)
    EVEN: gl.constexpr = EVEN_E5M2 if FORMAT.name == "e5m2" else EVEN_E4M3
    ODD: gl.constexpr = ODD_E5M2 if FORMAT.name == "e5m2" else ODD_E4M3
    even = gl.inline_asm_elementwise(
        EVEN, "=r,r,r,r,r,f", [zero, one, two, three, even_inverse], dtype=gl.int32, is_pure=True, pack=1
    )
    odd = gl.inline_asm_elementwise(
        ODD, "=r,r,r,r,r,f", [zero, one, two, three, odd_inverse], dtype=gl.int32, is_pure=True, pack=1
    )
    # 8 threads to the 128 bytes of a column
    turned: gl.constexpr = gl.BlockedLayout(
        [1, QUARTERS, 1, 1], [STACK, 1, 32 // STACK // 2, 2], [1, 1, WARPS, 1], [1, 0, 3, 2]
    )
    fours = gl.convert_layout(gl.join(even, odd), turned)
    q = gl.arange(0, STACK, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, turned))))[:, None, None, None]
    i = gl.arange(0, QUARTERS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, turned))))[None, :, None, None]
    w = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, turned))))[None, None, :, None]
    odds = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, turned))))[None, None, None, :]
    base = ptr + ((column_tile * (2 * WORDS)).to(gl.int64) * (P // 4) + first // 4)
    gl.store(base + ((w * 2 + odds) * (P // 4) + (q * QUARTERS + i)), fours, mask=w < words)


@gluon.jit
def _each_quarter(inverse, like):
    """`[BLOCKS, WORDS]` as `[STACK, QUARTERS, WORDS]`, in the layout of `like`."""
    BLOCKS: gl.constexpr = inverse.shape[0]
    wide = inverse[:, None, :].broadcast_to([BLOCKS, STACK // BLOCKS, WORDS]).reshape(STACK, WORDS)
    wide = gl.convert_layout(wide, gl.SliceLayout(1, like.type.layout)).expand_dims(1)
    like, wide = gl.broadcast(like, wide)
    return wide


@gluon.jit
def rows_kernel(
    x_ptr,
    ends_ptr,
    padded_ptr,
    along_ptr,
    along_scale_ptr,
    down_ptr,
    down_scale_ptr,
    K,
    S,
    P,
    x_row,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    E8M0: gl.constexpr,
    FORMAT: gl.constexpr,
    ROUNDING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A tile of 128 rows and columns, quantized along K and down the rows; either pointer may be None.

    x in words of two numbers, x_row of them a row; along in words of 2 bytes, down in words of 4. Scales of
    neighbouring rows lie side by side, of neighbouring columns too.
    """
    layout: gl.constexpr = tall(WARPS)
    column_tiles = gl.cdiv(K, 2 * WORDS)
    first = gl.program_id(0) // column_tiles * 128
    column_tile = gl.program_id(0) % column_tiles
    top, end = place(first, ends_ptr, padded_ptr, GROUPS, WIDTH, WARPS)
    rows = end - top
    if rows > 0:
        q = gl.arange(0, STACK, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        i = gl.arange(0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        w = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        row = q * DEEP + i
        ptrs = x_ptr + (top.to(gl.int64) * x_row + column_tile * WORDS) + (row * x_row + w)
        x = gl.load(ptrs, mask=(row < rows) & (w < K // 2 - column_tile * WORDS), other=0)
        if down_ptr is not None:
            down_columns(x, down_ptr, down_scale_ptr, first, column_tile, K, P, BLOCK, E8M0, FORMAT, ROUNDING, WARPS)
        if along_ptr is not None:
            along_rows(
                x,
                along_ptr,
                along_scale_ptr,
                top,
                rows,
                column_tile,
                K,
                S,
                BLOCK,
                E8M0,
                FORMAT,
                ROUNDING,
                WARPS,
            )
