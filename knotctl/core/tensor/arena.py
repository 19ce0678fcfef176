"""One block of memory that activations are cut from: a forward pass allocates nothing beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from knotctl.core.errors import BudgetError

Floats = npt.NDArray[np.float32]
# Arrays begin on a cache line.
ALIGN = 64


class Arena:
    """A stack of arrays in one block. What is cut from it inside a `scope` is given back when the scope ends.

    An array given back may be overwritten by the next one: nothing that outlives its scope may be cut inside it.
    """

    def __init__(self, count: int) -> None:
        # Pages that are never touched are never resident: a plan's worst case costs only what is used of it.
        self._block = np.empty(count + ALIGN, np.uint8)
        self._first = -self._block.ctypes.data % ALIGN
        self._used = 0
        self.size = count
        self.peak = 0

    def bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """Return an array of so many bytes. Raises: BudgetError arena-full: the plan counted too little."""
        start = self._used
        if start + count > self.size:
            raise BudgetError(
                "arena-full",
                f"activations: {start + count} bytes asked for, {self.size} planned: the plan is wrong",
            )
        self._used = min(self.size, -(-(start + count) // ALIGN) * ALIGN)
        self.peak = max(self.peak, self._used)
        return self._block[self._first + start : self._first + start + count]

    def floats(self, rows: int, columns: int) -> Floats:
        """Return an array float32 [rows, columns], its contents whatever was there before."""
        return self.bytes(4 * rows * columns).view(np.float32).reshape(rows, columns)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back at the end what was cut inside."""
        before = self._used
        try:
            yield
        finally:
            self._used = before
