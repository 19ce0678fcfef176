"""One token: rows of 32-element blocks as they stream by, at the memory's bandwidth.

Lanes are elements. Four rows are read together, four blocks (a quad) of each at a time, so that the sums of 16 blocks
become one vector by the same few additions; where 4 does not divide the blocks of a row the last quad overlaps the one
before it. After 16 rows the float steps run over the scratch with rows as lanes, so that they are those of a tile, bit
by bit. A thread's scratch holds, for each quad: the integer sums with both planes, 4 vectors of 4 rows each, and what
its blocks begin with.
"""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.dots import dot_bytes, dot_small
from knotctl.core.kernels.jit import Kernel, inlined, inner
from knotctl.core.kernels.lanes import halves_to_f32, load_half_f32x16, to_f32
from knotctl.core.kernels.machine import arguments, prefetch
from knotctl.core.kernels.quantize import BYTES_32, planes_at, rows_at
from knotctl.core.kernels.quarters import (
    fold_quarters,
    load_quarters,
    set_bit_4,
    turn_quarters,
)
from knotctl.core.kernels.simd import (
    add,
    flip,
    load_f32,
    load_i8x64,
    load_i32,
    load_i32x16,
    load_i64,
    load_u16,
    load_u32,
    mask,
    mul,
    shift_right,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    store_i64,
    zero_f32x16,
    zero_i32x16,
)

AHEAD = 8192  # as in rows.py
SUMS, SUMS2, HEADS, QUAD = 0, 256, 512, 768
_Q4_0, _Q5_0, _Q8_0, _Q4_1, _Q5_1 = range(5)  # those from _Q4_1 on have an m


