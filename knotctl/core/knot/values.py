"""Whether the numbers in a tensor's bytes can be: scales that are NaN, infinite or absurd betray damage or a shift.

Only scales are looked at, not the quants: any quant is possible.
Source: ggml-common.h for the block layouts; seed 000 section 5 for the symptom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from knotctl.core.qtypes import QType


class _Scales(NamedTuple):
    """Where the scales lie in a block: their offsets in bytes, the unsigned integer of their width, and two patterns.

    `finite` is the largest magnitude pattern of a finite number, `sane` of one that a model may have.
    """

    offsets: tuple[int, ...]
    dtype: str
    finite: int
    sane: int


def _f16(*offsets: int) -> _Scales:
    # 256.0: the largest scale in the models at hand is 9.25; of the scales in a shifted payload a quarter is above it.
    return _Scales(offsets, "<u2", 0x7BFF, 0x5C00)


# 2**30: norms and biases go to thousands; a float that begins a byte early has any exponent.
_F32 = _Scales((0,), "<u4", 0x7F7F_FFFF, 0x4E80_0000)
_SCALES: dict[str, _Scales] = {
    "F32": _F32,
    "F16": _Scales((0,), "<u2", 0x7BFF, 0x7BFF),
    "BF16": _Scales((0,), "<u2", 0x7F7F, 0x4E80),
    "F64": _Scales((0,), "<u8", 0x7FEF_FFFF_FFFF_FFFF, 0x7FEF_FFFF_FFFF_FFFF),
    "Q4_0": _f16(0), "Q4_1": _f16(0, 2), "Q5_0": _f16(0), "Q5_1": _f16(0, 2), "Q8_0": _f16(0), "Q8_1": _f16(0, 2),
    "Q2_K": _f16(80, 82), "Q3_K": _f16(108), "Q4_K": _f16(0, 2), "Q5_K": _f16(0, 2), "Q6_K": _f16(208), "Q8_K": _F32,
    "IQ2_XXS": _f16(0), "IQ2_XS": _f16(0), "IQ2_S": _f16(0), "IQ3_XXS": _f16(0), "IQ3_S": _f16(0), "IQ1_S": _f16(0),
    "IQ4_NL": _f16(0), "IQ4_XS": _f16(0), "TQ1_0": _f16(52), "TQ2_0": _f16(64), "Q1_0": _f16(0),
}  # fmt: skip


@dataclass
class ValueCheck:
    """Looks through a tensor's blocks as they are read; a block is named by its index in the tensor."""

    qtype: QType
    non_finite: int = 0
    insane: int = 0
    first_non_finite: int | None = None
    first_insane: int | None = None
    all_zero: bool = True

    def __post_init__(self) -> None:
        self._scales = _SCALES.get(self.qtype.name)
        if self._scales is None:
            self.all_zero = False

    def look(self, blocks: memoryview, first: int) -> None:
        """Look at whole blocks, the first of which is block `first` of the tensor."""
        if self._scales is None:
            return
        count = len(blocks) // self.qtype.block_bytes
        magnitude = np.dtype(self._scales.dtype).type((1 << (8 * np.dtype(self._scales.dtype).itemsize - 1)) - 1)
        for offset in self._scales.offsets:
            # Strided and unaligned: numpy reads it in place.
            bits = np.ndarray(count, self._scales.dtype, blocks, offset, (self.qtype.block_bytes,)) & magnitude
            top = int(bits.max(initial=0))
            self.all_zero = self.all_zero and top == 0
            if top > self._scales.sane:
                self._count(bits, first)

    def _count(self, bits: npt.NDArray[np.unsignedinteger], first: int) -> None:
        assert self._scales is not None
        bad = np.flatnonzero(bits > self._scales.finite)
        absurd = np.flatnonzero((bits > self._scales.sane) & (bits <= self._scales.finite))
        self.non_finite += len(bad)
        self.insane += len(absurd)
        if len(bad) and self.first_non_finite is None:
            self.first_non_finite = first + int(bad[0])
        if len(absurd) and self.first_insane is None:
            self.first_insane = first + int(absurd[0])
