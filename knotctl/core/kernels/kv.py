"""Keys and values on their way into a session's cache, as they are or rounded to half precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import bits_of, float_of, load_f32, load_i64, store_f32, store_i16
from knotctl.core.kernels.threads import run

# As f32 bits: infinity; the least that rounds to f16's infinity, 65520; the least normal f16, 2^-14.
_INFINITY, _TOO_LARGE, _LEAST_NORMAL = 0x7F800000, 0x477FF000, 0x38800000
# 0.5 as f32: its last bit is worth 2^-24, as that of a subnormal f16, so adding it rounds to one.
_HALF = 0x3F000000


@inner
def _to_half(x):
    """Return the f16 bits of an f32, rounded half to even."""
    bits = np.int64(bits_of(x))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > _INFINITY:
        return sign | 0x7E00
    if size >= _TOO_LARGE:
        return sign | 0x7C00
    if size < _LEAST_NORMAL:
        half = float_of(np.uint32(_HALF))
        return sign | (np.int64(bits_of(np.float32(float_of(np.uint32(size)) + half))) - _HALF)
    # the exponent's bias goes from 127 to 15; half of the last bit that stays, less 1 where that bit is even
    return sign | ((size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13)


@Kernel
def store_rows(args, scratch, begin, end):
    """Units are tokens."""
    x, positions, to, heads, dim, capacity, size = arguments(args, 7)
    for t in range(begin, end):
        position = load_i64(positions + 8 * t)
        for h in range(heads):
            row, at = x + 4 * (t * heads + h) * dim, to + size * (h * capacity + position) * dim
            if size == 4:
                for i in range(dim):
                    store_f32(at + 4 * i, load_f32(row + 4 * i))
            else:
                for i in range(dim):
                    store_i16(at + 2 * i, np.int16(_to_half(load_f32(row + 4 * i))))


def store(x: NDArray[np.float32], positions: NDArray[np.int64], to: NDArray[np.float32] | NDArray[np.float16]) -> None:
    """Write keys (or values) to their positions in a cache.

    Shapes: x f32[T, KVH, D], positions i64[T], to f32 or f16 [KVH, capacity, D]; all contiguous.
    """
    tokens, heads, dim = x.shape
    places = address(x), address(positions), address(to)
    run(store_rows, tokens, 8, (*places, heads, dim, to.shape[1], to.itemsize))
