"""A stream of bytes cut into frames, at any split. No I/O: whoever reads the socket feeds what arrived."""

from __future__ import annotations

from collections.abc import Iterator

from knotctl.core.errors import FrameError
from knotctl.core.wire.frame import Frame, parse_body
from knotctl.core.wire.header import FrameHeader, parse_header
from knotctl.core.wire.layout import HEADER, MAGIC, WIRE_LIMITS, Limits


class FrameDecoder:
    """Holds at most one frame that is not whole yet; after an error the stream is lost and every call raises it."""

    def __init__(self, limits: Limits = WIRE_LIMITS) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._header: FrameHeader | None = None
        self._failed: FrameError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes that arrived and yield the frames that are whole by now; the bytes are taken at once.

        Raises: FrameError as soon as the bytes so far cannot become a frame, before the frame's body is waited for.
        """
        if self._failed is not None:
            raise self._failed
        self._buffer += data
        return self._frames()

    def finish(self) -> None:
        """Raise FrameError "truncated" if the stream ended within a frame."""
        if self._failed is not None:
            raise self._failed
        if self._buffer:
            wanted = HEADER.size + (self._header.body_bytes if self._header else 0)
            raise FrameError(
                "truncated", f"frame stream: ended after {len(self._buffer)} bytes of a frame; expected {wanted}"
            )

    def _frames(self) -> Iterator[Frame]:
        try:
            while self._buffer:
                if self._header is None:
                    # Garbage is refused at its first bytes, not after a header's worth of it.
                    if len(self._buffer) < HEADER.size and MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                        return
                    self._header = parse_header(self._buffer, self._limits)
                end = HEADER.size + self._header.body_bytes
                if len(self._buffer) < end:
                    return
                with memoryview(self._buffer) as view, view[HEADER.size : end] as body:
                    frame = parse_body(self._header, body)
                del self._buffer[:end]
                self._header = None
                yield frame
        except FrameError as e:
            self._failed = e
            raise
