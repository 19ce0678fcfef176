"""Hostile HTTP on real sockets: each kind gets its status within its deadline, and the server goes on answering."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from knotctl.services import edge, http_guard
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.keys import ApiKeys
from knotctl.services.replies import JsonReply

KEY = "sk-0123456789abcdef"
HOST = b"Host: 127.0.0.1\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind the edge: says what reached it."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    body = await Request(scope, receive).body()
    await JsonReply({"path": scope["path"], "length": len(body)})(scope, receive, send)


@pytest.fixture(scope="module", autouse=True)
def short_deadlines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_guard, "HEAD_SECONDS", 0.5)
        patch.setattr(edge, "_DRAIN_SECONDS", 0.3)
        yield


@pytest.fixture(scope="module")
def server(serve_app: Callable[..., Any]) -> Iterator[Any]:
    with serve_app(Edge(echo, EdgeConfig(body_bytes=100_000, body_seconds=0.5))) as running:
        yield running


@pytest.fixture(scope="module")
def locked(serve_app: Callable[..., Any]) -> Iterator[Any]:
    with serve_app(Edge(echo, EdgeConfig(keys=ApiKeys([KEY, "another-key-1"])))) as running:
        yield running


def get(path: bytes = b"/", *fields: bytes) -> bytes:
    return (
        b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"".join(f + b"\r\n" for f in fields) + b"Connection: close\r\n\r\n"
    )


def post(body: bytes, *fields: bytes, path: bytes = b"/") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"".join(f + b"\r\n" for f in fields) + b"\r\n" + body


REFUSED = {
    "garbage": (400, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    "not HTTP": (400, b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "HTTP/2 preface": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "two Content-Length": (400, post(b"ab", b"Content-Length: 2", b"Content-Length: 3")),
    "Content-Length and chunked": (400, post(b"0\r\n\r\n", b"Content-Length: 2", b"Transfer-Encoding: chunked")),
    "Content-Length signed": (400, post(b"", b"Content-Length: +2")),
    "Content-Length 2^70": (400, post(b"", b"Content-Length: 1180591620717411303424")),
    "gzip, chunked": (400, post(b"0\r\n\r\n", b"Transfer-Encoding: gzip, chunked")),
    "bad chunk": (400, post(b"zz\r\nab\r\n0\r\n\r\n", b"Transfer-Encoding: chunked")),
    "trailer": (400, post(b"1\r\na\r\n0\r\nX: y\r\n\r\n", b"Transfer-Encoding: chunked")),
    "no Host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two Hosts": (400, get(b"/", b"Host: localhost")),
    "absolute form": (400, get(b"http://127.0.0.1/")),
    "CONNECT": (400, b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "blank in a field name": (400, get(b"/", b"X : y")),
    "folded field": (400, get(b"/", b"X: a\r\n b")),
    "NUL in a field": (400, get(b"/", b"X: a\0b")),
    "bare CR": (400, b"GET / HTTP/1.1\rHost: a\r\n\r\n"),
    "bytes in the path": (400, get(b"/\xff")),
    "64 KB path": (414, get(b"/" + b"a" * 65536)),
    "1 MB field": (431, get(b"/", b"X: " + b"a" * (1 << 20))),
    "10 000 fields": (431, get(b"/", *(b"X-%d: y" % i for i in range(10_000)))),
    "101 fields": (431, get(b"/", *(b"X-%d: y" % i for i in range(101)))),
    "a declared body over the cap": (413, post(b"", b"Content-Length: 100001")),
    "gzip body": (415, post(b"ab", b"Content-Length: 2", b"Content-Encoding: gzip", b"Connection: close")),
    "another site's name": (421, b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
    "a name that begins like ours": (
        421,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\nConnection: close\r\n\r\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once_in_json_and_closed(server: Any, name: str) -> None:
    status, request = REFUSED[name]
    started = time.monotonic()
    reply = server.talk(request)
    assert reply[:13] == b"HTTP/1.1 %d " % status, reply[:200]
    assert time.monotonic() - started < 2, "closed by the server, not by the test's patience"
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"]


ACCEPTED = {
    "plain": get(),
    "a hundred fields": get(b"/", *(b"X-%d: y" % i for i in range(98))),
    "localhost": b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nConnection: close\r\n\r\n",
    "IPv6 loopback": b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n\r\n",
    "HTTP/1.0 without Host": b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "chunked": post(b"2\r\nab\r\n0\r\n\r\n", b"Transfer-Encoding: chunked", b"Connection: close"),
    "many small chunks": post(b"1\r\na\r\n" * 5000 + b"0\r\n\r\n", b"Transfer-Encoding: chunked", b"Connection: close"),
    "a body of the cap": post(b"a" * 100_000, b"Content-Length: 100000", b"Connection: close"),
    "blank lines before": b"\r\n\r\n" + get(),
    "h2c offered": get(b"/", b"Upgrade: h2c"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_almost_same_and_valid_is_answered(server: Any, name: str) -> None:
    assert server.status(ACCEPTED[name]) == 200


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("silence", []),
        ("half a line", [b"GET / HT"]),
        ("a head without end", [b"GET / HTTP/1.1\r\n" + HOST, b"X: y\r\n"]),
        ("a head byte by byte", [bytes([c]) for c in get() * 3]),
        ("blank lines for ever", [b"\r\n"] * 200),
    ],
)
def test_a_head_that_does_not_end_is_408(server: Any, name: str, pieces: list[bytes]) -> None:
    started = time.monotonic()
    assert server.status(*pieces, pause=0.02) == 408
    assert time.monotonic() - started < 6


def test_a_body_that_does_not_end_is_408(server: Any) -> None:
    assert server.status(post(b"ab", b"Content-Length: 3")) == 408
    drip = [post(b"", b"Transfer-Encoding: chunked"), *[b"1\r\na\r\n"] * 100]
    assert server.status(*drip, pause=0.02) == 408


def test_a_chunked_body_over_the_cap_is_413_even_while_it_is_still_sent(server: Any) -> None:
    piece = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    assert server.status(post(b"", b"Transfer-Encoding: chunked"), *[piece] * 20) == 413


def test_chunk_extensions_without_end_are_cut_off(server: Any) -> None:
    extension = b"1;" + b"x" * 65536
    assert server.status(post(extension, b"Transfer-Encoding: chunked"), *[b"x" * 65536] * 20) == 400


def test_who_asks_before_sending_too_much_is_told_no(server: Any) -> None:
    reply = server.talk(post(b"", b"Content-Length: 1000000", b"Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 413")
    reply = server.talk(post(b"", b"Content-Length: 2", b"Expect: 100-continue"), b"ab", pause=0.1)
    assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


def test_requests_on_one_connection_are_answered_in_order(server: Any) -> None:
    first = b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\nx"
    reply = server.talk(first + b"GET /b HTTP/1.1\r\n" + HOST + b"\r\n" + get(b"/c"))
    assert [reply.find(b'"path":"/%c"' % c) > 0 for c in b"abc"] == [True] * 3
    assert reply.find(b'"/a"') < reply.find(b'"/b"') < reply.find(b'"/c"')


def test_words_after_a_request_are_no_request(server: Any) -> None:
    """A body longer than declared: what is over is the next head, refused, and the connection closed."""
    reply = server.talk(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\nabcdef\r\n\r\n")
    assert reply.count(b"HTTP/1.1 ") <= 2
    assert reply.rstrip().endswith(b"}")
    assert b"HTTP/1.1 400" in reply or reply.startswith(b"HTTP/1.1 200")


def test_two_hundred_idle_connections_do_not_keep_others_out(server: Any) -> None:
    idle = [server.connect() for _ in range(200)]
    try:
        assert server.status(get()) == 200
    finally:
        for s in idle:
            s.close()


def test_beyond_the_most_connections_more_are_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 0)
    assert server.status(get()) == 503
    monkeypatch.undo()
    assert server.status(get()) == 200


def test_a_request_id_is_given_and_a_sound_one_kept(server: Any) -> None:
    assert b"\r\nx-request-id: abc.DEF_1-2\r\n" in server.talk(get(b"/", b"X-Request-Id: abc.DEF_1-2"))
    for bad in (b"a b", b"a" * 65, b"<script>", b""):
        assert b"\r\nx-request-id: req-" in server.talk(get(b"/", b"X-Request-Id: " + bad))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([], 401),
        ([b"Authorization: Bearer " + KEY.encode()], 200),
        ([b"authorization: bearer another-key-1"], 200),
        ([b"X-Api-Key: " + KEY.encode()], 200),
        ([b"Authorization: Bearer " + KEY.encode() + b"x"], 401),
        ([b"Authorization: Bearer " + KEY.encode()[:-1]], 401),
        ([b"Authorization: Bearer"], 401),
        ([b"Authorization: Basic " + KEY.encode()], 401),
        ([b"Authorization: Bearer \xff\xfe"], 401),
        ([b"Authorization: Bearer wrong-key-1", b"X-Api-Key: " + KEY.encode()], 401),
    ],
)
def test_a_key_opens_what_is_not_public(locked: Any, fields: list[bytes], status: int) -> None:
    assert locked.status(get(b"/v1/models", *fields)) == status
    assert locked.status(get(b"/livez", *fields)) == 200


def test_a_key_in_the_url_is_no_key(locked: Any) -> None:
    assert locked.status(get(b"/v1/models?api_key=" + KEY.encode() + b"&key=" + KEY.encode())) == 401


@pytest.mark.parametrize(
    "path", [b"/livez/", b"//livez", b"/LIVEZ", b"/livez/../v1/models", b"/%6civez%2f", b"/metrics"]
)
def test_what_only_looks_public_needs_a_key(locked: Any, path: bytes) -> None:
    assert locked.status(get(path)) == 401


def test_with_keys_any_host_name_will_do(locked: Any) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n"
    assert locked.status(request) == 200


def test_an_error_has_openai_s_shape_under_v1_and_ours_elsewhere(locked: Any) -> None:
    body = locked.talk(get(b"/v1/models")).partition(b"\r\n\r\n")[2]
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert json.loads(body)["error"]["type"] == "authentication_error"
    body = locked.talk(get(b"/v1x")).partition(b"\r\n\r\n")[2]
    assert set(json.loads(body)["error"]) == {"code", "message", "hint"}
