"""Matrix times activations on the quantised blocks, one definition of a result for every kernel.

For output (row r, token t) of a quantised type: two sums, of the first and of the second planes of the activations
(quantize.py), added at the end. Each goes over the blocks in ascending order (those that have a second plane), from
+0, each step one f32 operation (products and sums are never fused):

    isum = sum of the integer products, each group times its integer scale     (int32, exact)
    f    = f + float(isum)·(d·a)             a: the plane's scale
    f    = f - float(msum)·(dmin·a)          Q4_K, Q5_K: msum = sum of min · sum of quants   (int32, exact)
    f    = f + m·(a·float(sum of quants))    Q4_1, Q5_1

Bounds of isum: Q4_K 31 M, Q5_K 63 M, Q6_K 260 M. For F32, F16 and BF16: 16 sums, one for each column modulo 16, over
ascending columns, product then sum; then lane i + lane i+8, i + i+4, i + i+2, i + i+1. Nothing depends on the number
of tokens, on the rows computed together, on threads or on the SIMD level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.few import FEW, few_q4_k, few_q6_k
from knotctl.core.kernels.floats import float_rows
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.machine import arguments
from knotctl.core.kernels.quantize import (
    BYTES_32,
    BYTES_256,
    TOKENS,
    Activations,
    activation_kind,
    planes_at,
    quantize,
)
from knotctl.core.kernels.rows import row_q4_k, row_q5_k, row_q6_k, scratch_256
from knotctl.core.kernels.rows32 import row_q4_0, row_q4_1, row_q5_0, row_q5_1, row_q8_0, scratch_32
from knotctl.core.kernels.simd import load_i64
from knotctl.core.kernels.threads import get_threads, recorded, run
from knotctl.core.kernels.tiles import (
    D32,
    SCRATCH_BYTES,
    SUMS,
    clear_sums,
    multiply_32,
    multiply_32_m,
    multiply_k,
    multiply_q6_k,
    widen,
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
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_256
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            count, listed = load_i64(part + 8 * b), part + 8 * blocks + 2 * b * tokens
            if 2 <= tokens <= FEW and not count:
                few_q4_k(tokens, at + 144 * b, stride, scratch, first + b * plane, f, ahead + 16 * 144 * b)
                continue
            unpack_q4_k(at + 144 * b, stride, scratch, ahead + 16 * 144 * b)
            widen(scratch, 64)
            multiply_k(scratch, tokens, all_tokens, first + b * plane, tokens, f)
            if count:
                multiply_k(scratch, count, listed, first + (blocks + b) * plane, tokens, f + 64 * tokens)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_256
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            count, listed = load_i64(part + 8 * b), part + 8 * blocks + 2 * b * tokens
            unpack_q5_k(at + 176 * b, stride, scratch, ahead + 16 * 176 * b)
            widen(scratch, 64)
            multiply_k(scratch, tokens, all_tokens, first + b * plane, tokens, f)
            if count:
                multiply_k(scratch, count, listed, first + (blocks + b) * plane, tokens, f + 64 * tokens)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q6_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_256
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(blocks):
            count, listed = load_i64(part + 8 * b), part + 8 * blocks + 2 * b * tokens
            if 2 <= tokens <= FEW and not count:
                few_q6_k(tokens, at + 210 * b, stride, scratch, first + b * plane, f, ahead + 16 * 210 * b)
                continue
            unpack_q6_k(at + 210 * b, stride, scratch, ahead + 16 * 210 * b)
            widen(scratch, 64)
            multiply_q6_k(scratch, tokens, all_tokens, first + b * plane, tokens, f)
            if count:
                multiply_q6_k(scratch, count, listed, first + (blocks + b) * plane, tokens, f + 64 * tokens)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q4_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_32
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n = min(8, blocks - b)
            for i in range(n):
                unpack_q4_0(
                    at + 18 * (b + i), stride, scratch + 512 * i, scratch + D32 + 64 * i, ahead + 16 * 18 * (b + i)
                )
            widen(scratch, 8 * n)
            multiply_32(scratch, scratch, scratch + D32, n, tokens, all_tokens, first + b * plane, tokens, f, 8, False)
            for i in range(n):
                count, listed = load_i64(part + 8 * (b + i)), part + 8 * blocks + 2 * (b + i) * tokens
                if count:
                    s, d, p = scratch + 512 * i, scratch + D32 + 64 * i, first + (blocks + b + i) * plane
                    multiply_32(scratch, s, d, 1, count, listed, p, tokens, f + 64 * tokens, 8, False)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q4_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_32
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n = min(8, blocks - b)
            for i in range(n):
                unpack_q4_1(
                    at + 20 * (b + i), stride, scratch + 512 * i, scratch + D32 + 64 * i, ahead + 16 * 20 * (b + i)
                )
            widen(scratch, 8 * n)
            multiply_32_m(scratch, scratch, scratch + D32, n, tokens, all_tokens, first + b * plane, tokens, f)
            for i in range(n):
                count, listed = load_i64(part + 8 * (b + i)), part + 8 * blocks + 2 * (b + i) * tokens
                if count:
                    s, d, p = scratch + 512 * i, scratch + D32 + 64 * i, first + (blocks + b + i) * plane
                    multiply_32_m(scratch, s, d, 1, count, listed, p, tokens, f + 64 * tokens)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_32
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n = min(8, blocks - b)
            for i in range(n):
                unpack_q5_0(
                    at + 22 * (b + i), stride, scratch + 512 * i, scratch + D32 + 64 * i, ahead + 16 * 22 * (b + i)
                )
            widen(scratch, 8 * n)
            multiply_32(scratch, scratch, scratch + D32, n, tokens, all_tokens, first + b * plane, tokens, f, 16, False)
            for i in range(n):
                count, listed = load_i64(part + 8 * (b + i)), part + 8 * blocks + 2 * (b + i) * tokens
                if count:
                    s, d, p = scratch + 512 * i, scratch + D32 + 64 * i, first + (blocks + b + i) * plane
                    multiply_32(scratch, s, d, 1, count, listed, p, tokens, f + 64 * tokens, 16, False)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q5_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_32
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n = min(8, blocks - b)
            for i in range(n):
                unpack_q5_1(
                    at + 24 * (b + i), stride, scratch + 512 * i, scratch + D32 + 64 * i, ahead + 16 * 24 * (b + i)
                )
            widen(scratch, 8 * n)
            multiply_32_m(scratch, scratch, scratch + D32, n, tokens, all_tokens, first + b * plane, tokens, f)
            for i in range(n):
                count, listed = load_i64(part + 8 * (b + i)), part + 8 * blocks + 2 * (b + i) * tokens
                if count:
                    s, d, p = scratch + 512 * i, scratch + D32 + 64 * i, first + (blocks + b + i) * plane
                    multiply_32_m(scratch, s, d, 1, count, listed, p, tokens, f + 64 * tokens)
        write_sums(f, tokens, out + 4 * r, width)


@Kernel
def q8_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, tokens, part, all_tokens, out, width = arguments(args, 9)
    first, plane = planes_at(part, blocks, tokens), tokens * BYTES_32
    for tile in range(begin, end):
        r, f = _first(tile, rows), scratch + SUMS
        at, ahead = w + r * stride, w + (r + 16) * stride
        clear_sums(f, tokens)
        for b in range(0, blocks, 8):
            n = min(8, blocks - b)
            for i in range(n):
                unpack_q8_0(
                    at + 34 * (b + i), stride, scratch + 512 * i, scratch + D32 + 64 * i, ahead + 16 * 34 * (b + i)
                )
            widen(scratch, 8 * n)
            multiply_32(scratch, scratch, scratch + D32, n, tokens, all_tokens, first + b * plane, tokens, f, 128, True)
            for i in range(n):
                count, listed = load_i64(part + 8 * (b + i)), part + 8 * blocks + 2 * (b + i) * tokens
                if count:
                    s, d, p = scratch + 512 * i, scratch + D32 + 64 * i, first + (blocks + b + i) * plane
                    multiply_32(scratch, s, d, 1, count, listed, p, tokens, f + 64 * tokens, 128, True)
        write_sums(f, tokens, out + 4 * r, width)


_TILES = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
_ROWS = {
    "Q4_0": row_q4_0, "Q4_1": row_q4_1, "Q5_0": row_q5_0, "Q5_1": row_q5_1, "Q8_0": row_q8_0,
    "Q4_K": row_q4_k, "Q5_K": row_q5_k, "Q6_K": row_q6_k,
}  # fmt: skip
_ALL = np.arange(TOKENS, dtype=np.uint16)  # the list of all tokens of a part
_ALL_AT = address(_ALL)
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
        if (program := recorded()) is not None:
            program.whole = False
        padded = blocks.reshape(rows, row_bytes)[np.minimum(np.arange(16), rows - 1)]
        wide = np.empty((acts.tokens, 16), np.float32)
        matmul(qtype, padded.reshape(-1), columns, acts, 0, wide)
        out[:, row : row + rows] = wide[:, :rows]
    else:
        n, units = columns // qtype.block, -(-rows // 16)
        grain = max(1, units // (_SHARES * get_threads()))
        weights, target, width = address(blocks), address(out) + 4 * row, out.strides[0] // 4
        if acts.tokens == 1 and columns >= 128:
            row_args = weights, row_bytes, n, rows, acts.parts[0][2], target
            run(_ROWS[qtype.name], units, grain, row_args, scratch_256(n) if qtype.block == 256 else scratch_32(n))
            return
        for tokens, _, part in acts.parts:
            args = weights, row_bytes, n, rows, tokens, part, _ALL_AT, target, width
            run(_TILES[qtype.name], units, grain, args, SCRATCH_BYTES)
            target += 4 * width * tokens
