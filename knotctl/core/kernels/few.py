"""A few tokens: a tile of 16 rows of Q4_K or Q6_K blocks, multiplied as it is taken apart, its weights never stored.

The same integers and float steps as tiles.py, for up to 4 tokens at once: a tuple holds a vector for each token, and
its length decides at compile time how many there are. Against a tile's way, which reads each stored weight again for
every four tokens, Q4_K takes 0.67 of the time for 2 tokens and 0.8 for 4.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from knotctl.core.kernels.dots import add_small_products
from knotctl.core.kernels.jit import inlined
from knotctl.core.kernels.lanes import load_rows
from knotctl.core.kernels.machine import intrinsic
from knotctl.core.kernels.simd import (
    bit_or,
    i8x64,
    i32x16,
    load_f32,
    load_i32x16,
    mask,
    shift_left,
    shift_right,
    splat,
)
from knotctl.core.kernels.tiles import SCALES, WIDE, step_k, step_q6_k
from knotctl.core.kernels.unpack import LOW, TWO, fetch, head_k, head_q6_k

# Tokens: the vectors of more do not fit the registers. Without byte products weights are widened, and stored for that.
FEW = 0 if WIDE else 4


def _splat_at(b: ir.IRBuilder, address: Any, step: Any, t: int) -> Any:
    """Return the dword of token t in all lanes."""
    at = b.add(address, b.mul(step, step.type(t)))
    return splat(b, b.load(b.inttoptr(at, ir.IntType(32).as_pointer()), align=1), i32x16.llvm)


@intrinsic
def zeros(typing: Any, n: Any) -> Any:
    """Return a tuple of n (a literal) vectors of zeros."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    result = types.UniTuple(i32x16, n.literal_value)
    return result(n), lambda c, b, s, a: ir.Constant(c.get_value_type(result), None)


@intrinsic
def splats(typing: Any, like: Any, address: Any, step: Any) -> Any:
    """Return for each token the dword at an address, `step` bytes apart, in all lanes."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return c.make_tuple(b, like, [_splat_at(b, a[1], a[2], t) for t in range(like.count)])

    return like(like, types.int64, types.int64), generate


@intrinsic
def dots(typing: Any, acc: Any, w: Any, address: Any, step: Any) -> Any:
    """Return acc + the sums of 4 products of w's bytes (up to 128) with each token's 4 bytes."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        weights = b.bitcast(a[1], i8x64.llvm)
        out = []
        for t in range(acc.count):
            four = b.bitcast(_splat_at(b, a[2], a[3], t), i8x64.llvm)
            out.append(add_small_products(b, b.extract_value(a[0], t), weights, four))
        return c.make_tuple(b, acc, out)

    return acc(acc, i32x16, types.int64, types.int64), generate


@intrinsic
def add_scaled(typing: Any, x: Any, y: Any, scale: Any) -> Any:
    """Return x + y · scale for each token."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        parts = [(b.extract_value(a[0], t), b.extract_value(a[1], t)) for t in range(x.count)]
        return c.make_tuple(b, x, [b.add(p, b.mul(q, a[2])) for p, q in parts])

    return x(x, x, i32x16), generate


@intrinsic
def store_all(typing: Any, address: Any, x: Any) -> Any:
    """Write the vectors one behind the other."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        for t in range(x.count):
            at = b.add(a[0], a[0].type(64 * t))
            b.store(b.extract_value(a[1], t), b.inttoptr(at, i32x16.llvm.as_pointer()), align=1)
        return c.get_dummy_value()

    return types.void(types.int64, x), generate


@inlined
def _four_dots(y, q0, q1, q2, q3, a):
    return dots(dots(dots(dots(y, q0, a, 256), q1, a + 4, 256), q2, a + 8, 256), q3, a + 12, 256)


