"""The SIMD vocabulary: vectors as numba types, their operations as intrinsics over LLVM vectors, loads at any address.

A vector is a value in a register; kernels read memory by address (an int64), so a block may lie at any byte. Every
operation here is plain LLVM and right on every CPU. Floats are multiplied and added separately, never fused: a result
then does not depend on the CPU having an fma.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from knotctl.core.kernels.machine import intrinsic

ELEMENTS: dict[str, tuple[Any, Any]] = {
    "i8": (ir.IntType(8), types.int8),
    "u8": (ir.IntType(8), types.uint8),
    "u16": (ir.IntType(16), types.uint16),
    "i16": (ir.IntType(16), types.int16),
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
        self.llvm = ir.VectorType(ELEMENTS[element][0], lanes)
        super().__init__(name=f"{element}x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


i8x16, i8x32, i8x64 = Vector("i8", 16), Vector("i8", 32), Vector("i8", 64)
i16x32 = Vector("i16", 32)
i32x8, i32x16 = Vector("i32", 8), Vector("i32", 16)
f32x16 = Vector("f32", 16)


def constant(vector: ir.VectorType, values: list[Any]) -> ir.Constant:
    """Return a vector of literal numbers."""
    return ir.Constant(vector, values)


def pick(indices: list[int]) -> ir.Constant:
    """Return what tells a shuffle which elements to take."""
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def splat(b: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    """Return a value in all lanes."""
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, pick([0] * vector.count))


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
    kind, result = ELEMENTS[element]
    return result, kind


load_i8, load_u8, load_u16 = _loader(*_scalar("i8")), _loader(*_scalar("u8")), _loader(*_scalar("u16"))
load_i32, load_u32, load_f32 = _loader(*_scalar("i32")), _loader(*_scalar("u32")), _loader(*_scalar("f32"))
load_i64 = _loader(*_scalar("i64"))
store_i8, store_i32, store_f32 = _storer(*_scalar("i8")), _storer(*_scalar("i32")), _storer(*_scalar("f32"))
store_i16, store_i64 = _storer(*_scalar("i16")), _storer(*_scalar("i64"))
load_i8x16, load_i8x32, load_i8x64 = (_loader(v, v.llvm) for v in (i8x16, i8x32, i8x64))
load_i16x32, store_i16x32 = _loader(i16x32, i16x32.llvm), _storer(i16x32, i16x32.llvm)
load_i32x16 = _loader(i32x16, i32x16.llvm)
store_i32x16, store_i8x16 = _storer(i32x16, i32x16.llvm), _storer(i8x16, i8x16.llvm)
store_i8x32 = _storer(i8x32, i8x32.llvm)
load_i32x8, load_f32x16 = _loader(i32x8, i32x8.llvm), _loader(f32x16, f32x16.llvm)
store_f32x16 = _storer(f32x16, f32x16.llvm)


def _first(b: ir.IRBuilder, n: Any) -> Any:
    """Return the mask of lanes 0 to n - 1 of 16."""
    lanes = constant(i32x16.llvm, list(range(16)))
    return b.icmp_signed("<", lanes, splat(b, b.trunc(n, _I32), i32x16.llvm))


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
        bits = b.bitcast(b.fadd(a[0], constant(f32x16.llvm, [12582912.0] * 16)), i32x16.llvm)
        biased = b.add(bits, constant(i32x16.llvm, [127] * 16))
        return b.bitcast(b.shl(biased, constant(i32x16.llvm, [23] * 16)), f32x16.llvm)

    return f32x16(f32x16), generate


def _with_constant(operation: str) -> Any:
    """Return the intrinsic of an operation of each (unsigned) lane with one literal number."""

    @intrinsic
    def operate(typing: Any, x: Any, n: Any) -> Any:
        if not isinstance(n, types.IntegerLiteral):
            return None
        value = n.literal_value

        def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
            return getattr(b, operation)(a[0], constant(x.llvm, [value] * x.lanes))

        return x(x, n), generate

    return operate


mask, shift_right, shift_left, minus = (_with_constant(name) for name in ("and_", "lshr", "shl", "sub"))
shift_signed, times, flip = (_with_constant(name) for name in ("ashr", "mul", "xor"))


@intrinsic
def variable_shift(typing: Any, x: Any, n: Any) -> Any:
    """Return 16 int32 shifted right, without sign, by one number of 0 … 31."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.lshr(a[0], splat(b, b.trunc(a[1], _I32), i32x16.llvm))

    return i32x16(i32x16, types.int64), generate


@intrinsic
def splat_f32x16(typing: Any, x: Any) -> Any:
    """Return a number in all 16 lanes."""
    return f32x16(types.float32), lambda c, b, s, a: splat(b, a[0], f32x16.llvm)


@intrinsic
def splat_i32x16(typing: Any, x: Any) -> Any:
    """Return an integer in all 16 lanes."""
    return i32x16(types.int32), lambda c, b, s, a: splat(b, a[0], i32x16.llvm)


@intrinsic
def lane_f32x16(typing: Any, x: Any, i: Any) -> Any:
    """Return a number in lane i and +0 in the others."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.insert_element(ir.Constant(f32x16.llvm, None), a[0], b.trunc(a[1], _I32))

    return f32x16(types.float32, types.int64), generate


@intrinsic
def signed_larger(typing: Any, x: Any, y: Any) -> Any:
    """Return the larger of two signed integers in each lane."""
    return x(x, x), lambda c, b, s, a: b.select(b.icmp_signed(">", a[0], a[1]), a[0], a[1])


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """Return the bits of an f32."""
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], _I32)


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Return the f32 of these bits."""
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


def _as(source: Vector, target: Vector) -> Any:
    @intrinsic
    def reinterpret(typing: Any, x: Any) -> Any:
        return target(source), lambda c, b, s, a: b.bitcast(a[0], target.llvm)

    return reinterpret


words_of, bits_f32x16 = _as(i32x16, i16x32), _as(f32x16, i32x16)
