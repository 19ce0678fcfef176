"""One token: rows of K-type blocks as they stream by, at the memory's bandwidth.

Lanes are elements. Each block's integer sums go to a thread's scratch, those of 16 rows side by side; after 16 rows the
float steps run over it with rows as lanes, so that they are those of a tile, bit by bit. Of Q4_K and Q5_K four rows are
read together: their sums fold into one vector. Q6_K is at the memory's bandwidth with one row at a time.
"""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.dots import dot_small, dot_words
from knotctl.core.kernels.jit import Kernel, inlined, inner
from knotctl.core.kernels.lanes import halves_to_f32, signed_i32x16, spread, to_f32, total, twice_i8x64
from knotctl.core.kernels.machine import arguments, prefetch
from knotctl.core.kernels.quantize import BYTES_256, planes_at, rows_at
from knotctl.core.kernels.quarters import (
    add_quarters,
    fold_quarters,
    load_bytes_i16x32,
    load_twice,
    set_bit_4_where,
    splat_words,
    spread_words,
    words_in_quarters,
)
from knotctl.core.kernels.simd import (
    add,
    bit_or,
    load_f32,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    load_i32,
    load_i32x16,
    load_i64,
    load_u16,
    load_u32,
    mask,
    mul,
    shift_left,
    shift_right,
    splat_f32x16,
    store_f32x16,
    store_i32,
    store_i32x16,
    store_i64,
    sub,
    zero_f32x16,
    zero_i32x16,
)

# Offsets in a block's scratch: of Q4_K and Q5_K the sums with both planes, 4 vectors of 4 rows (a quarter) each;
# the mins of 16 rows, 8 bytes each; d and dmin.
SUMS, SUMS2, MINS, HEADS, BLOCK_K = 0, 256, 512, 640, 704
# Of Q6_K: isum of both planes, and d as it lies there.
ISUM, HEAD, ISUM2, BLOCK_6 = 0, 64, 128, 192
# Bytes ahead of a row's block that its lines are fetched. Nearer is too late, farther gains nothing; without it Q6_K,
# whose stride of 210 bytes trains no hardware prefetcher, runs at half the bandwidth.
AHEAD = 8192


def scratch_256(blocks: int) -> int:
    """Return the bytes of scratch for rows of so many blocks."""
    return BLOCK_K * blocks


@inner
def _scales(w, mins):
    """Return the 8 scales of a block, a byte each, and write its 8 mins (the layout is in decode.py)."""
    both, later = load_i64(w + 4), np.int64(load_u32(w + 12))
    first = both & 0x3F3F3F3F3F3F3F3F
    later = (later | (later >> 4) << 32) & 0x0F0F0F0F0F0F0F0F | (both >> 2) & 0x3030303030303030
    store_i64(mins, ((first >> 32) & 0xFFFFFFFF) | later & -0x100000000)
    return (first & 0xFFFFFFFF) | later << 32


@inlined
def _quants(five, w):
    """Return the 256 quants of a block by 64: sub-blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7."""
    p, q = load_i8x64(w + 48 if five else w + 16), load_i8x64(w + 112 if five else w + 80)
    q0, q1, q2, q3 = mask(p, 15), shift_right(p, 4), mask(q, 15), shift_right(q, 4)
    if five:
        h = load_twice(w + 16)
        q0, q1 = set_bit_4_where(q0, h, 1, 4), set_bit_4_where(q1, h, 2, 8)
        q2, q3 = set_bit_4_where(q2, h, 16, 64), set_bit_4_where(q3, h, 32, 128)
    return q0, q1, q2, q3


@inlined
def _scaled(quants, scales, a):
    """Return in 16 partial sums isum of a block: the sums of 4 products fit int16, as its scales do."""
    q0, q1, q2, q3 = quants
    x0, x1 = dot_small(zero_i32x16(), q0, load_i8x64(a)), dot_small(zero_i32x16(), q1, load_i8x64(a + 64))
    x2, x3 = dot_small(zero_i32x16(), q2, load_i8x64(a + 128)), dot_small(zero_i32x16(), q3, load_i8x64(a + 192))
    x = dot_words(zero_i32x16(), words_in_quarters(x0, x1), spread_words(scales, 0))
    return dot_words(x, words_in_quarters(x2, x3), spread_words(scales, 4))


@inlined
def _isum(sums):
    """Return isum of 16 rows from their partial sums."""
    return add_quarters((load_i32x16(sums), load_i32x16(sums + 64), load_i32x16(sums + 128), load_i32x16(sums + 192)))


@inlined
def _msum(mins, sums):
    """Return msum of 16 rows: the mins of 4 rows fill a vector."""
    by = splat_words(sums)
    m0 = dot_words(zero_i32x16(), load_bytes_i16x32(mins), by)
    m1 = dot_words(zero_i32x16(), load_bytes_i16x32(mins + 32), by)
    m2 = dot_words(zero_i32x16(), load_bytes_i16x32(mins + 64), by)
    m3 = dot_words(zero_i32x16(), load_bytes_i16x32(mins + 96), by)
    return fold_quarters((m0, m1, m2, m3))


@inlined
def _step_k(f, isum, msum, d, m, scale):
    """Add a block's part to the sums of 16 rows."""
    a = splat_f32x16(load_f32(scale))
    f = add(f, mul(to_f32(isum), mul(d, a)))
    return sub(f, mul(to_f32(msum), mul(m, a)))


