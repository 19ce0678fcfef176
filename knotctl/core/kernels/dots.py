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
_I32X8, _I32X4 = (ir.VectorType(ir.IntType(32), n) for n in (8, 4))


def _pick(b: ir.IRBuilder, x: Any, indices: list[int]) -> Any:
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def _call(b: ir.IRBuilder, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in args])
    return b.call(b.module.declare_intrinsic(name, fnty=kind), args)


def _by_parts(b: ir.IRBuilder, name: str, result: Any, *args: Any) -> Any:
    """Return an instruction on 256 or 128 bits, those of its result, applied to the parts of 512-bit values."""
    parts = []
    count = 512 // (result.count * result.element.width)
    for i in range(count):
        of = [(x.type.count // count, x) for x in args]
        parts.append(_call(b, name, result, *(_pick(b, x, list(range(i * n, i * n + n))) for n, x in of)))
    while len(parts) > 1:
        order = pick(list(range(2 * parts[0].type.count)))
        parts = [b.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _sdot(b: ir.IRBuilder, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + the sums of 4 products of signed bytes."""
    return _by_parts(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", _I32X4, acc, w, a)


def _pairs(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Return x[2i]·y[2i] + x[2i+1]·y[2i+1] of int16, in words that LLVM turns into vpmaddwd, or smull and addp.

    Other words (the even ones first taken out, then multiplied) it takes apart where y is one number in all lanes.
    """
    n = x.type.count
    wide = ir.VectorType(ir.IntType(32), n)
    products = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(_pick(b, products, list(range(0, n, 2))), _pick(b, products, list(range(1, n, 2))))


def _dot_bytes(b: ir.IRBuilder, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + the sums of 4 products, for any unsigned w."""
    # The declarations name all operands int32, as LLVM did before version 21; later ones read that too.
    if LEVEL == "avx512":
        w, a = b.bitcast(w, i32x16.llvm), b.bitcast(a, i32x16.llvm)
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, acc, w, a)
    if LEVEL == "avxvnni":
        w, a = b.bitcast(w, i32x16.llvm), b.bitcast(a, i32x16.llvm)
        return _by_parts(b, "llvm.x86.avx512.vpdpbusd.256", _I32X8, acc, w, a)
    if LEVEL == "avx2":
        # Two products of 8 bits by 7 overflow int16: the top bit goes alone.
        low, top = (b.and_(w, ir.Constant(i8x64.llvm, [mask] * 64)) for mask in (127, 128))
        return add_small_products(b, add_small_products(b, acc, low, a), top, a)
    if LEVEL == "dotprod":
        # w - 128 is signed; of activations that are one number in all lanes LLVM takes the sum once for all quarters.
        sums = _sdot(b, ir.Constant(i32x16.llvm, None), ir.Constant(i8x64.llvm, [1] * 64), a)
        acc = b.add(acc, b.shl(sums, ir.Constant(i32x16.llvm, [7] * 16)))
        return _sdot(b, acc, b.xor(w, ir.Constant(i8x64.llvm, [128] * 64)), a)
    w, a = b.bitcast(w, i16x32.llvm), b.bitcast(a, i16x32.llvm)
    eight = ir.Constant(i16x32.llvm, [8] * 32)
    even = _pairs(b, b.and_(w, ir.Constant(i16x32.llvm, [255] * 32)), b.ashr(b.shl(a, eight), eight))
    return b.add(acc, b.add(even, _pairs(b, b.lshr(w, eight), b.ashr(a, eight))))


def add_small_products(b: ir.IRBuilder, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + the sums of 4 products, for w up to 127 (on AVX2 128: two products then fit int16)."""
    if LEVEL == "dotprod":
        return _sdot(b, acc, w, a)
    if LEVEL != "avx2":
        return _dot_bytes(b, acc, w, a)
    twos = _by_parts(b, "llvm.x86.avx2.pmadd.ub.sw", _I16X16, w, a)
    # The instruction by name: a product with ones in words is simplified away, and the sum then takes four steps.
    return b.add(acc, _by_parts(b, "llvm.x86.avx2.pmadd.wd", _I32X8, twos, ir.Constant(i16x32.llvm, [1] * 32)))


@intrinsic
def dot_bytes(typing: Any, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + in each lane the sum of 4 products of unsigned and signed bytes."""
    return i32x16(i32x16, i8x64, i8x64), lambda c, b, s, x: _dot_bytes(b, *x)


@intrinsic
def dot_small(typing: Any, acc: Any, w: Any, a: Any) -> Any:
    """Return acc + in each lane the sum of 4 products of bytes 0 … 127 and signed bytes."""
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
    if LEVEL in ("avxvnni", "avx2"):
        return _by_parts(b, "llvm.x86.avx2.packssdw", _I16X16, x, y)
    order = [8 * q + i for q in range(4) for i in (0, 2, 4, 6, 32, 34, 36, 38)]
    return b.shuffle_vector(b.bitcast(x, i16x32.llvm), b.bitcast(y, i16x32.llvm), pick(order))
