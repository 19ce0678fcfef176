"""A tile: 16 rows of a matrix, whose blocks are taken apart once and multiplied with any number of tokens.

Rows are the 16 lanes, so all scales of a block are plain 16-lane integers, the float steps of matmul.py's definition
are 16-lane ones, and neighbours in a vector cannot touch each other. A thread's scratch holds, for the block at hand
(offsets below): 64 vectors of weights, vector i the 4 elements 4i … 4i+3 of each row as unsigned bytes; scales; mins
in pairs of int16; d and m. Behind them lie the float sums of the tile, 16 a token: those of the first planes, then
those of the second ones. Multiplying takes a list of tokens (u16), whose sums it adds to.
"""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.dots import dot_bytes, dot_small, dot_words
from knotctl.core.kernels.jit import inlined, inner
from knotctl.core.kernels.lanes import splat_bytes, to_f32
from knotctl.core.kernels.levels import LEVEL
from knotctl.core.kernels.quantize import BYTES_32, TOKENS
from knotctl.core.kernels.simd import (
    add,
    load_f32,
    load_f32x16,
    load_i8x64,
    load_i16x32,
    load_i32,
    load_i32x16,
    load_u16,
    mask,
    mul,
    shift_left,
    shift_right,
    shift_signed,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i16x32,
    store_i32x16,
    sub,
    words_of,
    zero_f32x16,
    zero_i32x16,
)

SCALES, MINS, D, M, SUMS = 4096, 5120, 5376, 5440, 5504
# Eight blocks of a 32-element type lie where one of 256 does; d and m of each in place of the scales.
D32, M32 = 4096, 4608
# Without byte products a block is widened once, in place: elements 0 and 2 of each four as int16, and 1 and 3 at ODD;
# so are the activations that are multiplied next, at READY and READY_ODD.
WIDE = LEVEL == "generic"
ODD = SUMS + 2 * 64 * TOKENS
READY, READY_ODD = ODD + 4096, ODD + 5120
SCRATCH_BYTES = ODD + (6144 if WIDE else 0)


@inner
def widen(s, vectors):
    """Make the first vectors of weights int16 where the level needs that."""
    if WIDE:
        for i in range(vectors):
            v = load_i32x16(s + 64 * i)
            store_i32x16(s + 64 * i, mask(v, 0x00FF00FF))
            store_i32x16(s + ODD + 64 * i, mask(shift_right(v, 8), 0x00FF00FF))


@inner
def _ready(a, s, size):
    """Return where the `size` bytes of activations at a lie in the form that the level multiplies."""
    if WIDE:
        for i in range(0, size, 64):
            v = load_i16x32(a + i)
            store_i16x32(s + READY + i, shift_signed(shift_left(v, 8), 8))
            store_i16x32(s + READY_ODD + i, shift_signed(v, 8))
        return s + READY
    return a


@inlined
def _dot_wide(acc, w, a):
    """Return acc + the products of 4 elements of weights made WIDE."""
    acc = dot_words(acc, load_i16x32(w), words_of(splat_i32x16(load_i32(a))))
    return dot_words(acc, load_i16x32(w + ODD), words_of(splat_i32x16(load_i32(a + READY_ODD - READY))))


@inlined
def _four(acc, w, a):
    """Return acc + the products of 16 elements of weights up to 127."""
    if WIDE:
        return _dot_wide(_dot_wide(_dot_wide(_dot_wide(acc, w, a), w + 64, a + 4), w + 128, a + 8), w + 192, a + 12)
    acc = dot_small(dot_small(acc, load_i8x64(w), splat_bytes(a)), load_i8x64(w + 64), splat_bytes(a + 4))
    return dot_small(dot_small(acc, load_i8x64(w + 128), splat_bytes(a + 8)), load_i8x64(w + 192), splat_bytes(a + 12))


@inner
def step_k(s, f, isum, sums, a):
    """Add a block's part to the float sums at f: the step of Q4_K and Q5_K."""
    msum = dot_words(zero_i32x16(), words_of(load_i32x16(s + MINS)), words_of(splat_i32x16(load_i32(sums))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 64)), words_of(splat_i32x16(load_i32(sums + 4))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 128)), words_of(splat_i32x16(load_i32(sums + 8))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 192)), words_of(splat_i32x16(load_i32(sums + 12))))
    scale = splat_f32x16(a)
    y = add(load_f32x16(f), mul(to_f32(isum), mul(load_f32x16(s + D), scale)))
    store_f32x16(f, sub(y, mul(to_f32(msum), mul(load_f32x16(s + M), scale))))


@inner
def _sums_of(f, listed, i):
    return f + 64 * np.int64(load_u16(listed + 2 * i))


