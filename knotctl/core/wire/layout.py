"""The numbers of a frame (`AWFR`, version 1): the only place in code that knows them.

Source: man knot-frame(5), which a test compares with this file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAGIC = b"AWFR"
VERSION = 1
# magic, version, kind, dtype, flags, knot id, rows, width, metadata length, segments,
# payload bytes as stored, payload bytes unpacked, CRC of all after the header, CRC of the header before this field
HEADER = struct.Struct("<4sBBBB16sIIIIQQII")
HEADER_CRC = struct.Struct("<I")
HEADER_CRC_OFFSET = 60
# request id, position, tokens, mode, reserved zeros
SEGMENT = struct.Struct("<16sIIB7s")
ID_BYTES = 16
# A position is a row of a KV cache and an int32 in every kernel.
MAX_POSITION = 1 << 31
# RFC 8878 section 3.1.1.1.2 asks decoders for 8 MiB; a frame that wants more memory than that is refused.
ZSTD_MAX_WINDOW = 8 << 20
# Level 1 packs zero rows, which is what partial embeddings are made of, as well as any other, and fastest.
ZSTD_LEVEL = 1


class Kind(IntEnum):
    """What the payload of a frame is."""

    TOKENS = 1
    PARTIAL = 2
    HIDDEN = 3
    LOGITS = 4
    SAMPLED = 5
    ERROR = 6


class DType(IntEnum):
    """How an element of the payload is stored."""

    F32 = 0
    F16 = 1
    I32 = 2
    BF16 = 3


class Flags(IntFlag):
    """Properties of a whole frame."""

    NONE = 0
    ZSTD = 1
    LAST = 2
    DEGRADED = 4


class Mode(IntEnum):
    """What the tokens of a segment are for."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2


ELEMENT_BYTES = {DType.F32: 4, DType.F16: 2, DType.I32: 4, DType.BF16: 2}
# Kinds whose elements are token ids; the payload of the others is activations, and that of an error is empty.
ID_KINDS = frozenset((Kind.TOKENS, Kind.SAMPLED))
ALL_FLAGS = Flags.ZSTD | Flags.LAST | Flags.DEGRADED


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts before it allocates anything. Units: bytes, but segments."""

    stored: int
    unpacked: int
    segments: int
    meta: int


WIRE_LIMITS = Limits(stored=64 << 20, unpacked=256 << 20, segments=4096, meta=1 << 20)
# Files hold what one shell stage hands the next: all logits of a long prompt at most.
FILE_LIMITS = Limits(stored=4 << 30, unpacked=4 << 30, segments=1 << 20, meta=64 << 20)
