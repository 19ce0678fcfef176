"""A knot is opened in one read, or two; tensors are read by range; the tokenizer is unpacked under a cap."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path
from types import ModuleType

import pytest
import zstandard

from knotctl.core.errors import KnotError, ModelError
from knotctl.core.knot import layout
from knotctl.core.knot.reader import open_knot, unpack_tokenizer
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import FileSource


@pytest.fixture
def small(tmp_path: Path, make_knots: ModuleType) -> Path:
    path = tmp_path / "small.knot"
    path.write_bytes(make_knots.small().build())
    return path


def test_tensors_are_read_by_name(small: Path, make_knots: ModuleType) -> None:
    draft = make_knots.small()
    with open_knot(str(small)) as knot:
        for name, kind, shape, data in draft.tensors:
            assert knot.read(name) == data
            assert (knot.entry(name).qtype.name, list(knot.entry(name).shape)) == (kind, shape)
            span = knot.range_of(name)
            assert small.read_bytes()[span.start : span.end] == data
        assert knot.id == knot.header.knot_id
        assert knot.has("output_norm_weight")
        assert not knot.has("output_weight")
        assert knot.tokenizer_keys()["tokenizer.ggml.tokens"] == list("abcdefgh")


def test_a_missing_tensor_is_named(small: Path) -> None:
    with open_knot(str(small)) as knot, pytest.raises(ModelError) as e:
        knot.read("blk_9_ffn_up_weight")
    assert e.value.code == "missing-tensor"
    assert "blk_9_ffn_up_weight" in e.value.message


def test_the_header_takes_one_read(small: Path) -> None:
    source = CountedSource(FileSource(small))
    open_knot(source).close()
    assert source.reads == 1


def test_a_header_longer_than_the_probe_takes_two_reads(tmp_path: Path, make_knots: ModuleType) -> None:
    draft = make_knots.small()
    draft.config["gguf"]["note"] = "x" * layout.PROBE_BYTES
    (tmp_path / "long.knot").write_bytes(draft.build())
    source = CountedSource(FileSource(tmp_path / "long.knot"))
    knot = open_knot(source)
    assert source.reads == 2
    assert knot.read("token_embd_weight") == draft.data("token_embd_weight")
    knot.close()


def test_a_knot_that_is_refused_is_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no knot at all")
    source = FileSource(tmp_path / "x")
    with pytest.raises(KnotError) as e:
        open_knot(source)
    assert str(tmp_path / "x") in e.value.message
    assert source._fd == -1


GOOD = {"tokenizer.ggml.model": "gpt2"}
COMPRESSED = zstandard.ZstdCompressor().compress(json.dumps(GOOD).encode())


def test_what_was_packed_is_unpacked(make_knots: ModuleType) -> None:
    assert unpack_tokenizer(COMPRESSED) == GOOD
    assert unpack_tokenizer(make_knots.store_zstd(json.dumps(GOOD).encode())) == GOOD


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"{}",
        COMPRESSED[:-1],
        COMPRESSED + b"x",
        COMPRESSED + COMPRESSED,
        without_size(b"{}"),
        zstandard.ZstdCompressor().compress(b"[]"),
        zstandard.ZstdCompressor().compress(b'{"a":1,"a":2}'),
        zstandard.ZstdCompressor().compress(b'{"a":NaN}'),
        zstandard.ZstdCompressor().compress(b"\xff"),
        zstandard.ZstdCompressor().compress(b"[" * 100_000),
        zstandard.ZstdCompressor().compress(b'{"a":' + b"9" * 5000 + b"}"),
        zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(b"x" * 64)).compress(b"{}" * 9),
    ],
    ids=lambda p: f"{len(p)}-{p[:6]!r}",
)
def test_a_broken_tokenizer_is_refused(packed: bytes) -> None:
    with pytest.raises(KnotError) as e:
        unpack_tokenizer(packed)
    assert e.value.code == "bad-tokenizer"


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(layout.TOKENIZER_CAP + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(KnotError):
        unpack_tokenizer(bomb)
    # A frame that states less than it holds is a lie that the decoder itself must catch.
    lying = bomb[:5] + struct.pack("<I", 10) + bomb[9:]
    with pytest.raises(KnotError):
        unpack_tokenizer(lying)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
