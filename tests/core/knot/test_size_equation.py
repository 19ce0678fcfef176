"""Cut, continued and stale files are told from the header and the file's size alone, never by one byte."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from knotctl.core.errors import KnotError
from knotctl.core.knot import layout
from knotctl.core.knot.header import header_end, parse_header
from knotctl.core.knot.verify import Verification

Verify = Callable[..., Verification]


def codes(result: Verification) -> list[str]:
    return [f.code for f in result.findings]


@pytest.mark.parametrize("first", [0x40, 0x41], ids=["chance-marker", "no-chance-marker"])
@pytest.mark.parametrize("residue", [0, 1, 2, 3])
def test_stale_layout_is_told_for_every_length_of_metadata(
    residue: int, first: int, make_knots: ModuleType, verified: Verify
) -> None:
    draft = make_knots.small()
    draft.replace("token_embd_weight", bytes([first]) + draft.data("token_embd_weight")[1:]).pad(residue)
    document, payload = draft.parts()
    assert len(make_knots.dump(document)) % 4 == residue
    data = make_knots.stale(document, payload)
    assert data[layout.align(layout.PREFIX.unpack_from(data)[2])] == first
    assert codes(verified(data)) == ["stale-layout"]
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data))
    assert e.value.code == "stale-layout"
    assert "knotctl repair" in (e.value.hint or "")


@pytest.mark.parametrize("first", [0x40, 0x00])
@pytest.mark.parametrize("residue", [0, 1, 2, 3])
def test_a_canonical_knot_that_lost_a_byte_is_truncated_not_stale(
    residue: int, first: int, make_knots: ModuleType, verified: Verify
) -> None:
    draft = make_knots.small().pad(residue)
    draft.replace("token_embd_weight", bytes([first]) + draft.data("token_embd_weight")[1:])
    assert codes(verified(draft.build())) == []
    assert codes(verified(draft.build()[:-1])) == ["truncated"]
    assert codes(verified(draft.build() + b"\x40")) == ["trailing-bytes"]


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_a_stale_knot_of_another_size_is_not_called_stale(
    change: int, make_knots: ModuleType, verified: Verify
) -> None:
    data = make_knots.stale(*make_knots.small().parts())
    data = data[:change] if change < 0 else data + bytes(change)
    result = verified(data)
    assert not result.ok
    assert "stale-layout" not in codes(result)


def test_a_cut_at_every_byte_is_truncated(make_knots: ModuleType) -> None:
    data = make_knots.small().build()
    for size in range(len(data)):
        with pytest.raises(KnotError) as e:
            parse_header(data[:size], size)
        assert e.value.code == "truncated", size


@pytest.mark.parametrize("part", [0.01, 0.5, 0.999])
def test_a_cut_payload_names_the_first_tensor_that_is_cut(
    part: float, make_knots: ModuleType, verified: Verify
) -> None:
    data = make_knots.small().build()
    header = parse_header(data, len(data))
    size = header.payload_offset + int(part * (len(data) - header.payload_offset))
    (found,) = verified(data[:size]).findings
    cut = next(e for e in header.tensors if header.payload_offset + e.end > size)
    assert (found.code, found.tensor, found.offset) == ("truncated", cut.name, size)


@pytest.mark.parametrize("meta_len", [0, 1, layout.META_CAP + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_before_it_is_read(meta_len: int) -> None:
    probe = layout.PREFIX.pack(layout.MAGIC, layout.VERSION, meta_len)
    with pytest.raises(KnotError) as e:
        header_end(probe, 1 << 40)
    assert e.value.code == "bad-meta-length"


def test_a_length_beyond_the_file_is_truncated_before_it_is_read() -> None:
    probe = layout.PREFIX.pack(layout.MAGIC, layout.VERSION, layout.META_CAP)
    with pytest.raises(KnotError) as e:
        header_end(probe, 1 << 20)
    assert e.value.code == "truncated"


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        (b"PK\x03\x04", "zip"),
        (b"\x80\x04\x95", "pickle"),
        (b"version https://git-lfs", "Git LFS"),
        (b"\x40\0\0\0\0\0\0\0{", "safetensors"),
        (b"knot\x01\0", "'knot'"),
    ],
)
def test_another_format_is_named(head: bytes, word: str) -> None:
    data = head + bytes(64) if word != "safetensors" else head + b'"a"' + bytes(64)
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data))
    assert e.value.code == "not-a-knot"
    assert word in e.value.message


@pytest.mark.parametrize(("version", "word"), [(0, "never"), (2, "newer"), (256, "big-endian"), (65535, "newer")])
def test_another_version_is_named(version: int, word: str) -> None:
    data = layout.PREFIX.pack(layout.MAGIC, version, 2) + b"{}\x40"
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data))
    assert e.value.code == "bad-version"
    assert word in e.value.message
