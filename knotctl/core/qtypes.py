"""The quantised types: name, ggml number, and the block of elements that its bytes hold.

Every type of ggml is here, so that any GGUF can be encoded; COMPUTABLE names those the kernels multiply with.
Source: ggml's `ggml_type` and `GGML_QUANT_SIZES`; man knot(5), TYPES.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QType:
    """One element type. Units: block in elements, block_bytes in bytes."""

    name: str
    ggml: int
    block: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int | None:
        """Return the bytes of a row of so many elements, or None where the row is off the block grid."""
        return columns // self.block * self.block_bytes if columns % self.block == 0 else None

    def tensor_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of a tensor (row-major shape, the last dimension is the row), None off the block grid.

        A shape of no dimensions is one element; an empty tensor has 0 bytes.
        """
        rows = 1
        for n in shape[:-1]:
            rows *= n
        row = self.row_bytes(shape[-1] if shape else 1)
        return None if row is None else rows * row


_TABLE = """
F32 0 1 4        F16 1 1 2        Q4_0 2 32 18     Q4_1 3 32 20     Q5_0 6 32 22     Q5_1 7 32 24
Q8_0 8 32 34     Q8_1 9 32 40     Q2_K 10 256 84   Q3_K 11 256 110  Q4_K 12 256 144  Q5_K 13 256 176
Q6_K 14 256 210  Q8_K 15 256 292  IQ2_XXS 16 256 66  IQ2_XS 17 256 74  IQ3_XXS 18 256 98  IQ1_S 19 256 50
IQ4_NL 20 32 18  IQ3_S 21 256 110  IQ2_S 22 256 82  IQ4_XS 23 256 136  I8 24 1 1  I16 25 1 2
I32 26 1 4       I64 27 1 8       F64 28 1 8       IQ1_M 29 256 56  BF16 30 1 2      TQ1_0 34 256 54
TQ2_0 35 256 66  MXFP4 39 32 17   NVFP4 40 64 36   Q1_0 41 128 18
"""
_words = _TABLE.split()
QTYPES: dict[str, QType] = {
    _words[i]: QType(_words[i], *(int(n) for n in _words[i + 1 : i + 4])) for i in range(0, len(_words), 4)
}
BY_GGML: dict[int, QType] = {t.ggml: t for t in QTYPES.values()}
# Numbers that ggml once gave out and took back; a file that uses one needs an old converter, not a newer knotctl.
REMOVED_GGML: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
COMPUTABLE: frozenset[str] = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
