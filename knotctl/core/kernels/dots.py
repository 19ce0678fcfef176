"""Integer dot products: the one operation where a CPU's own instructions matter, chosen by levels.LEVEL.

All are exact, so every level gives the same integers. Lanes are 16 sums of int32; weights are unsigned bytes,
activations signed ones of at most 127 in size.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from knotctl.core.kernels.levels import LEVEL
from knotctl.core.kernels.machine import intrinsic
from knotctl.core.kernels.simd import i8x64, i16x32, i32x16, pick

_I16X16 = ir.VectorType(ir.IntType(16), 16)
_I8X32 = ir.VectorType(ir.IntType(8), 32)
_I32X8 = ir.VectorType(ir.IntType(32), 8)


def _pick(b: ir.IRBuilder, x: Any, indices: list[int]) -> Any:
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def _halves(b: ir.IRBuilder, x: Any) -> list[Any]:
    n = x.type.count
    return [_pick(b, x, list(range(n // 2))), _pick(b, x, list(range(n // 2, n)))]


def _join(b: ir.IRBuilder, parts: list[Any]) -> Any:
    n = 2 * parts[0].type.count
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(ir.IntType(32), n), list(range(n))))


def _call(b: ir.IRBuilder, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in args])
    return b.call(b.module.declare_intrinsic(name, fnty=kind), args)


def _by_halves(b: ir.IRBuilder, name: str, result: Any, *args: Any) -> Any:
    """Return a 256-bit instruction applied to both halves of 512-bit values."""
    return _join(b, [_call(b, name, result, *part) for part in zip(*(_halves(b, x) for x in args), strict=True)])


def _pairs(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Return x[2i]·y[2i] + x[2i+1]·y[2i+1] of int16, in words that LLVM turns into vpmaddwd."""
    n = x.type.count
    wide = ir.VectorType(ir.IntType(32), n // 2)
    products = []
    for odd in (0, 1):
        pick = list(range(odd, n, 2))
        products.append(b.mul(b.sext(_pick(b, x, pick), wide), b.sext(_pick(b, y, pick), wide)))
    return b.add(*products)


def _dot_bytes(b: ir.IRBuilder, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + the sums of 4 products, for any unsigned w."""
    # The declarations name all operands int32, as LLVM did before version 21; later ones read that too.
    if LEVEL == "avx512":
        w, a = b.bitcast(w, i32x16.llvm), b.bitcast(a, i32x16.llvm)
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, acc, w, a)
    if LEVEL == "avxvnni":
        w, a = b.bitcast(w, i32x16.llvm), b.bitcast(a, i32x16.llvm)
        return _by_halves(b, "llvm.x86.avx512.vpdpbusd.256", _I32X8, acc, w, a)
    if LEVEL == "avx2":
        # Two products of 8 bits by 7 overflow int16: the top bit goes alone.
        low, top = (b.and_(w, ir.Constant(i8x64.llvm, [mask] * 64)) for mask in (127, 128))
        return add_small_products(b, add_small_products(b, acc, low, a), top, a)
    w, a = b.bitcast(w, i16x32.llvm), b.bitcast(a, i16x32.llvm)
    eight = ir.Constant(i16x32.llvm, [8] * 32)
    even = _pairs(b, b.and_(w, ir.Constant(i16x32.llvm, [255] * 32)), b.ashr(b.shl(a, eight), eight))
    return b.add(acc, b.add(even, _pairs(b, b.lshr(w, eight), b.ashr(a, eight))))


def add_small_products(b: ir.IRBuilder, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + the sums of 4 products, for w up to 128: two products then fit int16."""
    if LEVEL != "avx2":
        return _dot_bytes(b, acc, w, a)
    twos = _by_halves(b, "llvm.x86.avx2.pmadd.ub.sw", _I16X16, w, a)
    # The instruction by name: a product with ones in words is simplified away, and the sum then takes four steps.
    return b.add(acc, _by_halves(b, "llvm.x86.avx2.pmadd.wd", _I32X8, twos, ir.Constant(i16x32.llvm, [1] * 32)))


@intrinsic
def dot_bytes(typing: Any, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + in each lane the sum of 4 products of unsigned and signed bytes."""
    return i32x16(i32x16, i8x64, i8x64), lambda c, b, s, x: _dot_bytes(b, *x)


@intrinsic
def dot_small(typing: Any, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + in each lane the sum of 4 products of bytes 0 … 128 and signed bytes."""
    return i32x16(i32x16, i8x64, i8x64), lambda c, b, s, x: add_small_products(b, *x)


@intrinsic
def dot_words(typing: Any, acc: Any, x: Any, y: Any) -> Any:
    """Return acc + in each lane the sum of 2 products of signed 16-bit numbers."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        if LEVEL == "avx512":
            words = [b.bitcast(x, i32x16.llvm) for x in a[1:]]
            return _call(b, "llvm.x86.avx512.vpdpwssd.512", i32x16.llvm, a[0], *words)
        return b.add(a[0], _pairs(b, a[1], a[2]))

    return i32x16(i32x16, i16x32, i16x32), generate


def pack_in_quarters(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Return 32 int16, 8 in each quarter: the 4 int32 of x, which fit, then those of y."""
    if LEVEL == "avx512":
        return _call(b, "llvm.x86.avx512.packssdw.512", i16x32.llvm, x, y)
    if LEVEL != "generic":
        return _by_halves(b, "llvm.x86.avx2.packssdw", _I16X16, x, y)
    order = [8 * q + i for q in range(4) for i in (0, 2, 4, 6, 32, 34, 36, 38)]
    return b.shuffle_vector(b.bitcast(x, i16x32.llvm), b.bitcast(y, i16x32.llvm), pick(order))
