"""Root-mean-square norm: x / sqrt(mean(x²) + eps) · weight.

The squares are summed in 16 lanes, one for each column modulo 16, then by halves, as matmul.py sums a float row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address, float_bits
from knotctl.core.kernels.jit import Kernel
from knotctl.core.kernels.lanes import total
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import (
    add,
    float_of,
    load_f32x16,
    load_first_f32x16,
    mul,
    splat_f32x16,
    store_f32x16,
    store_first_f32x16,
    zero_f32x16,
)
from knotctl.core.kernels.threads import run


@Kernel
def rms_norm_rows(args, scratch, begin, end):
    """Units are rows."""
    x, weight, eps_bits, out, columns = arguments(args, 5)
    eps = float_of(np.uint32(eps_bits))
    whole = columns // 16 * 16
    rest = columns - whole
    for t in range(begin, end):
        row, to = x + 4 * t * columns, out + 4 * t * columns
        squares = zero_f32x16()
        for k in range(0, whole, 16):
            v = load_f32x16(row + 4 * k)
            squares = add(squares, mul(v, v))
        v = load_first_f32x16(row + 4 * whole, rest)
        squares = add(squares, mul(v, v))
        mean = np.float32(total(squares) / np.float32(columns))
        scale = splat_f32x16(np.float32(np.float32(1) / np.sqrt(np.float32(mean + eps))))
        for k in range(0, whole, 16):
            store_f32x16(to + 4 * k, mul(mul(load_f32x16(row + 4 * k), scale), load_f32x16(weight + 4 * k)))
        last = load_first_f32x16(weight + 4 * whole, rest)
        store_first_f32x16(to + 4 * whole, mul(mul(load_first_f32x16(row + 4 * whole, rest), scale), last), rest)


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[np.float32]) -> None:
    """Write the norm of each row of x to out, which may be x.

    Shapes: x, out f32[..., K] contiguous (any leading dimensions: heads too), weight f32[K].
    """
    columns = weight.size
    places = address(x), address(weight), float_bits(eps), address(out)
    run(rms_norm_rows, x.size // columns, 8, (*places, columns))
