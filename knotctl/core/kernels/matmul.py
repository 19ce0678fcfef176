"""Matrix times activations on the quantised blocks, one definition of a result for every kernel.

For output (row r, token t) of a quantised type, over the blocks in ascending order, from +0, each step one f32
operation (products and sums are never fused):

    isum = sum of the integer products, each group times its integer scale     (int32, exact)
    f    = f + float(isum)·(d·a)             a: the activations' scale
    f    = f + float(msum)·(-(dmin·a))       Q4_K, Q5_K: msum = sum of min · sum of quants   (int32, exact)
    f    = f + m·(a·float(sum of quants))    Q4_1, Q5_1

Bounds of isum: Q4_K 31 M, Q5_K 63 M, Q6_K 260 M. For F32, F16 and BF16: 16 sums, one for each column modulo 16, over
ascending columns, product then sum; then lane i + lane i+8, i + i+4, i + i+2, i + i+1. Nothing depends on the number
of tokens, on the rows computed together, or on threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from knotctl.core.kernels.decode import check_computable
from knotctl.core.kernels.jit import inner, kernel
from knotctl.core.kernels.quantize import Activations, activation_kind, address, quantize
from knotctl.core.kernels.simd import (
    add,
    bit_or,
    bits_i8x32,
    bytes_i32x8,
    dot_i8x32,
    halves_i32x16,
    lane_f32x16,
    load_brain,
    load_brain_f32x16,
    load_f32,
    load_f32x16,
    load_half,
    load_half_f32x16,
    load_i8,
    load_i8x16,
    load_i8x32,
    load_i32,
    load_i32x8,
    load_u32,
    mask,
    minus,
    mul,
    nibbles_i8x32,
    shift_left,
    shift_right,
    splat_i32x16,
    store_f32,
    total,
    zero_f32x16,
)
from knotctl.core.kernels.threads import run
from knotctl.core.qtypes import QType

__all__ = ["Activations", "activation_kind", "matmul", "quantize"]

# weights, row_bytes, blocks of a row, quants, scales, sums, columns, tokens, out, stride of out, part, begin, end
_SIGNATURE = "void(" + ", ".join(["int64"] * 13) + ")"


@inner
def _half_scale(packed, top, shift):
    """Return four 6-bit numbers: the low nibbles of packed >> shift under the top bits of `top`."""
    low = np.uint32(np.uint32(packed) >> np.uint32(shift)) & np.uint32(0x0F0F0F0F)
    return np.uint32(low | ((np.uint32(top) >> np.uint32(2)) & np.uint32(0x30303030)))


@inner
def _scales(w):
    """Return scales 0-3, scales 4-7, mins 0-3, mins 4-7 of a Q4_K or Q5_K block, a byte each."""
    a, b, c = load_u32(w + 4), load_u32(w + 8), load_u32(w + 12)
    low = np.uint32(0x3F3F3F3F)
    return np.uint32(a & low), _half_scale(c, a, 0), np.uint32(b & low), _half_scale(c, b, 4)


@inner
def _byte(packed, i):
    return splat_i32x16(np.int32((np.uint32(packed) >> np.uint32(8 * i)) & np.uint32(255)))


@inner
def _pair(at, s, i, a):
    """Return the scaled products of the 64 elements whose nibbles lie at `at`."""
    packed = load_i8x32(at)
    low = dot_i8x32(mask(packed, 15), load_i8x32(a))
    up = dot_i8x32(shift_right(packed, 4), load_i8x32(a + 32))
    return add(mul(low, _byte(s, i)), mul(up, _byte(s, i + 1)))


@inner
def _step_k(f, at, isum, m0, m1, sums, a):
    """Return f and a Q4_K or Q5_K block's part: the float step of the definition above."""
    msum = total(mul(bytes_i32x8(m0, m1), load_i32x8(sums)))
    f = np.float32(f + np.float32(np.float32(isum) * np.float32(load_half(at) * a)))
    return np.float32(f + np.float32(np.float32(msum) * np.float32(-np.float32(load_half(at + 2) * a))))


@inner
def _sum_q4_k(w, s0, s1, a):
    t = add(_pair(w + 16, s0, 0, a), _pair(w + 48, s0, 2, a + 64))
    return total(add(t, add(_pair(w + 80, s1, 0, a + 128), _pair(w + 112, s1, 2, a + 192))))


