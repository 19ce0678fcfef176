"""Blocks of 16 rows taken apart into a tile's scratch (offsets in tiles.py, block layouts in decode.py).

Sixteen bytes of each row are loaded at a time and turned, so that a vector holds one dword of every row: all that is
left is the same masks and shifts for 16 rows at once. The lines of the next tile are fetched between these steps, a
few at a time: in one burst they fill the miss buffers and cost half the bandwidth (Q6_K: 13.7 against 22.3 GB/s).
"""

from __future__ import annotations

from knotctl.core.kernels.jit import inner
from knotctl.core.kernels.lanes import halves_to_f32, load_rows
from knotctl.core.kernels.machine import prefetch
from knotctl.core.kernels.simd import (
    bit_or,
    flip,
    load_i32x16,
    mask,
    shift_left,
    shift_right,
    shift_signed,
    store_f32x16,
    store_i32x16,
    times,
    variable_shift,
)
from knotctl.core.kernels.tiles import D32, M32, MINS, SCALES, D, M

# Nibbles of four bytes, the fifth bits above them, and those with the sixth.
LOW, TOP, TWO = 0x0F0F0F0F, 0x10101010, 0x30303030


@inner
def fetch(at, lines):
    """Fetch so many lines."""
    for i in range(lines):
        prefetch(at + 64 * i)


@inner
def head_k(w, stride, s):
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
    x = bit_or(mask(z, LOW), mask(shift_right(x, 2), TWO))
    y = bit_or(mask(shift_right(z, 4), LOW), mask(shift_right(y, 2), TWO))
    store_i32x16(s + SCALES + 256, mask(x, 63))
    store_i32x16(s + SCALES + 320, mask(shift_right(x, 8), 63))
    store_i32x16(s + SCALES + 384, mask(shift_right(x, 16), 63))
    store_i32x16(s + SCALES + 448, shift_right(x, 24))
    store_i32x16(s + MINS + 128, bit_or(mask(y, 63), shift_left(mask(shift_right(y, 8), 63), 16)))
    store_i32x16(s + MINS + 192, bit_or(mask(shift_right(y, 16), 63), shift_left(shift_right(y, 24), 16)))


