"""The SIMD vocabulary's second half: what crosses lanes or changes their kind: sums, f16 and bf16, rows to lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from knotctl.core.kernels.levels import LEVEL
from knotctl.core.kernels.machine import intrinsic
from knotctl.core.kernels.simd import (
    ELEMENTS,
    constant,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    i32x16,
    pick,
    splat,
)

_I32 = ir.IntType(32)


def _fold(b: ir.IRBuilder, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the lanes combined by halves: lane i with lane i + n/2, and so on down to one."""
    n = x.type.count
    while n > 1:
        n //= 2
        x = combine(b.shuffle_vector(x, x, pick(list(range(n)))), b.shuffle_vector(x, x, pick(list(range(n, 2 * n)))))
    return b.extract_element(x, _I32(0))


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """Return the sum of the lanes, floats by halves (lane i + lane i + n/2, …), in that order on every CPU."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return _fold(b, a[0], b.fadd if x.element == "f32" else b.add)

    return ELEMENTS[x.element][1](x), generate


@intrinsic
def totals(typing: Any, vectors: Any) -> Any:
    """Return in lane i the `total` of the i-th of 16 vectors: the same sums, two vectors to a register.

    Each round adds halves of pairs of vectors, so what a lane holds is followed here, and the last shuffle sorts it.
    """

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        # A register and, for each lane, (vector it belongs to, index among that vector's lanes that are left).
        parts = [(x, [(v, lane) for lane in range(16)]) for v, x in enumerate(cgutils.unpack_tuple(b, a[0]))]
        for half in (8, 4, 2, 1):
            merged = []
            for (x, of_x), (y, of_y) in zip(parts[::2], parts[1::2], strict=True):
                both = of_x + of_y
                low = [i for i, (_, lane) in enumerate(both) if lane < half]
                place = {key: i for i, key in enumerate(both)}
                high = [place[v, lane + half] for v, lane in (both[i] for i in low)]
                sums = b.fadd(b.shuffle_vector(x, y, pick(low)), b.shuffle_vector(x, y, pick(high)))
                merged.append((sums, [both[i] for i in low]))
            parts = merged
        ((x, of_x),) = parts
        return b.shuffle_vector(x, x, pick([of_x.index((v, 0)) for v in range(16)]))

    return f32x16(types.UniTuple(f32x16, 16)), generate


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """Return the largest lane."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return _fold(b, a[0], lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))

    return types.float32(f32x16), generate


@intrinsic
def largest_bits(typing: Any, x: Any) -> Any:
    """Return the largest signed lane."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return _fold(b, a[0], lambda p, q: b.select(b.icmp_signed(">", p, q), p, q))

    return types.int32(i32x16), generate


@intrinsic
def store_bytes(typing: Any, address: Any, x: Any) -> Any:
    """Write the lowest bytes of 16 int32 to an address."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        b.store(b.trunc(a[1], i8x16.llvm), b.inttoptr(a[0], i8x16.llvm.as_pointer()), align=1)
        return c.get_dummy_value()

    return types.void(types.int64, i32x16), generate


def _half(b: ir.IRBuilder, h: Any, kind: Any, floats: Any) -> Any:
    """Return f32 for the f16 bits in i32 lanes, by integer steps: no library call where a CPU has no f16."""

    def number(value: int) -> ir.Constant:
        return ir.Constant(kind, value if kind is _I32 else [value] * kind.count)

    def real(value: float) -> ir.Constant:
        return ir.Constant(floats, value if kind is _I32 else [value] * kind.count)

    size = b.and_(h, number(0x7FFF))
    # The exponent moves from bias 15 to 127 by an exact product, which also brings f16's subnormals into range.
    moved = b.bitcast(b.fmul(b.bitcast(b.shl(size, number(13)), floats), real(2.0**112)), kind)
    special = b.icmp_unsigned(">=", size, number(0x7C00))
    moved = b.or_(moved, b.select(special, number(0x7F800000), number(0)))
    return b.bitcast(b.or_(moved, b.shl(b.and_(h, number(0x8000)), number(16))), floats)


@intrinsic
def load_half(typing: Any, address: Any) -> Any:
    """Return the f16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        h = b.load(b.inttoptr(a[0], ir.IntType(16).as_pointer()), align=1)
        return _half(b, b.zext(h, _I32), _I32, ir.FloatType())

    return types.float32(types.int64), generate


def _load_16(b: ir.IRBuilder, address: Any) -> Any:
    kind = ir.VectorType(ir.IntType(16), 16)
    return b.zext(b.load(b.inttoptr(address, kind.as_pointer()), align=1), i32x16.llvm)


@intrinsic
def load_half_f32x16(typing: Any, address: Any) -> Any:
    """Return 16 f16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        if LEVEL == "generic":
            return _half(b, _load_16(b, a[0]), i32x16.llvm, f32x16.llvm)
        # Every CPU with AVX2 converts them itself; elsewhere LLVM would call a library that may not be there.
        halves = ir.VectorType(ir.HalfType(), 16)
        return b.fpext(b.load(b.inttoptr(a[0], halves.as_pointer()), align=1), f32x16.llvm)

    return f32x16(types.int64), generate


