"""What is fuzzed: the parsers of bytes that nobody vouches for. Nothing but a FormatError may come out of them."""

from __future__ import annotations

from collections.abc import Callable

from knotctl.core.errors import FormatError
from knotctl.core.gguf.header import read_gguf
from knotctl.core.knot import layout
from knotctl.core.knot.checks import check_header
from knotctl.core.knot.header import header_end, parse_header
from knotctl.core.knot.seal import seal
from knotctl.core.knot.whole import verify_whole
from knotctl.core.wire.decoder import FrameDecoder
from knotctl.core.wire.frame import parse_frame


class Memory:
    """A byte source over bytes."""

    def __init__(self, data: bytes) -> None:
        self.name, self.size, self.identity = "fuzz", len(data), "fuzz"
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= self.size
        return self._data[offset : offset + length]

    def read_into(self, offset: int, out: memoryview) -> None:
        out[:] = self.read(offset, len(out))

    def close(self) -> None: ...


def knot(data: bytes) -> None:
    """The reader and verify agree on what is an error; a header that passes is within the file."""
    try:
        header_end(data, len(data))
        header = parse_header(data, len(data))
    except FormatError as e:
        codes = [f.code for f in check_header(data, len(data)) if f.severity == "error"]
        assert codes[:1] == [e.code], (codes, e.code)
        return
    assert all(0 < header.range_of(e).start <= header.range_of(e).end <= len(data) for e in header.tensors if e.length)
    for _ in verify_whole(header):
        pass


def sealed_knot(data: bytes) -> None:
    """Metadata under a right prefix and a right digest of its own, so that the fuzzer gets past both."""
    meta = data
    if data.endswith(b'"}') and len(data) > len(layout.UNKNOWN_SHA256) + 2:
        meta = seal(data[: -len(layout.UNKNOWN_SHA256) - 2] + layout.UNKNOWN_SHA256.encode() + b'"}')
    pad = bytes(layout.align(len(meta)) - layout.JSON_OFFSET - len(meta))
    prefix = layout.PREFIX.pack(layout.MAGIC, layout.VERSION, len(meta))
    knot(prefix + meta + pad + bytes([layout.MARKER]))


def gguf(data: bytes) -> None:
    """A header that passes has every tensor within the file."""
    try:
        file = read_gguf(Memory(data))
    except FormatError:
        return
    assert all(0 <= t.offset <= t.offset + t.length <= len(data) for t in file.tensors if t.length)


def frame(data: bytes) -> None:
    """Whole or split anywhere, the same frame or the same refusal comes out."""
    try:
        whole = parse_frame(data)
    except FormatError:
        whole = None
    decoder = FrameDecoder()
    found = []
    try:
        for at in range(0, len(data), 7):
            found += list(decoder.feed(data[at : at + 7]))
    except FormatError:
        assert whole is None
    if whole is not None:
        assert len(found) == 1
        assert found[0].payload.tobytes() == whole.payload.tobytes()


TARGETS: dict[str, Callable[[bytes], None]] = {"knot": knot, "sealed-knot": sealed_knot, "gguf": gguf, "frame": frame}
