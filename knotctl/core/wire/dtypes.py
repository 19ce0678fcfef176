"""Elements of a payload to and from the arrays that the model computes with: float32 and int32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import FrameError
from knotctl.core.wire.layout import DType

Array = NDArray[Any]


def pack_elements(array: Array, dtype: DType) -> bytes | memoryview:
    """Return the array's elements stored as dtype, little-endian, rounded to nearest even.

    Raises: FrameError "bad-activation" where a finite number has no finite neighbour in a 16-bit dtype.
    """
    if dtype is DType.I32:
        return array.astype("<i4", copy=False).tobytes()
    wide = array.astype("<f4", copy=False)
    if dtype is DType.F32:
        # not a copy: hidden states of a long prompt are megabytes, of which a station has few
        return np.ascontiguousarray(wide).data.cast("B") if wide.size else b""
    with np.errstate(over="ignore"):
        stored = wide.astype("<f2") if dtype is DType.F16 else _round_to_bf16(wide)
    lost = np.isfinite(wide) & ~np.isfinite(unpack_elements(stored.tobytes(), dtype, wide.shape))
    if lost.any():
        row, column = (int(i[0]) for i in np.nonzero(lost))
        raise FrameError(
            "bad-activation",
            f"frame: row {row} column {column}: {float(wide[row, column]):g} does not fit {dtype.name.lower()}",
            hint="send f32",
        )
    return stored.tobytes()


def unpack_elements(data: bytes | memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return the stored elements as an own, writable float32 (or, for i32, int32) array of that shape."""
    if dtype is DType.BF16:
        wide = np.frombuffer(data, "<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(shape)
    code, out = {DType.F32: ("<f4", np.float32), DType.F16: ("<f2", np.float32), DType.I32: ("<i4", np.int32)}[dtype]
    return np.frombuffer(data, code).astype(out).reshape(shape)


def _round_to_bf16(wide: Array) -> Array:
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
    # Rounding would carry a NaN's mantissa over into a zero or an infinity: keep it, quiet.
    return np.where(np.isnan(wide), ((bits >> 16) | 0x40).astype("<u2"), rounded)
