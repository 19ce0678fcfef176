"""A frame: a batch of rows with a table that says whose rows they are, packed into bytes and read back.

`encode_frame` and `parse_frame` hold each other to one validator, so that nothing is written that is not read.
No I/O: bytes in, frame out. A stream of frames is cut up by `core/wire/decoder.py`.

Source: man knot-frame(5).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zstandard

from knotctl.core.errors import FrameError, printable
from knotctl.core.strict_json import parse_json_object
from knotctl.core.wire.dtypes import Array, pack_elements, unpack_elements
from knotctl.core.wire.header import (
    FrameHeader,
    check_sizes,
    encode_header,
    enum_member,
    parse_header,
    too_large,
)
from knotctl.core.wire.layout import (
    ELEMENT_BYTES,
    FILE_LIMITS,
    HEADER,
    ID_BYTES,
    ID_KINDS,
    MAX_POSITION,
    SEGMENT,
    WIRE_LIMITS,
    ZSTD_LEVEL,
    ZSTD_MAX_WINDOW,
    DType,
    Flags,
    Kind,
    Limits,
    Mode,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request: n_tokens rows, of which the first is at `position` of the request's sequence."""

    request_id: bytes
    position: int
    n_tokens: int
    mode: Mode = Mode.PREFILL


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A batch on its way from stage to stage.

    Shapes: payload [rows, width], rows in the order of the segments; int32 for ids and float32 for all else.
    """

    kind: Kind
    knot_id: bytes
    segments: tuple[Segment, ...]
    payload: Array
    meta: Mapping[str, Any] = field(default_factory=dict)
    flags: Flags = Flags.NONE

    @property
    def rows(self) -> int:
        """The number of rows, the tokens of all segments."""
        return int(self.payload.shape[0])

    @property
    def width(self) -> int:
        """The number of columns: 1 for ids, the hidden size, or the vocabulary's."""
        return int(self.payload.shape[1])


def encode_frame(
    frame: Frame, *, dtype: DType | None = None, compress: bool = False, limits: Limits = FILE_LIMITS
) -> bytes:
    """Return the frame's bytes; dtype defaults to f32, or i32 for ids. Partial embeddings are always compressed.

    Raises: FrameError with the code a reader would refuse the frame with.
    """
    return b"".join(encode_parts(frame, dtype=dtype, compress=compress, limits=limits))


