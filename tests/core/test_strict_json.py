"""JSON from outside: what lenient parsers let pass is refused, with a code, quickly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import FrameError
from knotctl.core.strict_json import MAX_DEPTH, parse_json, parse_json_object

REFUSED = {
    "empty": (b"", "bad-json"),
    "byte order mark": (b"\xef\xbb\xbf{}", "bad-json"),
    "invalid utf-8": (b'{"a":"\xff"}', "bad-json"),
    "overlong utf-8": (b'"\xc0\x80"', "bad-json"),
    "surrogate in utf-8": (b'"\xed\xa0\x80"', "bad-json"),
    "text after": (b"{} x", "bad-json"),
    "two values": (b"{}{}", "bad-json"),
    "duplicate key": (b'{"a":1,"a":1}', "duplicate-key"),
    "duplicate key by escape": (b'{"a":1,"\\u0061":1}', "duplicate-key"),
    "nested duplicate key": (b'[{"b":{"a":1,"a":2}}]', "duplicate-key"),
    "NaN": (b"[NaN]", "bad-json"),
    "Infinity": (b"-Infinity", "bad-json"),
    "1e400": (b"1e400", "bad-json"),
    "5 000 digits": (b"1" * 5000, "bad-json"),
    "5 000 decimals": (b"0." + b"1" * 5000, "bad-json"),
    "2^64": (str(1 << 64).encode(), "bad-json"),
    "-2^63-1": (str(-(1 << 63) - 1).encode(), "bad-json"),
    "100 000 deep list": (b"[" * 100_000, "bad-json"),
    "100 000 deep object": (b'{"a":' * 100_000, "bad-json"),
    "one too deep": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "bad-json"),
    "lone surrogate": (b'"\\ud800"', "bad-json"),
    "lone surrogate as key": (b'{"\\udfff":1}', "bad-json"),
    "lone surrogates swapped": (b'"\\udc00\\ud800"', "bad-json"),
    "control character": (b'"a\nb"', "bad-json"),
    "single quotes": (b"{'a':1}", "bad-json"),
}
# The almost-same twins that are valid.
ACCEPTED = {
    "space around": (b" {} \n", {}),
    "same key in two objects": (b'[{"a":1},{"a":1}]', [{"a": 1}, {"a": 1}]),
    "1e308": (b"1e308", 1e308),
    "2^64-1": (str((1 << 64) - 1).encode(), (1 << 64) - 1),
    "-2^63": (str(-(1 << 63)).encode(), -(1 << 63)),
    "as deep as allowed": (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)),
    "a thousand lists side by side": (b"[" + b"[]," * 999 + b"[]]", [[]] * 1000),
    "brackets in a string": (b'"' + b"[" * 1000 + b'\\"["', "[" * 1000 + '"['),
    "surrogate pair": (b'"\\ud83d\\ude00"', "😀"),
    "escaped backslash before u": (b'"\\\\ud800"', "\\ud800"),
    "emoji": ("😀".join('""').encode(), "😀"),
}


def refuse(code: str, what: str) -> FrameError:
    return FrameError(code, f"thing: {what}")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, code = REFUSED[name]
    with pytest.raises(FrameError) as e:
        parse_json(data, refuse)
    assert e.value.code == code
    assert e.value.message.isprintable()
    assert len(e.value.message) < 300


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    data, value = ACCEPTED[name]
    assert parse_json(data, refuse) == value


@pytest.mark.parametrize("data", [b"[]", b"1", b'"a"', b"null", b"true"])
def test_an_object_is_demanded_where_one_is_needed(data: bytes) -> None:
    with pytest.raises(FrameError, match="expected an object"):
        parse_json_object(data, refuse)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_our_error(data: bytes) -> None:
    try:
        value = parse_json(data, refuse)
    except FrameError:
        return
    # What passed can be sent on as UTF-8: nothing later turns it into a 500.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.booleans())
def test_every_value_comes_back(value: object, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), refuse) == value
