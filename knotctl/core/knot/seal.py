"""The metadata's digest of itself, so that one flipped bit of the JSON is told when the knot is opened.

The last key is `digest`: SHA-256 over the JSON's bytes, with zeros in the place of these 64 digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from knotctl.core.knot.layout import UNKNOWN_SHA256

KEY = "digest"
_DIGITS = re.compile(r"[0-9a-f]{64}")
_TAIL = re.compile(rb',"digest":"([0-9a-f]{64})"\}\Z')


def seal(meta: bytes) -> bytes:
    """Return the JSON, whose last key is `digest` with zeros, with its digest in their place."""
    start = len(meta) - len(UNKNOWN_SHA256) - len('"}')
    return meta[:start] + hashlib.sha256(meta).hexdigest().encode() + meta[-len('"}') :]


def has_seal(document: Mapping[str, object]) -> bool:
    """Say whether the metadata has a digest, be it under a key that is damaged: the last, with 64 digits."""
    last = next(reversed(list(document.values())), None)
    return KEY in document or (type(last) is str and _DIGITS.fullmatch(last) is not None)


def seal_holds(meta: bytes) -> bool:
    """Say whether the JSON ends in a digest, and the digest is its own."""
    tail = _TAIL.search(meta)
    return tail is not None and seal(meta[: tail.start(1)] + UNKNOWN_SHA256.encode() + b'"}') == meta
