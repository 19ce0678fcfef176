"""What is done to each element alone: the gate of the feed-forward layer, residual and bias."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.functions import exp
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.simd import add as plus
from knotctl.core.kernels.simd import (
    div,
    load_f32x16,
    load_first_f32x16,
    mul,
    splat_f32x16,
    store_f32x16,
    store_first_f32x16,
    sub,
    zero_f32x16,
)
from knotctl.core.kernels.threads import run

_CHUNK = 1024  # elements of a unit: a whole number of vectors, so that a chunk's end is never ragged but the last


@inner
def _gated(gate, up):
    """Return gate / (1 + e^-gate) · up."""
    e = exp(sub(zero_f32x16(), gate))
    return mul(div(gate, plus(splat_f32x16(np.float32(1)), e)), up)


@Kernel
def swiglu_chunks(args, scratch, begin, end):
    """Units are chunks."""
    gate, up, out, size = arguments(args, 4)
    first, last = _CHUNK * begin, min(_CHUNK * end, size)
    whole = last - (last - first) % 16
    for i in range(first, whole, 16):
        store_f32x16(out + 4 * i, _gated(load_f32x16(gate + 4 * i), load_f32x16(up + 4 * i)))
    rest, i = last - whole, 4 * whole
    store_first_f32x16(out + i, _gated(load_first_f32x16(gate + i, rest), load_first_f32x16(up + i, rest)), rest)


@Kernel
def add_chunks(args, scratch, begin, end):
    """Units are chunks."""
    x, y, size = arguments(args, 3)
    first, last = _CHUNK * begin, min(_CHUNK * end, size)
    whole = last - (last - first) % 16
    for i in range(first, whole, 16):
        store_f32x16(x + 4 * i, plus(load_f32x16(x + 4 * i), load_f32x16(y + 4 * i)))
    rest, i = last - whole, 4 * whole
    store_first_f32x16(x + i, plus(load_first_f32x16(x + i, rest), load_first_f32x16(y + i, rest)), rest)


@Kernel
def add_rows(args, scratch, begin, end):
    """Units are rows; each has y added."""
    x, y, period = arguments(args, 3)
    whole = period // 16 * 16
    rest = period - whole
    for t in range(begin, end):
        to = x + 4 * t * period
        for i in range(0, whole, 16):
            store_f32x16(to + 4 * i, plus(load_f32x16(to + 4 * i), load_f32x16(y + 4 * i)))
        tail = plus(load_first_f32x16(to + 4 * whole, rest), load_first_f32x16(y + 4 * whole, rest))
        store_first_f32x16(to + 4 * whole, tail, rest)


def swiglu(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write silu(gate)·up to out, which may be either.

    Shapes: f32, equal and contiguous.
    """
    run(swiglu_chunks, -(-gate.size // _CHUNK), 8, (address(gate), address(up), address(out), gate.size))


def add(x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
    """Add y to x in place. Shapes: f32, equal and contiguous."""
    run(add_chunks, -(-x.size // _CHUNK), 8, (address(x), address(y), x.size))


def add_bias(x: NDArray[np.float32], bias: NDArray[np.float32]) -> None:
    """Add a bias to every row in place. Shapes: x f32[T, N] contiguous, bias f32[N]."""
    run(add_rows, len(x), 64, (address(x), address(bias), bias.size))
