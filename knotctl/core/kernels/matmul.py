"""Matrix times activations on the quantised blocks, one definition of a result for every kernel.

For output (row r, token t) of a quantised type, over the blocks in ascending order, from +0, each step one f32
operation (products and sums are never fused):

    isum = sum of the integer products, each group times its integer scale     (int32, exact)
    f    = f + float(isum)·(d·a)             a: the activations' scale
    f    = f - float(msum)·(dmin·a)          Q4_K, Q5_K: msum = sum of min · sum of quants   (int32, exact)
    f    = f + m·(a·float(sum of quants))    Q4_1, Q5_1

Bounds of isum: Q4_K 31 M, Q5_K 63 M, Q6_K 260 M. For F32, F16 and BF16: 16 sums, one for each column modulo 16, over
ascending columns, product then sum; then lane i + lane i+8, i + i+4, i + i+2, i + i+1. Nothing depends on the number
of tokens, on the rows computed together, on threads or on the SIMD level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.floats import float_rows
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.quantize import Activations, activation_kind, address, quantize
from knotctl.core.kernels.threads import get_threads, run
from knotctl.core.kernels.tiles import (
    D32,
    SCRATCH_BYTES,
    SUMS,
    TOKENS,
    clear_sums,
    multiply_32,
    multiply_32_m,
    multiply_k,
    multiply_q6_k,
    write_sums,
)
from knotctl.core.kernels.unpack import (
    unpack_q4_0,
    unpack_q4_1,
    unpack_q4_k,
    unpack_q5_0,
    unpack_q5_1,
    unpack_q5_k,
    unpack_q6_k,
    unpack_q8_0,
)
from knotctl.core.qtypes import QType

__all__ = ["Activations", "activation_kind", "matmul", "quantize"]


@inner
def _first(tile, rows):
    """Return the first row of a tile; a ragged last tile moves back over its neighbour and computes the same again."""
    return min(16 * tile, rows - 16)


@Kernel
def q4_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            u = b * all_tokens
            unpack_q4_k(at + 144 * b, stride, scratch, ahead + 16 * 144 * b)
            multiply_k(scratch, tokens, quants + 256 * u, sums + 16 * u, scales + 4 * u, f)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            u = b * all_tokens
            unpack_q5_k(at + 176 * b, stride, scratch, ahead + 16 * 176 * b)
            multiply_k(scratch, tokens, quants + 256 * u, sums + 16 * u, scales + 4 * u, f)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q6_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            u = b * all_tokens
            unpack_q6_k(at + 210 * b, stride, scratch, ahead + 16 * 210 * b)
            multiply_q6_k(scratch, tokens, quants + 256 * u, sums + 64 * u, scales + 4 * u, f)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q4_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n, u = min(8, blocks - b), b * all_tokens
            for i in range(n):
                to, k = scratch + 512 * i, 18 * (b + i)
                unpack_q4_0(at + k, stride, to, scratch + D32 + 64 * i, ahead + 16 * k)
            multiply_32(scratch, n, tokens, all_tokens, quants + 32 * u, sums + 4 * u, scales + 4 * u, f, 8, False)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q4_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n, u = min(8, blocks - b), b * all_tokens
            for i in range(n):
                to, k = scratch + 512 * i, 20 * (b + i)
                unpack_q4_1(at + k, stride, to, scratch + D32 + 64 * i, ahead + 16 * k)
            multiply_32_m(scratch, n, tokens, all_tokens, quants + 32 * u, sums + 4 * u, scales + 4 * u, f)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n, u = min(8, blocks - b), b * all_tokens
            for i in range(n):
                to, k = scratch + 512 * i, 22 * (b + i)
                unpack_q5_0(at + k, stride, to, scratch + D32 + 64 * i, ahead + 16 * k)
            multiply_32(scratch, n, tokens, all_tokens, quants + 32 * u, sums + 4 * u, scales + 4 * u, f, 16, False)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n, u = min(8, blocks - b), b * all_tokens
            for i in range(n):
                to, k = scratch + 512 * i, 24 * (b + i)
                unpack_q5_1(at + k, stride, to, scratch + D32 + 64 * i, ahead + 16 * k)
            multiply_32_m(scratch, n, tokens, all_tokens, quants + 32 * u, sums + 4 * u, scales + 4 * u, f)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q8_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, all_tokens, quants, scales, sums, out, width = arguments(args, 11)
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n, u = min(8, blocks - b), b * all_tokens
            for i in range(n):
                to, k = scratch + 512 * i, 34 * (b + i)
                unpack_q8_0(at + k, stride, to, scratch + D32 + 64 * i, ahead + 16 * k)
            multiply_32(scratch, n, tokens, all_tokens, quants + 32 * u, sums + 4 * u, scales + 4 * u, f, 128, True)
        write_sums(f, tokens, out + 4 * r, width)


_TILES = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
# Which sums of the activations a type needs, and their bytes a token of a block.
_SUMS = {
    "Q4_0": ("sums", 4), "Q4_1": ("more", 4), "Q5_0": ("sums", 4), "Q5_1": ("more", 4), "Q8_0": ("sums", 4),
    "Q4_K": ("sums", 16), "Q5_K": ("sums", 16), "Q6_K": ("more", 64),
}  # fmt: skip
# Units a thread should find: enough that a core that is slower, or taken away for a while, delays nobody.
_SHARES = 8


def matmul(
    qtype: QType, blocks: NDArray[np.uint8], columns: int, acts: Activations, row: int, out: NDArray[np.float32]
) -> None:
    """Multiply rows [row, row + n) of a matrix, whose blocks are given, with T activations into out[:, row:row+n].

    Shapes: blocks u8[n · row_bytes], contiguous, at any address; out f32[T, N], rows contiguous.
    Raises: ModelError unsupported-type.
    """
    check_computable(qtype)
    row_bytes = columns // qtype.block * qtype.block_bytes
    rows = blocks.size // row_bytes
    if qtype.block == 1:
        float_rows(qtype, blocks, columns, acts, row, out)
    elif rows < 16:
        # A tile has 16 rows: the others repeat the last one and are dropped.
        padded = blocks.reshape(rows, row_bytes)[np.minimum(np.arange(16), rows - 1)]
        wide = np.empty((acts.tokens, 16), np.float32)
        matmul(qtype, padded.reshape(-1), columns, acts, 0, wide)
        out[:, row : row + rows] = wide[:, :rows]
    else:
        n, units = columns // qtype.block, -(-rows // 16)
        grain = max(1, units // (_SHARES * get_threads()))
        quants, scales, weights = address(acts.quants), address(acts.scales), address(blocks)
        sums_of, of_token = _SUMS[qtype.name]
        sums = address(getattr(acts, sums_of))
        target, width = address(out) + 4 * row, out.strides[0] // 4
        for t in range(0, acts.tokens, TOKENS):
            some = min(TOKENS, acts.tokens - t)
            at = quants + qtype.block * t, scales + 4 * t, sums + of_token * t, target + 4 * width * t, width
            run(
                _TILES[qtype.name],
                units,
                grain,
                (weights, row_bytes, n, rows, some, acts.tokens, *at),
                SCRATCH_BYTES,
            )
