"""Where arrays lie and how numbers travel: what Python hands to a kernel is int64 alone."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# numpy's array object begins with the pointer to its data, right behind what every Python object begins with. Read
# there it costs 0.14 us, by __array_interface__ 1.1 us, and a token takes some thousand of them.
_AT = object.__basicsize__
_word = ctypes.c_size_t.from_address


def address(array: NDArray[Any]) -> int:
    """Return where an array's bytes lie."""
    return _word(id(array) + _AT).value


@cache
def float_bits(x: float) -> int:
    """Return the bits of a number as an f32: how a kernel's argument carries it."""
    return int(np.float32(x).view(np.uint32))


_probe = np.arange(7)[3:]
if address(_probe) != _probe.ctypes.data:  # another layout than numpy has had since version 1.7

    def address(array: NDArray[Any]) -> int:
        """Return where an array's bytes lie."""
        return int(array.ctypes.data)
