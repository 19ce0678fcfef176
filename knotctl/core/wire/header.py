"""The first 64 bytes of a frame: what the rest will be, checked before a byte of it is waited for or allocated.

Source: man knot-frame(5), HEADER.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from knotctl.core.errors import FrameError
from knotctl.core.wire.layout import (
    ALL_FLAGS,
    ELEMENT_BYTES,
    HEADER,
    HEADER_CRC,
    HEADER_CRC_OFFSET,
    ID_BYTES,
    ID_KINDS,
    MAGIC,
    SEGMENT,
    VERSION,
    WIRE_LIMITS,
    DType,
    Flags,
    Kind,
    Limits,
)

_E = TypeVar("_E", bound=IntEnum)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The first 64 bytes of a frame, checked against each other and the limits. Units: sizes in bytes."""

    kind: Kind
    dtype: DType
    flags: Flags
    knot_id: bytes
    rows: int
    width: int
    meta_len: int
    n_segments: int
    stored: int
    unpacked: int
    body_crc: int

    @property
    def body_bytes(self) -> int:
        """How many bytes follow the header."""
        return self.n_segments * SEGMENT.size + self.meta_len + self.stored


def encode_header(h: FrameHeader) -> bytes:
    """Return the header's 64 bytes."""
    head = HEADER.pack(
        MAGIC, VERSION, h.kind, h.dtype, h.flags, h.knot_id, h.rows, h.width,
        h.meta_len, h.n_segments, h.stored, h.unpacked, h.body_crc, 0,
    )[:HEADER_CRC_OFFSET]  # fmt: skip
    return head + HEADER_CRC.pack(zlib.crc32(head))


def parse_header(data: bytes | bytearray | memoryview, limits: Limits = WIRE_LIMITS) -> FrameHeader:
    """Return the header at the start of the bytes, within the limits and at peace with itself."""
    start = bytes(data[: len(MAGIC)])
    if start != MAGIC[: len(start)]:
        raise FrameError("bad-magic", f"frame: byte 0: expected {MAGIC!r}, found {start!r}")
    if len(data) < HEADER.size:
        raise FrameError("truncated", f"frame: byte {len(data)}: expected a header of {HEADER.size} bytes")
    head = bytes(data[: HEADER.size])
    (_, version, kind, dtype, flags, knot_id, rows, width, meta_len, n_segments, stored, unpacked, body_crc, crc) = (
        HEADER.unpack(head)
    )
    if version != VERSION:
        raise FrameError(
            "bad-version",
            f"frame: byte 4: version {version}; expected {VERSION}",
            hint="upgrade knotctl on this side" if version > VERSION else None,
        )
    if crc != zlib.crc32(head[:HEADER_CRC_OFFSET]):
        raise FrameError(
            "bad-header-crc", f"frame: byte {HEADER_CRC_OFFSET}: the header's CRC does not match its bytes"
        )
    header = FrameHeader(
        enum_member(Kind, kind, "bad-kind", "byte 5"), enum_member(DType, dtype, "bad-dtype", "byte 6"), _flags(flags),
        knot_id, rows, width, meta_len, n_segments, stored, unpacked, body_crc,
    )  # fmt: skip
    check_sizes(header, limits, packed=True)
    return header


def check_sizes(h: FrameHeader, limits: Limits, *, packed: bool) -> None:
    """Check the header's numbers with each other; `packed` says that `stored` is known by now."""
    for what, size, limit in (
        ("metadata bytes", h.meta_len, limits.meta),
        ("segments", h.n_segments, limits.segments),
        ("payload bytes as stored", h.stored, limits.stored),
        ("payload bytes unpacked", h.unpacked, limits.unpacked),
    ):
        if size > limit:
            raise too_large(what, size, limit)
    if len(h.knot_id) != ID_BYTES:
        raise FrameError("bad-knot-id", f"frame: knot id of {len(h.knot_id)} bytes; expected {ID_BYTES}")
    if h.kind is Kind.ERROR:
        if h.rows or h.width or h.n_segments or h.stored or h.unpacked or Flags.ZSTD in h.flags:
            raise FrameError("size-mismatch", "error frame: expected no rows, segments or payload")
        return
    name = h.kind.name.lower()
    if (h.dtype is DType.I32) is not (h.kind in ID_KINDS):
        raise FrameError("bad-dtype", f"{name} frame: byte 6: dtype {h.dtype.name.lower()} is not for this kind")
    if not h.rows or not h.width or not h.n_segments:
        raise FrameError("empty", f"{name} frame: {h.rows} rows of {h.width} in {h.n_segments} segments; expected some")
    if h.kind is Kind.TOKENS and h.width != 1:
        raise FrameError("size-mismatch", f"tokens frame: byte 28: width {h.width}; expected 1")
    expected = h.rows * h.width * ELEMENT_BYTES[h.dtype]
    if h.unpacked != expected:
        shape = f"{h.rows} rows x {h.width} of {h.dtype.name.lower()} are {expected} bytes"
        raise FrameError("size-mismatch", f"{name} frame: byte 48: {shape}, found {h.unpacked}")
    if packed and Flags.ZSTD not in h.flags and h.stored != h.unpacked:
        raise FrameError(
            "size-mismatch", f"{name} frame: byte 40: {h.stored} bytes stored of {h.unpacked} not compressed"
        )
    if h.kind is Kind.PARTIAL and Flags.ZSTD not in h.flags:
        raise FrameError("bad-flags", "partial frame: byte 7: partial embeddings are always compressed")


def too_large(what: str, size: int, limit: int) -> FrameError:
    """Return the error for a size over its cap."""
    return FrameError("too-large", f"frame: {what}: {size}; expected at most {limit}")


def enum_member(enum: type[_E], value: int, code: str, place: str) -> _E:
    """Return the member of that value, or raise FrameError with the code."""
    try:
        return enum(value)
    except ValueError:
        known = ", ".join(f"{m.value} {m.name.lower()}" for m in enum)
        raise FrameError(code, f"frame: {place}: {enum.__name__.lower()} {value}; expected {known}") from None


def _flags(value: int) -> Flags:
    # int(): the complement of an IntFlag knows only the bits that have names
    if value & ~int(ALL_FLAGS):
        raise FrameError("bad-flags", f"frame: byte 7: flags {value:#x}; expected none but {ALL_FLAGS:#x}")
    return Flags(value)
