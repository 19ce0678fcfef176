"""One token: rows of K-type blocks as they stream by, at the memory's bandwidth.

Lanes are elements. Each block's integer sums go to a thread's scratch, 16 rows side by side; after 16 rows the float
steps run over it with rows as lanes, so that they are those of a tile, bit by bit. A block of scratch holds, 16 numbers
each: isum, msum, the block's d and dmin as they lie there, and isum and msum of the second plane.
"""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.dots import dot_mins, dot_small
from knotctl.core.kernels.jit import Kernel, inner
from knotctl.core.kernels.lanes import (
    bytes_i32x16,
    halves_to_f32,
    nibbles_i8x64,
    signed_i32x16,
    spread,
    store_totals,
    to_f32,
    total,
    twice_i8x64,
)
from knotctl.core.kernels.machine import arguments, prefetch
from knotctl.core.kernels.quantize import BYTES_256, planes_at
from knotctl.core.kernels.simd import (
    add,
    bit_or,
    load_f32,
    load_i8x16,
    load_i8x32,
    load_i8x64,
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
    sub,
    zero_f32x16,
    zero_i32x16,
)

ISUM, MSUM, HEAD, ISUM2, MSUM2, BLOCK = 0, 64, 128, 192, 256, 320
# Bytes ahead of a row's block that its lines are fetched. Nearer is too late, farther gains nothing; without it Q6_K,
# whose stride of 210 bytes trains no hardware prefetcher, runs at half the bandwidth.
AHEAD = 8192


@inner
def _scales_and_mins(w):
    """Return 8 scales, then 8 mins, in 16 lanes, and the mins as two integers of bytes (the layout is in decode.py)."""
    a, b, c = load_u32(w + 4), load_u32(w + 8), load_u32(w + 12)
    low, top = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    s0, m0 = np.uint32(a & np.uint32(0x3F3F3F3F)), np.uint32(b & np.uint32(0x3F3F3F3F))
    s1 = np.uint32((c & low) | ((a >> np.uint32(2)) & top))
    m1 = np.uint32(((c >> np.uint32(4)) & low) | ((b >> np.uint32(2)) & top))
    return s0, s1, m0, m1


@inner
def _sums_k(q0, q1, q2, q3, s, m0, m1, plane, isum, msum):
    """Write isum and msum of a block's 4 times 64 quants with one plane of one token."""
    x = mul(dot_small(zero_i32x16(), q0, load_i8x64(plane)), spread(s, 0, 2))
    x = add(x, mul(dot_small(zero_i32x16(), q1, load_i8x64(plane + 64)), spread(s, 2, 2)))
    y = mul(dot_small(zero_i32x16(), q2, load_i8x64(plane + 128)), spread(s, 4, 2))
    y = add(y, mul(dot_small(zero_i32x16(), q3, load_i8x64(plane + 192)), spread(s, 6, 2)))
    store_totals(isum, add(x, y), msum, dot_mins(m0, m1, plane + 256))


@inner
def _row_k(w, q0, q1, q2, q3, plane, second, to):
    s0, s1, m0, m1 = _scales_and_mins(w)
    s = bytes_i32x16(s0, s1)
    store_i32(to + HEAD, np.int32(load_u32(w)))
    _sums_k(q0, q1, q2, q3, s, m0, m1, plane, to + ISUM, to + MSUM)
    if second:
        _sums_k(q0, q1, q2, q3, s, m0, m1, second, to + ISUM2, to + MSUM2)


@inner
def _finish_k(scratch, blocks, part, first, out):
    """Run the float steps of 16 rows."""
    f, g = zero_f32x16(), zero_f32x16()
    for b in range(blocks):
        at = scratch + BLOCK * b
        head = load_i32x16(at + HEAD)
        d, m = halves_to_f32(mask(head, 0xFFFF)), halves_to_f32(shift_right(head, 16))
        a = splat_f32x16(load_f32(first + BYTES_256 * b + 336))
        f = add(f, mul(to_f32(load_i32x16(at + ISUM)), mul(d, a)))
        f = sub(f, mul(to_f32(load_i32x16(at + MSUM)), mul(m, a)))
        if load_i64(part + 8 * b):
            a = splat_f32x16(load_f32(first + BYTES_256 * (blocks + b) + 336))
            g = add(g, mul(to_f32(load_i32x16(at + ISUM2)), mul(d, a)))
            g = sub(g, mul(to_f32(load_i32x16(at + MSUM2)), mul(m, a)))
    store_f32x16(out, add(f, g))


@Kernel
def row_q4_k(args, scratch, begin, end):
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
                q0, q1 = nibbles_i8x64(load_i8x32(at + 16)), nibbles_i8x64(load_i8x32(at + 48))
                q2, q3 = nibbles_i8x64(load_i8x32(at + 80)), nibbles_i8x64(load_i8x32(at + 112))
                plane = first + BYTES_256 * b
                second = first + BYTES_256 * (blocks + b) if load_i64(part + 8 * b) else 0
                _row_k(at, q0, q1, q2, q3, plane, second, to + BLOCK * b)
                at += 144
        _finish_k(scratch, blocks, part, first, out + 4 * r0)


@inner
def _fifth(packed, high, bit):
    """Return 64 quants of Q5_K: the nibbles of 32 bytes under bits `bit` (a literal) and `bit` + 1 of 32 others."""
    return bit_or(nibbles_i8x64(packed), shift_left(mask(twice_i8x64(high, bit, 1), 1), 4))


@Kernel
def row_q5_k(args, scratch, begin, end):
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
                h = load_i8x32(at + 16)
                q0, q1 = _fifth(load_i8x32(at + 48), h, 0), _fifth(load_i8x32(at + 80), h, 2)
                q2, q3 = _fifth(load_i8x32(at + 112), h, 4), _fifth(load_i8x32(at + 144), h, 6)
                plane = first + BYTES_256 * b
                second = first + BYTES_256 * (blocks + b) if load_i64(part + 8 * b) else 0
                _row_k(at, q0, q1, q2, q3, plane, second, to + BLOCK * b)
                at += 176
        _finish_k(scratch, blocks, part, first, out + 4 * r0)


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
                s, to_block = signed_i32x16(load_i8x16(at + 192)), to + BLOCK * b
                store_i32(to_block + HEAD, np.int32(load_u16(at + 208)))
                _sum_q6_k(q0, q1, q2, q3, s, first + BYTES_256 * b, to_block + ISUM)
                if load_i64(part + 8 * b):
                    _sum_q6_k(q0, q1, q2, q3, s, first + BYTES_256 * (blocks + b), to_block + ISUM2)
                at += 210
        f, g = zero_f32x16(), zero_f32x16()
        for b in range(blocks):
            at = scratch + BLOCK * b
            d = halves_to_f32(load_i32x16(at + HEAD))
            a = splat_f32x16(load_f32(first + BYTES_256 * b + 336))
            f = add(f, mul(to_f32(load_i32x16(at + ISUM)), mul(d, a)))
            if load_i64(part + 8 * b):
                a = splat_f32x16(load_f32(first + BYTES_256 * (blocks + b) + 336))
                g = add(g, mul(to_f32(load_i32x16(at + ISUM2)), mul(d, a)))
        store_f32x16(out + 4 * r0, add(f, g))
