"""Activations as the kernels multiply them: int8 planes with f32 scales per block of the weights' type, or f32 itself.

For a block x of 256 (K types) or 32 elements of a row: scale = max|x| / 127, quant = round-half-even(x · inverse),
inverse = 127 / max|x|, each step one f32 operation; a block whose largest magnitude is below TINY is zero. ggml rounds
its scales to f16; we do not. A block that towers over its row (max|x| > 8 · sqrt(mean of the row's squares), which are
summed as norm.py does) would drown the row in rounding: what rounding took from it, x - scale · quant, is quantised
again, as a second plane of scale / 254. Measured, mean KL from gold without and with it: coder-1.5b 0.00067, 0.00022;
coder-0.5b 0.00036, 0.00018; smollm2 0.0026, 0.0010. About a tenth of the blocks of attention and gate have one, and a
quarter of those of the down projection.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import CheckFailed
from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.functions import MAGIC
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import largest_bits, store_bytes, total
from knotctl.core.kernels.machine import REPORT, arguments, atomic_add
from knotctl.core.kernels.simd import (
    add,
    bits_f32x16,
    float_of,
    load_f32x16,
    load_i8x16,
    load_i8x32,
    load_i32x16,
    load_i64,
    load_u32,
    mask,
    mul,
    shift_left,
    shift_signed,
    signed_larger,
    splat_f32x16,
    store_f32,
    store_i8x16,
    store_i8x32,
    store_i16,
    store_i32,
    store_i64,
    sub,
    zero_f32x16,
    zero_i32x16,
)
from knotctl.core.kernels.threads import run
from knotctl.core.qtypes import QType

# 127 / max|x| must stay finite, and 254 times that; no activation of a real model is this small.
TINY = float(np.float32(1e-30))
TOWERS = 8.0
# Tokens of a part, which is laid out, and multiplied, by itself: its float sums (64 KiB) and a block's activations
# (170 KiB) stay in the second-level cache.
TOKENS = 512
# Bytes of one token of one block: quants, sums i16[8] of 32, offsets i32[16] (-32 times the sum of 16), scale f32; or
# quants, sum i32, scale f32. Each kind lies together for all tokens: quants[T], sums[T], offsets[T], scales[T].
BYTES_256, BYTES_32 = 256 + 16 + 64 + 4, 32 + 4 + 4
_SIZE, _INFINITE = 0x7FFFFFFF, 0x7F800000


class Activations:
    """T rows of activations, ready for every weight of one activation kind.

    Kind "float" holds x f32[T, K] alone; the others hold parts of up to TOKENS rows: (rows, array, its address). A part
    is laid out as counts i64[n], listed u16[n, T], zeros to a multiple of 64; then for each of its n blocks the first
    plane of T tokens; then for each block the second plane of `count` tokens, with room for T: those listed.
    """

    __slots__ = ("kind", "parts", "tokens", "x")

    def __init__(self, kind: str, tokens: int, x: NDArray[np.float32] | None = None) -> None:
        self.kind, self.tokens, self.x = kind, tokens, x
        self.parts: list[tuple[int, NDArray[np.uint8], int]] = []


def activation_kind(qtype: QType) -> str:
    """Return what a weight type multiplies with; activations of one kind serve all types of that kind."""
    return "float" if qtype.block == 1 else "block256" if qtype.block == 256 else "block32"


@inner
def planes_at(part, blocks, tokens):
    """Return where a part's planes begin."""
    return part + (8 * blocks + 2 * blocks * tokens + 63) // 64 * 64


@inner
def rows_at(part, blocks, size):
    """Return where one token's quants lie in the order of weights, behind planes of so many bytes a block.

    Of each block of 256, both planes: 32 times the elements of nibbles 0 and 2, 1 and 3, 4 and 6, 5 and 7. Of each four
    blocks of 32, both planes: the first 16 of all, then the last 16; behind them an integer for each four: whether
    there is a second plane. Where 4 does not divide the blocks, the last four overlap those before.
    """
    return (planes_at(part, blocks, 1) + 2 * blocks * size + 63) // 64 * 64


@inner
def _arrange_256(part, blocks):
    planes, to = planes_at(part, blocks, 1), rows_at(part, blocks, BYTES_256)
    for b in range(blocks):
        for i in range(8):
            at, place = planes + BYTES_256 * b + 32 * i, to + 512 * b + i // 4 * 128 + i % 2 * 64 + i // 2 % 2 * 32
            store_i8x32(place, load_i8x32(at))
            if load_i64(part + 8 * b):
                store_i8x32(place + 256, load_i8x32(at + blocks * BYTES_256))


