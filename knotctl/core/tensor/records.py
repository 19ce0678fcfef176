"""An entry of a cache: the bytes with what they are of, checked whenever they are read.

The same record lies in memory, in the key-value level and on the wire, so that a bad one is told wherever it shows up.

     0  4  magic "KREC"
     4  1  version 1
     5  1  kind: 0 bytes as they lie in the knot, 1 a row as float32
     6  2  zero
     8  16 knot_id
    24  8  u64 index: a row of the embedding table; or, of a tensor, where it lies in the payload
    32  8  u64 length of the data
    40  16 digest: the first of SHA-256 over bytes 0..40 and the SHA-256 of the data
    56     the data
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

from knotctl.core.errors import FormatError

_HEAD = struct.Struct("<4sBBH16sQQ")
_MAGIC = b"KREC"
_VERSION = 1
_DIGEST_BYTES = 16
RECORD_BYTES = _HEAD.size + _DIGEST_BYTES


class RecordKind(IntEnum):
    """What the data are: bytes as they lie in the knot, or a row's numbers."""

    STORED = 0
    FLOATS = 1


def encode_record(kind: RecordKind, knot_id: bytes, index: int, data: bytes) -> bytes:
    """Return the record of some data."""
    return record_head(kind, knot_id, index, len(data), hashlib.sha256(data).digest()) + data


def record_head(kind: RecordKind, knot_id: bytes, index: int, length: int, sha256: bytes) -> bytes:
    """Return what stands in a record before its data, whose SHA-256 is known."""
    head = _HEAD.pack(_MAGIC, _VERSION, kind, 0, knot_id, index, length)
    return head + hashlib.sha256(head + sha256).digest()[:_DIGEST_BYTES]


def open_record(record: bytes, kind: RecordKind, knot_id: bytes, index: int, length: int) -> bytes | None:
    """Return the data if the record is whole and of exactly this, None where anything is wrong with it."""
    # One comparison of everything: what is in the record is never believed, not even its length.
    if len(record) != RECORD_BYTES + length:
        return None
    data = record[RECORD_BYTES:]
    head = record_head(kind, knot_id, index, length, hashlib.sha256(data).digest())
    return data if record.startswith(head) else None


def split_records(body: bytes, cap: int) -> list[tuple[RecordKind, int, bytes]]:
    """Return kind, index and whole bytes of each of the records in a reply, still to be opened.

    Raises: FormatError bad-records where they do not fill the reply end to end, or are more than `cap`.
    """
    found: list[tuple[RecordKind, int, bytes]] = []
    at = 0
    while at < len(body):
        if at + RECORD_BYTES > len(body):
            raise FormatError("bad-records", f"records: byte {at}: ends early")
        magic, version, kind, zero, _, index, length = _HEAD.unpack_from(body, at)
        end = at + RECORD_BYTES + length
        if (magic, version, zero) != (_MAGIC, _VERSION, 0) or kind not in tuple(RecordKind) or end > len(body):
            raise FormatError("bad-records", f"records: byte {at}: expected a record, found something else")
        if len(found) == cap:
            raise FormatError("bad-records", f"records: byte {at}: expected at most {cap} records")
        found.append((RecordKind(kind), index, body[at:end]))
        at = end
    return found
