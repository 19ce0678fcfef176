"""JSON from outside, read strictly: what lenient parsers accept in silence is refused with a code.

Refused: a byte order mark, invalid UTF-8, text after the value, duplicate keys, NaN and Infinity, numbers that
overflow, integers beyond 64 bits, lone surrogates, nesting deeper than MAX_DEPTH.
Source: RFC 8259 with the choices of RFC 7493 (I-JSON).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from knotctl.core.errors import KnotctlError, printable

MAX_DEPTH = 64
# 20 digits hold every unsigned 64-bit integer; longer ones make Python's own parser quadratic.
_MAX_DIGITS = 20
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)

# Makes the caller's error from (code, what is wrong); the caller adds which thing and where.
Refuse = Callable[[str, str], KnotctlError]


class _Fault(Exception):
    """Leaves the parser's hooks, which cannot know the caller's error class."""

    def __init__(self, code: str, what: str) -> None:
        self.code, self.what = code, what


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Fault("duplicate-key", f"key {printable(key, 60)!r} appears twice")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS or not -(1 << 63) <= (value := int(digits)) < 1 << 64:
        raise _Fault("bad-json", f"integer of {len(digits)} digits; expected one of 64 bits")
    return value


def _real(digits: str) -> float:
    if len(digits) > 1000 or not math.isfinite(value := float(digits)):
        raise _Fault("bad-json", f"number {printable(digits, 40)} is outside the range of a double")
    return value


def _constant(name: str) -> NoReturn:
    raise _Fault("bad-json", f"{name} is not JSON")


def _too_deep(data: bytes) -> bool:
    """Whether the nesting passes the cap; asked first, because Python's parser answers with a RecursionError."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for m in _STRUCTURE.finditer(data):
        byte = data[m.start()]
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif byte in b"]}":
            depth -= 1
    return False


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_real, parse_constant=_constant, strict=True
)


def parse_json(data: bytes, refuse: Refuse) -> Any:
    """Return the JSON value that the bytes hold.

    Raises: what `refuse` makes, with code "bad-json" or "duplicate-key".
    """
    try:
        if data.startswith(b"\xef\xbb\xbf"):
            raise _Fault("bad-json", "starts with a byte order mark")
        if _too_deep(data):
            raise _Fault("bad-json", f"nested deeper than {MAX_DEPTH}")
        value = _decoder.decode(data.decode("utf-8"))
        if b"\\u" in data:
            # Only an escape can bring in a lone surrogate: UTF-8 itself has none.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Fault as e:
        raise refuse(e.code, e.what) from None
    except json.JSONDecodeError as e:
        raise refuse("bad-json", f"character {e.pos}: {e.msg}") from None
    except UnicodeDecodeError as e:
        raise refuse("bad-json", f"byte {e.start}: not UTF-8") from None
    except UnicodeEncodeError:
        raise refuse("bad-json", "holds a lone surrogate") from None
    return value


def parse_json_object(data: bytes, refuse: Refuse) -> dict[str, Any]:
    """Return the JSON object that the bytes hold; any other value is refused as "bad-json"."""
    value = parse_json(data, refuse)
    if not isinstance(value, dict):
        raise refuse("bad-json", f"holds a {type(value).__name__}; expected an object")
    return value
