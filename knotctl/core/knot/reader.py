"""An open knot: the header in one read (two where it is longer than the first probe), tensors by range."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, NoReturn, Self

from knotctl.core.errors import KnotError, ModelError, printable
from knotctl.core.knot.header import KnotHeader, TensorEntry, header_end, parse_header
from knotctl.core.knot.layout import PROBE_BYTES, TOKENIZER_CAP, TOKENIZER_TENSOR
from knotctl.core.source.base import ByteSource
from knotctl.core.source.opening import open_source
from knotctl.core.spans import ByteRange


def open_knot(ref: str | ByteSource) -> Knot:
    """Return the open knot at a path or URL, or in an open source, which it then owns.

    Raises: KnotError of the first error in the header, SourceError where the bytes cannot be had.
    """
    source = open_source(ref) if isinstance(ref, str) else ref
    try:
        return Knot(parse_header(read_header(source), source.size, source.name), source)
    except BaseException:
        source.close()
        raise


def read_header(source: ByteSource) -> bytes:
    """Return the bytes that parse_header needs, in one read where the first probe holds them, else in two.

    Raises: KnotError where the first ten bytes are no knot's or claim too much, SourceError.
    """
    probe = source.read(0, min(PROBE_BYTES, source.size))
    end = header_end(probe, source.size, source.name)
    return probe[:end] if end <= len(probe) else probe + source.read(len(probe), end - len(probe))


class Knot:
    """A validated header and the source of its bytes; close it, or use it with `with`."""

    def __init__(self, header: KnotHeader, source: ByteSource) -> None:
        self.header = header
        self.source = source
        self._entries = {e.name: e for e in header.tensors}

    @property
    def id(self) -> str:
        """The knot's identity: hex of 16 bytes over the header, which holds the digests of all tensors."""
        return self.header.knot_id

    def has(self, name: str) -> bool:
        """Say whether there is a tensor of that name."""
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Return what the header says of a tensor. Raises: ModelError `missing-tensor`."""
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError("missing-tensor", f"{self.source.name}: tensor {printable(name)} is missing") from None

    def range_of(self, name: str) -> ByteRange:
        """Return the bytes of the file that a tensor takes. Raises: ModelError `missing-tensor`."""
        return self.header.range_of(self.entry(name))

    def read(self, name: str) -> bytes:
        """Return the bytes of a tensor as stored. Raises: ModelError `missing-tensor`, SourceError."""
        span = self.range_of(name)
        return self.source.read(span.start, len(span))

    def tokenizer_keys(self) -> dict[str, Any]:
        """Return the GGUF's `tokenizer.*` keys and values, the chat template among them.

        Raises: ModelError `missing-tensor`, KnotError `bad-tokenizer`, SourceError.
        """
        return unpack_tokenizer(self.read(TOKENIZER_TENSOR), self.source.name)

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def unpack_tokenizer(packed: bytes, name: str = "knot") -> dict[str, Any]:
    """Return the object in a `knot_tokenizer` tensor: zstd-compressed JSON.

    Raises: KnotError `bad-tokenizer`, before anything over TOKENIZER_CAP is allocated.
    """
    import zstandard

    def refuse(why: str) -> NoReturn:
        raise KnotError("bad-tokenizer", f"{name}: {TOKENIZER_TENSOR}: {why}", hint="encode the GGUF again")

    try:
        # The frame's own size wins over max_output_size: a bomb states its size, so the size is looked at first.
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= TOKENIZER_CAP:
            refuse(f"expected a frame that states at most {TOKENIZER_CAP} bytes, found {'none' if size < 0 else size}")
        text = zstandard.ZstdDecompressor(max_window_size=TOKENIZER_CAP).decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as e:
        refuse(f"expected one zstd frame: {e}")
    if len(text) != size:
        refuse(f"expected {size} bytes unpacked, found {len(text)}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            refuse("a key is named twice")
        return found

    try:
        keys = json.loads(text, object_pairs_hook=pairs, parse_constant=lambda c: refuse(f"{c} is not JSON"))
    except (ValueError, RecursionError) as e:
        refuse(f"expected JSON: {printable(e)}")
    if type(keys) is not dict:
        refuse("expected a JSON object")
    return keys
