"""Tensors as ranges of a knot: which bytes a matrix, or some of its rows, occupy."""

from __future__ import annotations

from dataclasses import dataclass

from knotctl.core.errors import ModelError
from knotctl.core.knot.reader import Knot
from knotctl.core.qtypes import COMPUTABLE, QType
from knotctl.core.spans import ByteRange


@dataclass(frozen=True, slots=True)
class TensorView:
    """A matrix [rows, columns] of a knot, or a vector as a matrix of one row; `range` is its bytes in the file."""

    name: str
    qtype: QType
    rows: int
    columns: int
    range: ByteRange

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return len(self.range) // self.rows

    def row_range(self, start: int, end: int) -> ByteRange:
        """Return the bytes of rows [start, end) in the file."""
        base, row = self.range.start, self.row_bytes
        return ByteRange(base + start * row, base + end * row)


def view(knot: Knot, name: str, shape: tuple[int, ...]) -> TensorView:
    """Return the view of a tensor that must have this shape, [rows, columns] or [columns].

    Raises: ModelError missing-tensor; wrong-shape; unsupported-type where the kernels cannot multiply with its type.
    """
    entry = knot.entry(name)
    if entry.shape != shape:
        raise ModelError(
            "wrong-shape",
            f"{knot.source.name}: tensor {name}: expected shape {list(shape)} by the model's configuration, "
            f"found {list(entry.shape)}",
        )
    if entry.qtype.name not in COMPUTABLE:
        raise ModelError(
            "unsupported-type",
            f"{knot.source.name}: tensor {name}: type {entry.qtype.name} has no kernels; "
            f"expected one of {' '.join(sorted(COMPUTABLE))}",
            hint="convert the GGUF to one of these types (Q4_K_M is a good one) and encode it again",
        )
    rows = shape[0] if len(shape) == 2 else 1
    return TensorView(name, entry.qtype, rows, shape[-1], knot.range_of(name))
