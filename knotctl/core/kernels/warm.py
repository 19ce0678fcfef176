"""Compiling ahead: all kernels, once a CPU, with progress; later starts load them from the cache."""

from __future__ import annotations

from collections.abc import Callable

from knotctl.core.kernels import attention, elementwise, floats, kv, matmul, norm, quantize, rope
from knotctl.core.kernels.jit import ENTRIES, KERNELS, kernel_folder

__all__ = ["is_warm", "steps", "warm"]
_OWNERS = (attention, elementwise, floats, kv, matmul, norm, quantize, rope)  # importing them is what fills the lists


def steps() -> int:
    """Return how many steps `warm` reports."""
    return len(KERNELS) + len(ENTRIES)


def is_warm() -> bool:
    """Return whether every kernel of this version has been compiled for this CPU before."""
    return (kernel_folder() / "complete").exists()


def warm(advance: Callable[[int], None] = lambda _: None) -> None:
    """Compile every kernel, or load it from the cache; afterwards none is compiled in this process or a later one."""
    for kernel in KERNELS:
        assert kernel.address
        advance(1)
    for entry in ENTRIES:
        assert callable(entry.call)
        advance(1)
    (kernel_folder() / "complete").touch()
