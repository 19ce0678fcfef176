"""How a kernel is compiled: once a CPU, with an explicit signature, into a cache keyed by everything it depends on.

numba stamps a cache entry with the kernel's own file alone, so an edit of a module that it inlines would be missed:
the folder's name therefore holds a digest of all kernel sources, of the CPU and of the compilers.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import njit
from numba.core import config as numba_config

config: Any = numba_config  # its members are set at run time

# No fast-math, and numpy's error model: a division by zero is an infinity, not an exception that costs a branch.
OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

KERNELS: list[Kernel] = []
_compiling = threading.RLock()


@cache
def cache_folder() -> Path:
    """Return the folder of this CPU's compiled kernels, under the user's cache directory."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for fact in (
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), numba.__version__, llvmlite.__version__,
    ):  # fmt: skip
        digest.update(fact.encode() + b"\0")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "knotctl" / "kernels" / digest.hexdigest()[:16]


class Kernel:
    """A function that is compiled, or loaded from the cache, the first time it is called; a GIL-free leaf.

    A call with other argument types is a TypeError rather than a silent second compilation.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.name = function.__name__
        self.signature = signature
        # numba reads the folder when a function is decorated; other users of numba in this process keep theirs.
        before = config.CACHE_DIR
        config.CACHE_DIR = str(cache_folder())
        try:
            self.dispatcher = njit(function, cache=True, **OPTIONS)
        finally:
            config.CACHE_DIR = before
        self.ready = False
        KERNELS.append(self)

    def compile(self) -> None:
        """Make the kernel callable without delay."""
        with _compiling:
            if not self.ready:
                self.dispatcher.compile(self.signature)
                self.dispatcher.disable_compile()
                self.ready = True

    def __call__(self, *args: Any) -> Any:
        """Run the kernel."""
        if not self.ready:
            self.compile()
        return self.dispatcher(*args)


def kernel(signature: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that makes a function a Kernel of this numba signature."""
    return lambda function: Kernel(function, signature)


# A function that kernels call: compiled into each of them.
inner = njit(**OPTIONS)
