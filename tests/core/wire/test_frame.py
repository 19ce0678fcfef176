"""Frames: what goes in comes out, and bytes that are not one whole, sound frame are refused by name."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from knotctl.core.errors import FrameError
from knotctl.core.wire.frame import Frame, Segment, check_finite, encode_frame, parse_frame
from knotctl.core.wire.layout import FILE_LIMITS, ID_KINDS, WIRE_LIMITS, DType, Flags, Kind, Limits, Mode

KNOT = bytes(range(16))
HEADER_FIELDS = (
    "magic", "version", "kind", "dtype", "flags", "knot", "rows", "width", "meta", "segments", "stored", "unpacked",
    "body_crc", "head_crc",
)  # fmt: skip
R1, R2 = b"\x01" * 16, b"\x02" * 16


def hidden(rows: int = 3, width: int = 4, **changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "kind": Kind.HIDDEN,
        "knot_id": KNOT,
        "segments": (Segment(R1, 7, rows),),
        "payload": np.arange(rows * width, dtype=np.float32).reshape(rows, width),
        "meta": {"route": ["a", "b"]},
    }
    return Frame(**(fields | changes))


def same(a: Frame, b: Frame) -> bool:
    return (
        (a.kind, a.knot_id, a.segments, dict(a.meta), a.flags) == (b.kind, b.knot_id, b.segments, dict(b.meta), b.flags)
        and a.payload.dtype == b.payload.dtype
        and a.payload.tobytes() == b.payload.tobytes()
        and a.payload.shape == b.payload.shape
    )


def sealed(data: bytes, **header: int | bytes) -> bytes:
    """The frame with header fields replaced and both CRCs made right: a liar with good checksums."""
    fields = dict(zip(HEADER_FIELDS, struct.unpack_from("<4sBBBB16sIIIIQQII", data), strict=True)) | header
    body = data[64:]
    if "body_crc" not in header:
        fields["body_crc"] = zlib.crc32(body)
    head = struct.pack("<4sBBBB16sIIIIQQI", *list(fields.values())[:-1])
    return head + struct.pack("<I", zlib.crc32(head)) + body


def refused(data: bytes, limits: Limits = WIRE_LIMITS) -> FrameError:
    with pytest.raises(FrameError) as e:
        parse_frame(data, limits=limits)
    assert e.value.message.isprintable()
    return e.value


# ---- round trips


@st.composite
def frames(draw: st.DrawFn) -> tuple[Frame, DType]:
    kind = draw(st.sampled_from(Kind))
    meta = draw(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), st.integers(0, 9)))
    flags = draw(st.sampled_from([Flags.NONE, Flags.LAST, Flags.DEGRADED, Flags.LAST | Flags.DEGRADED]))
    knot_id = draw(st.binary(min_size=16, max_size=16))
    if kind is Kind.ERROR:
        return Frame(kind, knot_id, (), np.zeros((0, 0), np.float32), meta, flags), DType.F32
    segments = tuple(
        draw(
            st.lists(
                st.builds(
                    Segment,
                    st.binary(min_size=16, max_size=16),
                    st.integers(0, 1 << 30),
                    st.integers(1, 5),
                    st.sampled_from(Mode),
                ),
                min_size=1,
                max_size=4,
            )
        )
    )
    shape = (sum(s.n_tokens for s in segments), 1 if kind is Kind.TOKENS else draw(st.integers(1, 9)))
    if kind in ID_KINDS:
        payload = draw(hnp.arrays(np.int32, shape, elements=st.integers(0, (1 << 31) - 1)))
        return Frame(kind, knot_id, segments, payload, meta, flags), DType.I32
    dtype = draw(st.sampled_from([DType.F32, DType.F16, DType.BF16]))
    width = {DType.F32: 32, DType.F16: 16, DType.BF16: 16}[dtype]
    payload = draw(hnp.arrays(np.float32, shape, elements=st.floats(width=width, allow_nan=dtype is DType.F32)))
    if dtype is DType.BF16:
        payload = (payload.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return Frame(kind, knot_id, segments, payload, meta, flags), dtype


@given(frames(), st.booleans())
def test_what_is_encoded_is_parsed_bit_for_bit(case: tuple[Frame, DType], compress: bool) -> None:
    frame, dtype = case
    data = encode_frame(frame, dtype=dtype, compress=compress)
    assert same(parse_frame(data), frame)
    assert data == encode_frame(frame, dtype=dtype, compress=compress)


def test_the_layout_is_the_contract_s() -> None:
    data = encode_frame(hidden())
    assert data[:8] == b"AWFR" + bytes([1, 3, 0, 0])
    assert data[8:24] == KNOT
    meta = json.dumps({"route": ["a", "b"]}, separators=(",", ":")).encode()
    assert struct.unpack_from("<IIII", data, 24) == (3, 4, len(meta), 1)
    assert struct.unpack_from("<QQ", data, 40) == (48, 48)
    assert struct.unpack_from("<II", data, 56) == (zlib.crc32(data[64:]), zlib.crc32(data[:60]))
    assert data[64:96] == R1 + struct.pack("<IIB7x", 7, 3, 0)
    assert data[96 : 96 + len(meta)] == meta
    assert np.array_equal(np.frombuffer(data[96 + len(meta) :], "<f4"), np.arange(12))


def test_a_payload_is_owned_and_aligned_for_kernels() -> None:
    data = bytearray(encode_frame(hidden(meta={"a": 1})))
    payload = parse_frame(data).payload
    data[-4:] = bytes(4)
    assert payload[2, 3] == 11
    assert payload.flags.writeable
    assert payload.flags.aligned
    assert payload.flags.c_contiguous


def test_partial_embeddings_always_go_compressed() -> None:
    partial = hidden(rows=64, width=576, kind=Kind.PARTIAL, payload=np.zeros((64, 576), np.float32))
    data = encode_frame(partial)
    assert data[7] == Flags.ZSTD
    assert len(data) < 300
    assert same(parse_frame(data), partial)


def test_an_error_frame_carries_words_and_no_rows() -> None:
    error = Frame(Kind.ERROR, KNOT, (), np.zeros((0, 0), np.float32), {"error": {"code": "no", "message": "é"}})
    assert same(parse_frame(encode_frame(error)), error)


# ---- 16-bit dtypes


@given(hnp.arrays(np.float32, (1, 8), elements=st.floats(width=32)))
def test_bf16_rounds_to_the_nearest_even_and_keeps_nan(x: np.ndarray) -> None:
    exact = x.astype(np.float64)
    big = np.isfinite(x) & (np.abs(exact) > 3.3895e38)
    x[big] = 0
    got = parse_frame(encode_frame(hidden(1, 8, payload=x), dtype=DType.BF16)).payload
    assert np.array_equal(np.isnan(got), np.isnan(x))
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    for value, down, up, out in zip(*(a.ravel() for a in (x, low, high, got)), strict=True):
        if not np.isfinite(value):
            assert np.isnan(value) or out == value
            continue
        below, above = abs(float(value) - float(down)), abs(float(up) - float(value))
        even = down if down.view(np.uint32) >> 16 & 1 == 0 else up
        assert out == (down if below < above else up if above < below else even)


@pytest.mark.parametrize(("dtype", "value"), [(DType.F16, 65520.0), (DType.BF16, 3.4e38)])
def test_a_number_too_big_for_sixteen_bits_is_refused_not_sent_as_infinity(dtype: DType, value: float) -> None:
    x = np.zeros((2, 4), np.float32)
    x[1, 2] = value
    with pytest.raises(FrameError, match="row 1 column 2") as e:
        encode_frame(hidden(2, 4, payload=x), dtype=dtype)
    assert e.value.code == "bad-activation"
    x[1, 2] = 65504
    assert parse_frame(encode_frame(hidden(2, 4, payload=x), dtype=dtype)).payload[1, 2] == pytest.approx(65504, 0.004)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_is_found_and_placed(value: float) -> None:
    frame = hidden()
    check_finite(frame)
    frame.payload[1, 2] = value
    with pytest.raises(FrameError, match="row 1 column 2") as e:
        check_finite(parse_frame(encode_frame(frame)))
    assert e.value.code == "bad-activation"


# ---- every cut, every flip

SAMPLES = {
    "plain": encode_frame(hidden()),
    "zstd": encode_frame(hidden(8, 32), compress=True),
    "tokens": encode_frame(
        Frame(Kind.TOKENS, KNOT, (Segment(R1, 0, 1), Segment(R2, 3, 2)), np.array([[1], [2], [3]], np.int32))
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_at_every_byte_is_truncated(name: str) -> None:
    data = SAMPLES[name]
    for end in range(len(data)):
        assert refused(data[:end]).code == "truncated", end


@pytest.mark.parametrize("name", SAMPLES)
def test_every_flipped_bit_is_found(name: str) -> None:
    data = SAMPLES[name]
    for i in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        code = refused(bytes(flipped)).code
        assert code == (
            "bad-magic" if i < 32 else "bad-version" if i < 40 else "bad-header-crc" if i < 512 else "bad-body-crc"
        )


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_frame_or_our_error(tail: bytes, with_magic: bool) -> None:
    with pytest.raises(FrameError):
        parse_frame((b"AWFR\x01" if with_magic else b"") + tail)


@settings(max_examples=300)
@given(st.data())
def test_a_liar_with_good_checksums_gets_our_error_or_a_consistent_frame(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(list(SAMPLES.values()))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(5, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = parse_frame(sealed(bytes(raw)))
    except FrameError:
        return
    assert sum(s.n_tokens for s in frame.segments) == frame.rows
    assert frame.payload.shape == (frame.rows, frame.width)


# ---- each refusal by its name

BIG = (1 << 32) - 1
LIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "bad-magic of another format": ("bad-magic", lambda: b"GGUF" + SAMPLES["plain"][4:]),
    "version of the future": ("bad-version", lambda: sealed(SAMPLES["plain"], version=2)),
    "version zero": ("bad-version", lambda: sealed(SAMPLES["plain"], version=0)),
    "kind zero": ("bad-kind", lambda: sealed(SAMPLES["plain"], kind=0)),
    "kind unknown": ("bad-kind", lambda: sealed(SAMPLES["plain"], kind=7)),
    "dtype unknown": ("bad-dtype", lambda: sealed(SAMPLES["plain"], dtype=4)),
    "hidden states as i32": ("bad-dtype", lambda: sealed(SAMPLES["plain"], dtype=2)),
    "tokens as f32": ("bad-dtype", lambda: sealed(SAMPLES["tokens"], dtype=0)),
    "flags unknown": ("bad-flags", lambda: sealed(SAMPLES["plain"], flags=8)),
    "partial not compressed": ("bad-flags", lambda: sealed(SAMPLES["plain"], kind=2)),
    "metaLen 2^32-1": ("too-large", lambda: sealed(SAMPLES["plain"], meta=BIG)),
    "segments 2^32-1": ("too-large", lambda: sealed(SAMPLES["plain"], segments=BIG)),
    "4097 segments": ("too-large", lambda: sealed(SAMPLES["plain"], segments=4097)),
    "stored 2^64-1": ("too-large", lambda: sealed(SAMPLES["plain"], stored=(1 << 64) - 1)),
    "unpacked 2^64-1": ("too-large", lambda: sealed(SAMPLES["plain"], unpacked=(1 << 64) - 1)),
    "rows times width wraps to the size": (
        "size-mismatch",
        lambda: sealed(SAMPLES["plain"], rows=1 << 31, width=1 << 31),
    ),
    "one column more": ("size-mismatch", lambda: sealed(SAMPLES["plain"], width=5)),
    "stored less than unpacked": ("size-mismatch", lambda: sealed(SAMPLES["plain"][:-4], stored=44)),
    "zero rows": ("empty", lambda: sealed(SAMPLES["plain"], rows=0)),
    "zero width": ("empty", lambda: sealed(SAMPLES["plain"], width=0)),
    "zero segments": ("empty", lambda: sealed(SAMPLES["plain"], segments=0)),
    "an error with rows": ("size-mismatch", lambda: sealed(SAMPLES["plain"], kind=6)),
    "tokens two wide": ("size-mismatch", lambda: sealed(SAMPLES["tokens"], width=2)),
    "a byte after": ("trailing-bytes", lambda: SAMPLES["plain"] + b"\0"),
    "two frames": ("trailing-bytes", lambda: SAMPLES["plain"] * 2),
    "body crc": ("bad-body-crc", lambda: sealed(SAMPLES["plain"], body_crc=1)),
}


@pytest.mark.parametrize("name", LIES)
def test_refused_before_the_body_is_looked_at(name: str) -> None:
    code, make = LIES[name]
    assert refused(make()).code == code


def body_of(name: str, start: int, replacement: bytes) -> bytes:
    data = SAMPLES[name]
    return sealed(data[: 64 + start] + replacement + data[64 + start + len(replacement) :])


@pytest.mark.parametrize(
    ("code", "start", "replacement"),
    [
        ("bad-segments", 16 + 4, struct.pack("<I", 2)),  # tokens do not sum to rows
        ("bad-segments", 16 + 4, struct.pack("<I", BIG)),
        ("bad-segments", 16 + 4, struct.pack("<I", 0)),
        ("bad-segments", 16, struct.pack("<I", BIG)),  # position beyond int32
        ("bad-mode", 16 + 8, b"\x03"),
        ("bad-segments", 16 + 9, b"\x01"),  # reserved
        ("bad-segments", 16 + 15, b"\x01"),
        ("bad-json", 32, b"["),
        ("bad-json", 32, b"\xff"),
        ("bad-json", 32, b"{} "),
    ],
)
def test_refused_in_the_body(code: str, start: int, replacement: bytes) -> None:
    assert refused(body_of("plain", start, replacement)).code == code


def test_a_segment_without_tokens_is_refused_even_where_the_sum_is_right() -> None:
    data = encode_frame(Frame(Kind.TOKENS, KNOT, (Segment(R1, 0, 1), Segment(R2, 3, 2)), np.ones((3, 1), np.int32)))
    table = struct.pack("<16sIIB7x", R1, 0, 0, 0) + struct.pack("<16sIIB7x", R2, 3, 3, 0)
    assert refused(sealed(data[:64] + table + data[128:])).code == "bad-segments"


def with_meta(meta: bytes) -> bytes:
    data = encode_frame(hidden(meta={}))
    return sealed(data[:96] + meta + data[98:], meta=len(meta))


@pytest.mark.parametrize(
    ("meta", "code"),
    [(b"", "bad-json"), (b"[]", "bad-json"), (b'{"a":NaN}', "bad-json"), (b'{"a":1,"a":2}', "duplicate-key")],
)
def test_metadata_is_one_strict_object(meta: bytes, code: str) -> None:
    assert refused(with_meta(meta)).code == code
    assert parse_frame(with_meta(b'{"a": 1}')).meta == {"a": 1}


@pytest.mark.parametrize("token", [-1, -(1 << 31)])
def test_a_negative_token_id_is_refused(token: int) -> None:
    data = SAMPLES["tokens"]
    assert refused(sealed(data[:-4] + struct.pack("<i", token))).code == "bad-token"


def zstd_frame(stored: bytes, unpacked: int = 4096) -> bytes:
    """A hidden frame of 1 x 1024 whose stored payload is whatever is given."""
    data = encode_frame(hidden(1, 1024, meta={}, payload=np.zeros((1, 1024), np.float32)))
    width = unpacked // 4
    return sealed(data[:98] + stored, flags=1, stored=len(stored), unpacked=unpacked, width=width)


def test_a_bomb_is_refused_by_what_it_states() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    assert len(bomb) < 100_000
    assert refused(zstd_frame(bomb)).code == "bad-zstd"


def test_a_bomb_that_states_no_size_is_refused() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = packer.compress(bytes(1 << 24)) + packer.flush()
    assert "no size" in refused(zstd_frame(bomb)).message


def test_a_large_window_is_refused() -> None:
    params = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=1)
    raw = bytes(48 << 20)
    data = zstandard.ZstdCompressor(compression_params=params).compress(raw)
    assert "window" in refused(zstd_frame(data, len(raw))).message


def test_a_dictionary_is_refused() -> None:
    samples = [struct.pack("<256I", *range(i, i + 256)) for i in range(100)]
    trained = zstandard.train_dictionary(1024, samples)
    data = zstandard.ZstdCompressor(dict_data=trained).compress(samples[0] * 4)
    assert "dictionary" in refused(zstd_frame(data)).message


@pytest.mark.parametrize("damage", ["cut", "extra", "flip", "not zstd", "empty", "short", "skippable"])
def test_a_damaged_zstd_payload_is_refused(damage: str) -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 4, 4096, np.uint8).tobytes()
    good = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    data = {
        "cut": good[:-1],
        "extra": good + b"\0",
        "flip": good[:40] + bytes([good[40] ^ 0xFF]) + good[41:],
        "not zstd": b"\0" * 100,
        "empty": b"",
        "short": zstandard.ZstdCompressor().compress(raw[:-4]),
        "skippable": struct.pack("<II", 0x184D2A50, 4) + b"abcd" + good,
    }[damage]
    assert refused(zstd_frame(data)).code == "bad-zstd"
    assert parse_frame(zstd_frame(good)).payload.tobytes() == raw


def test_files_may_be_larger_than_the_wire() -> None:
    meta = {"a": "x" * (1 << 20)}
    data = encode_frame(hidden(meta=meta))
    assert refused(data).code == "too-large"
    assert parse_frame(data, limits=FILE_LIMITS).meta == meta
    with pytest.raises(FrameError):
        encode_frame(hidden(meta=meta), limits=WIRE_LIMITS)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("size-mismatch", {"payload": np.zeros(3, np.float32)}),
        ("bad-segments", {"segments": (Segment(R1, 0, 2),)}),
        ("bad-segments", {"segments": (Segment(b"short", 0, 3),)}),
        ("bad-segments", {"segments": (Segment(R1, -1, 3),)}),
        ("bad-knot-id", {"knot_id": b"00" * 16}),
        ("empty", {"payload": np.zeros((0, 4), np.float32), "segments": ()}),
        ("bad-json", {"meta": {"a": float("nan")}}),
        ("bad-json", {"meta": {"a": "\ud800"}}),
        ("bad-token", {"kind": Kind.TOKENS, "payload": np.array([[1], [-1], [2]], np.int32)}),
        ("bad-token", {"kind": Kind.TOKENS, "payload": np.array([[1], [1 << 31], [2]], np.int64)}),
    ],
)
def test_what_no_reader_takes_is_not_written(code: str, changes: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as e:
        encode_frame(hidden(**changes))
    assert e.value.code == code
