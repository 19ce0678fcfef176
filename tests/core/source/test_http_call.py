"""Calls between nodes against a server of raw sockets: deadlines, caps, kept connections, a way out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from knotctl.core.errors import UsageError
from knotctl.core.source import http_call
from knotctl.core.source.http_call import Peer, TransportError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Script = Callable[[socket.socket, bytes], None]


class Raw:
    """Calls a script with each request (its head and the body that its length promises) of every connection."""

    def __init__(self) -> None:
        self.script: Script = lambda s, _: s.sendall(OK)
        self.connections = 0
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while request := self._request(connection):
                    self.script(connection, request)
            except OSError:
                pass
        self.ended.set()

    def _request(self, connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(1 << 16)
            if not piece:
                return b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(1 << 16)
        return head + b"\r\n\r\n" + body


@pytest.fixture
def server() -> Iterator[Raw]:
    made = Raw()
    yield made
    made.close()


@pytest.fixture
def peer(server: Raw) -> Iterator[Peer]:
    made = Peer(server.url, token="a-token", body_cap=1000)
    yield made
    made.close()


def code(peer: Peer, **options: float) -> str:
    with pytest.raises(TransportError) as e:
        peer.call("GET", "/", seconds=options.get("seconds", 5.0))
    assert str(e.value.message).startswith(peer.url)
    return e.value.code


def test_a_connection_is_kept_and_says_who_calls(server: Raw, peer: Peer) -> None:
    seen: list[bytes] = []

    def script(s: socket.socket, request: bytes) -> None:
        seen.append(request)
        s.sendall(OK)

    server.script = script
    for _ in range(3):
        reply = peer.call("POST", "/x", b"body", seconds=5, headers={"x-a": "b"})
        assert (reply.status, reply.body) == (200, b"ok")
    assert server.connections == 1
    assert b"authorization: Bearer a-token\r\n" in seen[0]
    assert b"x-a: b\r\n" in seen[0]
    assert seen[0].endswith(b"\r\n\r\nbody")


def test_a_large_body_and_any_split_of_the_answer(server: Raw, peer: Peer) -> None:
    def script(s: socket.socket, request: bytes) -> None:
        answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n%04x\r\n0\r\n\r\n" % (
            len(request) & 0xFFFF
        )
        for i in range(len(answer)):
            s.sendall(answer[i : i + 1])

    server.script = script
    assert len(peer.call("POST", "/", bytes(3 << 20), seconds=20).body) == 4


def test_what_came_unasked_is_no_answer(server: Raw, peer: Peer) -> None:
    """A server that closes an idle connection says 408 first; the next call must not take that for its answer."""

    def script(s: socket.socket, _: bytes) -> None:
        s.sendall(OK)
        time.sleep(0.05)
        s.sendall(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    server.script = script
    assert peer.call("GET", "/", seconds=5).status == 200
    time.sleep(0.3)
    assert peer.call("GET", "/", seconds=5).status == 200
    assert server.connections == 2


def test_a_kept_connection_that_was_closed_is_replaced(server: Raw, peer: Peer) -> None:
    def script(s: socket.socket, _: bytes) -> None:
        s.sendall(OK)
        s.shutdown(socket.SHUT_RDWR)

    server.script = script
    for _ in range(4):
        assert peer.call("GET", "/", seconds=5).body == b"ok"


def test_one_deadline_holds_for_the_whole_call(server: Raw, peer: Peer) -> None:
    """A byte now and then keeps no call alive."""

    def drip(s: socket.socket, _: bytes) -> None:
        for byte in OK * 10:
            s.sendall(bytes([byte]))
            time.sleep(0.1)

    server.script = drip
    began = time.monotonic()
    assert code(peer, seconds=0.5) == "timeout"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "closed-early"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "closed-midway"),
        (b"not HTTP at all\r\n\r\n", "bad-reply"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + bytes(5000), "bad-reply"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"content-length: 0\r\n\r\n", "bad-reply"),
    ],
    ids=["nothing", "half a body", "garbage", "over the cap", "too many fields"],
)
def test_what_is_no_whole_answer_has_a_name(server: Raw, peer: Peer, answer: bytes, expected: str) -> None:
    def script(s: socket.socket, _: bytes) -> None:
        s.sendall(answer)
        s.shutdown(socket.SHUT_RDWR)

    server.script = script
    assert code(peer) == expected


def test_a_call_given_up_closes_its_connection(server: Raw, peer: Peer) -> None:
    asked: list[int] = []

    def script(s: socket.socket, _: bytes) -> None:
        while s.recv(1):
            pass

    def check() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise RecursionError

    server.script = script
    with pytest.raises(RecursionError):
        peer.call("GET", "/", seconds=30, check=check)
    assert server.ended.wait(10)


def test_nobody_there_is_unreachable_and_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(TransportError) as e:
        Peer(url).call("GET", "/", seconds=5)
    assert (e.value.code, e.value.sent) == ("unreachable", False)


@pytest.mark.parametrize(
    "url", ["", "a", "ftp://a:1", "http://", "http://a:b", "http://a:1/path", "file:///etc/passwd"]
)
def test_only_urls_of_nodes_are_taken(url: str) -> None:
    with pytest.raises(UsageError) as e:
        Peer(url)
    assert e.value.code == "bad-url"


def test_a_connection_is_not_kept_for_longer_than_servers_do() -> None:
    from knotctl.services.http_guard import HEAD_SECONDS

    assert http_call._IDLE_SECONDS < HEAD_SECONDS


def test_who_dies_over_a_request_on_a_kept_connection_is_not_taken_for_one_that_was_never_there(
    server: Raw, peer: Peer
) -> None:
    assert peer.call("GET", "/", seconds=5).status == 200

    def die(connection: socket.socket, _: bytes) -> None:
        server.close()
        connection.shutdown(socket.SHUT_RDWR)

    server.script = die
    with pytest.raises(TransportError) as e:
        peer.call("GET", "/", seconds=5)
    assert (e.value.code, e.value.sent) == ("closed-early", True)
    with pytest.raises(TransportError) as e:
        peer.call("GET", "/", seconds=5)
    assert (e.value.code, e.value.sent) == ("unreachable", False)