@inner
def _arrange_32(part, blocks):
    planes, to, quads = planes_at(part, blocks, 1), rows_at(part, blocks, BYTES_32), (blocks + 3) // 4
    for j in range(quads):
        first = min(4 * j, blocks - 4)
        count = part + 8 * first
        any_second = load_i64(count) | load_i64(count + 8) | load_i64(count + 16) | load_i64(count + 24)
        store_i64(to + 256 * quads + 8 * j, any_second)
        for k in range(4):
            for half in range(2):
                at, place = planes + BYTES_32 * (first + k) + 16 * half, to + 256 * j + 64 * half + 16 * k
                store_i8x16(place, load_i8x16(at))
                if any_second:
                    x = load_i8x16(at + blocks * BYTES_32)
                    store_i8x16(place + 128, x if load_i64(count + 8 * k) else mask(x, 0))


@inner
def _largest(x, n):
    """Return the bits of the largest magnitude of n numbers; NaN and infinities are at least _INFINITE."""
    most = zero_i32x16()
    for i in range(0, n, 16):
        most = signed_larger(mask(load_i32x16(x + 4 * i), _SIZE), most)
    return largest_bits(most)


@inner
def _limit(row, columns):
    """Return the magnitude above which a block of the row gets a second plane."""
    squares = zero_f32x16()
    for i in range(0, columns, 16):
        v = load_f32x16(row + 4 * i)
        squares = add(squares, mul(v, v))
    return np.float32(np.sqrt(np.float32(total(squares) / np.float32(columns))) * np.float32(TOWERS))


@inner
def _scale(bits):
    """Return scale and inverse of a block whose largest magnitude has these bits."""
    most = float_of(np.uint32(bits))
    if most >= np.float32(TINY):
        return most / np.float32(127), np.float32(127) / most
    return np.float32(0), np.float32(0)


@inner
def _sixteen(x, inverse, scale, inverse2, out):
    """Write 16 quants and return their sum: of x, or where scale is not 0 of what its first plane left."""
    # Adding MAGIC rounds half to even and leaves the whole number in the lowest bits.
    magic, v = splat_f32x16(np.float32(MAGIC)), load_f32x16(x)
    rounded = add(mul(v, splat_f32x16(inverse)), magic)
    if scale != np.float32(0):
        rest = sub(v, mul(splat_f32x16(scale), sub(rounded, magic)))
        rounded = add(mul(rest, splat_f32x16(inverse2)), magic)
    bits = bits_f32x16(rounded)
    store_bytes(out, bits)
    return np.int32(total(shift_signed(shift_left(bits, 24), 24)))


@inner
def _plane_256(x, inverse, scale, inverse2, region, t, tokens, stored):
    quants, sums, offsets = region + 256 * t, region + 256 * tokens + 16 * t, region + 272 * tokens + 64 * t
    for g in range(8):
        low = _sixteen(x + 128 * g, inverse, scale, inverse2, quants + 32 * g)
        high = _sixteen(x + 128 * g + 64, inverse, scale, inverse2, quants + 32 * g + 16)
        store_i16(sums + 2 * g, np.int16(low + high))
        store_i32(offsets + 8 * g, np.int32(low * -32))
        store_i32(offsets + 8 * g + 4, np.int32(high * -32))
    store_f32(region + 336 * tokens + 4 * t, stored)


@inner
def _plane_32(x, inverse, scale, inverse2, region, t, tokens, stored):
    low = _sixteen(x, inverse, scale, inverse2, region + 32 * t)
    high = _sixteen(x + 64, inverse, scale, inverse2, region + 32 * t + 16)
    store_i32(region + 32 * tokens + 4 * t, np.int32(low + high))
    store_f32(region + 36 * tokens + 4 * t, stored)


@Kernel
def quantize_256(args, scratch, begin, end):
    """Units are tokens."""
    x, columns, tokens, part = arguments(args, 4)
    blocks = columns // 256
    first = planes_at(part, blocks, tokens)
    second, zero = first + blocks * tokens * BYTES_256, np.float32(0)
    for t in range(begin, end):
        row = x + 4 * t * columns
        limit = _limit(row, columns)
        for b in range(blocks):
            at, region = row + 1024 * b, b * tokens * BYTES_256
            bits = _largest(at, 256)
            if bits >= _INFINITE:
                store_i64(args + REPORT, 1)
            scale, inverse = _scale(bits)
            _plane_256(at, inverse, zero, zero, first + region, t, tokens, scale)
            if float_of(np.uint32(bits)) > limit and scale != zero:
                i = atomic_add(part + 8 * b, 1)
                store_i16(part + 8 * blocks + 2 * (b * tokens + i), np.int16(t))
                inverse2, scale2 = np.float32(inverse * np.float32(254)), np.float32(scale / np.float32(254))
                _plane_256(at, inverse, scale, inverse2, second + region, i, tokens, scale2)
    if tokens == 1:
        _arrange_256(part, blocks)


