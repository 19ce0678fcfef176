"""The SIMD vocabulary: vectors as numba types, their operations as intrinsics over LLVM vectors, loads at any address.

A vector is a value in a register; kernels read memory by address (an int64), so a block may lie at any byte. Every
operation here is plain LLVM and right on every CPU. Floats are multiplied and added separately, never fused: a result
then does not depend on the CPU having an fma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic as _intrinsic
from numba.extending import register_model

intrinsic: Any = _intrinsic  # its annotations describe the plain function, not how kernels call it

_ELEMENTS: dict[str, tuple[Any, Any]] = {
    "i8": (ir.IntType(8), types.int8),
    "u8": (ir.IntType(8), types.uint8),
    "u16": (ir.IntType(16), types.uint16),
    "i32": (ir.IntType(32), types.int32),
    "u32": (ir.IntType(32), types.uint32),
    "i64": (ir.IntType(64), types.int64),
    "f32": (ir.FloatType(), types.float32),
}
_I32 = ir.IntType(32)


class Vector(types.Type):
    """A vector of so many elements, as numba sees it."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        self.llvm = ir.VectorType(_ELEMENTS[element][0], lanes)
        super().__init__(name=f"{element}x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


i8x16, i8x32 = Vector("i8", 16), Vector("i8", 32)
i32x8, i32x16 = Vector("i32", 8), Vector("i32", 16)
f32x16 = Vector("f32", 16)


def _constant(vector: ir.VectorType, values: list[Any]) -> ir.Constant:
    return ir.Constant(vector, values)


def _mask(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def _splat(b: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, _mask([0] * vector.count))


def _loader(result: Any, kind: Any) -> Any:
    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
            return b.load(b.inttoptr(a[0], kind.as_pointer()), align=1)

        return result(types.int64), generate

    return load


def _storer(value: Any, kind: Any) -> Any:
    @intrinsic
    def store(typing: Any, address: Any, x: Any) -> Any:
        def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
            b.store(a[1], b.inttoptr(a[0], kind.as_pointer()), align=1)
            return c.get_dummy_value()

        return types.void(types.int64, value), generate

    return store


def _scalar(element: str) -> tuple[Any, Any]:
    kind, result = _ELEMENTS[element]
    return result, kind


load_i8, load_u8, load_u16 = _loader(*_scalar("i8")), _loader(*_scalar("u8")), _loader(*_scalar("u16"))
load_i32, load_u32, load_f32 = _loader(*_scalar("i32")), _loader(*_scalar("u32")), _loader(*_scalar("f32"))
load_i64 = _loader(*_scalar("i64"))
store_i8, store_i32, store_f32 = _storer(*_scalar("i8")), _storer(*_scalar("i32")), _storer(*_scalar("f32"))
load_i8x16, load_i8x32 = _loader(i8x16, i8x16.llvm), _loader(i8x32, i8x32.llvm)
load_i32x8, load_f32x16 = _loader(i32x8, i32x8.llvm), _loader(f32x16, f32x16.llvm)
store_f32x16 = _storer(f32x16, f32x16.llvm)


def _first(b: ir.IRBuilder, n: Any) -> Any:
    """Return the mask of lanes 0 to n - 1 of 16."""
    lanes = _constant(i32x16.llvm, list(range(16)))
    return b.icmp_signed("<", lanes, _splat(b, b.trunc(n, _I32), i32x16.llvm))


@intrinsic
def load_first_f32x16(typing: Any, address: Any, n: Any) -> Any:
    """Return n f32 at an address, then zeros; reads nothing behind them."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        at = f32x16.llvm.as_pointer()
        kind = ir.FunctionType(f32x16.llvm, [at, _I32, ir.VectorType(ir.IntType(1), 16), f32x16.llvm])
        load = b.module.declare_intrinsic("llvm.masked.load.v16f32.p0", fnty=kind)
        return b.call(load, [b.inttoptr(a[0], at), _I32(1), _first(b, a[1]), ir.Constant(f32x16.llvm, None)])

    return f32x16(types.int64, types.int64), generate


@intrinsic
def store_first_f32x16(typing: Any, address: Any, x: Any, n: Any) -> Any:
    """Write the first n lanes to an address and nothing behind them."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        at = f32x16.llvm.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [f32x16.llvm, at, _I32, ir.VectorType(ir.IntType(1), 16)])
        store = b.module.declare_intrinsic("llvm.masked.store.v16f32.p0", fnty=kind)
        b.call(store, [a[1], b.inttoptr(a[0], at), _I32(1), _first(b, a[2])])
        return c.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), generate


def _zero(vector: Vector) -> Any:
    @intrinsic
    def zero(typing: Any) -> Any:
        return vector(), lambda c, b, s, a: ir.Constant(vector.llvm, None)

    return zero


zero_i32x16, zero_f32x16 = _zero(i32x16), _zero(f32x16)


def _operation(on_integers: str, on_floats: str | None = None) -> Any:
    """Return the intrinsic of a lane-wise operation of two vectors of one type."""

    @intrinsic
    def operate(typing: Any, x: Any, y: Any) -> Any:
        name = on_floats if x.element == "f32" else on_integers
        return x(x, x), lambda c, b, s, a: getattr(b, str(name))(a[0], a[1])

    return operate


add, sub, mul = _operation("add", "fadd"), _operation("sub", "fsub"), _operation("mul", "fmul")
div, bit_or = _operation("sdiv", "fdiv"), _operation("or_")


@intrinsic
def larger(typing: Any, x: Any, y: Any) -> Any:
    """Return x where it is larger than y, else y; so y where x is NaN."""
    return x(x, x), lambda c, b, s, a: b.select(b.fcmp_ordered(">", a[0], a[1]), a[0], a[1])


@intrinsic
def where_below(typing: Any, x: Any, bound: Any, below: Any, other: Any) -> Any:
    """Return `below` in the lanes where x < bound, `other` in the rest and where x is NaN."""
    return x(x, x, x, x), lambda c, b, s, a: b.select(b.fcmp_ordered("<", a[0], a[1]), a[2], a[3])


@intrinsic
def power_of_two(typing: Any, n: Any) -> Any:
    """Return 2^n for whole numbers n of -126 to 127 in 16 f32 lanes (anything for other n)."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        # 1.5 · 2^23 + n has n in its lowest bits, whatever n is: no conversion that a NaN or a large n would poison.
        bits = b.bitcast(b.fadd(a[0], _constant(f32x16.llvm, [12582912.0] * 16)), i32x16.llvm)
        biased = b.add(bits, _constant(i32x16.llvm, [127] * 16))
        return b.bitcast(b.shl(biased, _constant(i32x16.llvm, [23] * 16)), f32x16.llvm)

    return f32x16(f32x16), generate


def _with_constant(operation: str) -> Any:
    """Return the intrinsic of an operation of each (unsigned) lane with one literal number."""

    @intrinsic
    def operate(typing: Any, x: Any, n: Any) -> Any:
        if not isinstance(n, types.IntegerLiteral):
            return None
        value = n.literal_value

        def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
            return getattr(b, operation)(a[0], _constant(x.llvm, [value] * x.lanes))

        return x(x, n), generate

    return operate


mask, shift_right, shift_left, minus = (_with_constant(name) for name in ("and_", "lshr", "shl", "sub"))


@intrinsic
def splat_f32x16(typing: Any, x: Any) -> Any:
    """Return a number in all 16 lanes."""
    return f32x16(types.float32), lambda c, b, s, a: _splat(b, a[0], f32x16.llvm)


@intrinsic
def splat_i32x16(typing: Any, x: Any) -> Any:
    """Return an integer in all 16 lanes."""
    return i32x16(types.int32), lambda c, b, s, a: _splat(b, a[0], i32x16.llvm)


@intrinsic
def lane_f32x16(typing: Any, x: Any, i: Any) -> Any:
    """Return a number in lane i and +0 in the others."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.insert_element(ir.Constant(f32x16.llvm, None), a[0], b.trunc(a[1], _I32))

    return f32x16(types.float32, types.int64), generate


@intrinsic
def halves_i32x16(typing: Any, low: Any, high: Any) -> Any:
    """Return one integer in lanes 0-7 and another in lanes 8-15."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        two = b.insert_element(ir.Constant(i32x16.llvm, ir.Undefined), a[0], _I32(0))
        two = b.insert_element(two, a[1], _I32(1))
        return b.shuffle_vector(two, two, _mask([0] * 8 + [1] * 8))

    return i32x16(types.int32, types.int32), generate


@intrinsic
def nibbles_i8x32(typing: Any, packed: Any) -> Any:
    """Return the 16 low nibbles of 16 bytes, then the 16 high ones."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        low = b.and_(a[0], _constant(i8x16.llvm, [15] * 16))
        high = b.lshr(a[0], _constant(i8x16.llvm, [4] * 16))
        return b.shuffle_vector(low, high, _mask(list(range(32))))

    return i8x32(i8x16), generate


@intrinsic
def bits_i8x32(typing: Any, bits: Any) -> Any:
    """Return the 32 bits of an integer as bytes 0 or 1, lowest first."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.zext(b.bitcast(a[0], ir.VectorType(ir.IntType(1), 32)), i8x32.llvm)

    return i8x32(types.uint32), generate


@intrinsic
def bytes_i32x8(typing: Any, low: Any, high: Any) -> Any:
    """Return the 8 bytes of two integers, lowest first, as unsigned numbers."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        two = b.insert_element(ir.Constant(ir.VectorType(_I32, 2), ir.Undefined), a[0], _I32(0))
        two = b.insert_element(two, a[1], _I32(1))
        return b.zext(b.bitcast(two, ir.VectorType(ir.IntType(8), 8)), i32x8.llvm)

    return i32x8(types.uint32, types.uint32), generate


@intrinsic
def dot_i8x32(typing: Any, x: Any, y: Any) -> Any:
    """Return the 16 sums of neighbouring products x[2i]·y[2i] + x[2i+1]·y[2i+1] of signed bytes.

    Written in 16 bits so that LLVM finds the CPU's multiply-and-add of pairs (vpmaddwd on x86).
    """

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        wide = ir.VectorType(ir.IntType(16), 32)
        wx, wy = b.sext(a[0], wide), b.sext(a[1], wide)
        half = []
        for odd in (0, 1):
            pick = _mask(list(range(odd, 32, 2)))
            half.append(
                b.mul(
                    b.sext(b.shuffle_vector(wx, wx, pick), i32x16.llvm),
                    b.sext(b.shuffle_vector(wy, wy, pick), i32x16.llvm),
                )
            )
        return b.add(half[0], half[1])

    return i32x16(i8x32, i8x32), generate


def _fold(b: ir.IRBuilder, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the lanes combined by halves: lane i with lane i + n/2, and so on down to one."""
    n = x.type.count
    while n > 1:
        n //= 2
        x = combine(b.shuffle_vector(x, x, _mask(list(range(n)))), b.shuffle_vector(x, x, _mask(list(range(n, 2 * n)))))
    return b.extract_element(x, _I32(0))


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """Return the sum of the lanes, floats by halves (lane i + lane i + n/2, …), in that order on every CPU."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return _fold(b, a[0], b.fadd if x.element == "f32" else b.add)

    return _ELEMENTS[x.element][1](x), generate


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """Return the largest lane."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return _fold(b, a[0], lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))

    return types.float32(f32x16), generate


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """Return the bits of an f32."""
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], _I32)


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Return the f32 of these bits."""
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


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
    return f32x16(types.int64), lambda c, b, s, a: _half(b, _load_16(b, a[0]), i32x16.llvm, f32x16.llvm)


@intrinsic
def load_brain_f32x16(typing: Any, address: Any) -> Any:
    """Return 16 bf16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.bitcast(b.shl(_load_16(b, a[0]), _constant(i32x16.llvm, [16] * 16)), f32x16.llvm)

    return f32x16(types.int64), generate


@intrinsic
def load_brain(typing: Any, address: Any) -> Any:
    """Return the bf16 at an address as f32."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        h = b.load(b.inttoptr(a[0], ir.IntType(16).as_pointer()), align=1)
        return b.bitcast(b.shl(b.zext(h, _I32), _I32(16)), ir.FloatType())

    return types.float32(types.int64), generate