@inlined
def _rows_k(five, size, args, scratch, begin, end):
    w, stride, blocks, rows, part, out = arguments(args, 6)
    first, arranged = planes_at(part, blocks, 1), rows_at(part, blocks, BYTES_256)
    for tile in range(begin, end):
        r0 = min(16 * tile, rows - 16)
        for r in range(0, 16, 4):
            at, ahead = w + (r0 + r) * stride, w + (r0 + r) * stride + AHEAD
            for b in range(blocks):
                for i in range(0, 4 * size, 64):
                    prefetch(ahead + i)
                to, bt, ct, dt = scratch + BLOCK_K * b, at + stride, at + 2 * stride, at + 3 * stride
                # Row 4i + k's mins lie where _msum's sums of 4 vectors put row 4i + k: at 4k + i.
                mins, heads = to + MINS + 2 * r, to + HEADS + 4 * r
                s0, s1 = _scales(at, mins), _scales(bt, mins + 32)
                s2, s3 = _scales(ct, mins + 64), _scales(dt, mins + 96)
                store_i32(heads, load_i32(at))
                store_i32(heads + 4, load_i32(bt))
                store_i32(heads + 8, load_i32(ct))
                store_i32(heads + 12, load_i32(dt))
                q0, q1, q2, q3 = _quants(five, at), _quants(five, bt), _quants(five, ct), _quants(five, dt)
                a = arranged + 512 * b
                x = _scaled(q0, s0, a), _scaled(q1, s1, a), _scaled(q2, s2, a), _scaled(q3, s3, a)
                store_i32x16(to + SUMS + 16 * r, fold_quarters(x))
                if load_i64(part + 8 * b):
                    a += 256
                    x = _scaled(q0, s0, a), _scaled(q1, s1, a), _scaled(q2, s2, a), _scaled(q3, s3, a)
                    store_i32x16(to + SUMS2 + 16 * r, fold_quarters(x))
                at, ahead = at + size, ahead + 4 * size
        f, g = zero_f32x16(), zero_f32x16()
        for b in range(blocks):
            at, plane = scratch + BLOCK_K * b, first + BYTES_256 * b
            heads = load_i32x16(at + HEADS)
            d, m = halves_to_f32(heads), halves_to_f32(shift_right(heads, 16))
            f = _step_k(f, _isum(at + SUMS), _msum(at + MINS, plane + 256), d, m, plane + 336)
            if load_i64(part + 8 * b):
                plane += BYTES_256 * blocks
                g = _step_k(g, _isum(at + SUMS2), _msum(at + MINS, plane + 256), d, m, plane + 336)
        store_f32x16(out + 4 * r0, add(f, g))


@Kernel
def row_q4_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows_k(False, 144, args, scratch, begin, end)


@Kernel
def row_q5_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows_k(True, 176, args, scratch, begin, end)


@inner
def _sum_q6_k(q0, q1, q2, q3, s, plane, isum):
    """Write isum of a Q6_K block's 4 times 64 quants, which are 32 too large, with one plane of one token."""
    x = mul(dot_small(zero_i32x16(), q0, load_i8x64(plane)), spread(s, 0, 4))
    x = add(x, mul(dot_small(zero_i32x16(), q1, load_i8x64(plane + 64)), spread(s, 4, 4)))
    y = mul(dot_small(zero_i32x16(), q2, load_i8x64(plane + 128)), spread(s, 8, 4))
    y = add(y, mul(dot_small(zero_i32x16(), q3, load_i8x64(plane + 192)), spread(s, 12, 4)))
    store_i32(isum, total(add(add(x, y), mul(s, load_i32x16(plane + 272)))))


@Kernel
def row_q6_k(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    w, stride, blocks, rows, part, out = arguments(args, 6)
    first = planes_at(part, blocks, 1)
    for tile in range(begin, end):
        r0 = min(16 * tile, rows - 16)
        for r in range(16):
            at, to = w + (r0 + r) * stride, scratch + 4 * r
            for b in range(blocks):
                prefetch(at + AHEAD)
                prefetch(at + AHEAD + 64)
                prefetch(at + AHEAD + 128)
                prefetch(at + AHEAD + 192)
                p0, h0 = load_i8x64(at), twice_i8x64(load_i8x32(at + 128), 0, 2)
                p1, h1 = load_i8x64(at + 64), twice_i8x64(load_i8x32(at + 160), 0, 2)
                q0 = bit_or(mask(p0, 15), shift_left(mask(h0, 3), 4))
                q1 = bit_or(shift_right(p0, 4), mask(h0, 48))
                q2 = bit_or(mask(p1, 15), shift_left(mask(h1, 3), 4))
                q3 = bit_or(shift_right(p1, 4), mask(h1, 48))
                s, to_block = signed_i32x16(load_i8x16(at + 192)), to + BLOCK_6 * b
                store_i32(to_block + HEAD, np.int32(load_u16(at + 208)))
                _sum_q6_k(q0, q1, q2, q3, s, first + BYTES_256 * b, to_block + ISUM)
                if load_i64(part + 8 * b):
                    _sum_q6_k(q0, q1, q2, q3, s, first + BYTES_256 * (blocks + b), to_block + ISUM2)
                at += 210
        f, g = zero_f32x16(), zero_f32x16()
        for b in range(blocks):
            at = scratch + BLOCK_6 * b
            d = halves_to_f32(load_i32x16(at + HEAD))
            a = splat_f32x16(load_f32(first + BYTES_256 * b + 336))
            f = add(f, mul(to_f32(load_i32x16(at + ISUM)), mul(d, a)))
            if load_i64(part + 8 * b):
                a = splat_f32x16(load_f32(first + BYTES_256 * (blocks + b) + 336))
                g = add(g, mul(to_f32(load_i32x16(at + ISUM2)), mul(d, a)))
        store_f32x16(out + 4 * r0, add(f, g))
