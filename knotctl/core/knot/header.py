"""Bytes to header and back; no I/O. The layout's words are man knot(5), its numbers layout.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from knotctl import __version__
from knotctl.core.errors import KnotError
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot import layout
from knotctl.core.knot.checks import check_header, check_prefix
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.seal import KEY, seal

__all__ = ["ENCODER", "KnotConfig", "KnotHeader", "TensorEntry", "encode_header", "header_end", "parse_header"]

ENCODER = f"knotctl {__version__}"
_HINTS = {
    "repair": "run `knotctl repair` to write a canonical copy",
    "encode": "run `knotctl encode` again on the GGUF, or fetch the knot again",
}


def encode_header(
    config: KnotConfig, tensors: Iterable[TensorEntry], *, source: Mapping[str, object], encoder: str = ENCODER
) -> bytes:
    """Return all bytes before the payload; the same arguments give the same bytes.

    A digest is 64 digits, whatever it says: a writer that does not know digests yet passes layout.UNKNOWN_SHA256 for
    each, learns the payload's offset from the length, and encodes again in the end. None leaves `sha256` out.
    """
    items = []
    for t in tensors:
        item = {"name": t.name, "type": t.qtype.name, "shape": t.shape, "offset": t.offset, "length": t.length}
        items.append(item if t.sha256 is None else item | {"sha256": t.sha256})
    document = {
        "format": "knot",
        "encoder": encoder,
        "source": dict(source),
        "config": config.to_json(),
        "tensors": items,
    }
    return frame_metadata(document)


def frame_metadata(document: Mapping[str, object]) -> bytes:
    """Return the header of a knot whose JSON is this document, whatever it says, with the digest of its own bytes.

    Raises: KnotError `bad-meta-length` where it is over the cap.
    """
    sealed = {**document, KEY: layout.UNKNOWN_SHA256}
    meta = seal(json.dumps(sealed, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    if len(meta) > layout.META_CAP:
        raise KnotError("bad-meta-length", f"metadata: expected at most {layout.META_CAP} bytes, found {len(meta)}")
    padding = bytes(layout.align(len(meta)) - layout.JSON_OFFSET - len(meta))
    return layout.PREFIX.pack(layout.MAGIC, layout.VERSION, len(meta)) + meta + padding + bytes([layout.MARKER])


def header_end(probe: bytes, file_bytes: int, name: str = "knot") -> int:
    """Return how many bytes from the file's start parse_header needs, by the first ten of them.

    Raises: KnotError where these are no knot's, or claim more than the file has.
    """
    steps = check_prefix(probe, file_bytes)
    while True:
        try:
            _raise(next(steps), name)
        except StopIteration as done:
            return min(layout.payload_offset(done.value), file_bytes)


def parse_header(data: bytes, file_bytes: int, name: str = "knot") -> KnotHeader:
    """Return the header of a file of that size which begins with `data`, validated whole.

    Raises: KnotError of the first finding that is an error.
    """
    steps = check_header(data, file_bytes)
    while True:
        try:
            found = next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        if found.severity is Severity.ERROR:
            _raise(found, name)


def _raise(found: Finding, name: str) -> None:
    place = "" if found.offset is None else f" byte {found.offset}:"
    tensor = "" if found.tensor is None else f" {found.tensor}:"
    raise KnotError(found.code, f"{name}:{place}{tensor} {found.message}", hint=_HINTS.get(CODES[found.code].mend))