@inner
def _fifth(packed, high, a, s, i):
    q = bit_or(packed, shift_left(mask(high, 1), 4))
    return mul(dot_i8x32(q, load_i8x32(a)), _byte(s, i))


@inner
def _sum_q5_k(w, s0, s1, a):
    h = load_i8x32(w + 16)
    p0, p1, p2, p3 = load_i8x32(w + 48), load_i8x32(w + 80), load_i8x32(w + 112), load_i8x32(w + 144)
    t = add(_fifth(mask(p0, 15), h, a, s0, 0), _fifth(shift_right(p0, 4), shift_right(h, 1), a + 32, s0, 1))
    t = add(t, _fifth(mask(p1, 15), shift_right(h, 2), a + 64, s0, 2))
    t = add(t, _fifth(shift_right(p1, 4), shift_right(h, 3), a + 96, s0, 3))
    t = add(t, _fifth(mask(p2, 15), shift_right(h, 4), a + 128, s1, 0))
    t = add(t, _fifth(shift_right(p2, 4), shift_right(h, 5), a + 160, s1, 1))
    t = add(t, _fifth(mask(p3, 15), shift_right(h, 6), a + 192, s1, 2))
    return total(add(t, _fifth(shift_right(p3, 4), shift_right(h, 7), a + 224, s1, 3)))


@inner
def _sixth(low, high, a, s):
    q = minus(bit_or(low, shift_left(mask(high, 3), 4)), 32)
    return mul(dot_i8x32(q, load_i8x32(a)), halves_i32x16(np.int32(load_i8(s)), np.int32(load_i8(s + 1))))


@inner
def _half_q6_k(ql, qh, s, a):
    """Return the scaled products of 128 elements of a Q6_K block."""
    p0, p1, h = load_i8x32(ql), load_i8x32(ql + 32), load_i8x32(qh)
    t = add(_sixth(mask(p0, 15), h, a, s), _sixth(mask(p1, 15), shift_right(h, 2), a + 32, s + 2))
    t = add(t, _sixth(shift_right(p0, 4), shift_right(h, 4), a + 64, s + 4))
    return add(t, _sixth(shift_right(p1, 4), shift_right(h, 6), a + 96, s + 6))


