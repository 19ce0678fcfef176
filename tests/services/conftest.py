"""A server in a thread on a free port, for real sockets; and the tiny model's API on one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium
from selenium import webdriver

from knotctl.services.server import Server, bind, url_of

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Running:
    """A server that listens; `talk` is one connection's raw bytes there and back."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self.server = server
        self.url = url_of(listener)
        self.port = listener.getsockname()[1]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def talk(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """All that comes back until the server closes, or has said nothing for two seconds."""
        with self.connect() as s:
            try:
                for piece in pieces:
                    s.sendall(piece)
                    time.sleep(pause)
            except (ConnectionError, TimeoutError):
                pass  # it may have heard enough
            return read_all(s)

    def status(self, *pieces: bytes, pause: float = 0.0) -> int:
        reply = self.talk(*pieces, pause=pause)
        assert reply.startswith(b"HTTP/1.1 "), reply[:200]
        return int(reply[9:12])


def read_all(s: socket.socket, seconds: float = 2.0) -> bytes:
    s.settimeout(seconds)
    data = b""
    try:
        while piece := s.recv(1 << 16):
            data += piece
    except (TimeoutError, ConnectionError):
        pass
    return data


@contextmanager
def running(app: Any, **options: Any) -> Iterator[Running]:
    listener = bind("127.0.0.1", 0)
    server = Server(app, **options)
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Running(server, listener)
    finally:
        server.stop()
        thread.join(40)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serve_app() -> Callable[..., Any]:
    """`with serve_app(app) as server:` runs an ASGI application on a free port."""
    return running


@pytest.fixture(scope="session")
def tiny_knot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the fixtures as a knot: random weights, so that its text is bytes of every kind."""
    from knotctl.core.knot.from_gguf import encode_gguf

    path = tmp_path_factory.mktemp("tiny") / "tiny.knot"
    encode_gguf(str(FIXTURES / "tiny.gguf"), path)
    return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Headless Chromium."""
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator[Page]:
    """Its tab; what the console was told is of this test alone."""
    made = Page(browser)
    assert made.complaints is not None
    yield made
    browser.get("about:blank")
    browser.get_log("browser")