@inner
def multiply_k(s, count, listed, plane, tokens, f):
    """Multiply the block in s with `count` activations of a plane with room for `tokens`: Q4_K and Q5_K."""
    sums, scales = plane + 256 * tokens, plane + 336 * tokens
    t = 0
    while t + 4 <= count:
        a = _ready(plane + 256 * t, s, 1024)
        x0, x1, x2, x3 = zero_i32x16(), zero_i32x16(), zero_i32x16(), zero_i32x16()
        for j in range(8):
            w, k = s + 512 * j, a + 32 * j
            scale = load_i32x16(s + SCALES + 64 * j)
            y0, y1 = _four(zero_i32x16(), w, k), _four(zero_i32x16(), w, k + 256)
            y2, y3 = _four(zero_i32x16(), w, k + 512), _four(zero_i32x16(), w, k + 768)
            w, k = w + 256, k + 16
            y0, y1, y2, y3 = _four(y0, w, k), _four(y1, w, k + 256), _four(y2, w, k + 512), _four(y3, w, k + 768)
            x0, x1 = add(x0, mul(y0, scale)), add(x1, mul(y1, scale))
            x2, x3 = add(x2, mul(y2, scale)), add(x3, mul(y3, scale))
        m, d = sums + 16 * t, scales + 4 * t
        step_k(s, _sums_of(f, listed, t), x0, m, load_f32(d))
        step_k(s, _sums_of(f, listed, t + 1), x1, m + 16, load_f32(d + 4))
        step_k(s, _sums_of(f, listed, t + 2), x2, m + 32, load_f32(d + 8))
        step_k(s, _sums_of(f, listed, t + 3), x3, m + 48, load_f32(d + 12))
        t += 4
    while t < count:
        a = _ready(plane + 256 * t, s, 256)
        x0 = zero_i32x16()
        for j in range(8):
            w, k = s + 512 * j, a + 32 * j
            y0 = _four(_four(zero_i32x16(), w, k), w + 256, k + 16)
            x0 = add(x0, mul(y0, load_i32x16(s + SCALES + 64 * j)))
        step_k(s, _sums_of(f, listed, t), x0, sums + 16 * t, load_f32(scales + 4 * t))
        t += 1


@inner
def step_q6_k(s, f, isum, a):
    """Add a block's part to the float sums at f: the step of Q6_K."""
    d = mul(load_f32x16(s + D), splat_f32x16(a))
    store_f32x16(f, add(load_f32x16(f), mul(to_f32(isum), d)))


@inner
def multiply_q6_k(s, count, listed, plane, tokens, f):
    """Multiply the Q6_K block in s, whose quants were stored plus 32, with `count` activations of a plane."""
    offsets, scales = plane + 272 * tokens, plane + 336 * tokens
    t = 0
    while t + 4 <= count:
        a, o = _ready(plane + 256 * t, s, 1024), offsets + 64 * t
        x0, x1, x2, x3 = zero_i32x16(), zero_i32x16(), zero_i32x16(), zero_i32x16()
        for j in range(16):
            w, k, n = s + 256 * j, a + 16 * j, o + 4 * j
            scale = load_i32x16(s + SCALES + 64 * j)
            y0 = _four(splat_i32x16(load_i32(n)), w, k)
            y1 = _four(splat_i32x16(load_i32(n + 64)), w, k + 256)
            y2 = _four(splat_i32x16(load_i32(n + 128)), w, k + 512)
            y3 = _four(splat_i32x16(load_i32(n + 192)), w, k + 768)
            x0, x1 = add(x0, mul(y0, scale)), add(x1, mul(y1, scale))
            x2, x3 = add(x2, mul(y2, scale)), add(x3, mul(y3, scale))
        d = scales + 4 * t
        step_q6_k(s, _sums_of(f, listed, t), x0, load_f32(d))
        step_q6_k(s, _sums_of(f, listed, t + 1), x1, load_f32(d + 4))
        step_q6_k(s, _sums_of(f, listed, t + 2), x2, load_f32(d + 8))
        step_q6_k(s, _sums_of(f, listed, t + 3), x3, load_f32(d + 12))
        t += 4
    while t < count:
        a, o = _ready(plane + 256 * t, s, 256), offsets + 64 * t
        x0 = zero_i32x16()
        for j in range(16):
            y0 = _four(splat_i32x16(load_i32(o + 4 * j)), s + 256 * j, a + 16 * j)
            x0 = add(x0, mul(y0, load_i32x16(s + SCALES + 64 * j)))
        step_q6_k(s, _sums_of(f, listed, t), x0, load_f32(scales + 4 * t))
        t += 1


@inlined
def _eight(acc, w, a, wide):
    """Return acc + the products of 32 elements; of any unsigned weights where `wide`, else of weights up to 127."""
    if WIDE or not wide:
        return _four(_four(acc, w, a), w + 256, a + 16)
    for i in range(8):
        acc = dot_bytes(acc, load_i8x64(w + 64 * i), splat_bytes(a + 4 * i))
    return acc


@inner
def _step_32(f, isum, d, a):
    return add(f, mul(to_f32(isum), mul(d, splat_f32x16(load_f32(a)))))


@inner
def _start(sums, t, offset):
    return splat_i32x16(np.int32(load_i32(sums + 4 * t) * -offset))


