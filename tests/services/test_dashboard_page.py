"""The dashboard in a real browser: headless Chromium on real sockets, over the tiny model and over a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from test_dashboard import KEY, cluster

from knotctl.core.cluster.overview import cluster_sections
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.services.dashboard import PUBLIC_PATHS, dashboard_routes
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.head import Head
from knotctl.services.keys import ApiKeys

# What runs where somebody takes text for markup.
HOSTILE = '<img src=x onerror="window.broken=1">&lt;b&gt;\'"</script><script>window.broken=1</script>'


@pytest.fixture(scope="module")
def head(tiny_knot: Path) -> Iterator[Head]:
    with Engine.open(str(tiny_knot), EngineSpec(stations=2, context=512)) as engine:
        yield Head(engine)


@pytest.fixture(scope="module")
def url(head: Head, serve_app: Callable[..., Any]) -> Iterator[str]:
    with serve_app(head.app(EdgeConfig())) as server:
        yield server.url


@contextmanager
def tracker(serve_app: Callable[..., Any], document: dict[str, Any], answer: list[str] | None = None) -> Iterator[str]:
    """A server with the dashboard of a cluster, whose model says just this."""

    async def complete(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for piece in answer or []:
                choice = {"delta": {"content": piece}, "finish_reason": None}
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def status(_: Request) -> dict[str, Any]:
        return document

    routes = [*dashboard_routes(status), Route("/v1/chat/completions", complete, methods=["POST"])]
    with serve_app(Edge(Router(routes), EdgeConfig(public=PUBLIC_PATHS))) as server:
        yield server.url


def cluster_document(**sections: Any) -> dict[str, Any]:
    server = {"version": "0", "role": "tracker", "status": "ok", "reason": None, "uptime_s": 1.0}
    return {"server": server, "models": [{"name": "m"}], **cluster_sections(cluster(), 3.0), **sections}


def test_it_shows_the_model_and_what_it_takes_without_a_word_on_the_console(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for("state", "ready")
    assert page.text("title") == "tiny"
    assert "all 3 layers on 2 nodes" in page.text("coverage-text")
    assert "layers 0:1" in page.text("picture")
    assert "qwen2, 3 layers" in page.text("facts")
    assert page.complaints == []
    loaded = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert loaded
    assert all(name.startswith(f"{url}/") for name in loaded), "it works offline"


def test_the_chat_streams_an_answer_and_says_how_fast(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for("state", "ready")
    page.ask("hello")
    note = page.answered()
    assert "tokens/s" in note
    assert "first after" in note
    assert page.run("return document.querySelector('#log .assistant .body').textContent.length") > 0
    page.ask("and again")
    assert "in the prompt" in page.answered()
    assert page.run("return document.querySelectorAll('#log article').length") == 4
    page.driver.find_element(By.ID, "clear").click()
    assert page.run("return document.querySelectorAll('#log article').length") == 0
    assert page.complaints == []


def test_stop_ends_the_work_on_the_server(page: Page, url: str, head: Head) -> None:
    page.open(url)
    page.wait_for("state", "ready")
    page.run("document.getElementById('stop-at').value = ''; document.getElementById('temperature').value = '2'")
    for _ in range(5):  # random weights may end a text at once
        page.ask("a", max_tokens=500)
        page.run("document.getElementById('stop').click()")  # at once: a real click waits for the page to stand still
        if "stopped here" in page.answered():
            break
    else:
        pytest.fail("no answer lasted")
    page.wait(lambda: head.engine.stats()["running"] == 0)


def test_a_refusal_is_shown_in_the_server_s_words(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for("state", "ready")
    page.ask("word " * 600)
    page.answered()
    assert "the prompt has" in page.text("log")
    page.ask("hello")  # what was refused is not asked again
    assert "tokens" in page.answered()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_has_the_colours_of_the_system_until_told_otherwise(page: Page, url: str, scheme: str) -> None:
    def is_dark() -> bool:
        # light-dark() gives rgb(r, g, b)
        colour = page.run("return getComputedStyle(document.body).backgroundColor")
        return int(colour.removeprefix("rgb(").split(",")[0]) < 128

    page.open(url, dark=scheme == "dark")
    assert is_dark() is (scheme == "dark")
    seen = set()
    for _ in range(3):
        page.driver.find_element(By.ID, "theme").click()
        seen.add(is_dark())
    assert seen == {True, False}
    assert is_dark() is (scheme == "dark")


@pytest.mark.parametrize("width", [390, 320, 800, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, serve_app: Callable[..., Any], url: str, width: int) -> None:
    document = cluster_document()
    document["nodes"][0]["node_id"] = "n" * 128
    with tracker(serve_app, document) as cluster_url:
        for address in (url, cluster_url):
            page.open(address, width)
            page.wait_for("state", "ready")
            page.wait(lambda: page.text("picture"))
            assert page.run("return document.documentElement.scrollWidth") == width
    assert page.complaints == []


def test_it_shows_a_cluster_live(page: Page, serve_app: Callable[..., Any]) -> None:
    document = cluster_document()
    with tracker(serve_app, document) as url:
        page.open(url)
        page.wait_for("state", "ready")
        gap = document["coverage"]["gaps"][0]
        assert f"gap {gap[0]}:{gap[1]}" in page.text("picture")
        assert "cannot be served" in page.text("coverage-text")
        assert "LOAD_SHARD" in page.text("directives")
        assert {n["node_id"] for n in document["nodes"]} <= set(page.text("nodes"))
        lost = document["nodes"].pop()["node_id"]
        document["coverage"] |= {"covered": True, "gaps": []}
        document["nodes"][0] |= {"flagged": True, "measured_tokens_per_s": 0.3}
        page.wait_for("coverage-text", "all 100 layers")
        page.wait_for("nodes", "claims more than it delivers")
        names = page.run("return [...document.querySelectorAll('#nodes tbody th')].map((c) => c.textContent)")
        assert lost not in names
    page.wait_for("state", "no answer")


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(page: Page, head: Head, serve_app: Callable[..., Any]) -> None:
    with serve_app(head.app(EdgeConfig(keys=ApiKeys([KEY])))) as server:
        page.open(server.url)
        field = page.wait(lambda: page.driver.find_element(By.CSS_SELECTOR, "dialog[open] input"))
        field.send_keys("wrong-key-0001", Keys.ENTER)
        page.wait_for("key-error", "does not take")
        page.driver.find_element(By.ID, "key").send_keys(KEY, Keys.ENTER)
        page.wait_for("state", "ready")
        page.ask("hello")
        assert "tokens" in page.answered()
        kept = page.run("return [document.cookie, JSON.stringify(localStorage), location.href]")
        assert not any(KEY in text for text in kept)
        page.open(server.url)
        page.wait_for("state", "ready")  # a reload has it still
        page.driver.find_element(By.ID, "forget-key").click()
        page.wait(lambda: page.driver.find_elements(By.CSS_SELECTOR, "dialog[open]"))
        assert page.run("return sessionStorage.length") == 0
    assert page.complaints == []


def test_what_models_and_nodes_say_is_text(page: Page, serve_app: Callable[..., Any]) -> None:
    document = cluster_document(models=[{"name": HOSTILE}, {"name": "m"}])
    document["nodes"][0] |= {"node_id": HOSTILE, "state": HOSTILE, "reason": HOSTILE, "quantization": HOSTILE}
    document["directives"][0]["reason"] = HOSTILE
    document["ledger"] = {"nodes": [{"account_id": HOSTILE, "requests": 1}], "models": [{"model": HOSTILE}]}
    document["streams"] = [{"id": HOSTILE, "state": HOSTILE, "model": HOSTILE, "route": [HOSTILE]}]
    with tracker(serve_app, document, [HOSTILE, "\n```html\n", HOSTILE, "\n```\n", HOSTILE]) as url:
        page.open(url)
        page.wait_for("state", "ready")
        page.ask(HOSTILE)
        page.answered()
        time.sleep(0.3)
        for place in ("nodes", "directives", "ledger", "streams", "model"):
            assert HOSTILE in page.text(place), place
        assert page.text("log").count(HOSTILE) >= 4
        assert page.run("return document.querySelector('#log pre').textContent") == HOSTILE
        assert page.run("return document.querySelectorAll('main img, main script, main b').length") == 0
        assert page.run("return window.broken") is None
        assert page.complaints == []
        # were there a mistake, the browser itself would refuse
        with pytest.raises(JavascriptException, match="TrustedHTML"):
            page.run("document.body.innerHTML = '<b>x</b>'")


def test_it_can_be_used_without_seeing_it(page: Page, serve_app: Callable[..., Any], url: str) -> None:
    with tracker(serve_app, cluster_document()) as cluster_url:
        for address in (url, cluster_url):
            page.open(address)
            page.wait_for("state", "ready")
            nameless = page.run("""
                return [...document.querySelectorAll('button, input, select, textarea, [role=img], section')]
                  .filter((e) => e.checkVisibility())
                  .filter((e) => {
                    const by = e.getAttribute('aria-labelledby');
                    const label = by ? document.getElementById(by)?.textContent : e.getAttribute('aria-label');
                    return !(label || e.labels?.length || e.textContent.trim());
                  })
                  .map((e) => e.outerHTML.slice(0, 80))
            """)
            assert nameless == []
            assert page.run("return document.documentElement.lang") == "en"
            levels = page.run("return [...document.querySelectorAll('h1, h2')].map((e) => e.tagName)")
            assert levels.count("H1") == 1
