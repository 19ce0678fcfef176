"""Intrinsics under the kernels that are no arithmetic: atomic words, calls by address, prefetch, pause, arguments."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # its annotations describe the plain function, not how kernels call it

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
# ARM's yield does nothing on most of its CPUs; isb (15: of the whole system) does wait, so Rust's spin_loop is one.
_ISB: tuple[str, tuple[int, ...]] = ("llvm.aarch64.isb", (15,))
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": _ISB, "arm64": _ISB}

sched_yield = types.ExternalFunction("sched_yield", types.intc())
clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.int64))


def _word(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


@intrinsic
def atomic_add(typing: Any, address: Any, n: Any) -> Any:
    """Add to the int64 at an address and return what was there; a full barrier."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.atomic_rmw("add", _word(b, a[0]), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    """Return the int64 at an address, in one order with every atomic_add."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.load_atomic(_word(b, a[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def call(typing: Any, function: Any, args: Any, scratch: Any, begin: Any, end: Any) -> Any:
    """Call the kernel at an address."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        b.call(b.inttoptr(a[0], kind.as_pointer()), a[1:])
        return c.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a spin."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, args = _PAUSES[platform.machine()]
            function = b.module.declare_intrinsic(name, fnty=ir.FunctionType(ir.VoidType(), [_I32] * len(args)))
            b.call(function, [_I32(x) for x in args])
        return c.get_dummy_value()

    return types.void(), generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Fetch the cache line at an address, which may lie anywhere, into the second-level cache."""

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = b.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        b.call(function, [b.inttoptr(a[0], _BYTES), _I32(0), _I32(2), _I32(1)])
        return c.get_dummy_value()

    return types.void(types.int64), generate


REPORT = 128  # where a kernel writes a number other than 0 to report it: bytes behind its arguments


@intrinsic
def arguments(typing: Any, args: Any, n: Any) -> Any:
    """Return the first n (a literal) int64 of a kernel's arguments as a tuple."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    count = n.literal_value
    result = types.UniTuple(types.int64, count)

    def generate(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        base = _word(b, a[0])
        return c.make_tuple(b, result, [b.load(b.gep(base, [_I32(i)])) for i in range(count)])

    return result(types.int64, n), generate