def scratch_32(blocks: int) -> int:
    """Return the bytes of scratch for rows of so many blocks."""
    return QUAD * -(-blocks // 4)


@inner
def _bits(at, size):
    """Return the 16 bits at the same place in each of 4 blocks, one behind the other."""
    low = np.int64(load_u16(at)) | np.int64(load_u16(at + size)) << 16
    return low | (np.int64(load_u16(at + 2 * size)) | np.int64(load_u16(at + 3 * size)) << 16) << 32


@inlined
def _quants(kind, at, size):
    """Return the first 16 quants of each of 4 blocks, then the last 16."""
    if kind == _Q8_0:
        return flip(load_quarters(at + 2, size), 128), flip(load_quarters(at + 18, size), 128)
    if kind == _Q4_0:
        q = load_quarters(at + 2, size)
        return mask(q, 15), shift_right(q, 4)
    if kind == _Q4_1:
        q = load_quarters(at + 4, size)
        return mask(q, 15), shift_right(q, 4)
    if kind == _Q5_0:
        q = load_quarters(at + 6, size)
        return set_bit_4(mask(q, 15), _bits(at + 2, size)), set_bit_4(shift_right(q, 4), _bits(at + 4, size))
    q = load_quarters(at + 8, size)
    return set_bit_4(mask(q, 15), _bits(at + 4, size)), set_bit_4(shift_right(q, 4), _bits(at + 6, size))


@inlined
def _dots(kind, quants, a):
    """Return the products of 4 blocks, each summed to the 4 lanes of its quarter."""
    x, y = quants
    if kind == _Q8_0:
        return dot_bytes(dot_bytes(zero_i32x16(), x, load_i8x64(a)), y, load_i8x64(a + 64))
    return dot_small(dot_small(zero_i32x16(), x, load_i8x64(a)), y, load_i8x64(a + 64))


@inlined
def _step(kind, offset, f, isum, head, plane):
    """Add a block's part to the sums of 16 rows; quants are `offset` too large."""
    a = load_f32(plane + 36)
    if offset:
        isum = add(isum, splat_i32x16(np.int32(load_i32(plane + 32) * -offset)))
    if kind >= _Q4_1:
        both = load_i32x16(head)
        f = add(f, mul(to_f32(isum), mul(halves_to_f32(both), splat_f32x16(a))))
        scaled = np.float32(a * np.float32(load_i32(plane + 32)))
        return add(f, mul(halves_to_f32(shift_right(both, 16)), splat_f32x16(scaled)))
    return add(f, mul(to_f32(isum), mul(load_half_f32x16(head), splat_f32x16(a))))


@inlined
def _finish(kind, offset, scratch, flags, blocks, part, first, out):
    """Run the float steps of 16 rows."""
    f, g = zero_f32x16(), zero_f32x16()
    for j in range((blocks + 3) // 4):
        at, begin = scratch + QUAD * j, min(4 * j, blocks - 4)
        s = turn_quarters((load_i32x16(at + SUMS), load_i32x16(at + SUMS + 64),
                           load_i32x16(at + SUMS + 128), load_i32x16(at + SUMS + 192)))  # fmt: skip
        plane = first + BYTES_32 * begin
        if begin == 4 * j:
            f = _step(kind, offset, f, s[0], at + HEADS, plane)
        if begin + 1 >= 4 * j:
            f = _step(kind, offset, f, s[1], at + HEADS + 64, plane + BYTES_32)
        if begin + 2 >= 4 * j:
            f = _step(kind, offset, f, s[2], at + HEADS + 128, plane + 2 * BYTES_32)
        f = _step(kind, offset, f, s[3], at + HEADS + 192, plane + 3 * BYTES_32)
        if load_i64(flags + 8 * j):
            s = turn_quarters((load_i32x16(at + SUMS2), load_i32x16(at + SUMS2 + 64),
                               load_i32x16(at + SUMS2 + 128), load_i32x16(at + SUMS2 + 192)))  # fmt: skip
            plane += BYTES_32 * blocks
            if begin == 4 * j and load_i64(part + 8 * begin):
                g = _step(kind, offset, g, s[0], at + HEADS, plane)
            if begin + 1 >= 4 * j and load_i64(part + 8 * begin + 8):
                g = _step(kind, offset, g, s[1], at + HEADS + 64, plane + BYTES_32)
            if begin + 2 >= 4 * j and load_i64(part + 8 * begin + 16):
                g = _step(kind, offset, g, s[2], at + HEADS + 128, plane + 2 * BYTES_32)
            if load_i64(part + 8 * begin + 24):
                g = _step(kind, offset, g, s[3], at + HEADS + 192, plane + 3 * BYTES_32)
    store_f32x16(out, add(f, g))


@inlined
def _fetch(at, size):
    """Fetch the lines of 4 rows' quad ahead."""
    for i in range(AHEAD, AHEAD + 16 * size, 64):
        prefetch(at + i)


@inlined
def _copy_heads(kind, to, at, stride):
    """Note what 4 rows' blocks begin with, side by side: d, or d and m."""
    if kind >= _Q4_1:
        store_i64(to, np.int64(load_u32(at)) | np.int64(load_u32(at + stride)) << 32)
        at += 2 * stride
        store_i64(to + 8, np.int64(load_u32(at)) | np.int64(load_u32(at + stride)) << 32)
    else:
        bt = at + 2 * stride
        low = np.int64(load_u16(at)) | np.int64(load_u16(at + stride)) << 16
        store_i64(to, low | (np.int64(load_u16(bt)) | np.int64(load_u16(bt + stride)) << 16) << 32)


@inlined
def _rows(kind, size, offset, args, scratch, begin, end):
    w, stride, blocks, rows, part, out = arguments(args, 6)
    first, quads = planes_at(part, blocks, 1), (blocks + 3) // 4
    acts = rows_at(part, blocks, BYTES_32)
    flags = acts + 256 * quads
    for tile in range(begin, end):
        r0 = min(16 * tile, rows - 16)
        for r in range(0, 16, 4):
            row = w + (r0 + r) * stride
            for j in range(quads):
                at, to = row + size * min(4 * j, blocks - 4), scratch + QUAD * j
                bt = at + 2 * stride
                _fetch(row + 16 * size * j, size)
                heads = to + HEADS + (4 * r if kind >= _Q4_1 else 2 * r)
                _copy_heads(kind, heads, at, stride)
                _copy_heads(kind, heads + 64, at + size, stride)
                _copy_heads(kind, heads + 128, at + 2 * size, stride)
                _copy_heads(kind, heads + 192, at + 3 * size, stride)
                q0, q1 = _quants(kind, at, size), _quants(kind, at + stride, size)
                q2, q3 = _quants(kind, bt, size), _quants(kind, bt + stride, size)
                a = acts + 256 * j
                x = fold_quarters((_dots(kind, q0, a), _dots(kind, q1, a), _dots(kind, q2, a), _dots(kind, q3, a)))
                store_i32x16(to + SUMS + 16 * r, x)
                if load_i64(flags + 8 * j):
                    a += 128
                    x = fold_quarters((_dots(kind, q0, a), _dots(kind, q1, a), _dots(kind, q2, a), _dots(kind, q3, a)))
                    store_i32x16(to + SUMS2 + 16 * r, x)
        _finish(kind, offset, scratch, flags, blocks, part, first, out + 4 * r0)


@Kernel
def row_q4_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows(_Q4_0, 18, 8, args, scratch, begin, end)


@Kernel
def row_q4_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows(_Q4_1, 20, 0, args, scratch, begin, end)


@Kernel
def row_q5_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows(_Q5_0, 22, 16, args, scratch, begin, end)


@Kernel
def row_q5_1(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows(_Q5_1, 24, 0, args, scratch, begin, end)


@Kernel
def row_q8_0(args, scratch, begin, end):
    """Units are tiles of 16 rows."""
    _rows(_Q8_0, 34, 128, args, scratch, begin, end)
