"""How a kernel is compiled: once a CPU, with an explicit signature, into a cache keyed by everything it depends on.

numba stamps a cache entry with the kernel's own file alone, so an edit of a module that it inlines would be missed:
the folder's name therefore holds a digest of all kernel sources, of the CPU and of the compilers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import cfunc, njit
from numba.core import config as numba_config

from knotctl.core.caches import cache_folder, drop_unused, touch_folder
from knotctl.core.kernels.levels import LEVEL

config: Any = numba_config  # its members are set at run time

# No fast-math, and numpy's error model: a division by zero is an infinity, not an exception that costs a branch.
OPTIONS: dict[str, Any] = {"boundscheck": False, "error_model": "numpy"}

_UNUSED_DAYS = 30

KERNELS: list[Kernel] = []
ENTRIES: list[Entry] = []
_compiling = threading.RLock()


@cache
def kernel_folder() -> Path:
    """Return the folder of this CPU's compiled kernels, in the user's cache folder. Raises: SourceError."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        # numba asks for the same path and time of change too, so what it would compile again has another folder.
        digest.update(f"{source}\0{source.stat().st_mtime_ns}\0".encode() + source.read_bytes())
    for fact in (LEVEL, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), numba.__version__,
                 llvmlite.__version__):  # fmt: skip
        digest.update(fact.encode() + b"\0")
    folder = cache_folder("kernels") / digest.hexdigest()[:16]
    if not folder.exists():  # a new version, or an edit: the time to let old ones go
        drop_unused(folder.parent, _UNUSED_DAYS)
    touch_folder(cache_folder("kernels", folder.name))
    return folder


@contextmanager
def _our_cache() -> Iterator[None]:
    # numba reads the folder when a function is decorated; other users of numba in this process keep theirs.
    before = config.CACHE_DIR
    config.CACHE_DIR = str(kernel_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before


class Kernel:
    """A function of (args, scratch, begin, end) over addresses and units, run by threads.py on every thread.

    It is compiled to a C function, or loaded from the cache, when its address is first asked for.
    """

    address: int

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        KERNELS.append(self)

    def __getattr__(self, name: str) -> Any:
        # Only the first look-up of `address` comes here; hundreds of launches a token make a property too slow.
        if name != "address":
            raise AttributeError(name)
        with _compiling, _our_cache():
            self._compiled = cfunc("void(int64, int64, int64, int64)", cache=True, **OPTIONS)(self._function)
        self.address = self._compiled.address or 0
        return self.address


class Entry:
    """A function that Python calls, compiled with this one signature and GIL-free."""

    call: Callable[..., Any]

    def __init__(self, signature: str, function: Callable[..., Any]) -> None:
        self._signature = signature
        self._function = function
        ENTRIES.append(self)

    def __getattr__(self, name: str) -> Any:
        if name != "call":
            raise AttributeError(name)
        with _compiling, _our_cache():
            # Other argument types are a TypeError: no silent compilation.
            self.call = njit(self._signature, cache=True, nogil=True, **OPTIONS)(self._function)
        return self.call


def entry(signature: str) -> Callable[[Callable[..., Any]], Entry]:
    """Return a decorator that makes a function an Entry."""
    return lambda function: Entry(signature, function)


# A function that kernels call: compiled into each of them.
inner = njit(**OPTIONS)
# One that must become part of its caller: its branches on a constant argument are decided there.
inlined = njit(forceinline=True, **OPTIONS)