@intrinsic
def load_brain_f32x16(typing: Any, address: Any) -> Any:
    """Return 16 bf16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.bitcast(b.shl(_load_16(b, a[0]), constant(i32x16.llvm, [16] * 16)), f32x16.llvm)

    return f32x16(types.int64), generate


@intrinsic
def load_brain(typing: Any, address: Any) -> Any:
    """Return the bf16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        h = b.load(b.inttoptr(a[0], ir.IntType(16).as_pointer()), align=1)
        return b.bitcast(b.shl(b.zext(h, _I32), _I32(16)), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def to_f32(typing: Any, x: Any) -> Any:
    """Return 16 int32 as f32, rounded to nearest even."""
    return f32x16(i32x16), lambda c, b, s, a: b.sitofp(a[0], f32x16.llvm)


@intrinsic
def halves_to_f32(typing: Any, bits: Any) -> Any:
    """Return the f16 in the low 16 bits of each lane (the others are ignored) as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        if LEVEL == "generic":
            return _half(b, a[0], i32x16.llvm, f32x16.llvm)
        halves = b.bitcast(b.trunc(a[0], ir.VectorType(ir.IntType(16), 16)), ir.VectorType(ir.HalfType(), 16))
        return b.fpext(halves, f32x16.llvm)

    return f32x16(i32x16), generate


@intrinsic
def splat_bytes(typing: Any, address: Any) -> Any:
    """Return the 4 bytes at an address in all 16 lanes."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        one = b.load(b.inttoptr(a[0], _I32.as_pointer()), align=1)
        return b.bitcast(splat(b, one, i32x16.llvm), i8x64.llvm)

    return i8x64(types.int64), generate


@intrinsic
def load_rows(typing: Any, address: Any, stride: Any) -> Any:
    """Return 16 bytes of each of 16 rows as 4 vectors: lane r of vector k is the k-th dword of row r.

    Row 4L + i is loaded into 128-bit lane L of register i; then dwords change places inside the lanes, 4 by 4.
    """
    result = types.UniTuple(i32x16, 4)

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        four = ir.VectorType(_I32, 4)
        rows = []
        for r in range(16):
            at = b.add(a[0], b.mul(a[1], a[1].type(r)))
            rows.append(b.load(b.inttoptr(at, four.as_pointer()), align=1))
        registers = []
        for i in range(4):
            low = b.shuffle_vector(rows[i], rows[4 + i], pick(list(range(8))))
            high = b.shuffle_vector(rows[8 + i], rows[12 + i], pick(list(range(8))))
            registers.append(b.shuffle_vector(low, high, pick(list(range(16)))))

        def weave(x: Any, y: Any, pattern: tuple[int, int, int, int]) -> Any:
            return b.shuffle_vector(
                x, y, pick([4 * lane + i + (12 if i > 3 else 0) for lane in range(4) for i in pattern])
            )

        x0, x1, x2, x3 = registers
        low01, high01 = weave(x0, x1, (0, 4, 1, 5)), weave(x0, x1, (2, 6, 3, 7))
        low23, high23 = weave(x2, x3, (0, 4, 1, 5)), weave(x2, x3, (2, 6, 3, 7))
        out = [
            weave(low01, low23, (0, 1, 4, 5)), weave(low01, low23, (2, 3, 6, 7)),
            weave(high01, high23, (0, 1, 4, 5)), weave(high01, high23, (2, 3, 6, 7)),
        ]  # fmt: skip
        return c.make_tuple(b, result, out)

    return result(types.int64, types.int64), generate


@intrinsic
def twice_i8x64(typing: Any, x: Any, first: Any, more: Any) -> Any:
    """Return 32 bytes shifted right by `first`, then the same bytes shifted by `first + more`; both literals.

    Bits of a byte's neighbour come in at its top: a shift by words is one instruction, by bytes it is two.
    """
    if not (isinstance(first, types.IntegerLiteral) and isinstance(more, types.IntegerLiteral)):
        return None
    shifts = [first.literal_value, first.literal_value + more.literal_value]

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        words = ir.VectorType(ir.IntType(16), 16)
        parts = [b.bitcast(b.lshr(b.bitcast(a[0], words), constant(words, [n] * 16)), i8x32.llvm) for n in shifts]
        return b.shuffle_vector(*parts, pick(list(range(64))))

    return i8x64(i8x32, first, more), generate


@intrinsic
def signed_i32x16(typing: Any, x: Any) -> Any:
    """Return 16 signed bytes as int32."""
    return i32x16(i8x16), lambda c, b, s, a: b.sext(a[0], i32x16.llvm)


@intrinsic
def spread(typing: Any, x: Any, first: Any, count: Any) -> Any:
    """Return `count` lanes from lane `first` on, each repeated to fill 16; both literals."""
    if not (isinstance(first, types.IntegerLiteral) and isinstance(count, types.IntegerLiteral)):
        return None
    start, n = first.literal_value, count.literal_value
    lanes = pick([start + i * n // 16 for i in range(16)])
    return i32x16(i32x16, first, count), lambda c, b, s, a: b.shuffle_vector(a[0], a[0], lanes)
