"""One JSON object, strictly: what `json` lets pass (NaN, duplicate keys, lone surrogates) is refused here.

Duplicate keys matter most: two readers that keep different ones see two models in one file.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, NoReturn

from knotctl.core.errors import KnotError, printable
from knotctl.core.findings import Finding
from knotctl.core.knot.codes import finding
from knotctl.core.knot.layout import JSON_DEPTH

_INT_DIGITS = 20  # 2**64 - 1 has 20, with a minus sign 2**63 too


def check_object(data: bytes, offset: int) -> Generator[Finding, None, dict[str, Any] | None]:
    """Yield what is wrong with a JSON object that begins at `offset` of the file; return it, None where it is broken.

    Of a key named twice the first value counts, and a finding says so.
    """
    duplicates: list[str] = []
    try:
        text = data.decode("utf-8")
        if not text.startswith("{"):
            raise KnotError("bad-json", f"JSON: expected an object, found {printable(ascii(text[:8]))}")
        document = _decoder(duplicates).decode(text)
        _check_tree(document)
    except UnicodeDecodeError as e:
        yield finding("bad-json", f"JSON: expected UTF-8, found byte 0x{data[e.start]:02x}", offset=offset + e.start)
        return None
    except json.JSONDecodeError as e:
        place = offset + len(e.doc[: e.pos].encode())
        yield finding("bad-json", f"JSON: {e.msg[:1].lower()}{e.msg[1:]}", offset=place)
        return None
    except RecursionError:
        yield finding("bad-json", f"JSON: expected values nested at most {JSON_DEPTH} deep, found more", offset=offset)
        return None
    except KnotError as e:
        yield finding(e.code, e.message, offset=offset)
        return None
    for key in duplicates:
        yield finding("duplicate-key", f"JSON: key {printable(key)!r} is named twice in one object", offset=offset)
    return document  # type: ignore[no-any-return]


def _decoder(duplicates: list[str]) -> json.JSONDecoder:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            found = {}
            for key, value in items:
                if key in found:
                    duplicates.append(key)
                found.setdefault(key, value)
        return found

    def integer(digits: str) -> int:
        if len(digits) > _INT_DIGITS:
            raise KnotError("bad-json", f"JSON: expected integers of 64 bits, found one of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise KnotError("bad-json", f"JSON: number {printable(digits, 40)} is beyond 64-bit floats")
        return value

    def constant(name: str) -> NoReturn:
        raise KnotError("bad-json", f"JSON: {name} is not JSON")

    return json.JSONDecoder(object_pairs_hook=pairs, parse_int=integer, parse_float=real, parse_constant=constant)


def _check_tree(document: object) -> None:
    """Refuse nesting beyond the cap and text that UTF-8 cannot hold (lone surrogates, written as escapes)."""
    level: list[object] = [document]
    for _ in range(JSON_DEPTH):
        below: list[object] = []
        for value in level:
            if type(value) is dict:
                below += value.keys()
                below += value.values()
            elif type(value) is list:
                below += value
            elif type(value) is str and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise KnotError("bad-json", "JSON: a string holds a lone surrogate") from None
        level = below
        if not level:
            return
    raise KnotError("bad-json", f"JSON: expected values nested at most {JSON_DEPTH} deep, found more")
