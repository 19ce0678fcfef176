"""A tile: 16 rows of a matrix, whose blocks are taken apart once and multiplied with any number of tokens.

Rows are the 16 lanes, so all scales of a block are plain 16-lane integers, the float steps of matmul.py's definition
are 16-lane ones, and neighbours in a vector cannot touch each other. A thread's scratch holds, for the block at hand
(offsets below): 64 vectors of weights, vector i the 4 elements 4i … 4i+3 of each row as unsigned bytes; scales; mins
in pairs of int16; d and m. Behind them lie the float sums of the tile, 16 a token.
"""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.dots import dot_bytes, dot_small, dot_words
from knotctl.core.kernels.jit import inner
from knotctl.core.kernels.lanes import splat_bytes, to_f32
from knotctl.core.kernels.simd import (
    add,
    load_f32,
    load_f32x16,
    load_i8x64,
    load_i32,
    load_i32x16,
    mul,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    sub,
    words_of,
    zero_f32x16,
    zero_i32x16,
)

SCALES, MINS, D, M, SUMS = 4096, 5120, 5376, 5440, 5504
# Eight blocks of a 32-element type lie where one of 256 does; d and m of each in place of the scales.
D32, M32 = 4096, 4608
# Tokens at a time: their sums (32 KiB) and the activations of a block (128 KiB) stay in the second-level cache.
TOKENS = 512
SCRATCH_BYTES = SUMS + 64 * TOKENS


@inner
def _four(acc, s, a):
    """Return acc + the products of 16 elements."""
    acc = dot_small(acc, load_i8x64(s), splat_bytes(a))
    acc = dot_small(acc, load_i8x64(s + 64), splat_bytes(a + 4))
    acc = dot_small(acc, load_i8x64(s + 128), splat_bytes(a + 8))
    return dot_small(acc, load_i8x64(s + 192), splat_bytes(a + 12))


@inner
def _step_k(s, f, isum, sums, a):
    """Add a block's part to the float sums at f: the step of Q4_K and Q5_K."""
    msum = dot_words(zero_i32x16(), words_of(load_i32x16(s + MINS)), words_of(splat_i32x16(load_i32(sums))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 64)), words_of(splat_i32x16(load_i32(sums + 4))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 128)), words_of(splat_i32x16(load_i32(sums + 8))))
    msum = dot_words(msum, words_of(load_i32x16(s + MINS + 192)), words_of(splat_i32x16(load_i32(sums + 12))))
    scale = splat_f32x16(a)
    y = add(load_f32x16(f), mul(to_f32(isum), mul(load_f32x16(s + D), scale)))
    store_f32x16(f, sub(y, mul(to_f32(msum), mul(load_f32x16(s + M), scale))))


@inner
def multiply_k(s, tokens, quants, sums, scales, f):
    """Multiply the block in s with its activations: Q4_K and Q5_K.

    Shapes: quants i8[T, 256], sums i16[T, 8], scales f32[T], f f32[T, 16].
    """
    t = 0
    while t + 4 <= tokens:
        a = quants + 256 * t
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
        to, m, d = f + 64 * t, sums + 16 * t, scales + 4 * t
        _step_k(s, to, x0, m, load_f32(d))
        _step_k(s, to + 64, x1, m + 16, load_f32(d + 4))
        _step_k(s, to + 128, x2, m + 32, load_f32(d + 8))
        _step_k(s, to + 192, x3, m + 48, load_f32(d + 12))
        t += 4
    while t < tokens:
        a = quants + 256 * t
        x0 = zero_i32x16()
        for j in range(8):
            w, k = s + 512 * j, a + 32 * j
            y0 = _four(_four(zero_i32x16(), w, k), w + 256, k + 16)
            x0 = add(x0, mul(y0, load_i32x16(s + SCALES + 64 * j)))
        _step_k(s, f + 64 * t, x0, sums + 16 * t, load_f32(scales + 4 * t))
        t += 1


@inner
def _step_q6_k(s, f, isum, a):
    d = mul(load_f32x16(s + D), splat_f32x16(a))
    store_f32x16(f, add(load_f32x16(f), mul(to_f32(isum), d)))


@inner
def multiply_q6_k(s, tokens, quants, offsets, scales, f):
    """Multiply the Q6_K block in s with its activations; a quant of -32 … 31 was stored plus 32.

    Shapes: quants i8[T, 256], offsets i32[T, 16] (-32 · the sum of 16 quants), scales f32[T], f f32[T, 16].
    """
    t = 0
    while t + 4 <= tokens:
        a, o = quants + 256 * t, offsets + 64 * t
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
        to, d = f + 64 * t, scales + 4 * t
        _step_q6_k(s, to, x0, load_f32(d))
        _step_q6_k(s, to + 64, x1, load_f32(d + 4))
        _step_q6_k(s, to + 128, x2, load_f32(d + 8))
        _step_q6_k(s, to + 192, x3, load_f32(d + 12))
        t += 4
    while t < tokens:
        a, o = quants + 256 * t, offsets + 64 * t
        x0 = zero_i32x16()
        for j in range(16):
            y0 = _four(splat_i32x16(load_i32(o + 4 * j)), s + 256 * j, a + 16 * j)
            x0 = add(x0, mul(y0, load_i32x16(s + SCALES + 64 * j)))
        _step_q6_k(s, f + 64 * t, x0, load_f32(scales + 4 * t))
        t += 1