@Kernel
def quantize_32(args, scratch, begin, end):
    """Units are tokens."""
    x, columns, tokens, part = arguments(args, 4)
    blocks = columns // 32
    first = planes_at(part, blocks, tokens)
    second, zero = first + blocks * tokens * BYTES_32, np.float32(0)
    for t in range(begin, end):
        row = x + 4 * t * columns
        limit = _limit(row, columns)
        for b in range(blocks):
            at, region = row + 128 * b, b * tokens * BYTES_32
            bits = _largest(at, 32)
            if bits >= _INFINITE:
                store_i64(args + REPORT, 1)
            scale, inverse = _scale(bits)
            _plane_32(at, inverse, zero, zero, first + region, t, tokens, scale)
            if float_of(np.uint32(bits)) > limit and scale != zero:
                i = atomic_add(part + 8 * b, 1)
                store_i16(part + 8 * blocks + 2 * (b * tokens + i), np.int16(t))
                inverse2, scale2 = np.float32(inverse * np.float32(254)), np.float32(scale / np.float32(254))
                _plane_32(at, inverse, scale, inverse2, second + region, i, tokens, scale2)
    if tokens == 1 and blocks >= 4:
        _arrange_32(part, blocks)


@Kernel
def clear_counts(args, scratch, begin, end):
    """The one unit is a part's counts."""
    part, blocks = arguments(args, 2)
    for b in range(blocks):
        store_i64(part + 8 * b, 0)


@Kernel
def check_finite(args, scratch, begin, end):
    """Units are rows."""
    x, columns = arguments(args, 2)
    for t in range(begin, end):
        row, whole = x + 4 * t * columns, columns // 16 * 16
        worst = np.int64(_largest(row, whole))
        for i in range(whole, columns):
            worst = max(worst, np.int64(load_u32(row + 4 * i)) & _SIZE)
        if worst >= _INFINITE:
            store_i64(args + REPORT, 1)


def quantized_bytes(qtype: QType, columns: int, tokens: int) -> int:
    """Return the bytes that `quantize` allocates for T rows of K columns."""
    if qtype.block == 1:
        return 0
    n, size = columns // qtype.block, BYTES_256 if qtype.block == 256 else BYTES_32
    return sum(_part_bytes(n, min(TOKENS, tokens - t), size) for t in range(0, tokens, TOKENS))


def _part_bytes(blocks: int, tokens: int, size: int) -> int:
    arranged = 64 + (512 * blocks if size == BYTES_256 else 264 * -(-blocks // 4)) if tokens == 1 else 0
    return 8 * blocks + 2 * blocks * tokens + 64 + 2 * blocks * tokens * size + arranged


def _fresh(count: int) -> NDArray[np.uint8]:
    return np.empty(count, np.uint8)


def quantize(
    x: NDArray[np.float32], qtype: QType, allocate: Callable[[int], NDArray[np.uint8]] = _fresh
) -> Activations:
    """Return activations as weights of this type multiply them, in memory that `allocate` gives for a number of bytes.

    Shapes: x f32[T, K], K a multiple of the type's block.
    Raises: CheckFailed bad-activation where a number is not finite, ModelError unsupported-type.
    """
    check_computable(qtype)
    x = np.ascontiguousarray(x, np.float32)
    tokens, columns = x.shape
    at, reported = address(x), 0
    if qtype.block == 1:
        acts = Activations("float", tokens, x)
        reported = run(check_finite, tokens, 16, (at, columns))
    else:
        acts = Activations(activation_kind(qtype), tokens)
        n = columns // qtype.block
        kernel, size = (quantize_256, BYTES_256) if qtype.block == 256 else (quantize_32, BYTES_32)
        for t in range(0, tokens, TOKENS):
            some = min(TOKENS, tokens - t)
            part = allocate(_part_bytes(n, some, size))
            acts.parts.append((some, part, address(part)))
            run(clear_counts, 1, 1, (acts.parts[-1][2], n))
            # A grain of some microseconds: 100 ns per 256 numbers.
            reported |= run(kernel, some, 1 + 8192 // columns, (at + 4 * t * columns, columns, some, acts.parts[-1][2]))
    if reported:
        row = int(np.isfinite(x).all(axis=1).argmin())
        raise CheckFailed("bad-activation", f"activations: row {row}: expected finite numbers, found NaN or infinity")
    return acts
