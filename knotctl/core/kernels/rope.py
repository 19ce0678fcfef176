"""Rotary position embedding: pairs of a head's elements turned by position · inv_freq.

The angle and its cosine and sine are f64 and depend on (position, i) alone; they are rounded to f32, and each product
and sum of the rotation is one f32 operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.functions import cosine_and_sine
from knotctl.core.kernels.jit import Kernel
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import load_f32, load_i64, store_f32
from knotctl.core.kernels.threads import run


@Kernel
def rope_rows(args, scratch, begin, end):
    """Units are tokens."""
    x, positions, inv_freq, heads, head_dim, pairs, interleaved = arguments(args, 7)
    for t in range(begin, end):
        position = np.float64(load_i64(positions + 8 * t))
        row = x + 4 * t * heads * head_dim
        for i in range(pairs):
            c, s = cosine_and_sine(position * np.float64(load_f32(inv_freq + 4 * i)))
            cosine, sine = np.float32(c), np.float32(s)
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
            for h in range(heads):
                at, bt = row + 4 * (h * head_dim + first), row + 4 * (h * head_dim + second)
                a, b = load_f32(at), load_f32(bt)
                store_f32(at, np.float32(np.float32(a * cosine) - np.float32(b * sine)))
                store_f32(bt, np.float32(np.float32(a * sine) + np.float32(b * cosine)))


def rope(
    x: NDArray[np.float32], positions: NDArray[np.int64], inv_freq: NDArray[np.float32], interleaved: bool
) -> None:
    """Turn each head of each token in place; elements beyond the 2·len(inv_freq) first of a head stay.

    Shapes: x f32[T, H, D] contiguous, positions i64[T], inv_freq f32[R/2]: the pairs are (2i, 2i + 1) where
    interleaved (llama's order in GGUF), else (i, i + R/2).
    """
    tokens, heads, head_dim = x.shape
    pairs = inv_freq.size
    places = address(x), address(positions), address(inv_freq)
    run(rope_rows, tokens, 4, (*places, heads, head_dim, pairs, int(interleaved)))
