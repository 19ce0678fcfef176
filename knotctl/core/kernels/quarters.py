"""The SIMD vocabulary's third part: vectors by their quarters (128 bits), in which four rows, or four blocks, lie.

A shuffle that keeps every element in its quarter is one instruction everywhere; so is one that moves whole quarters.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from knotctl.core.kernels.dots import pack_in_quarters
from knotctl.core.kernels.machine import intrinsic
from knotctl.core.kernels.simd import constant, i8x64, i16x32, i32x16, pick, splat

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_FOUR = types.UniTuple(i32x16, 4)


def _join(b: ir.IRBuilder, parts: list[Any]) -> Any:
    """Return vectors one behind the other, in rounds of pairs."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        parts = [b.shuffle_vector(x, y, pick(list(range(n)))) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def load_quarters(typing: Any, address: Any, step: Any) -> Any:
    """Return 4 times 16 bytes, `step` bytes apart."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        kind = ir.VectorType(_I8, 16).as_pointer()
        at = [b.add(a[0], b.mul(a[1], _I64(i))) for i in range(4)]
        x0, x1, x2, x3 = (b.load(b.inttoptr(x, kind), align=1) for x in at)
        low, high = (b.shuffle_vector(x, y, pick(list(range(32)))) for x, y in ((x0, x1), (x2, x3)))
        return b.shuffle_vector(low, high, pick(list(range(64))))

    return i8x64(types.int64, types.int64), generate


@intrinsic
def load_twice(typing: Any, address: Any) -> Any:
    """Return 32 bytes two times."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        x = b.load(b.inttoptr(a[0], ir.VectorType(_I8, 32).as_pointer()), align=1)
        return b.shuffle_vector(x, x, pick(list(range(32)) * 2))

    return i8x64(types.int64), generate


def _inside(b: ir.IRBuilder, x: Any, y: Any, of: tuple[int, ...]) -> Any:
    """Return of each quarter the lanes `of`: 0 to 3 of x, 4 to 7 of y."""
    return b.shuffle_vector(x, y, pick([4 * q + i + (12 if i > 3 else 0) for q in range(4) for i in of]))


def _whole(b: ir.IRBuilder, x: Any, y: Any, of: tuple[int, ...]) -> Any:
    """Return the quarters `of`: 0 to 3 of x, 4 to 7 of y."""
    return b.shuffle_vector(x, y, pick([4 * q + i for q in of for i in range(4)]))


@intrinsic
def fold_quarters(typing: Any, vectors: Any) -> Any:
    """Return in lane 4q + v the sum of the lanes of quarter q of the v-th of 4 vectors."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        x0, x1, x2, x3 = (b.extract_value(a[0], i) for i in range(4))
        x, y = (b.add(_inside(b, *two, (0, 4, 1, 5)), _inside(b, *two, (2, 6, 3, 7))) for two in ((x0, x1), (x2, x3)))
        return b.add(_inside(b, x, y, (0, 1, 4, 5)), _inside(b, x, y, (2, 3, 6, 7)))

    return i32x16(_FOUR), generate


@intrinsic
def turn_quarters(typing: Any, vectors: Any) -> Any:
    """Return 4 vectors of which the q-th holds, in quarter v, quarter q of the v-th given."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        x0, x1, x2, x3 = (b.extract_value(a[0], i) for i in range(4))
        out = []
        for half in ((0, 1, 4, 5), (2, 3, 6, 7)):
            x, y = _whole(b, x0, x1, half), _whole(b, x2, x3, half)
            out += [_whole(b, x, y, (0, 2, 4, 6)), _whole(b, x, y, (1, 3, 5, 7))]
        return c.make_tuple(b, _FOUR, out)

    return _FOUR(_FOUR), generate


@intrinsic
def add_quarters(typing: Any, vectors: Any) -> Any:
    """Return in quarter v the sum of the quarters of the v-th of 4 vectors, each lane with its like."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        def added(x: Any, y: Any) -> Any:
            return b.add(_whole(b, x, y, (0, 2, 4, 6)), _whole(b, x, y, (1, 3, 5, 7)))

        x0, x1, x2, x3 = (b.extract_value(a[0], i) for i in range(4))
        return added(added(x0, x1), added(x2, x3))

    return i32x16(_FOUR), generate


@intrinsic
def set_bit_4(typing: Any, x: Any, bits: Any) -> Any:
    """Return 64 bytes with bit 4 set in byte i where bit i of an integer is."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        chosen = b.bitcast(a[1], ir.VectorType(ir.IntType(1), 64))
        return b.or_(a[0], b.select(chosen, constant(i8x64.llvm, [16] * 64), constant(i8x64.llvm, [0] * 64)))

    return i8x64(i8x64, types.int64), generate


@intrinsic
def set_bit_4_where(typing: Any, x: Any, bits: Any, low: Any, high: Any) -> Any:
    """Return 64 bytes with bit 4 set where `bits` has a bit in common with `low` (`high` in the last 32); literals."""
    if not (isinstance(low, types.IntegerLiteral) and isinstance(high, types.IntegerLiteral)):
        return None
    masks = [low.literal_value] * 32 + [high.literal_value] * 32

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        chosen = b.icmp_signed("!=", b.and_(a[1], constant(i8x64.llvm, masks)), constant(i8x64.llvm, [0] * 64))
        return b.or_(a[0], b.select(chosen, constant(i8x64.llvm, [16] * 64), constant(i8x64.llvm, [0] * 64)))

    return i8x64(i8x64, i8x64, low, high), generate


@intrinsic
def words_in_quarters(typing: Any, x: Any, y: Any) -> Any:
    """Return as int16 (which they fit) the 4 lanes of each quarter of x, then those of y."""
    return i16x32(i32x16, i32x16), lambda c, b, s, a: pack_in_quarters(b, *a)


@intrinsic
def spread_words(typing: Any, scales: Any, first: Any) -> Any:
    """Return bytes `first` … `first` + 3 of an integer as int16, 4 times each: two twice, then two twice."""
    if not isinstance(first, types.IntegerLiteral):
        return None
    of = [first.literal_value + q // 2 * 2 + i for q in range(4) for i in (0, 0, 0, 0, 1, 1, 1, 1)]

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        everywhere = b.bitcast(splat(b, a[0], ir.VectorType(_I64, 8)), i8x64.llvm)
        indices = [i for word, byte in enumerate(of) for i in (word // 8 * 16 + byte, 64)]
        spread = b.shuffle_vector(everywhere, constant(i8x64.llvm, [0] * 64), pick(indices))
        return b.bitcast(spread, i16x32.llvm)

    return i16x32(types.int64, first), generate


@intrinsic
def load_bytes_i16x32(typing: Any, address: Any) -> Any:
    """Return the 32 bytes at an address, unsigned, as int16."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        kind = ir.VectorType(_I8, 32).as_pointer()
        return b.zext(b.load(b.inttoptr(a[0], kind), align=1), i16x32.llvm)

    return i16x32(types.int64), generate


@intrinsic
def splat_words(typing: Any, address: Any) -> Any:
    """Return the 8 int16 at an address in each quarter."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        x = b.load(b.inttoptr(a[0], ir.VectorType(_I16, 8).as_pointer()), align=1)
        return b.shuffle_vector(x, x, pick(list(range(8)) * 4))

    return i16x32(types.int64), generate
