"""The dashboard's files and its document: what is served to whom, and what is never in it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cluster_nodes import TOKEN
from cluster_nodes import cluster as nodes_of
from starlette.requests import Request
from starlette.routing import Router
from test_knot_service_page import section

from knotctl.core.cluster import overview
from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.nodes import parse_nodes
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import parse_preset
from knotctl.core.cluster.usage import EarningsRow, UsageRow
from knotctl.core.engine import remote
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.errors import SourceError
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.services import dashboard
from knotctl.services.dashboard import PUBLIC_PATHS, dashboard_routes
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.head import Head
from knotctl.services.head_status import engine_sections
from knotctl.services.keys import ApiKeys

KEY = "sk-0123456789abcdef"
FILES = Path(dashboard.__file__).parent / "static"
CLUSTER = Path(__file__).parents[2] / "fixtures" / "cluster"
SECTIONS = re.split(r"^\.TP\n", section("DASHBOARD").replace("\\-", "-").partition(".TE\n")[2], flags=re.M)[1:]
# Section -> the names that the page lists for it.
LISTED = {part.split("\n")[0].removeprefix(".B "): set(re.findall(r"^\.IR? (\w+)", part, re.M)) for part in SECTIONS}


@pytest.fixture(scope="module")
def engine(tiny_knot: Path) -> Iterator[Engine]:
    with Engine.open(str(tiny_knot), EngineSpec(shards=2, stations=2, context=512)) as made:
        yield made


def cluster(name: str = "six-nodes.json") -> Controller:
    """A controller whose nodes did what they were told, but for one, which still loads layers that nobody has."""
    model = parse_preset((CLUSTER / "llama-700b.json").read_bytes())
    controller = Controller(model, Policy())
    for node in parse_nodes((CLUSTER / name).read_bytes(), model):
        controller.join(node, 1.0)
    given = [d for node_id in controller.members for d in controller.deliver(node_id)]
    last = next(d for d in reversed(given) if d.order.closes_gap)
    for directive in given:
        if directive is not last:
            controller.answer(directive.order.node_id, directive.epoch, 2.0)
    return controller


def fields_of(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else {name for item in value for name in item}


# ---- the files


def test_everything_that_the_page_names_is_served_by_itself_and_nothing_else() -> None:
    texts = {path.name: path.read_text() for path in FILES.iterdir()}
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', texts["index.html"]))
    named |= {f"/static/{n}" for t in texts.values() for n in re.findall(r'^import .* from "\./(.+)";$', t, re.M)}
    assert named | {"/"} == set(PUBLIC_PATHS)
    outside = [u for t in texts.values() for u in re.findall(r"https?://[^\"'\s]+", t)]
    assert set(outside) <= {"http://www.w3.org/2000/svg"}, "a namespace, which nobody fetches"
    for name, text in texts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), name
        assert not re.search(r"\sstyle=|<style|\son\w+=\"", text), f"{name}: the policy forbids it"


def test_files_come_with_a_policy_their_type_and_an_etag(engine: Engine, serve_app: Callable[..., Any]) -> None:
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "/": "text/html; charset=utf-8"}
    with serve_app(Head(engine).app(EdgeConfig(keys=ApiKeys([KEY])))) as server:
        for path in PUBLIC_PATHS:
            reply = httpx2.get(f"{server.url}{path}")
            assert reply.status_code == 200, "a key is typed into the page: it must load without one"
            assert reply.headers["content-type"].startswith(types[path.rpartition(".")[2]])
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            again = httpx2.get(f"{server.url}{path}", headers={"if-none-match": reply.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/static/", "/static/../dashboard.py", "/static/%2e%2e/dashboard.py", "/static/none.js"):
            assert httpx2.get(f"{server.url}{path}", headers={"x-api-key": KEY}).status_code == 404


# ---- the document


def test_the_document_needs_a_key_and_has_none(engine: Engine, serve_app: Callable[..., Any]) -> None:
    with serve_app(Head(engine).app(EdgeConfig(keys=ApiKeys([KEY])))) as server:
        url = f"{server.url}/dashboard.json"
        assert httpx2.get(url).status_code == 401
        assert httpx2.get(url, headers={"x-api-key": "wrong-key-0001"}).status_code == 401
        reply = httpx2.get(url, headers={"authorization": f"Bearer {KEY}"})
        assert reply.status_code == 200
        assert reply.headers["cache-control"] == "no-store"
        assert KEY not in reply.text


def test_a_head_s_document_is_what_the_manual_has(engine: Engine) -> None:
    head = Head(engine)
    stop = dict.fromkeys(engine.tokenizer.stop_ids, -100.0)
    stream = engine.submit([5] * 8, SamplingParams(temperature=0, logit_bias=stop), 500)
    next(iter(stream))
    document = head._dashboard() | {"version": 1}
    stream.cancel()
    assert document["nodes"][0]["spans"] == [[0, 1]]
    assert document["coverage"]["covered"] is True
    assert document["requests"]["running"] == 1
    assert document["streams"][0]["prompt_tokens"] == 8
    assert sum(w["bytes"] for w in document["weights"]) == document["memory"]["model_bytes"]
    assert json.dumps(document, allow_nan=False)
    assert set(document) <= set(LISTED)
    for name, value in document.items():
        if isinstance(value, dict | list):
            assert fields_of(value) <= LISTED[name], name


def test_what_is_asked_and_answered_is_not_in_the_document(engine: Engine, serve_app: Callable[..., Any]) -> None:
    head = Head(engine)
    with serve_app(head.app(EdgeConfig())) as server, httpx2.Client(timeout=60) as client:
        before = head.metrics.totals()["tokens"]["generated"]
        fields = {"model": "tiny", "prompt": "xyzzy plugh", "max_tokens": 400, "stream": True}
        fields["logit_bias"] = {str(i): -100 for i in engine.tokenizer.stop_ids}
        with client.stream("POST", f"{server.url}/v1/completions", json=fields) as reply:
            lines = reply.iter_lines()
            text = "".join(json.loads(next(lines)[6:])["choices"][0]["text"] for _ in range(40) if next(lines) == "")
            document = client.get(f"{server.url}/dashboard.json").text
        assert json.loads(document)["requests"]["running"] == 1
        assert json.loads(document)["tokens"]["generated"] > before, "tokens of what still runs are counted"
        assert "xyzzy" not in document
        assert "plugh" not in document
        assert text not in document


def test_a_cluster_s_document_is_what_the_manual_has() -> None:
    controller = cluster()
    controller.measured("a", 0.5, 3.0)
    document = overview.cluster_sections(controller, 3.0)
    usage = [UsageRow("alice", "m", 1, 2, 3, 4), UsageRow("bob", "m", 10, 20, 30, 40)]
    document["ledger"] = overview.ledger_section(usage, [EarningsRow("node:a", 1, 2, 3, 4)])
    for name, value in document.items():
        if name not in ("more_nodes", "ledger"):
            assert fields_of(value) <= LISTED[name], name
    assert document["ledger"]["models"] == [
        {"model": "m", "requests": 11, "prompt_tokens": 22, "generated_tokens": 33, "charged": 44}
    ]
    assert "alice" not in json.dumps(document), "whose requests they were is for nobody else"
    nodes = {n["node_id"]: n for n in document["nodes"]}
    assert nodes["a"]["flagged"]
    assert nodes["a"]["measured_tokens_per_s"] == 0.5
    (directive,) = document["directives"]
    loading = nodes[directive["node_id"]]
    assert loading["state"] == "loading"
    assert [directive["start_layer"], directive["end_layer"]] in loading["loading"]
    assert document["coverage"]["gaps"]


def test_of_very_many_nodes_the_first_are_listed() -> None:
    model = parse_preset((CLUSTER / "llama-700b.json").read_bytes())
    controller = Controller(model, Policy())
    (first, *_) = parse_nodes((CLUSTER / "six-nodes.json").read_bytes(), model)
    for i in range(overview.MAX_NODES + 5):
        controller.join(type(first)(f"n{i}", first.vram_bytes, first.quantizations, 10.0, first.benchmark_model), 1.0)
    document = overview.cluster_sections(controller, 1.0)
    assert (len(document["nodes"]), document["more_nodes"]) == (overview.MAX_NODES, 5)
    assert document["nodes"][0]["loading"], "those with layers first"


def test_many_who_look_have_the_document_made_once(
    serve_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(dashboard, "FRESH_SECONDS", 60.0)

    async def status(_: Request) -> dict[str, Any]:
        return {"n": made.append(1)}

    with serve_app(Edge(Router(dashboard_routes(status)), EdgeConfig())) as server:
        replies = [httpx2.get(f"{server.url}/dashboard.json").json() for _ in range(5)]
    assert replies == [{"version": 1, "n": None}] * 5
    assert len(made) == 1


def test_stations_elsewhere_are_nodes_and_one_that_is_gone_is_lost(
    tiny_knot: Path, serve_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_POLL_SECONDS", 0.05)
    with nodes_of(str(tiny_knot), serve_app) as nodes, nodes.engine() as engine:
        found = engine_sections(engine, Head(engine).metrics)
        assert [n["node_id"] for n in found["nodes"]] == nodes.stations
        assert [n["spans"] for n in found["nodes"]] == [[[0, 1]], [[1, 3]]]
        assert all(n["state"] == "serving" and type(n["weight_bytes"]) is int for n in found["nodes"])
        assert [s["node_id"] for s in found["routes"][0]["stages"]] == nodes.stations
        assert TOKEN not in json.dumps(found)
        nodes.station(1).ready = False
        end = time.monotonic() + 10
        while engine_sections(engine, Head(engine).metrics)["nodes"][1]["state"] != "loading":
            assert time.monotonic() < end
            time.sleep(0.05)
        monkeypatch.setattr(remote.NodeAbout, "ask", gone)
        while engine_sections(engine, Head(engine).metrics)["nodes"][1]["state"] != "lost":
            assert time.monotonic() < end
            time.sleep(0.05)
        found = engine_sections(engine, Head(engine).metrics)
        assert found["coverage"]["gaps"] == [[0, 3]]


def gone(*_: Any) -> Any:
    raise SourceError("unreachable", "no connection")
