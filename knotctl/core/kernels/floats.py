"""Matrix times activations for F32, F16 and BF16 rows: the float part of matmul.py's definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import load_brain, load_brain_f32x16, load_half, load_half_f32x16, total
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.quantize import Activations
from knotctl.core.kernels.simd import add, lane_f32x16, load_f32, load_f32x16, mul, store_f32, zero_f32x16
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


@Kernel
def floats(args, scratch, begin, end):
    """Units are rows."""
    w, x, columns, tokens, out, stride, kind = arguments(args, 7)
    size = 4 if kind == _F32 else 2
    whole = columns // 16 * 16
    for r in range(begin, end):
        for t in range(tokens):
            acc = zero_f32x16()
            row, a = w + r * columns * size, x + 4 * t * columns
            for k in range(0, whole, 16):
                acc = add(acc, mul(_numbers(kind, row + k * size), load_f32x16(a + 4 * k)))
            # A ragged end is one more step with zeros behind it: +0 changes no sum.
            for k in range(whole, columns):
                product = np.float32(_number(kind, row + k * size) * load_f32(a + 4 * k))
                acc = add(acc, lane_f32x16(product, k - whole))
            store_f32(out + 4 * (t * stride + r), total(acc))


def float_rows(
    qtype: QType, blocks: NDArray[np.uint8], columns: int, acts: Activations, row: int, out: NDArray[np.float32]
) -> None:
    """Do matmul's work for a float type."""
    assert acts.x is not None
    rows = blocks.size // (columns * qtype.block_bytes)
    grain = max(1, rows // (8 * get_threads()))
    shape = columns, acts.tokens, address(out) + 4 * row, out.strides[0] // 4, _KINDS[qtype.name]
    run(floats, rows, grain, (address(blocks), address(acts.x), *shape))
