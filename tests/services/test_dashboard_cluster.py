"""The dashboard of a real tracker with real workers, in a real browser: what happens to the cluster is seen at once.

The pictures of the README are made here, over five workers of which one lies:

    KNOTCTL_PICTURES=fixtures pytest tests/services/test_dashboard_cluster.py -k pictures
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Page
from selenium.webdriver.common.keys import Keys
from test_dashboard import LISTED, fields_of
from tracker_cluster import PATIENCE, TrackedCluster, in_background, wait_until

from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.credits import MICRO, Price
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import open_database
from knotctl.core.cluster.tables import LEDGER

PICTURES = os.environ.get("KNOTCTL_PICTURES")
STORY = "Tell me the story of a lighthouse keeper who finds a letter in a bottle."


@contextmanager
def tracked(knot: Path, rooms: dict[str, tuple[int, int]], **claims: float) -> Iterator[TrackedCluster]:
    """A tracker, and workers that have room for so many layers, once all of them are there."""
    with TrackedCluster(knot) as cluster:
        cluster.tracker()
        for name, layers in rooms.items():
            cluster.worker(name, layers, claim=claims.get(name, 1.0))
        wait_until(lambda: {n["node_id"] for n in cluster.coverage()["nodes"]} == set(rooms))
        wait_until(lambda: cluster.client.get(f"{cluster.url}/readyz").status_code == 200)
        yield cluster


def settled(cluster: TrackedCluster) -> bool:
    """Whether each layer is at one node, and nobody is told to change that."""
    nodes = cluster.coverage()["nodes"]
    moving = any(n["loading"] or n["dropping"] or len(n["layers"]) != 1 for n in nodes)
    return not moving and sum(b - a for n in nodes for a, b in n["layers"]) == cluster.model.n_layers


@pytest.mark.model
def test_the_page_shows_a_chat_on_its_way_then_the_gap_that_a_death_leaves_then_its_end(
    page: Page, knot_of: Callable[[str], Path]
) -> None:
    # either has room for its half alone: the layers of one that dies are nobody's
    with tracked(knot_of("smollm2"), {"one": (0, 17), "two": (13, 30)}) as cluster:
        page.open(cluster.url, 390)
        page.wait_for("state", "ready")
        assert "all 30 layers on 2 nodes" in page.text("coverage-text")
        wait_until(lambda: settled(cluster))
        held = {n["node_id"]: n["layers"][0] for n in cluster.coverage()["nodes"]}
        head, tail = sorted(held, key=lambda n: held[n])
        page.wait(lambda: all("layers {}:{}".format(*span) in page.text("picture") for span in held.values()))
        page.ask(STORY, max_tokens=160)
        page.wait_for("streams", f"{head} → {tail}")
        page.wait(lambda: page.run("return document.querySelector('#log .assistant .body').textContent.length") > 20)
        cluster.workers[tail].kill()
        page.wait_for("state", "gaps", PATIENCE)
        assert "gap {}:{}".format(*held[tail]) in page.text("picture")
        assert "cannot be served" in page.text("coverage-text")
        # at its head, or back at the tracker, which looks for another
        page.wait(lambda: any(state in page.text("streams") for state in ("stalled", "waiting")))
        page.run("document.getElementById('stop').click()")
        assert "stopped here" in page.answered()
        cluster.worker("three", (13, 30))
        page.wait_for("state", "ready", PATIENCE)
        assert "three" in page.text("nodes")
        page.ask("And what does it say?", max_tokens=24)
        assert "tokens/s" in page.answered(PATIENCE)
        page.wait_for("streams", "None now")
        assert page.run("return document.documentElement.scrollWidth") == 390
        assert page.complaints == []


def test_a_liar_is_shown_as_one(page: Page, tiny_knot: Path) -> None:
    with tracked(tiny_knot, {"honest": (0, 2), "liar": (1, 3)}, liar=1e6) as cluster:
        page.open(cluster.url)
        page.wait_for("nodes", "claims more than it delivers", PATIENCE)
        row = page.run("return [...document.querySelectorAll('#nodes tr:has(.bad) th')].map((c) => c.textContent)")
        assert row == ["liar"]
        page.wait(lambda: page.run("return document.querySelectorAll('#picture rect.liar').length"))
        assert "honest" in page.text("picture")


def test_the_ledger_is_live_and_opens_to_those_who_may_see_it(page: Page, tiny_knot: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.db")
    with open_database(path, LEDGER) as database:
        accounts = Accounts(database)
        accounts.open("alice")
        accounts.open(ISSUE)
        accounts.transfer("grant", ISSUE, "alice", 1000 * MICRO)
        Ledger(database).set_price("tiny", Price(1_000_000, 3_000_000))
        asks, _ = KeyStore(database).create("alice", [Scope.INFER])
        looks, _ = KeyStore(database).create("alice", [Scope.INFER, Scope.METRICS])
    with TrackedCluster(tiny_knot, key=looks) as cluster:
        cluster.tracker("--database", path, "--api-keys")
        cluster.worker("whole", (0, 3))
        wait_until(lambda: cluster.client.get(f"{cluster.url}/readyz").status_code == 200)
        page.open(cluster.url)
        page.give_key("knk_0000000000000000_wrong")
        page.wait_for("key-error", "does not take")
        page.give_key(asks)
        page.wait_for("state", "chat only")
        page.ask("hello", max_tokens=8)
        assert "tokens" in page.answered()
        assert not page.run("return document.querySelector('#nodes').checkVisibility()")
        page.run("document.getElementById('forget-key').click()")
        page.give_key(looks)
        page.wait_for("state", "ready")
        page.wait_for("ledger", "node:whole")
        assert "alice" not in page.text("ledger"), "whose requests they were is for nobody else"
        before = page.text("ledger")
        page.ask("hello", max_tokens=8)
        page.answered()
        page.wait(lambda: page.text("ledger") != before)
        assert page.complaints == []


def test_a_tracker_s_document_is_what_the_manual_has_and_the_leader_s_for_all(tiny_knot: Path, tmp_path: Path) -> None:
    database = ("--database", str(tmp_path / "tracker.db"))
    with TrackedCluster(tiny_knot) as cluster:
        first, second = cluster.tracker(*database), cluster.tracker(*database)
        cluster.worker("whole", (0, 3))
        assert [cluster.client.get(f"{t.url}/health").json()["leading"] for t in (first, second)].count(True) <= 1
        for url in (first.url, second.url):
            wait_until(lambda u=url: cluster.client.get(f"{u}/readyz").status_code == 200)  # type: ignore[misc]
            found = cluster.client.get(f"{url}/dashboard.json").json()
            assert set(found) <= set(LISTED)
            for name, value in found.items():
                if isinstance(value, dict | list):
                    assert fields_of(value) <= LISTED[name], name
            assert found["server"]["status"] == "ok"
            assert [n["node_id"] for n in found["nodes"]] == ["whole"]
            assert found["routes"][0]["stages"] == [{"node_id": "whole", "start_layer": 0, "end_layer": 3}]


def test_all_of_it_is_reached_by_the_keyboard_in_the_order_of_the_page(page: Page, tiny_knot: Path) -> None:
    with tracked(tiny_knot, {"whole": (0, 3)}) as cluster:
        page.open(cluster.url)
        page.wait_for("state", "ready")
        seen = []
        for _ in range(12):
            page.press(Keys.TAB)
            active = "return [document.activeElement.id || document.activeElement.className, %s]"
            style = "getComputedStyle(document.activeElement).outlineStyle"
            name, outline = page.run(active % style)
            assert not name or outline != "none", f"{name}: where the focus is must be seen"
            seen.append(name)
        wanted = ["skip", "theme", "log", "message", "temperature", "send"]
        assert [n for n in seen if n in wanted][: len(wanted)] == wanted


@pytest.mark.model
@pytest.mark.skipif(not PICTURES, reason="makes the README's pictures; KNOTCTL_PICTURES names their folder")
def test_pictures(page: Page, knot_of: Callable[[str], Path]) -> None:
    rooms = {"attic": (0, 20), "cellar": (6, 30), "garage": (0, 14), "kitchen": (14, 30), "lodger": (10, 30)}
    claims = {"attic": 30.0, "cellar": 25.0, "garage": 20.0, "kitchen": 20.0, "lodger": 2000.0}
    with tracked(knot_of("smollm2"), rooms, **claims) as cluster:
        wait_until(lambda: cluster.node("lodger").get("flagged"))
        wait_until(lambda: all(n["measured_tokens_per_sec"] for n in cluster.coverage()["nodes"] if n["layers"]))
        page.open(cluster.url)
        page.wait_for("state", "ready")
        body = {
            "model": cluster.model.name, "messages": [{"role": "user", "content": STORY}], "max_tokens": 250, "seed": 1,
        }  # fmt: skip
        story = in_background(lambda: cluster.post(body, "/v1/chat/completions"))
        page.ask("Why is the sky blue?", max_tokens=120)
        page.wait(lambda: page.run("return document.querySelector('#log .assistant .body').textContent.length") > 250)
        for scheme in ("light", "dark"):
            page.size(1280, 1000, dark=scheme == "dark")
            time.sleep(0.5)  # for the picture to be drawn again
            shot = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
            target = Path(str(PICTURES)) / f"dashboard-{scheme}.png"
            target.write_bytes(base64.b64decode(shot["data"]))
            assert target.stat().st_size <= 150_000
        story.join(PATIENCE)
