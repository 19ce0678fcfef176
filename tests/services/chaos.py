"""A TCP proxy that spoils what passes: latency, bandwidth, resets, half-open connections, flipped bits, silence."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_PIECE = 1 << 14


class Chaos:
    """Passes connections on to a URL's host; set its attributes at any time, they hold for what passes from then on."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.latency = 0.0  # seconds before each piece
        self.bandwidth: float | None = None  # bytes a second, of each direction
        self.silent = False  # connections stay open and nothing passes
        self.reset_after: int | None = None  # bytes of the next answer, then a reset; once
        self.drop_request_after: int | None = None  # bytes of the next request, then a reset; once
        self.flip_answer_at: int | None = None  # byte of the next answer that loses its lowest bit; once
        self.flip_request_at: int | None = None
        self.hits = 0
        self._closing = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lets_in(self, near: socket.socket) -> bool:
        """Whether a connection is passed on at all."""
        return True

    def cut(self) -> None:
        """Reset every connection that is open."""
        for s in self._open:
            _reset(s)
        self._open.clear()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread in accept()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._closing:
                _reset(near)
                return
            if not self.lets_in(near):
                _reset(near)
                continue
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(near)
                continue
            far.settimeout(None)
            for s in (near, far):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [near, far]
            threading.Thread(target=self._pump, args=(near, far, "request"), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, "answer"), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, what: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                while self.silent and not self._closing:
                    time.sleep(0.01)
                time.sleep(self.latency)
                if self.bandwidth:
                    time.sleep(len(piece) / self.bandwidth)
                piece, broken = self._spoil(piece, what)
                sink.sendall(piece)
                if broken:
                    _reset(source)
                    _reset(sink)
                    return
            sink.shutdown(socket.SHUT_WR)

    def _spoil(self, piece: bytes, what: str) -> tuple[bytes, bool]:
        flip, cut = ("flip_answer_at", "reset_after") if what == "answer" else ("flip_request_at", "drop_request_after")
        at = getattr(self, flip)
        if at is not None:
            if at < len(piece):
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                setattr(self, flip, None)
                self.hits += 1
            else:
                setattr(self, flip, at - len(piece))
        at = getattr(self, cut)
        if at is not None:
            if at <= len(piece):
                setattr(self, cut, None)
                self.hits += 1
                return piece[:at], True
            setattr(self, cut, at - len(piece))
        return piece, False


def _reset(s: socket.socket) -> None:
    """Close with RST, as a crashed peer's kernel does."""
    with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.shutdown(socket.SHUT_RDWR)
    s.close()


@contextmanager
def chaos(target: str) -> Iterator[Chaos]:
    proxy = Chaos(target)
    try:
        yield proxy
    finally:
        proxy.close()
