"""What a header says: a tensor's place, and the header whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from knotctl.core.knot.config import KnotConfig
from knotctl.core.qtypes import QType
from knotctl.core.spans import ByteRange


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the payload.

    Shapes: row-major, the last dimension is the row. Units: offset in bytes from the payload's start, length in bytes.
    sha256 is lower-case hex, None in a knot of somebody who wrote none.
    """

    name: str
    qtype: QType
    shape: tuple[int, ...]
    offset: int
    length: int
    sha256: str | None

    @property
    def end(self) -> int:
        """Offset behind the last byte, from the payload's start."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class KnotHeader:
    """All that stands before the payload, validated whole: nobody re-checks it."""

    encoder: str
    source: Mapping[str, object]
    config: KnotConfig
    tensors: tuple[TensorEntry, ...]
    payload_offset: int
    file_bytes: int
    knot_id: str

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(e.length for e in self.tensors)

    def range_of(self, entry: TensorEntry) -> ByteRange:
        """Return the bytes of the file that the tensor takes."""
        return ByteRange(self.payload_offset + entry.offset, self.payload_offset + entry.end)
