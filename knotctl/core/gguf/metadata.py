"""The key-values of a GGUF, read from a cursor.

Source: ggml's gguf specification, gguf_metadata_kv_t.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from struct import Struct

from knotctl.core.errors import printable
from knotctl.core.gguf import limits
from knotctl.core.gguf.cursor import U64, Cursor
from knotctl.core.gguf.limits import SCALAR_CODES, ValueType

_FORMS = {kind: Struct("<" + code) for kind, code in SCALAR_CODES.items()}
_KINDS = {kind.value: kind for kind in ValueType}


@dataclass(frozen=True, slots=True)
class GgufValue:
    """One metadata value; an array of scalars stays in their own width, its booleans as bytes 0 and 1.

    Units: offset in bytes from the start of the file.
    """

    type: ValueType
    value: bool | int | float | str | list[str] | array[int] | array[float]
    offset: int
    item: ValueType | None = None


def read_metadata(cursor: Cursor, n_keys: int) -> dict[str, GgufValue]:
    """Return the key-values at the cursor, in the file's order. Raises: GgufError."""
    metadata: dict[str, GgufValue] = {}
    budget = limits.STRINGS_CAP
    for i in range(n_keys):
        start = cursor.pos
        key = cursor.string(f"key {i} of {n_keys}", limits.KEY_CAP)
        what = f"key {printable(key)}"
        if not key:
            cursor.fail("empty-key", start, f"key {i} of {n_keys}: expected a name, found an empty one")
        if key.startswith("GGUF."):
            cursor.fail("reserved-key", start, f"{what}: names that start with GGUF. are readers' own fields")
        if key in metadata:
            cursor.fail("duplicate-key", start, f"{what}: already has a value at byte {metadata[key].offset}")
        found = _value(cursor, what, budget)
        if found.item is ValueType.STRING and isinstance(found.value, list):
            budget -= len(found.value)
        metadata[key] = found
    return metadata


def _value(cursor: Cursor, what: str, budget: int) -> GgufValue:
    kind = _kind(cursor, what)
    offset = cursor.pos
    if kind is ValueType.STRING:
        return GgufValue(kind, cursor.string(what, limits.STRING_CAP), offset)
    if kind is not ValueType.ARRAY:
        value = cursor.scalar(_FORMS[kind], what)
        if kind is not ValueType.BOOL:
            return GgufValue(kind, value, offset)
        if value not in (0, 1):
            cursor.fail("bad-bool", offset, f"{what}: expected 0 or 1, found {value}")
        return GgufValue(kind, value == 1, offset)
    item = _kind(cursor, f"{what}, items")
    if item is ValueType.ARRAY:
        # ggml refuses them too: no model has one, and how deep to go would be the file's choice.
        cursor.fail("nested-array", offset, f"{what}: expected an array of scalars or strings, found one of arrays")
    if item is ValueType.STRING:
        count = cursor.count(f"{what}, number of strings", budget, U64.size)
        return GgufValue(kind, _strings(cursor, what, count), offset, item)
    width = _FORMS[item].size
    count = cursor.count(f"{what}, number of items", limits.HEADER_CAP // width, width)
    return GgufValue(kind, _scalars(cursor, what, item, count), offset, item)


def _kind(cursor: Cursor, what: str) -> ValueType:
    start = cursor.pos
    raw = cursor.u32(f"{what}, type")
    if raw not in _KINDS:
        cursor.fail("unknown-value-type", start, f"{what}: expected a value type from 0 to 12, found {raw}")
    return _KINDS[raw]


def _scalars(cursor: Cursor, what: str, item: ValueType, count: int) -> array[int] | array[float]:
    length = count * _FORMS[item].size
    cursor.need(length, what)
    values = array(SCALAR_CODES[item])
    values.frombytes(memoryview(cursor.data)[cursor.pos : cursor.pos + length])
    if sys.byteorder == "big":
        values.byteswap()
    if item is ValueType.BOOL and count and max(values) > 1:
        at = next(i for i, v in enumerate(values) if v > 1)
        cursor.fail("bad-bool", cursor.pos + at, f"{what}, item {at}: expected 0 or 1, found {values[at]}")
    cursor.pos += length
    return values


def _strings(cursor: Cursor, what: str, count: int) -> list[str]:
    # Two of these hold 150 thousand strings each in most models: all that can be is a local name.
    out: list[str] = []
    append, unpack = out.append, U64.unpack_from
    data, pos, have = cursor.data, cursor.pos, len(cursor.data)
    for i in range(count):
        end = pos + 8
        if end <= have:
            end += unpack(data, pos)[0]
        if end <= have:
            try:
                append(data[pos + 8 : end].decode())
                pos = end
                continue
            except UnicodeDecodeError:
                pass  # read again below, by the one who says where
        cursor.pos = pos
        append(cursor.string(f"{what}, item {i}", limits.STRING_CAP))
        data, pos, have = cursor.data, cursor.pos, len(cursor.data)
    cursor.pos = pos
    return out
