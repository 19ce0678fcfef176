"""The only numbers of the knot format, version 1; the words to them are man knot(5).

     0  4  magic "KNOT"
     4  2  u16 version
     6  4  u32 meta_len: bytes of the JSON, unpadded
    10     JSON, UTF-8, no trailing padding
           NUL bytes up to `align`, a multiple of 4 (0 to 3 of them)
    align  codec marker
    align+1  tensor payload

Source: CONTRACT section 1.
"""

from __future__ import annotations

import struct

MAGIC = b"KNOT"
VERSION = 1
PREFIX = struct.Struct("<4sHI")
JSON_OFFSET = PREFIX.size  # 10
ALIGNMENT = 4
MARKER = 0x40

# A header of 50,000 tensors takes 10 MiB (a 7B: 0.1 MiB); a claim above it is refused before anything is allocated.
META_CAP = 16 << 20
# First read of a header: holds that of any dense model to 100 layers, so that it takes one request at a store.
PROBE_BYTES = 256 << 10
NAME_CAP = 128  # bytes of a tensor's name; GGUF allows 64
MAX_DIMS = 4  # ggml's
INT_CAP = (1 << 63) - 1  # of offsets, lengths and dimensions: what every language can hold

TOKENIZER_TENSOR = "knot_tokenizer"
# The unpacked tokenizer: 262,144 tokens take 10 MiB.
TOKENIZER_CAP = 64 << 20
DIGESTS_TENSOR = "knot_digests"
DIGEST_CHUNK = 64 << 10
DIGEST_BYTES = 8  # the first of SHA-256
KNOT_ID_BYTES = 16  # the first of SHA-256

# Stands in a header whose digests are not known yet: as long as any, so that the payload's offset is final.
UNKNOWN_SHA256 = "0" * 64


def align(meta_len: int) -> int:
    """Return the offset of the marker: the first multiple of 4 at or after the JSON's end."""
    return (JSON_OFFSET + meta_len + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def payload_offset(meta_len: int) -> int:
    """Return the offset of the tensor payload. It is 1 modulo 4: the payload is bytes, never an aligned view."""
    return align(meta_len) + 1


def stale_payload_offset(meta_len: int) -> int | None:
    """Return where the payload begins if the file is of the stale layout, None where this length rules it out.

    Encoders before 2026-04-25 padded the JSON with spaces until 10 + meta_len was 3 modulo 4, counted the padding in
    meta_len, and put the marker right behind.
    """
    end = JSON_OFFSET + meta_len
    return end + 1 if end % ALIGNMENT == ALIGNMENT - 1 else None


def digest_count(payload_bytes: int) -> int:
    """Return the number of chunk digests over so many bytes of payload (those before the table itself)."""
    return -(-payload_bytes // DIGEST_CHUNK)
