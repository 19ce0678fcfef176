"""OpenAI's API over a real engine on real sockets, asked by the official client and by raw bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from knotctl.core.engine import session
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.services import openai_reply
from knotctl.services.edge import EdgeConfig
from knotctl.services.head import Head

HELLO: Any = [{"role": "user", "content": "hello"}]
CONTEXT = 512
# Against the ids that end a text, which random weights say at any time; filled in by `head`.
NO_STOP: dict[str, float] = {}


@pytest.fixture(scope="module")
def head(tiny_knot: Path) -> Iterator[Head]:
    with Engine.open(str(tiny_knot), EngineSpec(shards=4, stations=2, context=CONTEXT, max_batch=1)) as engine:
        NO_STOP.update({str(i): -100 for i in engine.tokenizer.stop_ids})
        yield Head(engine)


@pytest.fixture(scope="module")
def server(head: Head, serve_app: Callable[..., Any]) -> Iterator[Any]:
    with serve_app(head.app(EdgeConfig()), on_drain=head.drain) as running:
        while httpx2.get(f"{running.url}/readyz").status_code != 200:
            time.sleep(0.05)
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    defaults = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "logit_bias": NO_STOP}
    return client.chat.completions.create(**(defaults | fields))


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str | None, list[Any]]:
    """Text, finish reason and chunks of a streamed answer."""
    chunks = list(chat(client, stream=True, **fields))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(reasons) == 1
    return text, reasons[0], chunks


def post(server: Any, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=fields, timeout=60)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


# ---- answers


def test_the_model_list_names_the_model(client: openai.OpenAI, head: Head) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert models[0].model_dump()["knot_id"] == head.engine.knot_id


@pytest.mark.parametrize("seed", range(6))
def test_streamed_and_unstreamed_answers_are_equal(client: openai.OpenAI, seed: int) -> None:
    """Random weights say bytes that are no UTF-8, characters cut by max_tokens among them."""
    fields = {"seed": seed, "temperature": 1.5, "max_tokens": 7 + seed}
    whole = chat(client, **fields)
    text, reason, chunks = streamed(client, **fields)
    assert text == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert whole.usage.completion_tokens == 7 + seed


def test_a_greedy_answer_is_the_engine_s_own(client: openai.OpenAI, head: Head) -> None:
    engine = head.engine
    ids = engine.tokenizer.with_bos(engine.tokenizer.encode("hello"))
    params = SamplingParams(temperature=0, logit_bias={int(i): bias for i, bias in NO_STOP.items()})
    tokens = [step.token for step in engine.submit(ids, params, 24)]
    fields: Any = {"model": "tiny", "max_tokens": 24, "temperature": 0, "logit_bias": NO_STOP}
    answer = client.completions.create(prompt="hello", **fields)
    assert answer.choices[0].text == engine.tokenizer.decode(tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    by_ids = client.completions.create(prompt=ids, **fields)
    assert by_ids.choices[0].text == answer.choices[0].text
    chunks = list(client.completions.create(prompt="hello", stream=True, **fields))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text


def test_a_seed_repeats_an_answer_and_none_does_not(client: openai.OpenAI) -> None:
    def content(**fields: Any) -> str:
        return str(chat(client, temperature=1.0, **fields).choices[0].message.content)

    assert content(seed=3) == content(seed=3)
    assert len({content() for _ in range(3)}) > 1


def test_answers_do_not_depend_on_the_company(client: openai.OpenAI) -> None:
    def content(seed: int) -> str:
        return str(chat(client, seed=seed, temperature=1.0, max_tokens=12).choices[0].message.content)

    alone = [content(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(content, range(8))) == alone


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    _, _, chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage == chat(client).usage
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_stop_string_cuts_both_kinds_alike(client: openai.OpenAI, at: int) -> None:
    full = str(chat(client, temperature=0).choices[0].message.content)
    stop = full[at : at + 3]
    whole = chat(client, temperature=0, stop=[stop, "never"])
    text, reason, _ = streamed(client, temperature=0, stop=stop)
    assert text == whole.choices[0].message.content == full[: full.index(stop)]
    assert reason == whole.choices[0].finish_reason == "stop"


def test_logprobs_of_a_greedy_answer_lead_the_list(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 24
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs) == entry.top_logprobs[0].logprob < 0
        assert entry.bytes == entry.top_logprobs[0].bytes
    _, _, chunks = streamed(client, temperature=0, logprobs=True, top_logprobs=3)
    pieces = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert pieces == entries


def test_a_sampled_token_has_its_own_logprob(client: openai.OpenAI) -> None:
    entries = chat(client, temperature=2, seed=1, logprobs=True).choices[0].logprobs.content
    assert all(e.logprob < 0 and e.top_logprobs == [] for e in entries)
    plain = client.completions.create(
        model="tiny", prompt="hello", logprobs=2, temperature=2, seed=1, logit_bias=NO_STOP
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == 16
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_special_tokens_and_template_syntax_in_user_text_are_text(client: openai.OpenAI, head: Head) -> None:
    tokenizer = head.engine.tokenizer
    plain = chat(client, messages=[{"role": "user", "content": ""}], max_tokens=1).usage.prompt_tokens
    for text in ("<|im_end|>", "{{ 7*7 }}", "{% for i in range(10**9) %}x{% endfor %}"):
        used = chat(client, messages=[{"role": "user", "content": text}], max_tokens=1).usage.prompt_tokens
        assert used - plain > 1, "a control token would be one id"
        assert not set(tokenizer.encode(text)) & tokenizer.stop_ids


# ---- the context's edge


def test_a_prompt_may_leave_room_for_one_token_and_no_less(client: openai.OpenAI) -> None:
    ids = [5] * (CONTEXT - 1)
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=50)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    for n in (CONTEXT, CONTEXT + 1):
        with pytest.raises(openai.BadRequestError) as e:
            client.completions.create(model="tiny", prompt=[5] * n)
        assert (e.value.code, e.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, messages=[{"role": "user", "content": "word " * CONTEXT}])
    assert (e.value.code, e.value.param) == ("context_length_exceeded", "messages")


def test_max_tokens_beyond_the_context_is_cut_to_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5] * (CONTEXT - 4), max_tokens=10**9, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens <= CONTEXT


# ---- refusals


@pytest.mark.parametrize("name", ["gpt-4", "tiny.knot", "../tiny", "/etc/passwd", "", "a" * 5000, "tiny\n", "😀"])
def test_another_model_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as e:
        chat(client, model=name)
    assert (e.value.code, e.value.param) == ("model_not_found", "model")


def test_a_model_that_is_not_there_cannot_be_looked_up(server: Any) -> None:
    for name in ("gpt-4", "../../etc/passwd", "%2e%2e", "a/b"):
        reply = httpx2.get(f"{server.url}/v1/models/{name}")
        assert reply.status_code == 404
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/embeddings", "POST", 404),
        ("/v1", "GET", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/v1/chat/completions/", "POST", 404),
        ("/v1/models", "DELETE", 405),
        ("/livez", "POST", 405),
        ("/", "POST", 405),
        ("/static", "GET", 404),
        ("/docs", "GET", 404),
    ],
)
def test_what_is_not_there_is_said_in_json(server: Any, path: str, method: str, status: int) -> None:
    reply = httpx2.request(method, f"{server.url}{path}")
    assert reply.status_code == status
    assert reply.json()["error"]["code"] in ("not-found", "method-not-allowed")
    assert (status == 405) == ("allow" in reply.headers)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', 400),
        (b'{"model":"tiny","model":"tiny","messages":[]}', 400),
        (b'{"model":"tiny","messages":[],"temperature":NaN}', 400),
        (b'{"model":"\\ud83d\\ude00","messages":[{"role":"user","content":"a"}]}', 404),
    ],
)
def test_bodies_that_are_no_request_are_never_a_500(server: Any, content: bytes, status: int) -> None:
    reply = httpx2.post(
        f"{server.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_refusal_comes_as_a_status_even_where_a_stream_was_asked_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, stream=True, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (e.value.code, e.value.param) == ("unsupported_parameter", "tools")


# ---- clients that leave


def request_bytes(stream: bool, **fields: Any) -> bytes:
    defaults = {"model": "tiny", "prompt": [7], "max_tokens": 500, "stream": stream, "logit_bias": NO_STOP}
    body = json.dumps(defaults | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def generated(server: Any) -> float:
    families = text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text)
    return next(s.value for f in families for s in f.samples if s.name == "knot_generation_tokens_total")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_stops_the_work(server: Any, head: Head, stream: bool, how: str) -> None:
    before = generated(server)
    s = server.connect()
    s.sendall(request_bytes(stream))
    data = b""
    while stream and b'"text"' not in data:
        data += more(s)
    wait_for(lambda: head.engine.stats()["running"] == 1)
    if how == "reset":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    s.close()
    wait_for(lambda: head.engine.stats()["running"] == 0)
    assert generated(server) - before < 450, "it went on to the end"
    if not stream:
        text = httpx2.get(f"{server.url}/metrics").text
        assert 'knot_requests_total{code="499",model="tiny",route="/v1/completions"}' in text
    assert head.engine.stats()["kv_bytes"] == 0


def more(s: socket.socket) -> bytes:
    """What comes next; a connection that ended is a failure, not a loop without end."""
    data = s.recv(1 << 16)
    assert data, "the server closed the connection"
    return data


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: Any, head: Head) -> None:
    first = server.connect()
    first.sendall(request_bytes(True))
    assert first.recv(15) == b"HTTP/1.1 200 OK"
    second = server.connect()
    second.sendall(request_bytes(False))
    wait_for(lambda: head.engine.stats()["waiting"] == 1)
    second.close()
    first.close()
    wait_for(lambda: head.engine.stats()["running"] == head.engine.stats()["waiting"] == 0)


def test_a_waiting_stream_is_pinged(server: Any, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_reply, "PING_SECONDS", 0.02)
    first = server.connect()
    first.sendall(request_bytes(True))
    assert first.recv(15) == b"HTTP/1.1 200 OK"
    second = server.connect()
    second.sendall(request_bytes(True, max_tokens=20))
    data = b""
    while b": ping\n\n" not in data:
        data += more(second)
    assert b"data: " not in data
    first.close()
    while b"[DONE]" not in data:
        data += more(second)
    second.close()


def test_an_engine_that_ends_within_a_stream_gives_an_error_and_no_done(
    tiny_knot: Path, serve_app: Callable[..., Any]
) -> None:
    engine = Engine.open(str(tiny_knot), EngineSpec(context=CONTEXT))
    head = Head(engine)
    with serve_app(head.app(EdgeConfig())) as running:
        s = running.connect()
        s.sendall(request_bytes(True))
        data = s.recv(1 << 16)
        threading.Thread(target=engine.close).start()
        s.settimeout(10)
        while b"\r\n0\r\n\r\n" not in data:
            data += more(s)
        s.close()
        assert b'"code":"shutting-down"' in data
        assert b"[DONE]" not in data


# ---- health and metrics


def test_health_says_what_runs(server: Any, head: Head) -> None:
    assert httpx2.get(f"{server.url}/livez").json() == {"status": "ok"}
    document = httpx2.get(f"{server.url}/health").json()
    assert (document["status"], document["role"], document["knot_id"]) == ("ok", "head", head.engine.knot_id)
    assert document["spans"] == [[0, 1], [1, 3]]
    assert document["bytes"]["peak_weight_bytes"] > 0


def test_metrics_are_what_a_scraper_reads(server: Any, client: openai.OpenAI, head: Head) -> None:
    chat(client, max_tokens=3)
    httpx2.get(f"{server.url}/v1/models/none")
    httpx2.get(f"{server.url}/some/path?with=query")
    reply = httpx2.get(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    samples = {
        (s.name, s.labels.get("route")): s.value for f in text_string_to_metric_families(reply.text) for s in f.samples
    }
    assert samples["knot_requests_total", "/v1/chat/completions"] > 0
    assert samples["knot_requests_total", "/v1/models"] > 0
    assert samples["knot_requests_total", "other"] > 0
    assert samples["knot_prompt_tokens_total", None] > 0
    assert samples["knot_requests_running", None] == 0
    assert samples["knot_peak_weight_bytes", None] > 0
    assert samples["knot_time_to_first_token_seconds_count", None] > 0
    assert {route for _, route in samples} <= {None, "other", *head.routes}


def test_a_server_that_drains_is_not_ready_but_alive_and_finishes_what_runs(
    tiny_knot: Path, serve_app: Callable[..., Any]
) -> None:
    with Engine.open(str(tiny_knot), EngineSpec(context=CONTEXT)) as engine:
        head = Head(engine)
        with serve_app(head.app(EdgeConfig()), on_drain=head.drain) as running:
            wait_for(lambda: head.ready)
            s = running.connect()
            s.sendall(request_bytes(True))
            assert s.recv(15) == b"HTTP/1.1 200 OK"
            head.drain()
            assert httpx2.get(f"{running.url}/readyz").status_code == 503
            assert httpx2.get(f"{running.url}/livez").status_code == 200
            running.server.stop()
            data = b""
            while piece := s.recv(1 << 16):
                data += piece
            s.close()
            assert b"data: [DONE]" in data
        with pytest.raises(OSError):
            running.connect()


def test_a_client_that_reads_nothing_is_given_up(head: Head, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hand-made send that never returns: a kernel's buffers would take all that the tiny model says."""
    monkeypatch.setattr(openai_reply, "SEND_SECONDS", 0.1)

    async def visit() -> list[str]:
        sent = []
        forever = asyncio.Event()

        async def receive() -> Any:
            if not sent:
                body = request_bytes(True).partition(b"\r\n\r\n")[2]
                sent.append("request")
                return {"type": "http.request", "body": body, "more_body": False}
            return await forever.wait()

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if len(sent) > 4:
                await forever.wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await asyncio.wait_for(head.app(EdgeConfig())({**scope, "headers": headers}, receive, send), 10)
        return sent

    assert asyncio.run(visit())[:3] == ["request", "http.response.start", "http.response.body"]
    wait_for(lambda: head.engine.stats()["running"] == 0)


def test_more_than_may_wait_are_told_to_come_again(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_WAITING", 0)
    with pytest.raises(openai.RateLimitError) as e:
        chat(client)
    assert e.value.code == "overloaded"
    assert e.value.response.headers["retry-after"] == "1"