@inner
def multiply_32(base, s, d, blocks, count, listed, plane, tokens, f, offset, wide):
    """Multiply blocks of 32 at s, whose quants were stored plus `offset`, with `count` activations of their planes."""
    t = 0
    while t + 4 <= count:
        to0, to1 = _sums_of(f, listed, t), _sums_of(f, listed, t + 1)
        to2, to3 = _sums_of(f, listed, t + 2), _sums_of(f, listed, t + 3)
        f0, f1, f2, f3 = load_f32x16(to0), load_f32x16(to1), load_f32x16(to2), load_f32x16(to3)
        for b in range(blocks):
            w, p, scale = s + 512 * b, plane + BYTES_32 * b * tokens, load_f32x16(d + 64 * b)
            k, sums, a = _ready(p + 32 * t, base, 128), p + 32 * tokens, p + 36 * tokens + 4 * t
            x0 = _eight(_start(sums, t, offset), w, k, wide)
            x1 = _eight(_start(sums, t + 1, offset), w, k + 32, wide)
            x2 = _eight(_start(sums, t + 2, offset), w, k + 64, wide)
            x3 = _eight(_start(sums, t + 3, offset), w, k + 96, wide)
            f0, f1 = _step_32(f0, x0, scale, a), _step_32(f1, x1, scale, a + 4)
            f2, f3 = _step_32(f2, x2, scale, a + 8), _step_32(f3, x3, scale, a + 12)
        store_f32x16(to0, f0)
        store_f32x16(to1, f1)
        store_f32x16(to2, f2)
        store_f32x16(to3, f3)
        t += 4
    while t < count:
        to = _sums_of(f, listed, t)
        f0 = load_f32x16(to)
        for b in range(blocks):
            p = plane + BYTES_32 * b * tokens
            x0 = _eight(_start(p + 32 * tokens, t, offset), s + 512 * b, _ready(p + 32 * t, base, 32), wide)
            f0 = _step_32(f0, x0, load_f32x16(d + 64 * b), p + 36 * tokens + 4 * t)
        store_f32x16(to, f0)
        t += 1


@inner
def _step_32_m(f, isum, d, a, m, n):
    """Add a block's part where the weights have a minimum m; n is the address of the sum of quants."""
    scaled = np.float32(load_f32(a) * np.float32(load_i32(n)))
    return add(_step_32(f, isum, d, a), mul(m, splat_f32x16(scaled)))


@inner
def multiply_32_m(base, s, d, blocks, count, listed, plane, tokens, f):
    """Multiply blocks of 32 at s with `count` activations of their planes: Q4_1 and Q5_1."""
    t = 0
    while t + 4 <= count:
        to0, to1 = _sums_of(f, listed, t), _sums_of(f, listed, t + 1)
        to2, to3 = _sums_of(f, listed, t + 2), _sums_of(f, listed, t + 3)
        f0, f1, f2, f3 = load_f32x16(to0), load_f32x16(to1), load_f32x16(to2), load_f32x16(to3)
        for b in range(blocks):
            w, p = s + 512 * b, plane + BYTES_32 * b * tokens
            scale, m = load_f32x16(d + 64 * b), load_f32x16(d + M32 - D32 + 64 * b)
            k, n, a = _ready(p + 32 * t, base, 128), p + 32 * tokens + 4 * t, p + 36 * tokens + 4 * t
            x0, x1 = _eight(zero_i32x16(), w, k, False), _eight(zero_i32x16(), w, k + 32, False)
            x2, x3 = _eight(zero_i32x16(), w, k + 64, False), _eight(zero_i32x16(), w, k + 96, False)
            f0, f1 = _step_32_m(f0, x0, scale, a, m, n), _step_32_m(f1, x1, scale, a + 4, m, n + 4)
            f2, f3 = _step_32_m(f2, x2, scale, a + 8, m, n + 8), _step_32_m(f3, x3, scale, a + 12, m, n + 12)
        store_f32x16(to0, f0)
        store_f32x16(to1, f1)
        store_f32x16(to2, f2)
        store_f32x16(to3, f3)
        t += 4
    while t < count:
        to = _sums_of(f, listed, t)
        f0 = load_f32x16(to)
        for b in range(blocks):
            p = plane + BYTES_32 * b * tokens
            n, a = p + 32 * tokens + 4 * t, p + 36 * tokens + 4 * t
            x0 = _eight(zero_i32x16(), s + 512 * b, _ready(p + 32 * t, base, 32), False)
            f0 = _step_32_m(f0, x0, load_f32x16(d + 64 * b), a, load_f32x16(d + M32 - D32 + 64 * b), n)
        store_f32x16(to, f0)
        t += 1


@inner
def clear_sums(f, tokens):
    """Set the float sums of both planes to +0."""
    for t in range(2 * tokens):
        store_f32x16(f + 64 * t, zero_f32x16())


@inner
def write_sums(f, tokens, out, stride):
    """Write the sum of both planes' sums of 16 rows to its place in each token's row of the output."""
    for t in range(tokens):
        store_f32x16(out + 4 * t * stride, add(load_f32x16(f + 64 * t), load_f32x16(f + 64 * (tokens + t))))
