"""Runs an application under uvicorn behind the guarded protocol; drains on the first signal, leaves on the second."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.services.http_guard import GuardedProtocol

DRAIN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 30


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises: UsageError bad-address, SourceError cannot-listen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as e:
        raise UsageError("bad-address", f"{printable(host)}:{port}: {e.strerror}") from e
    try:
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=1024)
    except OSError as e:
        raise SourceError(
            "cannot-listen", f"{printable(host)}:{port}: {e.strerror}", hint="--port 0 takes any free port"
        ) from e


def url_of(listener: socket.socket) -> str:
    """Return the URL under which a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server of one application. `run_on(listener)` returns when it is stopped and drained."""

    def __init__(self, app: ASGIApp, *, on_drain: Callable[[], None] = lambda: None) -> None:
        self._on_drain = on_drain
        # It warns of every request that is not HTTP; the client is told, and the log is not for strangers to fill.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
        )

    def run_on(self, listener: socket.socket) -> None:
        """Serve until `stop()` or a signal, and until what runs then is done or DRAIN_SECONDS have passed."""
        self.run(sockets=[listener])

    def stop(self) -> None:
        """Take no more requests and drain; from any thread."""
        self._on_drain()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Drain on the first SIGINT or SIGTERM, which is how a server is meant to end; leave at once on the second."""
        # uvicorn's own raises the signal again after draining, so that the process would die of it.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._signalled) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if self.should_exit:
            os._exit(130 if number == signal.SIGINT else 128 + number)
        self.stop()