@inner
def _eight(acc, s, a, wide):
    """Return acc + the products of 32 elements; of any unsigned weights where `wide`, else of weights up to 127."""
    for i in range(8):
        if wide:
            acc = dot_bytes(acc, load_i8x64(s + 64 * i), splat_bytes(a + 4 * i))
        else:
            acc = dot_small(acc, load_i8x64(s + 64 * i), splat_bytes(a + 4 * i))
    return acc


@inner
def _step_32(f, isum, d, a):
    return add(f, mul(to_f32(isum), mul(d, splat_f32x16(load_f32(a)))))


@inner
def multiply_32(s, blocks, tokens, all_tokens, quants, sums, scales, f, offset, wide):
    """Multiply the blocks of 32 in s with their activations; a quant was stored plus `offset`.

    Shapes: for each block, all_tokens apart: quants i8[T, 32], sums i32[T], scales f32[T]; f f32[T, 16].
    """
    t = 0
    while t + 4 <= tokens:
        to = f + 64 * t
        f0, f1, f2, f3 = load_f32x16(to), load_f32x16(to + 64), load_f32x16(to + 128), load_f32x16(to + 192)
        for b in range(blocks):
            w, u = s + 512 * b, t + b * all_tokens
            a, n, scale, d = quants + 32 * u, sums + 4 * u, scales + 4 * u, load_f32x16(s + D32 + 64 * b)
            x0 = _eight(splat_i32x16(np.int32(load_i32(n) * -offset)), w, a, wide)
            x1 = _eight(splat_i32x16(np.int32(load_i32(n + 4) * -offset)), w, a + 32, wide)
            x2 = _eight(splat_i32x16(np.int32(load_i32(n + 8) * -offset)), w, a + 64, wide)
            x3 = _eight(splat_i32x16(np.int32(load_i32(n + 12) * -offset)), w, a + 96, wide)
            f0, f1 = _step_32(f0, x0, d, scale), _step_32(f1, x1, d, scale + 4)
            f2, f3 = _step_32(f2, x2, d, scale + 8), _step_32(f3, x3, d, scale + 12)
        store_f32x16(to, f0)
        store_f32x16(to + 64, f1)
        store_f32x16(to + 128, f2)
        store_f32x16(to + 192, f3)
        t += 4
    while t < tokens:
        f0 = load_f32x16(f + 64 * t)
        for b in range(blocks):
            u = t + b * all_tokens
            start = splat_i32x16(np.int32(load_i32(sums + 4 * u) * -offset))
            x0 = _eight(start, s + 512 * b, quants + 32 * u, wide)
            f0 = _step_32(f0, x0, load_f32x16(s + D32 + 64 * b), scales + 4 * u)
        store_f32x16(f + 64 * t, f0)
        t += 1


@inner
def _step_32_m(f, isum, d, a, m, n):
    return add(_step_32(f, isum, d, a), mul(m, splat_f32x16(load_f32(n))))


@inner
def multiply_32_m(s, blocks, tokens, all_tokens, quants, scaled_sums, scales, f):
    """Multiply the blocks of 32 in s with their activations: Q4_1 and Q5_1.

    Shapes: for each block, all_tokens apart: quants i8[T, 32], scaled_sums f32[T] (scale · sum), scales f32[T];
    f f32[T, 16].
    """
    t = 0
    while t + 4 <= tokens:
        to = f + 64 * t
        f0, f1, f2, f3 = load_f32x16(to), load_f32x16(to + 64), load_f32x16(to + 128), load_f32x16(to + 192)
        for b in range(blocks):
            w, u = s + 512 * b, t + b * all_tokens
            a, n, scale = quants + 32 * u, scaled_sums + 4 * u, scales + 4 * u
            d, m = load_f32x16(s + D32 + 64 * b), load_f32x16(s + M32 + 64 * b)
            x0, x1 = _eight(zero_i32x16(), w, a, False), _eight(zero_i32x16(), w, a + 32, False)
            x2, x3 = _eight(zero_i32x16(), w, a + 64, False), _eight(zero_i32x16(), w, a + 96, False)
            f0, f1 = _step_32_m(f0, x0, d, scale, m, n), _step_32_m(f1, x1, d, scale + 4, m, n + 4)
            f2, f3 = _step_32_m(f2, x2, d, scale + 8, m, n + 8), _step_32_m(f3, x3, d, scale + 12, m, n + 12)
        store_f32x16(to, f0)
        store_f32x16(to + 64, f1)
        store_f32x16(to + 128, f2)
        store_f32x16(to + 192, f3)
        t += 4
    while t < tokens:
        f0 = load_f32x16(f + 64 * t)
        for b in range(blocks):
            u = t + b * all_tokens
            x0 = _eight(zero_i32x16(), s + 512 * b, quants + 32 * u, False)
            d, m = load_f32x16(s + D32 + 64 * b), load_f32x16(s + M32 + 64 * b)
            f0 = _step_32_m(f0, x0, d, scales + 4 * u, m, scaled_sums + 4 * u)
        store_f32x16(f + 64 * t, f0)
        t += 1


@inner
def clear_sums(f, tokens):
    """Set the float sums to +0."""
    for t in range(tokens):
        store_f32x16(f + 64 * t, zero_f32x16())


@inner
def write_sums(f, tokens, out, stride):
    """Copy the float sums of 16 rows to their place in each token's row of the output."""
    for t in range(tokens):
        store_f32x16(out + 4 * t * stride, load_f32x16(f + 64 * t))
