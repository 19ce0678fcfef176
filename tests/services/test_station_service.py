"""A station and a shard as their callers see them, frame by frame: what is answered, what is refused, what is kept."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from cluster_nodes import TOKEN, Cluster, cluster
from prometheus_client.parser import text_string_to_metric_families

from knotctl.core.engine.choose import Ask, parse_sampled
from knotctl.core.engine.hop import FRAME_TYPE
from knotctl.core.model.embed import Shard, token_frame
from knotctl.core.model.shard_head import merge_logits, merge_tops
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.http_call import Peer
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.core.wire.frame import Frame, Segment, encode_frame, parse_frame
from knotctl.core.wire.layout import Kind
from knotctl.core.wire.merge import merge_partials

AUTH = {"authorization": f"Bearer {TOKEN}"}
TOKENS = [5, 17, 200, 3, 44, 91]


@pytest.fixture(scope="module")
def nodes(tiny_knot: Path, serve_app: Callable[..., Any]) -> Iterator[Cluster]:
    with cluster(str(tiny_knot), serve_app) as made:
        yield made


@pytest.fixture
def session() -> bytes:
    return secrets.token_bytes(16)


def hidden(nodes: Cluster, session: bytes, tokens: list[int] | None = None, position: int = 0, **meta: Any) -> Frame:
    ids = token_frame(nodes.knot.id, TOKENS if tokens is None else tokens, position, session)
    whole = Shard(nodes.knot, VocabSpan(0, nodes.knot.header.config.vocab_size))
    return replace(merge_partials([whole.embed(ids)]), meta=meta)


def post(url: str, frame: Frame | bytes, path: str = "/forward", **headers: str) -> httpx2.Response:
    body = frame if isinstance(frame, bytes) else encode_frame(frame)
    return httpx2.post(f"{url}{path}", content=body, headers=AUTH | {"content-type": FRAME_TYPE} | headers, timeout=30)


def code(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, str(reply.json()["error"]["code"])


def metric(node: Any, name: str) -> float:
    families = text_string_to_metric_families(node.metrics.exposition().decode())
    return sum(s.value for f in families for s in f.samples if s.name == name)


def route(nodes: Cluster) -> list[dict[str, object]]:
    return [{"url": nodes.stations[1], "layers": [1, 3]}]


def test_a_frame_goes_along_its_route_and_the_tails_answer_comes_back(nodes: Cluster, session: bytes) -> None:
    whole = Station(nodes.knot, StationSpec(LayerSpan(0, 3), kv_tokens=64))
    expected = whole.forward(hidden(nodes, session)).payload
    frame = hidden(nodes, session, route=route(nodes), layers=[0, 1])
    logits = parse_frame(post(nodes.stations[0], frame).content)
    assert (logits.kind, logits.segments) == (Kind.LOGITS, (Segment(session, 5, 1),))
    assert logits.payload.tobytes() == expected.tobytes()
    ask = Ask(0, 6, 400, SamplingParams(temperature=0, seed=1, logprobs=2))
    frame = replace(frame, meta=dict(frame.meta) | {"sample": [ask.to_json()]})
    sampled = parse_frame(post(nodes.stations[0], frame).content)
    ((step,),) = parse_sampled(sampled, [ask], frame.segments)
    assert step.token == int(np.argmax(expected))  # type: ignore[union-attr]
    assert step.top[0][0] == step.token  # type: ignore[union-attr]
    # a chunk of a prompt asks for nothing and is told nothing
    assert post(nodes.stations[0], replace(frame, meta=dict(frame.meta) | {"sample": []})).status_code == 204
    # without a route the hidden states come back
    assert parse_frame(post(nodes.stations[0], hidden(nodes, session)).content).kind is Kind.HIDDEN


def test_a_step_asked_for_again_has_the_same_answer_and_is_not_computed_again(nodes: Cluster, session: bytes) -> None:
    node = nodes.station(0)
    first = post(nodes.stations[0], hidden(nodes, session, step="s-1"))
    computed, duplicates = metric(node, "knot_tokens_total"), metric(node, "knot_duplicate_steps_total")
    assert post(nodes.stations[0], hidden(nodes, session, step="s-1")).content == first.content
    assert metric(node, "knot_tokens_total") == computed
    assert metric(node, "knot_duplicate_steps_total") == duplicates + 1
    assert code(post(nodes.stations[0], hidden(nodes, session, [9], step="s-1"))) == (409, "step-reused")
    assert node.station is not None
    assert node.station.sessions[session].length == len(TOKENS)


def test_a_gap_says_which_position_was_expected_and_a_replay_is_taken(nodes: Cluster, session: bytes) -> None:
    url = nodes.stations[0]
    assert post(url, hidden(nodes, session)).status_code == 200
    reply = post(url, hidden(nodes, session, [7], 9))
    assert code(reply) == (409, "position-gap")
    assert "expected position 6" in reply.json()["error"]["message"]
    assert (
        post(url, hidden(nodes, session, [44, 91], 4)).content == post(url, hidden(nodes, session, [44, 91], 4)).content
    )


def test_a_frame_that_overtook_another_waits_for_it(nodes: Cluster, session: bytes) -> None:
    url, replies = nodes.stations[0], {}
    late = threading.Thread(
        target=lambda: replies.update(late=post(url, hidden(nodes, session, [44, 91], 4, hold_ms=20_000)))
    )
    late.start()
    time.sleep(0.2)
    replies["early"] = post(url, hidden(nodes, session, TOKENS[:4]))
    late.join()
    other = secrets.token_bytes(16)
    post(url, hidden(nodes, other, TOKENS[:4]))
    expected = parse_frame(post(url, hidden(nodes, other, [44, 91], 4)).content).payload
    assert parse_frame(replies["late"].content).payload.tobytes() == expected.tobytes()
    assert code(post(url, hidden(nodes, session, [1], 90, hold_ms=50))) == (409, "position-gap")


@pytest.mark.parametrize(
    ("change", "status", "what"),
    [
        ({"knot_id": bytes(16)}, 409, "wrong-identity"),
        ({"meta": {"layers": [0, 2]}}, 409, "wrong-identity"),
        ({"meta": {"route": [{"url": "http://127.0.0.1:9", "layers": [2, 3]}]}}, 400, "bad-route"),
        ({"meta": {"route": "elsewhere"}}, 400, "bad-route"),
        ({"meta": {"route": [{"url": "file:///etc/passwd", "layers": [1, 3]}]}}, 400, "bad-url"),
        ({"meta": {"step": 7}}, 400, "usage"),
        ({"meta": {"logits": [[0, 9]]}}, 400, "usage"),
        ({"kind": Kind.PARTIAL}, 400, "wrong-frame"),
        ({"payload": np.zeros((6, 8), np.float32)}, 400, "wrong-frame"),
        ({"payload": np.full((6, 256), np.nan, np.float32)}, 422, "bad-activation"),
        ({"segments": (Segment(bytes(16), 0, 3), Segment(bytes(16), 3, 3))}, 400, "duplicate-segment"),
        ({"segments": (Segment(bytes(16), 1 << 20, 6),)}, 400, "context-exceeded"),
    ],
    ids=lambda v: str(v) if isinstance(v, str) else None,
)  # fmt: skip
def test_a_frame_that_is_not_for_this_station_is_refused_by_name(
    nodes: Cluster, session: bytes, change: dict[str, Any], status: int, what: str
) -> None:
    on = metric(nodes.station(1), "knot_tokens_total")
    frame = replace(hidden(nodes, session, route=route(nodes)), **change)
    assert code(post(nodes.stations[0], frame)) == (status, what)
    assert metric(nodes.station(1), "knot_tokens_total") == on, "it was passed on"


def test_bytes_that_are_no_frame_are_refused(nodes: Cluster, session: bytes) -> None:
    url = nodes.stations[0]
    body = encode_frame(hidden(nodes, session))
    flipped = bytearray(body)
    flipped[-1] ^= 1
    assert code(post(url, bytes(flipped))) == (400, "bad-body-crc")
    assert code(post(url, body[:-1])) == (400, "truncated")
    assert code(post(url, body + b"x")) == (400, "trailing-bytes")
    assert code(post(url, b"")) == (400, "truncated")
    assert code(post(url, body, **{"content-type": "application/json"})) == (415, "bad-content-type")
    assert httpx2.post(f"{url}/forward", content=body, headers={"content-type": FRAME_TYPE}).status_code == 401
    many = hidden(nodes, session, [1] * 129)
    assert code(post(url, many)) == (400, "batch-too-long")


def test_what_the_next_station_says_is_passed_back_with_its_name(nodes: Cluster, session: bytes) -> None:
    first, second = nodes.stations
    post(first, hidden(nodes, session))  # the second station has not seen these
    reply = post(first, hidden(nodes, session, [7], 6, route=route(nodes)))
    assert code(reply) == (409, "position-gap")
    assert reply.headers["x-knot-failed"] == second
    gone = "http://127.0.0.1:9"
    reply = post(first, hidden(nodes, session, route=[{"url": gone, "layers": [1, 3]}]))
    assert code(reply) == (502, "unreachable")
    assert (reply.headers["x-knot-failed"], reply.headers["x-knot-down"]) == (gone, "unsent")


def test_a_session_is_dropped_along_the_route(nodes: Cluster, session: bytes) -> None:
    first, second = nodes.stations
    post(first, hidden(nodes, session, route=route(nodes)))
    reply = httpx2.delete(f"{first}/sessions/{session.hex()}", headers=AUTH)
    assert reply.json() == {"dropped": True, "behind": True}
    for url in (first, second):
        assert httpx2.delete(f"{url}/sessions/{session.hex()}", headers=AUTH).json()["dropped"] is False
    assert code(httpx2.delete(f"{first}/sessions/short", headers=AUTH)) == (400, "usage")


def test_a_caller_that_leaves_ends_the_work_within_a_phase_on_every_station(
    nodes: Cluster, session: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail waits in its first phase until it is told to stop."""
    node, began, stopped = nodes.station(1), threading.Event(), threading.Event()
    assert node.station is not None

    def forward(frame: Frame, check: Callable[[], None]) -> Frame:
        began.set()
        try:
            for _ in range(1000):
                check()
                time.sleep(0.01)
        except BaseException:
            stopped.set()
            raise
        return frame

    monkeypatch.setattr(node.station, "forward", forward)

    def gone() -> None:
        if began.is_set():
            raise RecursionError

    with pytest.raises(RecursionError):
        Peer(nodes.stations[0], token=TOKEN).call(
            "POST", "/forward", encode_frame(hidden(nodes, session, route=route(nodes))), seconds=20, check=gone,
            headers={"content-type": FRAME_TYPE},
        )  # fmt: skip
    assert stopped.wait(10)
    end = time.monotonic() + 10
    while any(metric(nodes.station(i), "knot_frames_queued") for i in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_another_span_can_be_booted_and_the_old_ones_callers_hear_of_it(
    tiny_knot: Path, serve_app: Callable[..., Any], session: bytes
) -> None:
    with cluster(str(tiny_knot), serve_app, shards=1, stations=((0, 1),)) as own:
        (url,) = own.stations
        before = httpx2.get(f"{url}/health").json()
        assert post(url, hidden(own, session)).status_code == 200
        for wrong in (b'{"layers":[1,9]}', b'{"layers":"all"}', b"[]", b"{"):
            assert httpx2.post(f"{url}/boot", content=wrong, headers=AUTH).status_code == 400
        reply = httpx2.post(f"{url}/boot", content=b'{"layers":[1,3]}', headers=AUTH)
        assert (reply.json()["spans"], reply.json()["role"], reply.json()["sessions"]) == ([[1, 3]], "exit", 0)
        after = httpx2.get(f"{url}/health").json()
        assert after["boot"] != before["boot"]
        assert code(post(url, hidden(own, session, layers=[0, 1]))) == (409, "wrong-identity")
        assert parse_frame(post(url, hidden(own, session, layers=[1, 3])).content).kind is Kind.LOGITS


def test_sessions_that_nobody_ends_give_way(tiny_knot: Path, serve_app: Callable[..., Any]) -> None:
    from knotctl.services import station

    with cluster(str(tiny_knot), serve_app, shards=1, stations=((0, 1),), context=256) as own:
        (url,) = own.stations
        for _ in range(4):
            assert post(url, hidden(own, secrets.token_bytes(16), [1] * 60)).status_code == 200
        assert code(post(url, hidden(own, secrets.token_bytes(16), [1] * 60))) == (507, "kv-full")
        before = station._SHORT_SESSION_SECONDS
        station._SHORT_SESSION_SECONDS = 0.0
        try:
            assert post(url, hidden(own, secrets.token_bytes(16), [1] * 60)).status_code == 200
        finally:
            station._SHORT_SESSION_SECONDS = before


def test_health_tells_who_it_is_and_metrics_what_it_did(nodes: Cluster) -> None:
    for url, node in nodes.nodes.items():
        about = httpx2.get(f"{url}/health").json()
        assert (about["status"], about["knot_id"]) == ("ok", nodes.knot.id)
        assert about["spans"]
        assert httpx2.get(f"{url}/readyz").json() == {"status": "ok"}
        assert httpx2.get(f"{url}/livez").json()["boot"] == about["boot"]
        assert httpx2.get(f"{url}/metrics").status_code == 401
        text = httpx2.get(f"{url}/metrics", headers=AUTH).text
        assert {f.name for f in text_string_to_metric_families(text)} >= {"knot_requests", "knot_tokens"}
        node.drain()
        assert httpx2.get(f"{url}/readyz").status_code == 503
        node._draining = False


def test_a_shard_embeds_what_it_owns_and_refuses_ids_that_nobody_owns(nodes: Cluster, session: bytes) -> None:
    ids = token_frame(nodes.knot.id, TOKENS, 0, session)
    partials = [parse_frame(post(u, ids, "/cobordism-embed").content) for u in nodes.shards]
    assert merge_partials(partials).payload.tobytes() == hidden(nodes, session).payload.tobytes()
    vocab = nodes.knot.header.config.vocab_size
    for wrong in (vocab, 1 << 30):
        reply = post(nodes.shards[0], token_frame(nodes.knot.id, [wrong], 0, session), "/cobordism-embed")
        assert code(reply) == (400, "token-out-of-range")
    assert code(post(nodes.shards[0], hidden(nodes, session), "/cobordism-embed")) == (400, "wrong-frame")
    assert code(post(nodes.shards[0], replace(ids, knot_id=bytes(16)), "/cobordism-embed")) == (409, "wrong-identity")


def test_the_heads_of_all_shards_merge_into_the_whole_head(nodes: Cluster, session: bytes) -> None:
    tail = Station(nodes.knot, StationSpec(LayerSpan(0, 3), kv_tokens=64))
    x = tail.forward(replace(hidden(nodes, session), meta={"logits": "none"})).payload
    whole = tail.forward(replace(hidden(nodes, session), meta={"logits": "all"})).payload
    frame = replace(hidden(nodes, session), payload=x)
    tops = [post(u, replace(frame, meta={"top": 5}), "/cobordism-head") for u in nodes.shards]
    merged = merge_tops([parse_frame(t.content) for t in tops], 5)
    for row, found in zip(whole, merged, strict=True):
        order = np.lexsort((np.arange(len(row)), -row))[:5]
        assert found == [(int(i), float(row[i])) for i in order]
    every = [parse_frame(post(u, replace(frame, meta={"top": "all"}), "/cobordism-head").content) for u in nodes.shards]
    assert merge_logits(every).tobytes() == whole.tobytes()
    for wrong in (0, -1, 5000, "some", 1.0, True):
        assert code(post(nodes.shards[0], replace(frame, meta={"top": wrong}), "/cobordism-head")) == (400, "usage")
    for few in ([parse_frame(t.content) for t in tops[:2]], [parse_frame(tops[0].content)] * 2):
        with pytest.raises(Exception, match="meet end to end") as e:
            merge_tops(few, 1) if few[0] is few[1] else merge_logits(few[1:])
        assert getattr(e.value, "code", "") == "no-owner"


def test_errors_are_documents(nodes: Cluster) -> None:
    reply = httpx2.get(f"{nodes.stations[0]}/nowhere", headers=AUTH)
    assert reply.status_code == 404
    assert set(json.loads(reply.content)["error"]) == {"code", "message", "hint"}
