"""Activations as the kernels multiply them: int8 with one f32 scale per block of the weights' type, or f32 itself.

For a block x of 256 (K types) or 32 elements: scale = max|x| / 127, quant = round-half-even(x · (127 / max|x|)), each
step one f32 operation; a block whose largest magnitude is below TINY is zero. ggml rounds its scales to f16; we do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import CheckFailed
from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.jit import kernel
from knotctl.core.kernels.simd import bits_of, float_of, load_f32, load_u32, store_f32, store_i8, store_i32
from knotctl.core.kernels.threads import run
from knotctl.core.qtypes import QType

# 127 / max|x| must stay finite; no activation of a real model is this small.
TINY = float(np.float32(1e-35))
_EXPONENT = 0x7F800000


@dataclass(frozen=True, slots=True)
class Activations:
    """T rows of activations, ready for every weight of one activation kind.

    Shapes: kind "float": x f32[T, K] and nothing else; "block256" and "block32": quants i8[T, K], scales
    f32[T, K / block], sums i32[T, K / 32] of 32 neighbouring quants.
    """

    kind: str
    x: NDArray[np.float32]
    quants: NDArray[np.int8]
    scales: NDArray[np.float32]
    sums: NDArray[np.int32]


def activation_kind(qtype: QType) -> str:
    """Return what a weight type multiplies with; activations of one kind serve all types of that kind."""
    return "float" if qtype.block == 1 else f"block{qtype.block}"


def address(array: NDArray[Any]) -> int:
    """Return where an array's bytes lie."""
    return int(array.__array_interface__["data"][0])


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _quantize(x, quants, scales, sums, bad, columns, block, part, begin, end):
    magic = np.float32(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds half to even
    for t in range(begin, end):
        row = x + 4 * t * columns
        worst = np.uint32(0)
        for b in range(columns // block):
            source = row + 4 * b * block
            largest = np.uint32(0)
            for i in range(block):
                size = np.uint32(load_u32(source + 4 * i) & np.uint32(0x7FFFFFFF))
                largest = max(largest, size)
            worst = max(worst, largest)
            most = float_of(largest)
            scale, inverse = np.float32(0), np.float32(0)
            if most >= np.float32(TINY):
                scale, inverse = most / np.float32(127), np.float32(127) / most
            store_f32(scales + 4 * (t * (columns // block) + b), scale)
            for g in range(block // 32):
                at = b * block + 32 * g
                s = np.int32(0)
                for i in range(32):
                    v = np.float32(load_f32(row + 4 * (at + i)) * inverse)
                    q = np.int32(np.int32(bits_of(np.float32(v + magic))) << np.int32(24)) >> np.int32(24)
                    store_i8(quants + t * columns + at + i, np.int8(q))
                    s += np.int32(q)
                store_i32(sums + 4 * (t * columns + at) // 32, np.int32(s))
        if worst >= np.uint32(_EXPONENT):
            store_i32(bad + 4 * t, np.int32(1))


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _check_finite(x, bad, columns, part, begin, end):
    for t in range(begin, end):
        worst = np.uint32(0)
        for i in range(columns):
            worst = max(worst, np.uint32(load_u32(x + 4 * (t * columns + i)) & np.uint32(0x7FFFFFFF)))
        if worst >= np.uint32(_EXPONENT):
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
    none = np.empty((0, 0))
    if qtype.block == 1:
        acts = Activations("float", x, none.astype(np.int8), none.astype(np.float32), none.astype(np.int32))
        run(_check_finite, tokens, address(x), address(bad), columns)
    else:
        acts = Activations(
            activation_kind(qtype),
            none.astype(np.float32),
            np.empty((tokens, columns), np.int8),
            np.empty((tokens, columns // qtype.block), np.float32),
            np.empty((tokens, columns // 32), np.int32),
        )
        out = address(acts.quants), address(acts.scales), address(acts.sums)
        run(_quantize, tokens, address(x), *out, address(bad), columns, qtype.block)
    if bad.any():
        raise CheckFailed(
            "bad-activation", f"activations: row {int(bad.argmax())}: expected finite numbers, found NaN or infinity"
        )
    return acts