@inner
def unpack_q4_k(w, stride, s, ahead):
    """Take a Q4_K block of 16 rows apart, fetching 36 lines ahead."""
    fetch(ahead, 4)
    head_k(w, stride, s)
    for p in range(8):
        fetch(ahead + 256 + 256 * p, 4)
        to = s + 1024 * (p // 2) + 256 * (p % 2)
        q0, q1, q2, q3 = load_rows(w + 16 + 16 * p, stride)
        store_i32x16(to, mask(q0, LOW))
        store_i32x16(to + 64, mask(q1, LOW))
        store_i32x16(to + 128, mask(q2, LOW))
        store_i32x16(to + 192, mask(q3, LOW))
        store_i32x16(to + 512, mask(shift_right(q0, 4), LOW))
        store_i32x16(to + 576, mask(shift_right(q1, 4), LOW))
        store_i32x16(to + 640, mask(shift_right(q2, 4), LOW))
        store_i32x16(to + 704, mask(shift_right(q3, 4), LOW))


@inner
def _store_q5(to, q, h, bit):
    """Store low and high nibbles of q with bits `bit` and `bit` + 1 of h as their fifth."""
    h = variable_shift(h, bit)
    store_i32x16(to, bit_or(mask(q, LOW), mask(shift_left(h, 4), TOP)))
    store_i32x16(to + 512, bit_or(mask(shift_right(q, 4), LOW), mask(shift_left(h, 3), TOP)))


@inner
def unpack_q5_k(w, stride, s, ahead):
    """Take a Q5_K block of 16 rows apart, fetching 44 lines ahead."""
    fetch(ahead, 4)
    head_k(w, stride, s)
    for half in range(2):
        h0, h1, h2, h3 = load_rows(w + 16 + 16 * half, stride)
        fetch(ahead + 256 + 1280 * half, 4)
        for run in range(4):
            fetch(ahead + 512 + 1280 * half + 256 * run, 4)
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
    store_i32x16(to, bit_or(mask(q, LOW), mask(shift_left(h, 4), TWO)))
    store_i32x16(to + 1024, bit_or(mask(shift_right(q, 4), LOW), mask(h, TWO)))


@inner
def head_q6_k(w, stride, s):
    """Take apart d and scales of a Q6_K block."""
    _, _, _, d = load_rows(w + 194, stride)  # its last dword ends with d
    store_f32x16(s + D, halves_to_f32(shift_right(d, 16)))
    x0, x1, x2, x3 = load_rows(w + 192, stride)
    for x, i in ((x0, 0), (x1, 4), (x2, 8), (x3, 12)):
        to = s + SCALES + 64 * i
        store_i32x16(to, shift_signed(shift_left(x, 24), 24))
        store_i32x16(to + 64, shift_signed(shift_left(x, 16), 24))
        store_i32x16(to + 128, shift_signed(shift_left(x, 8), 24))
        store_i32x16(to + 192, shift_signed(x, 24))


@inner
def unpack_q6_k(w, stride, s, ahead):
    """Take a Q6_K block of 16 rows apart, fetching 53 lines ahead."""
    fetch(ahead, 4)
    head_q6_k(w, stride, s)
    for i in range(4):
        half, part = i // 2, i % 2
        fetch(ahead + 256 + 832 * i, 5)
        h0, h1, h2, h3 = load_rows(w + 128 + 32 * half + 16 * part, stride)
        for pair in range(2):
            fetch(ahead + 256 + 832 * i + 320 + 256 * pair, 4)
            to = s + 2048 * half + 512 * pair + 256 * part
            q0, q1, q2, q3 = load_rows(w + 64 * half + 32 * pair + 16 * part, stride)
            _store_q6(to, q0, h0, pair)
            _store_q6(to + 64, q1, h1, pair)
            _store_q6(to + 128, q2, h2, pair)
            _store_q6(to + 192, q3, h3, pair)


@inner
def _store_nibbles(s, q0, q1, q2, q3):
    store_i32x16(s, mask(q0, LOW))
    store_i32x16(s + 64, mask(q1, LOW))
    store_i32x16(s + 128, mask(q2, LOW))
    store_i32x16(s + 192, mask(q3, LOW))
    store_i32x16(s + 256, mask(shift_right(q0, 4), LOW))
    store_i32x16(s + 320, mask(shift_right(q1, 4), LOW))
    store_i32x16(s + 384, mask(shift_right(q2, 4), LOW))
    store_i32x16(s + 448, mask(shift_right(q3, 4), LOW))


@inner
def _add_fifth_bits(s, h):
    """Set bit 4 of element i where bit i of h is set: a product spreads 4 bits over 4 bytes."""
    for k in range(8):
        four = mask(variable_shift(h, 4 * k), 15)
        store_i32x16(s + 64 * k, bit_or(load_i32x16(s + 64 * k), mask(times(four, 0x02040810), TOP)))


@inner
def unpack_q4_0(w, stride, s, scale, ahead):
    """Take a Q4_0 block of 16 rows apart."""
    fetch(ahead, 5)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    q0, q1, q2, q3 = load_rows(w + 2, stride)
    _store_nibbles(s, q0, q1, q2, q3)


@inner
def unpack_q4_1(w, stride, s, scale, ahead):
    """Take a Q4_1 block of 16 rows apart."""
    fetch(ahead, 5)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    store_f32x16(scale + M32 - D32, halves_to_f32(shift_right(d, 16)))
    q0, q1, q2, q3 = load_rows(w + 4, stride)
    _store_nibbles(s, q0, q1, q2, q3)


@inner
def unpack_q5_0(w, stride, s, scale, ahead):
    """Take a Q5_0 block of 16 rows apart."""
    fetch(ahead, 6)
    d, h, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    q0, q1, q2, q3 = load_rows(w + 6, stride)
    _store_nibbles(s, q0, q1, q2, q3)
    _add_fifth_bits(s, bit_or(shift_right(d, 16), shift_left(h, 16)))


@inner
def unpack_q5_1(w, stride, s, scale, ahead):
    """Take a Q5_1 block of 16 rows apart."""
    fetch(ahead, 6)
    d, h, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    store_f32x16(scale + M32 - D32, halves_to_f32(shift_right(d, 16)))
    q0, q1, q2, q3 = load_rows(w + 8, stride)
    _store_nibbles(s, q0, q1, q2, q3)
    _add_fifth_bits(s, h)


@inner
def unpack_q8_0(w, stride, s, scale, ahead):
    """Take a Q8_0 block of 16 rows apart; a quant is stored plus 128."""
    fetch(ahead, 9)
    d, _, _, _ = load_rows(w, stride)
    store_f32x16(scale, halves_to_f32(d))
    for p in range(2):
        q0, q1, q2, q3 = load_rows(w + 2 + 16 * p, stride)
        to = s + 256 * p
        store_i32x16(to, flip(q0, 0x80808080))
        store_i32x16(to + 64, flip(q1, 0x80808080))
        store_i32x16(to + 128, flip(q2, 0x80808080))
        store_i32x16(to + 192, flip(q3, 0x80808080))
