"""Matrix times activations for F32, F16 and BF16 rows: the float part of matmul.py's definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import load_brain, load_brain_f32x16, load_half, load_half_f32x16, total, totals
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.quantize import Activations
from knotctl.core.kernels.simd import add, lane_f32x16, load_f32, load_f32x16, mul, store_f32, store_f32x16, zero_f32x16
from knotctl.core.kernels.threads import get_threads, run
from knotctl.core.qtypes import QType

_F32, _F16, _BF16 = range(3)
_KINDS = {"F32": _F32, "F16": _F16, "BF16": _BF16}


@inner
def _numbers(kind, at):
    if kind == _F32:
        return load_f32x16(at)
    if kind == _F16:
        return load_half_f32x16(at)
    return load_brain_f32x16(at)


@inner
def _number(kind, at):
    if kind == _F32:
        return load_f32(at)
    if kind == _F16:
        return load_half(at)
    return load_brain(at)


@inner
def _dot(kind, size, w, x, columns):
    """Return the product of a row and a token."""
    acc, whole = zero_f32x16(), columns // 16 * 16
    for k in range(0, whole, 16):
        acc = add(acc, mul(_numbers(kind, w + k * size), load_f32x16(x + 4 * k)))
    # A ragged end is one more step with zeros behind it: +0 changes no sum.
    for k in range(whole, columns):
        product = np.float32(_number(kind, w + k * size) * load_f32(x + 4 * k))
        acc = add(acc, lane_f32x16(product, k - whole))
    return total(acc)


@inner
def _four_by_four(kind, size, w, x, columns):
    """Return the products of 4 rows and 4 tokens, lane 4t + r that of row r and token t: 16 sums hide all latency."""
    s0, s1, s2, s3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    s4, s5, s6, s7 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    s8, s9, sa, sb = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    sc, sd, se, sf = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    row, token = columns * size, 4 * columns
    for k in range(0, columns, 16):
        at, a = w + k * size, x + 4 * k
        w0, w1 = _numbers(kind, at), _numbers(kind, at + row)
        w2, w3 = _numbers(kind, at + 2 * row), _numbers(kind, at + 3 * row)
        x0, x1 = load_f32x16(a), load_f32x16(a + token)
        s0, s1, s2, s3 = add(s0, mul(w0, x0)), add(s1, mul(w1, x0)), add(s2, mul(w2, x0)), add(s3, mul(w3, x0))
        s4, s5, s6, s7 = add(s4, mul(w0, x1)), add(s5, mul(w1, x1)), add(s6, mul(w2, x1)), add(s7, mul(w3, x1))
        x0, x1 = load_f32x16(a + 2 * token), load_f32x16(a + 3 * token)
        s8, s9, sa, sb = add(s8, mul(w0, x0)), add(s9, mul(w1, x0)), add(sa, mul(w2, x0)), add(sb, mul(w3, x0))
        sc, sd, se, sf = add(sc, mul(w0, x1)), add(sd, mul(w1, x1)), add(se, mul(w2, x1)), add(sf, mul(w3, x1))
    return totals((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf))


@Kernel
def floats(args, scratch, begin, end):
    """Units are 4 rows."""
    w, x, columns, rows, tokens, out, stride, kind = arguments(args, 8)
    size = 4 if kind == _F32 else 2
    for unit in range(begin, end):
        r0, r1 = 4 * unit, min(4 * unit + 4, rows)
        at, t = w + r0 * columns * size, 0
        if r1 - r0 == 4 and columns % 16 == 0:
            while t + 4 <= tokens:
                store_f32x16(scratch, _four_by_four(kind, size, at, x + 4 * t * columns, columns))
                for i in range(4):
                    for r in range(4):
                        store_f32(out + 4 * ((t + i) * stride + r0 + r), load_f32(scratch + 16 * i + 4 * r))
                t += 4
        while t < tokens:
            for r in range(r0, r1):
                product = _dot(kind, size, w + r * columns * size, x + 4 * t * columns, columns)
                store_f32(out + 4 * (t * stride + r), product)
            t += 1


def float_rows(
    qtype: QType, blocks: NDArray[np.uint8], columns: int, acts: Activations, row: int, out: NDArray[np.float32]
) -> None:
    """Do matmul's work for a float type."""
    assert acts.x is not None
    rows = blocks.size // (columns * qtype.block_bytes)
    units = -(-rows // 4)
    grain = max(1, units // (8 * get_threads()))
    shape = columns, rows, acts.tokens, address(out) + 4 * row, out.strides[0] // 4, _KINDS[qtype.name]
    run(floats, units, grain, (address(blocks), address(acts.x), *shape), 64)
