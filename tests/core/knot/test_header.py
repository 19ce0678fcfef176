"""encode_header and parse_header are each other's inverse; the same arguments give the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knotctl.core.errors import KnotctlError, KnotError
from knotctl.core.knot import layout
from knotctl.core.knot.header import KnotConfig, TensorEntry, encode_header, header_end, parse_header
from knotctl.core.qtypes import QTYPES

CONFIG = KnotConfig("mamba", 4, 0, 0, 0, 0, 0, 3, 3, 16, 1e-5, 1e4, 0, True, {"a.b": 1, "c": "é", "d": 2.5, "e": False})
DIGEST = hashlib.sha256().hexdigest()

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@st.composite
def tilings(draw: st.DrawFn) -> list[TensorEntry]:
    entries, offset = [], 0
    for name in draw(st.lists(names.filter(lambda n: not n.startswith("knot_")), unique=True, max_size=8)):
        qtype = QTYPES[draw(st.sampled_from(sorted(QTYPES)))]
        shape = (*draw(st.lists(st.integers(0, 5), max_size=3)), qtype.block * draw(st.integers(0, 3)))
        length = qtype.tensor_bytes(shape)
        assert length is not None
        entries.append(TensorEntry(name, qtype, shape, offset, length, draw(st.sampled_from([DIGEST, None]))))
        offset += length
    return entries


@given(tilings())
def test_what_is_encoded_is_parsed(entries: list[TensorEntry]) -> None:
    head = encode_header(CONFIG, entries, source={"name": "x"}, encoder="me")
    size = len(head) + sum(e.length for e in entries)
    header = parse_header(head, size)
    assert header.tensors == tuple(entries)
    assert (header.config, header.source, header.encoder) == (CONFIG, {"name": "x"}, "me")
    assert header.payload_offset == len(head) == header_end(head[:10], size)
    assert header.payload_offset % 4 == 1
    assert header.knot_id == hashlib.sha256(head).hexdigest()[:32]
    assert encode_header(header.config, header.tensors, source=header.source, encoder=header.encoder) == head


def test_the_length_does_not_depend_on_digests() -> None:
    entry = TensorEntry("a", QTYPES["I8"], (4,), 0, 4, layout.UNKNOWN_SHA256)
    unknown = encode_header(CONFIG, [entry], source={})
    known = encode_header(CONFIG, [dataclasses.replace(entry, sha256=DIGEST)], source={})
    assert len(unknown) == len(known)


def test_a_digest_that_the_writer_forgot_is_refused() -> None:
    head = encode_header(CONFIG, [TensorEntry("a", QTYPES["I8"], (4,), 0, 4, layout.UNKNOWN_SHA256)], source={})
    with pytest.raises(KnotError) as e:
        parse_header(head, len(head) + 4)
    assert e.value.code == "bad-digest"


def test_the_json_is_compact_and_in_the_order_of_the_contract(make_knots: ModuleType) -> None:
    entry = TensorEntry("a", QTYPES["Q4_K"], (1, 256), 0, 144, DIGEST)
    head = encode_header(CONFIG, [entry], source={}, encoder="knotctl 0")
    text = head[layout.JSON_OFFSET :].rstrip(b"\0\x40").decode()
    assert text.startswith('{"format":"knot","encoder":"knotctl 0","source":{},"config":{"architecture":"mamba",')
    seal = json.loads(text)["digest"]
    assert text.endswith(
        f'"tensors":[{{"name":"a","type":"Q4_K","shape":[1,256],"offset":0,"length":144,"sha256":"{DIGEST}"}}],"digest":"{seal}"}}'
    )
    assert "é" in text
    assert json.loads(text)["config"]["gguf"] == dict(CONFIG.gguf)


def test_one_flipped_bit_anywhere_in_the_header_is_refused(make_knots: ModuleType) -> None:
    data = make_knots.small().build()
    end = header_end(data, len(data))
    for at in range(end):
        for bit in (1 << at % 7, 0x80, 0x20):
            changed = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            with pytest.raises(KnotError):
                parse_header(changed, len(changed))


def test_a_header_over_the_cap_is_not_written() -> None:
    with pytest.raises(KnotError) as e:
        encode_header(CONFIG, [], source={"x": "y" * layout.META_CAP})
    assert e.value.code == "bad-meta-length"


@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_any_bytes_are_parsed_or_refused_by_name(data: bytes, more: int) -> None:
    for head in (data, b"KNOT\x01\0" + data, b"KNOT\x01\0" + (len(data)).to_bytes(4, "little") + data):
        try:
            parse_header(head, len(head) + more)
        except KnotctlError as e:
            assert e.exit_code == 3


@settings(deadline=None)
@given(st.data())
def test_any_change_of_the_header_is_parsed_or_refused_by_name(make_knots: ModuleType, data: st.DataObject) -> None:
    whole = make_knots.small().build()
    end = header_end(whole, len(whole))
    at = data.draw(st.integers(0, end - 1))
    new = data.draw(st.binary(max_size=8))
    changed = whole[:at] + new + whole[at + data.draw(st.integers(0, 8)) :]
    try:
        parse_header(changed, len(changed))
    except KnotctlError as e:
        assert e.exit_code == 3
