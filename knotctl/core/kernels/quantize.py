"""Activations as the kernels multiply them: int8 with one f32 scale per block of the weights' type, or f32 itself.

For a block x of 256 (K types) or 32 elements: scale = max|x| / 127, quant = round-half-even(x · (127 / max|x|)), each
step one f32 operation; a block whose largest magnitude is below TINY is zero. ggml rounds its scales to f16; we do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import CheckFailed
from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.functions import MAGIC
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import largest_bits, store_bytes, total
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import (
    add,
    bits_f32x16,
    float_of,
    load_f32x16,
    load_i32x16,
    load_u32,
    mask,
    mul,
    shift_left,
    shift_signed,
    signed_larger,
    splat_f32x16,
    store_f32,
    store_i16,
    store_i32,
    zero_i32x16,
)
from knotctl.core.kernels.threads import run
from knotctl.core.qtypes import QType

# 127 / max|x| must stay finite; no activation of a real model is this small.
TINY = float(np.float32(1e-35))
_SIZE, _INFINITE = 0x7FFFFFFF, 0x7F800000


@dataclass(frozen=True, slots=True)
class Activations:
    """T rows of activations of K columns, ready for every weight of one activation kind.

    Kind "float" holds x alone. The others lie block by block, so that a tile reads one range per block:
    Shapes: x f32[T, K]; quants i8[K / block, T, block]; scales f32[K / block, T]. "block256": sums i16[K / 256, T, 8]
    of 32 quants each, more i32[K / 256, T, 16]: -32 times the sum of 16 quants. "block32": sums i32[K / 32, T], more
    f32[K / 32, T]: scale · sum.
    """

    kind: str
    tokens: int
    x: NDArray[np.float32] | None = None
    quants: NDArray[np.int8] | None = None
    scales: NDArray[np.float32] | None = None
    sums: NDArray[Any] | None = None
    more: NDArray[Any] | None = None


def activation_kind(qtype: QType) -> str:
    """Return what a weight type multiplies with; activations of one kind serve all types of that kind."""
    return "float" if qtype.block == 1 else f"block{qtype.block}"


def address(array: NDArray[Any] | None) -> int:
    """Return where an array's bytes lie."""
    assert array is not None
    return int(array.__array_interface__["data"][0])


@cache
def float_bits(x: float) -> int:
    """Return the bits of a number as an f32: how a kernel's argument carries it."""
    return int(np.float32(x).view(np.uint32))


@inner
def _largest(x, n):
    """Return the bits of the largest magnitude of n numbers; NaN and infinities are at least _INFINITE."""
    most = zero_i32x16()
    for i in range(0, n, 16):
        most = signed_larger(mask(load_i32x16(x + 4 * i), _SIZE), most)
    return largest_bits(most)


@inner
def _scale(bits):
    """Return scale and inverse of a block whose largest magnitude has these bits."""
    most = float_of(np.uint32(bits))
    if most >= np.float32(TINY):
        return most / np.float32(127), np.float32(127) / most
    return np.float32(0), np.float32(0)


@inner
def _sixteen(x, inverse, out):
    """Write 16 quants and return their sum."""
    # Adding MAGIC rounds half to even and leaves the whole number in the lowest bits.
    bits = bits_f32x16(add(mul(load_f32x16(x), splat_f32x16(inverse)), splat_f32x16(np.float32(MAGIC))))
    store_bytes(out, bits)
    return np.int32(total(shift_signed(shift_left(bits, 24), 24)))


@Kernel
def quantize_256(args, scratch, begin, end):
    """Units are blocks, in the order of the output."""
    x, columns, tokens, quants, scales, sums, more, bad = arguments(args, 8)
    for unit in range(begin, end):
        b, t = unit // tokens, unit % tokens
        at = x + 4 * (t * columns + 256 * b)
        bits = _largest(at, 256)
        if bits >= _INFINITE:
            store_i32(bad + 4 * t, np.int32(1))
        scale, inverse = _scale(bits)
        store_f32(scales + 4 * unit, scale)
        for g in range(8):
            low = _sixteen(at + 128 * g, inverse, quants + 256 * unit + 32 * g)
            high = _sixteen(at + 128 * g + 64, inverse, quants + 256 * unit + 32 * g + 16)
            store_i16(sums + 16 * unit + 2 * g, np.int16(low + high))
            store_i32(more + 64 * unit + 8 * g, np.int32(low * -32))
            store_i32(more + 64 * unit + 8 * g + 4, np.int32(high * -32))


@Kernel
def quantize_32(args, scratch, begin, end):
    """Units are blocks, in the order of the output."""
    x, columns, tokens, quants, scales, sums, more, bad = arguments(args, 8)
    for unit in range(begin, end):
        b, t = unit // tokens, unit % tokens
        at = x + 4 * (t * columns + 32 * b)
        bits = _largest(at, 32)
        if bits >= _INFINITE:
            store_i32(bad + 4 * t, np.int32(1))
        scale, inverse = _scale(bits)
        to = quants + 32 * unit
        s = np.int32(_sixteen(at, inverse, to) + _sixteen(at + 64, inverse, to + 16))
        store_f32(scales + 4 * unit, scale)
        store_i32(sums + 4 * unit, s)
        store_f32(more + 4 * unit, np.float32(scale * np.float32(s)))


@Kernel
def check_finite(args, scratch, begin, end):
    """Units are rows."""
    x, columns, bad = arguments(args, 3)
    for t in range(begin, end):
        row, whole = x + 4 * t * columns, columns // 16 * 16
        worst = np.int64(_largest(row, whole))
        for i in range(whole, columns):
            worst = max(worst, np.int64(load_u32(row + 4 * i)) & _SIZE)
        if worst >= _INFINITE:
            store_i32(bad + 4 * t, np.int32(1))


def quantize(x: NDArray[np.float32], qtype: QType) -> Activations:
    """Return activations as weights of this type multiply them.

    Shapes: x f32[T, K], K a multiple of the type's block.
    Raises: CheckFailed bad-activation where a number is not finite, ModelError unsupported-type.
    """
    check_computable(qtype)
    x = np.ascontiguousarray(x, np.float32)
    tokens, columns = x.shape
    bad = np.zeros(tokens, np.int32)
    if qtype.block == 1:
        acts = Activations("float", tokens, x)
        run(check_finite, tokens, 16, (address(x), columns, address(bad)))
    else:
        n, k = columns // qtype.block, qtype.block == 256
        quants, scales = np.empty((n, tokens, qtype.block), np.int8), np.empty((n, tokens), np.float32)
        sums = np.empty((n, tokens, 8), np.int16) if k else np.empty((n, tokens), np.int32)
        more = np.empty((n, tokens, 16), np.int32) if k else np.empty((n, tokens), np.float32)
        acts = Activations(activation_kind(qtype), tokens, None, quants, scales, sums, more)
        places = address(quants), address(scales), address(sums), address(more), address(bad)
        # A grain of some microseconds: 100 ns per 256 numbers.
        run(quantize_256 if k else quantize_32, n * tokens, 32 if k else 128, (address(x), columns, tokens, *places))
    if bad.any():
        raise CheckFailed(
            "bad-activation", f"activations: row {int(bad.argmax())}: expected finite numbers, found NaN or infinity"
        )
    return acts