@kernel(_SIGNATURE)
def _q4_k(w, row_bytes, blocks, quants, scales, sums, columns, tokens, out, stride, part, begin, end):
    for r in range(begin, end):
        for t in range(tokens):
            f = np.float32(0)
            for b in range(blocks):
                at, k = w + r * row_bytes + 144 * b, t * columns + 256 * b
                s0, s1, m0, m1 = _scales(at)
                isum = _sum_q4_k(at, s0, s1, quants + k)
                f = _step_k(f, at, isum, m0, m1, sums + k // 8, load_f32(scales + 4 * (t * blocks + b)))
            store_f32(out + 4 * (t * stride + r), f)


@kernel(_SIGNATURE)
def _q5_k(w, row_bytes, blocks, quants, scales, sums, columns, tokens, out, stride, part, begin, end):
    for r in range(begin, end):
        for t in range(tokens):
            f = np.float32(0)
            for b in range(blocks):
                at, k = w + r * row_bytes + 176 * b, t * columns + 256 * b
                s0, s1, m0, m1 = _scales(at)
                isum = _sum_q5_k(at, s0, s1, quants + k)
                f = _step_k(f, at, isum, m0, m1, sums + k // 8, load_f32(scales + 4 * (t * blocks + b)))
            store_f32(out + 4 * (t * stride + r), f)


@kernel(_SIGNATURE)
def _q6_k(w, row_bytes, blocks, quants, scales, sums, columns, tokens, out, stride, part, begin, end):
    for r in range(begin, end):
        for t in range(tokens):
            f = np.float32(0)
            for b in range(blocks):
                at, a = w + r * row_bytes + 210 * b, quants + t * columns + 256 * b
                halves = add(_half_q6_k(at, at + 128, at + 192, a), _half_q6_k(at + 64, at + 160, at + 200, a + 128))
                d = np.float32(load_half(at + 208) * load_f32(scales + 4 * (t * blocks + b)))
                f = np.float32(f + np.float32(np.float32(total(halves)) * d))
            store_f32(out + 4 * (t * stride + r), f)


_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = range(5)


@inner
def _quants_32(kind, at):
    """Return the 32 quants of a block of a 32-element type."""
    if kind == _Q8_0:
        return load_i8x32(at + 2)
    if kind == _Q4_0:
        return minus(nibbles_i8x32(load_i8x16(at + 2)), 8)
    if kind == _Q4_1:
        return nibbles_i8x32(load_i8x16(at + 4))
    if kind == _Q5_0:
        q = bit_or(nibbles_i8x32(load_i8x16(at + 6)), shift_left(bits_i8x32(load_u32(at + 2)), 4))
        return minus(q, 16)
    return bit_or(nibbles_i8x32(load_i8x16(at + 8)), shift_left(bits_i8x32(load_u32(at + 4)), 4))


@kernel(_SIGNATURE.replace("int64)", "int64, int64, int64)"))
def _q32(w, row_bytes, blocks, quants, scales, sums, columns, tokens, out, stride, kind, block_bytes, part, begin, end):
    for r in range(begin, end):
        for t in range(tokens):
            f = np.float32(0)
            for b in range(blocks):
                at, k = w + r * row_bytes + block_bytes * b, t * blocks + b
                a = load_f32(scales + 4 * k)
                isum = total(dot_i8x32(_quants_32(kind, at), load_i8x32(quants + 32 * k)))
                f = np.float32(f + np.float32(np.float32(isum) * np.float32(load_half(at) * a)))
                if kind in (_Q4_1, _Q5_1):
                    f = np.float32(
                        f + np.float32(load_half(at + 2) * np.float32(a * np.float32(load_i32(sums + 4 * k))))
                    )
            store_f32(out + 4 * (t * stride + r), f)


_F32, _F16, _BF16 = range(3)


@inner
def _numbers(kind, at):
    if kind == _F32:
        return load_f32x16(at)
    if kind == _F16:
        return load_half_f32x16(at)
    return load_brain_f32x16(at)


@inner
def _number(kind, at):
    if kind == _F32:
        return load_f32(at)
    if kind == _F16:
        return load_half(at)
    return load_brain(at)


@kernel("void(" + ", ".join(["int64"] * 10) + ")")
def _float(w, x, columns, tokens, out, stride, kind, part, begin, end):
    size = 4 if kind == _F32 else 2
    whole = columns // 16 * 16
    for r in range(begin, end):
        for t in range(tokens):
            acc = zero_f32x16()
            row, a = w + r * columns * size, x + 4 * t * columns
            for k in range(0, whole, 16):
                acc = add(acc, mul(_numbers(kind, row + k * size), load_f32x16(a + 4 * k)))
            # A ragged end is one more step with zeros behind it: +0 changes no sum.
            for k in range(whole, columns):
                product = np.float32(_number(kind, row + k * size) * load_f32(a + 4 * k))
                acc = add(acc, lane_f32x16(product, k - whole))
            store_f32(out + 4 * (t * stride + r), total(acc))


_KERNELS_K = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
_KINDS_32 = {"Q4_0": _Q4_0, "Q4_1": _Q4_1, "Q5_0": _Q5_0, "Q5_1": _Q5_1, "Q8_0": _Q8_0}
_KINDS_FLOAT = {"F32": _F32, "F16": _F16, "BF16": _BF16}


def matmul(
    qtype: QType, blocks: NDArray[np.uint8], columns: int, acts: Activations, row: int, out: NDArray[np.float32]
) -> None:
    """Multiply rows [row, row + n) of a matrix, whose blocks are given, with T activations into out[:, row:row+n].

    Shapes: blocks u8[n · row_bytes], contiguous, at any address; out f32[T, N], rows contiguous.
    Raises: ModelError unsupported-type.
    """
    check_computable(qtype)
    row_bytes = columns // qtype.block * qtype.block_bytes
    rows, tokens = blocks.size // row_bytes, len(out)
    target, stride = address(out) + 4 * row, out.strides[0] // 4
    if qtype.name in _KINDS_FLOAT:
        kind = _KINDS_FLOAT[qtype.name]
        run(_float, rows, address(blocks), address(acts.x), columns, tokens, target, stride, kind)
        return
    n_blocks = columns // qtype.block
    of_acts = address(acts.quants), address(acts.scales), address(acts.sums), columns, tokens
    if qtype.name in _KERNELS_K:
        run(_KERNELS_K[qtype.name], rows, address(blocks), row_bytes, n_blocks, *of_acts, target, stride)
    else:
        kind = _KINDS_32[qtype.name]
        run(_q32, rows, address(blocks), row_bytes, n_blocks, *of_acts, target, stride, kind, qtype.block_bytes)
