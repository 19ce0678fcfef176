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
from knotctl.core.kernels.lanes import halves_to_f32, load_rows, splat_bytes, to_f32
from knotctl.core.kernels.machine import prefetch
from knotctl.core.kernels.simd import (
    add,
    bit_or,
    flip,
    load_f32,
    load_f32x16,
    load_i8x64,
    load_i32,
    load_i32x16,
    mask,
    mul,
    shift_left,
    shift_right,
    shift_signed,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    sub,
    times,
    variable_shift,
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

_LOW, _TOP = 0x0F0F0F0F, 0x10101010


@inner
def _fetch(at, lines):
    for i in range(lines):
        prefetch(at + 64 * i)


@inner
def _head_k(w, stride, s):
    """Take apart d, dmin, scales and mins of a Q4_K or Q5_K block (the layout is in decode.py)."""
    d, x, y, z = load_rows(w, stride)
    store_f32x16(s + D, halves_to_f32(mask(d, 0xFFFF)))
    store_f32x16(s + M, halves_to_f32(shift_right(d, 16)))
    m0, m1, m2, m3 = (
        mask(y, 63),
        mask(shift_right(y, 8), 63),
        mask(shift_right(y, 16), 63),
        mask(shift_right(y, 24), 63),
    )
    store_i32x16(s + SCALES, mask(x, 63))
    store_i32x16(s + SCALES + 64, mask(shift_right(x, 8), 63))
    store_i32x16(s + SCALES + 128, mask(shift_right(x, 16), 63))
    store_i32x16(s + SCALES + 192, mask(shift_right(x, 24), 63))
    store_i32x16(s + MINS, bit_or(m0, shift_left(m1, 16)))
    store_i32x16(s + MINS + 64, bit_or(m2, shift_left(m3, 16)))
    # The later four, a byte each: low nibble of z under the top bits of x, high nibble under those of y.
    x = bit_or(mask(z, _LOW), mask(shift_right(x, 2), 0x30303030))
    y = bit_or(mask(shift_right(z, 4), _LOW), mask(shift_right(y, 2), 0x30303030))
    store_i32x16(s + SCALES + 256, mask(x, 63))
    store_i32x16(s + SCALES + 320, mask(shift_right(x, 8), 63))
    store_i32x16(s + SCALES + 384, mask(shift_right(x, 16), 63))
    store_i32x16(s + SCALES + 448, shift_right(x, 24))
    store_i32x16(s + MINS + 128, bit_or(mask(y, 63), shift_left(mask(shift_right(y, 8), 63), 16)))
    store_i32x16(s + MINS + 192, bit_or(mask(shift_right(y, 16), 63), shift_left(shift_right(y, 24), 16)))


@inner
def unpack_q4_k(w, stride, s, ahead):
    """Take a Q4_K block of 16 rows apart, fetching 36 lines ahead."""
    _fetch(ahead, 4)
    _head_k(w, stride, s)
    for p in range(8):
        _fetch(ahead + 256 + 256 * p, 4)
        to = s + 1024 * (p // 2) + 256 * (p % 2)
        q0, q1, q2, q3 = load_rows(w + 16 + 16 * p, stride)
        store_i32x16(to, mask(q0, _LOW))
        store_i32x16(to + 64, mask(q1, _LOW))
        store_i32x16(to + 128, mask(q2, _LOW))
        store_i32x16(to + 192, mask(q3, _LOW))
        store_i32x16(to + 512, mask(shift_right(q0, 4), _LOW))
        store_i32x16(to + 576, mask(shift_right(q1, 4), _LOW))
        store_i32x16(to + 640, mask(shift_right(q2, 4), _LOW))
        store_i32x16(to + 704, mask(shift_right(q3, 4), _LOW))


@inner
def _store_q5(to, q, h, bit):
    """Store low and high nibbles of q with bits `bit` and `bit` + 1 of h as their fifth."""
    h = variable_shift(h, bit)
    store_i32x16(to, bit_or(mask(q, _LOW), mask(shift_left(h, 4), _TOP)))
    store_i32x16(to + 512, bit_or(mask(shift_right(q, 4), _LOW), mask(shift_left(h, 3), _TOP)))


@inner
def unpack_q5_k(w, stride, s, ahead):
    """Take a Q5_K block of 16 rows apart, fetching 44 lines ahead."""
    _fetch(ahead, 4)
    _head_k(w, stride, s)
    for half in range(2):
        h0, h1, h2, h3 = load_rows(w + 16 + 16 * half, stride)
        _fetch(ahead + 256 + 1280 * half, 4)
        for run in range(4):
            _fetch(ahead + 512 + 1280 * half + 256 * run, 4)
            to = s + 1024 * run + 256 * half
            q0, q1, q2, q3 = load_rows(w + 48 + 32 * run + 16 * half, stride)
            _store_q5(to, q0, h0, 2 * run)
            _store_q5(to + 64, q1, h1, 2 * run)
            _store_q5(to + 128, q2, h2, 2 * run)
            _store_q5(to + 192, q3, h3, 2 * run)


@inner
def _store_q6(to, q, h, pair):
    """Store low and high nibbles of q under bits 2·pair and 2·pair + 4 (and the next ones) of h."""
    h = variable_shift(h, 2 * pair)
    store_i32x16(to, bit_or(mask(q, _LOW), mask(shift_left(h, 4), 0x30303030)))
    store_i32x16(to + 1024, bit_or(mask(shift_right(q, 4), _LOW), mask(h, 0x30303030)))


@inner
def unpack_q6_k(w, stride, s, ahead):
    """Take a Q6_K block of 16 rows apart, fetching 53 lines ahead."""
    _fetch(ahead, 4)
    _, _, _, d = load_rows(w + 194, stride)  # its last dword ends with d
    store_f32x16(s + D, halves_to_f32(shift_right(d, 16)))
    x0, x1, x2, x3 = load_rows(w + 192, stride)
    for x, i in ((x0, 0), (x1, 4), (x2, 8), (x3, 12)):
        to = s + SCALES + 64 * i
        store_i32x16(to, shift_signed(shift_left(x, 24), 24))
        store_i32x16(to + 64, shift_signed(shift_left(x, 16), 24))
        store_i32x16(to + 128, shift_signed(shift_left(x, 8), 24))
        store_i32x16(to + 192, shift_signed(x, 24))
    for i in range(4):
        half, part = i // 2, i % 2
        _fetch(ahead + 256 + 832 * i, 5)
        h0, h1, h2, h3 = load_rows(w + 128 + 32 * half + 16 * part, stride)
        for pair in range(2):
            _fetch(ahead + 256 + 832 * i + 320 + 256 * pair, 4)
            to = s + 2048 * half + 512 * pair + 256 * part
            q0, q1, q2, q3 = load_rows(w + 64 * half + 32 * pair + 16 * part, stride)
            _store_q6(to, q0, h0, pair)
            _store_q6(to + 64, q1, h1, pair)
            _store_q6(to + 128, q2, h2, pair)
            _store_q6(to + 192, q3, h3, pair)


@inner
def _store_nibbles(s, q0, q1, q2, q3):
    store_i32x16(s, mask(q0, _LOW))
    store_i32x16(s + 64, mask(q1, _LOW))
    store_i32x16(s + 128, mask(q2, _LOW))
    store_i32x16(s + 192, mask(q3, _LOW))
    store_i32x16(s + 256, mask(shift_right(q0, 4), _LOW))
    store_i32x16(s + 320, mask(shift_right(q1, 4), _LOW))
    store_i32x16(s + 384, mask(shift_right(q2, 4), _LOW))
    store_i32x16(s + 448, mask(shift_right(q3, 4), _LOW))


@inner
def _add_fifth_bits(s, h):
    """Set bit 4 of element i where bit i of h is set: a product spreads 4 bits over 4 bytes."""
    for k in range(8):
        four = mask(variable_shift(h, 4 * k), 15)
        store_i32x16(s + 64 * k, bit_or(load_i32x16(s + 64 * k), mask(times(four, 0x02040810), _TOP)))


@inner
def unpack_q4_0(w, stride, s, scale, ahead):
    """Take a Q4_0 block of 16 rows apart."""
    _fetch(ahead, 5)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    q0, q1, q2, q3 = load_rows(w + 2, stride)
    _store_nibbles(s, q0, q1, q2, q3)


@inner
def unpack_q4_1(w, stride, s, scale, ahead):
    """Take a Q4_1 block of 16 rows apart."""
    _fetch(ahead, 5)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    store_f32x16(scale + M32 - D32, halves_to_f32(shift_right(d, 16)))
    q0, q1, q2, q3 = load_rows(w + 4, stride)
    _store_nibbles(s, q0, q1, q2, q3)


@inner
def unpack_q5_0(w, stride, s, scale, ahead):
    """Take a Q5_0 block of 16 rows apart."""
    _fetch(ahead, 6)
    d, h, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    q0, q1, q2, q3 = load_rows(w + 6, stride)
    _store_nibbles(s, q0, q1, q2, q3)
    _add_fifth_bits(s, bit_or(shift_right(d, 16), shift_left(h, 16)))


@inner
def unpack_q5_1(w, stride, s, scale, ahead):
    """Take a Q5_1 block of 16 rows apart."""
    _fetch(ahead, 6)
    d, h, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    store_f32x16(scale + M32 - D32, halves_to_f32(shift_right(d, 16)))
    q0, q1, q2, q3 = load_rows(w + 8, stride)
    _store_nibbles(s, q0, q1, q2, q3)
    _add_fifth_bits(s, h)


@inner
def unpack_q8_0(w, stride, s, scale, ahead):
    """Take a Q8_0 block of 16 rows apart; a quant is stored plus 128."""
    _fetch(ahead, 9)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    for p in range(2):
        q0, q1, q2, q3 = load_rows(w + 2 + 16 * p, stride)
        to = s + 256 * p
        store_i32x16(to, flip(q0, 0x80808080))
        store_i32x16(to + 64, flip(q1, 0x80808080))
        store_i32x16(to + 128, flip(q2, 0x80808080))
        store_i32x16(to + 192, flip(q3, 0x80808080))


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