def encode_parts(
    frame: Frame, *, dtype: DType | None = None, compress: bool = False, limits: Limits = FILE_LIMITS
) -> tuple[bytes, bytes | memoryview]:
    """Return the frame's bytes in two parts, of which the second may be the payload itself and not a copy.

    Raises: as encode_frame.
    """
    dtype = dtype if dtype is not None else (DType.I32 if frame.kind in ID_KINDS else DType.F32)
    if frame.payload.ndim != 2:
        raise FrameError("size-mismatch", f"frame: payload of {frame.payload.ndim} dimensions; expected rows x width")
    unpacked = frame.rows * frame.width * ELEMENT_BYTES[dtype]
    flags = frame.flags & ~Flags.ZSTD
    if frame.kind is Kind.PARTIAL or (compress and unpacked):
        flags |= Flags.ZSTD
    try:
        meta = json.dumps(dict(frame.meta), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as e:
        raise FrameError("bad-json", f"frame: metadata: {printable(e)}") from None
    header = FrameHeader(
        frame.kind, dtype, flags, frame.knot_id, frame.rows, frame.width, len(meta), len(frame.segments), 0, unpacked, 0
    )
    check_sizes(header, limits, packed=False)
    _check_segments(frame.segments, frame.rows)
    _check_ids(frame.kind, frame.payload)
    payload = pack_elements(frame.payload, dtype)
    if Flags.ZSTD in flags:
        payload = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(payload)
    if len(payload) > limits.stored:
        raise too_large("payload as stored", len(payload), limits.stored)
    table = b"".join(SEGMENT.pack(s.request_id, s.position, s.n_tokens, s.mode, bytes(7)) for s in frame.segments)
    header = replace(header, stored=len(payload), body_crc=zlib.crc32(payload, zlib.crc32(table + meta)))
    return encode_header(header) + table + meta, payload


def parse_frame(data: bytes | bytearray | memoryview, *, limits: Limits = WIRE_LIMITS) -> Frame:
    """Return the frame that the bytes hold, which must be one whole frame and nothing after it.

    Raises: FrameError, whose codes are the headings of man knot-frame(5), ERRORS.
    """
    view = memoryview(data)
    header = parse_header(view, limits)
    found = len(view) - HEADER.size
    if found < header.body_bytes:
        raise FrameError(
            "truncated",
            f"frame: byte {len(view)}: ends early; expected {header.body_bytes} bytes of body, found {found}",
        )
    if found > header.body_bytes:
        end = HEADER.size + header.body_bytes
        raise FrameError("trailing-bytes", f"frame: byte {end}: {len(view) - end} bytes after its end")
    return parse_body(header, view[HEADER.size :])


def parse_body(header: FrameHeader, body: memoryview) -> Frame:
    """Return the frame whose header was read and whose body is exactly these bytes."""
    if zlib.crc32(body) != header.body_crc:
        raise FrameError("bad-body-crc", f"frame: byte {HEADER.size}: the body's CRC does not match its bytes")
    table_end = header.n_segments * SEGMENT.size
    meta_end = table_end + header.meta_len
    segments = tuple(_segment(i, *fields) for i, fields in enumerate(SEGMENT.iter_unpack(body[:table_end])))
    _check_segments(segments, header.rows)
    meta = parse_json_object(
        bytes(body[table_end:meta_end]),
        lambda code, what: FrameError(code, f"frame: byte {64 + table_end}: JSON: {what}"),
    )
    stored = body[meta_end:]
    raw = _unpack(stored, header.unpacked) if Flags.ZSTD in header.flags else stored
    payload = unpack_elements(raw, header.dtype, (header.rows, header.width))
    _check_ids(header.kind, payload)
    return Frame(header.kind, header.knot_id, segments, payload, meta, header.flags & ~Flags.ZSTD)


def check_finite(frame: Frame) -> None:
    """Raise FrameError "bad-activation" where a NaN or an infinity is among the frame's activations."""
    finite = np.isfinite(frame.payload)
    if not finite.all():
        row, column = (int(i[0]) for i in np.nonzero(~finite))
        raise FrameError(
            "bad-activation",
            f"{frame.kind.name.lower()} frame: row {row} column {column}: {frame.payload[row, column]}; "
            f"expected finite numbers, found {int(finite.size - np.count_nonzero(finite))} others",
        )


def _check_segments(segments: tuple[Segment, ...], rows: int) -> None:
    total = 0
    for i, s in enumerate(segments):
        if len(s.request_id) != ID_BYTES:
            raise FrameError(
                "bad-segments", f"frame: segment {i}: request id of {len(s.request_id)} bytes; expected 16"
            )
        if s.n_tokens < 1 or s.position < 0 or s.position + s.n_tokens > MAX_POSITION:
            raise FrameError(
                "bad-segments",
                f"frame: segment {i}: {s.n_tokens} tokens at position {s.position}; expected some below {MAX_POSITION}",
            )
        total += s.n_tokens
    if total != rows:
        raise FrameError("bad-segments", f"frame: segments of {total} tokens in all; expected the frame's {rows} rows")


def _check_ids(kind: Kind, payload: Array) -> None:
    if kind not in ID_KINDS:
        return
    wrong = (payload < 0) | (payload >= MAX_POSITION)
    if wrong.any():
        row, column = (int(i[0]) for i in np.nonzero(wrong))
        raise FrameError(
            "bad-token", f"{kind.name.lower()} frame: row {row}: token id {payload[row, column]}; expected 0 to 2^31-1"
        )


def _segment(i: int, request_id: bytes, position: int, n_tokens: int, mode: int, reserved: bytes) -> Segment:
    if any(reserved):
        raise FrameError("bad-segments", f"frame: byte {HEADER.size + i * SEGMENT.size + 25}: expected seven zeros")
    return Segment(request_id, position, n_tokens, enum_member(Mode, mode, "bad-mode", f"segment {i}"))


def _unpack(stored: memoryview, size: int) -> bytes:
    """Return the payload out of one zstd frame, whose own claims are checked before anything is allocated."""
    try:
        p = zstandard.get_frame_parameters(stored)
        if p.content_size != size:
            claim = "no size" if p.content_size == zstandard.CONTENTSIZE_UNKNOWN else f"{p.content_size} bytes"
            raise FrameError("bad-zstd", f"frame: payload: zstd states {claim}; expected {size}")
        if p.window_size > ZSTD_MAX_WINDOW or p.dict_id:
            found = f"a dictionary ({p.dict_id})" if p.dict_id else f"a window of {p.window_size} bytes"
            raise FrameError("bad-zstd", f"frame: payload: zstd needs {found}; expected none, within {ZSTD_MAX_WINDOW}")
        out = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FrameError("bad-zstd", f"frame: payload: {printable(e)}") from None
    if len(out) != size:
        raise FrameError("bad-zstd", f"frame: payload: zstd held {len(out)} bytes; expected {size}")
    return out