@inlined
def _block_q4_k(zero, w, stride, s, plane, f, ahead):
    n = len(zero)
    fetch(ahead, 4)
    head_k(w, stride, s)
    x = zero
    for run in range(4):
        low, high = zero, zero
        for half in range(2):
            fetch(ahead + 256 + 512 * run + 256 * half, 4)
            q0, q1, q2, q3 = load_rows(w + 16 + 32 * run + 16 * half, stride)
            l0, l1, l2, l3 = mask(q0, LOW), mask(q1, LOW), mask(q2, LOW), mask(q3, LOW)
            q0, q1 = mask(shift_right(q0, 4), LOW), mask(shift_right(q1, 4), LOW)
            q2, q3 = mask(shift_right(q2, 4), LOW), mask(shift_right(q3, 4), LOW)
            a = plane + 64 * run + 16 * half
            low, high = _four_dots(low, l0, l1, l2, l3, a), _four_dots(high, q0, q1, q2, q3, a + 32)
        x = add_scaled(x, low, load_i32x16(s + SCALES + 128 * run))
        x = add_scaled(x, high, load_i32x16(s + SCALES + 128 * run + 64))
    store_all(s, x)
    for t in range(n):
        step_k(s, f + 64 * t, load_i32x16(s + 64 * t), plane + 256 * n + 16 * t, load_f32(plane + 336 * n + 4 * t))


@inlined
def _block_q6_k(zero, w, stride, s, plane, f, ahead):
    n = len(zero)
    fetch(ahead, 4)
    head_q6_k(w, stride, s)
    x, offsets = zero, plane + 272 * n
    for i in range(4):
        half, part = i // 2, i % 2
        fetch(ahead + 256 + 832 * i, 5)
        h0, h1, h2, h3 = load_rows(w + 128 + 32 * half + 16 * part, stride)
        for pair in range(2):
            fetch(ahead + 256 + 832 * i + 320 + 256 * pair, 4)
            q0, q1, q2, q3 = load_rows(w + 64 * half + 32 * pair + 16 * part, stride)
            l0 = bit_or(mask(q0, LOW), mask(shift_left(h0, 4), TWO))
            l1 = bit_or(mask(q1, LOW), mask(shift_left(h1, 4), TWO))
            l2 = bit_or(mask(q2, LOW), mask(shift_left(h2, 4), TWO))
            l3 = bit_or(mask(q3, LOW), mask(shift_left(h3, 4), TWO))
            q0 = bit_or(mask(shift_right(q0, 4), LOW), mask(h0, TWO))
            q1 = bit_or(mask(shift_right(q1, 4), LOW), mask(h1, TWO))
            q2 = bit_or(mask(shift_right(q2, 4), LOW), mask(h2, TWO))
            q3 = bit_or(mask(shift_right(q3, 4), LOW), mask(h3, TWO))
            j = 8 * half + 2 * pair + part
            a, o, scale = plane + 16 * j, offsets + 4 * j, s + SCALES + 64 * j
            x = add_scaled(x, _four_dots(splats(zero, o, 64), l0, l1, l2, l3, a), load_i32x16(scale))
            y = _four_dots(splats(zero, o + 16, 64), q0, q1, q2, q3, a + 64)
            x = add_scaled(x, y, load_i32x16(scale + 256))
            h0, h1, h2, h3 = shift_right(h0, 2), shift_right(h1, 2), shift_right(h2, 2), shift_right(h3, 2)
    store_all(s, x)
    for t in range(n):
        step_q6_k(s, f + 64 * t, load_i32x16(s + 64 * t), load_f32(plane + 336 * n + 4 * t))


@inlined
def few_q4_k(tokens, w, stride, s, plane, f, ahead):
    """Add the part of a block of Q4_K to the float sums of 2, 3 or 4 tokens, which are all of its plane."""
    if tokens == 2:
        _block_q4_k(zeros(2), w, stride, s, plane, f, ahead)
    elif tokens == 3:
        _block_q4_k(zeros(3), w, stride, s, plane, f, ahead)
    else:
        _block_q4_k(zeros(4), w, stride, s, plane, f, ahead)


@inlined
def few_q6_k(tokens, w, stride, s, plane, f, ahead):
    """Add the part of a block of Q6_K to the float sums of 2, 3 or 4 tokens, which are all of its plane."""
    if tokens == 2:
        _block_q6_k(zeros(2), w, stride, s, plane, f, ahead)
    elif tokens == 3:
        _block_q6_k(zeros(3), w, stride, s, plane, f, ahead)
    else:
        _block_q6_k(zeros(4), w, stride, s, plane, f, ahead)
