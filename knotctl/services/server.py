"""Runs an application under uvicorn behind the guarded protocol; drains on the first signal, leaves on the second."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.services.heap import give_back_large_blocks
from knotctl.services.http_guard import GuardedProtocol

DRAIN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A server's certificate chain and private key, in PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise UsageError bad-tls where the files are no certificate and its key."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as e:
            raise UsageError("bad-tls", f"{printable(self.certificate)}, {printable(self.key)}: {printable(e)}") from e


def trust(authority: Path | None) -> ssl.SSLContext | None:
    """Return the TLS settings of a client that trusts the certificates of a PEM file, None for the system's.

    Raises: UsageError bad-tls.
    """
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as e:
        raise UsageError("bad-tls", f"{printable(authority)}: {printable(e)}") from e


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises: UsageError bad-address, SourceError cannot-listen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as e:
        raise UsageError("bad-address", f"{printable(host)}:{port}: {e.strerror}") from e
    try:
        listener = socket.create_server((str(address[0]), int(address[1])), family=family, backlog=1024)
    except OSError as e:
        raise SourceError(
            "cannot-listen", f"{printable(host)}:{port}: {e.strerror}", hint="--port 0 takes any free port"
        ) from e
    # asyncio sets it only on sockets that name their protocol, which accepted ones do not; without it the body of a
    # reply waits 40 ms for the acknowledgement of its head
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket, tls: TlsFiles | None = None) -> str:
    """Return the URL under which a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """A server of one application. `run_on(listener)` returns when it is stopped and drained."""

    def __init__(
        self, app: ASGIApp, *, on_drain: Callable[[], None] = lambda: None, tls: TlsFiles | None = None
    ) -> None:
        self._on_drain = on_drain
        self._was_signalled = False
        give_back_large_blocks()
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
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
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
        # Not `should_exit`: the first signal may come while it drains for another reason, and asks for just that.
        if self._was_signalled:
            os._exit(130 if number == signal.SIGINT else 128 + number)
        self._was_signalled = True
        self.stop()
