"""A tracker and workers as real processes: covered, proved, billed, and streams that no death of a node ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tracker_cluster import Process, TrackedCluster, wait_until

from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import MICRO, Price
from knotctl.core.cluster.forfeits import verdicts
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.services.edge import EdgeConfig
from knotctl.services.head import Head

BODY = {"model": "tiny", "prompt": [5, 17, 200, 3, 44, 91], "max_tokens": 120, "temperature": 0.9, "seed": 5}
ACCOUNT = "customer"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    path = tmp_path_factory.mktemp("tracker") / "tracker.db"
    with open_database(str(path), LEDGER) as opened:
        Accounts(opened).open(ACCOUNT)
        Accounts(opened).open(ISSUE)
        Accounts(opened).transfer("grant", ISSUE, ACCOUNT, 1000 * MICRO)
        Ledger(opened).set_price("tiny", Price(1_000_000, 3_000_000))
        yield opened


@pytest.fixture(scope="module")
def tracked(tiny_knot: Path, database: Database) -> Iterator[TrackedCluster]:
    """One that lies, two that can hold the first two layers, three that can hold the last."""
    key, _ = KeyStore(database).create(ACCOUNT, [Scope.INFER])
    path = str(database.engine.url.database)
    with TrackedCluster(tiny_knot, key=key) as made:
        made.tracker("--database", path, "--api-keys")
        for name, layers in (("a", (0, 2)), ("b", (0, 2)), ("x", (2, 3)), ("y", (2, 3)), ("z", (2, 3))):
            made.worker(name, layers)
        wait_until(lambda: len([n for n in made.coverage()["nodes"] if n["layers"]]) >= 4)
        yield made


@pytest.fixture(scope="module")
def alone(tiny_knot: Path, serve_app: Callable[..., Any]) -> Iterator[str]:
    """The same model in one process: what every answer must be."""
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        head = Head(engine)
        with serve_app(head.app(EdgeConfig()), on_drain=head.drain) as server:
            yield server.url


@pytest.fixture(scope="module")
def text(tracked: TrackedCluster, alone: str) -> str:
    reply = tracked.client.post(f"{alone}/v1/completions", json=BODY).json()
    return str(reply["choices"][0]["text"])


def test_chat_through_the_tracker_is_that_of_one_process(tracked: TrackedCluster, alone: str) -> None:
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "seed": 3,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    here = tracked.client.post(f"{alone}/v1/chat/completions", json=chat).json()
    there = tracked.post(chat, "/v1/chat/completions").json()
    for key in ("choices", "usage", "model", "system_fingerprint"):
        assert there[key] == here[key]


def test_what_is_wrong_is_refused_as_by_one_process(tracked: TrackedCluster, alone: str) -> None:
    for body in ({"temperature": 9}, {"model": "other"}, {"prompt": [401]}, {"prompt": list(range(300)) * 2}):
        here = tracked.client.post(f"{alone}/v1/completions", json=BODY | body)
        there = tracked.post(BODY | body)
        assert there.status_code == here.status_code
        assert there.json()["error"]["code"] == here.json()["error"]["code"]
        assert there.json()["error"]["param"] == here.json()["error"]["param"]


def test_prompts_that_come_together_fit_the_frames_of_the_smallest_node(tracked: TrackedCluster) -> None:
    def recoveries() -> list[str]:
        text = tracked.client.get(f"{tracked.url}/metrics", headers=tracked.node_headers).text
        return [line for line in text.splitlines() if line.startswith("knot_head_recoveries_total")]

    before = recoveries()
    assert before
    body = BODY | {"prompt": list(range(1, 61)), "max_tokens": 4}
    with ThreadPoolExecutor(6) as pool:
        assert all(reply.is_success for reply in pool.map(lambda _: tracked.post(body), range(12)))
    assert recoveries() == before


def test_the_model_is_listed(tracked: TrackedCluster) -> None:
    listed = tracked.client.get(f"{tracked.url}/v1/models", headers=tracked.headers).json()["data"]
    assert [m["id"] for m in listed] == ["tiny"]


def test_keys_have_scopes(tracked: TrackedCluster) -> None:
    get = tracked.client.get
    assert get(f"{tracked.url}/v1/models").status_code == 401
    assert get(f"{tracked.url}/coverage", headers=tracked.headers).status_code == 403
    assert tracked.client.post(f"{tracked.url}/nodes", json={}, headers=tracked.headers).status_code == 403


def test_a_repeated_request_is_charged_once(tracked: TrackedCluster, database: Database) -> None:
    before = Accounts(database).get(ACCOUNT).balance
    body = BODY | {"max_tokens": 10}
    first = tracked.post(body, **{"idempotency-key": "once"})
    assert first.status_code == 200
    again = tracked.post(body, **{"idempotency-key": "once"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already-served")
    other = tracked.post(body | {"max_tokens": 11}, **{"idempotency-key": "once"})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "operation-mismatch")
    assert before - Accounts(database).get(ACCOUNT).balance == 6 * 1 + 10 * 3


@pytest.mark.parametrize("role", ["tail", "head"])
def test_a_stream_survives_the_death_of_a_node(tracked: TrackedCluster, text: str, role: str) -> None:
    name = tracked.route(BODY)[0 if role == "head" else -1]
    assert tracked.streamed(BODY, 20, tracked.workers[name].kill) == text
    # whoever is left covers what it had, and it comes back
    wait_until(lambda: tracked.coverage()["covered"])
    old = tracked.workers[name]
    layers = (0, 2) if name in "ab" else (2, 3)
    old.close()
    tracked.worker(name, layers)
    wait_until(lambda: tracked.node(name).get("silent_s", 99) < 5)


def test_a_stream_survives_a_node_that_hangs(tracked: TrackedCluster, text: str) -> None:
    wait_until(lambda: {"x", "y", "z"} & {n["node_id"] for n in tracked.coverage()["nodes"] if n["layers"] == [[2, 3]]})
    name = tracked.route(BODY)[-1]
    try:
        assert tracked.streamed(BODY, 20, lambda: tracked.workers[name].signal(signal.SIGSTOP)) == text
    finally:
        tracked.workers[name].signal(signal.SIGCONT)
    wait_until(lambda: tracked.node(name).get("silent_s", 99) < 5)


def test_a_liar_is_found_and_slashed_with_the_evidence_kept(tracked: TrackedCluster, database: Database) -> None:
    tracked.worker("liar", (0, 3), claim=1e6)
    wait_until(lambda: tracked.node("liar").get("flagged"))
    about = tracked.node("liar")
    assert about["measured_tokens_per_sec"] < about["benchmark_tokens_per_sec"] / 2
    wait_until(lambda: verdicts(database, "liar"))
    evidence = verdicts(database, "liar")[0].evidence
    assert evidence.flagged
    assert evidence.claimed == 10**9
    # nobody who delivers what he claims is accused
    assert {v.account_id for v in verdicts(database)} == {"node:liar"}


def test_a_node_that_is_told_to_end_leaves_and_streams_go_on(tracked: TrackedCluster, text: str) -> None:
    name = tracked.route(BODY)[-1]
    statuses: list[int] = []
    assert tracked.streamed(BODY, 10, lambda: tracked.workers[name].signal(signal.SIGTERM)) == text
    statuses.append(tracked.workers[name]._process.wait(60))
    assert statuses == [0]
    assert not tracked.node(name)


def test_a_client_that_leaves_ends_the_work_and_pays_for_what_it_got(
    tracked: TrackedCluster, database: Database
) -> None:
    body = BODY | {"max_tokens": 400, "stream": True}
    wait_until(lambda: not Ledger(database).open_holds())
    before = Accounts(database).get(ACCOUNT).balance
    with tracked.client.stream(
        "POST", f"{tracked.url}/v1/completions", json=body, headers=tracked.headers | {"idempotency-key": "leaver"}
    ) as reply:
        next(reply.iter_lines())
    wait_until(lambda: not Ledger(database).open_holds())
    hold = Ledger(database).find(ACCOUNT, "key:leaver")
    assert hold is not None
    assert hold.state == "settled"
    assert 0 < hold.usage.generated < 400
    assert before - Accounts(database).get(ACCOUNT).balance == hold.charged == hold.price.bill(hold.usage)
    wait_until(lambda: not tracked.coverage()["streams"])


def test_usage_and_the_books(tracked: TrackedCluster, database: Database) -> None:
    about = tracked.client.get(f"{tracked.url}/v1/usage", headers=tracked.headers).json()
    assert about["account"] == ACCOUNT
    assert about["data"][0]["model"] == "tiny"
    assert about["micro_credits"]["balance"] == Accounts(database).get(ACCOUNT).balance
    wait_until(lambda: not Ledger(database).open_holds())
    report = audit(database)
    assert report.ok, json.dumps(str(report))
    earned = sum(a.balance for a in Accounts(database).all() if a.account_id.startswith(("node:", "system:forfeits")))
    assert earned == 1000 * MICRO - Accounts(database).get(ACCOUNT).balance > 0


def test_a_tracker_that_is_restarted_finds_nodes_that_hold_their_layers(tracked: TrackedCluster, text: str) -> None:
    old = next(t for t in tracked.trackers if t.is_running)
    port = int(old.url.rsplit(":", 1)[1])
    old.kill()
    tracked.tracker(*old.argv[-3:], port=port)
    wait_until(lambda: tracked.coverage()["covered"])
    assert tracked.streamed(BODY) == text
    # and learns who is here from their heartbeats
    wait_until(lambda: all(n["silent_s"] < 3 for n in tracked.coverage()["nodes"]))


def test_a_tracker_that_is_restarted_gets_over_nodes_that_died_meanwhile(tracked: TrackedCluster, text: str) -> None:
    # It knows them from its database alone, and the first route that it proves may lead over them.
    name = tracked.route(BODY)[-1]
    old = next(t for t in tracked.trackers if t.is_running)
    old.kill()
    tracked.workers[name].kill()
    tracked.tracker(*old.argv[-3:], port=int(old.url.rsplit(":", 1)[1]))
    # Whoever has its layers, or is told to load them, answers in its place.
    wait_until(lambda: (reply := tracked.post(BODY)).is_success and reply.json()["choices"][0]["text"] == text, 60)
    assert not tracked.node(name)


def test_of_two_trackers_on_one_database_one_is_killed(
    text: str, tiny_knot: Path, database_url: Callable[[], str]
) -> None:
    with TrackedCluster(tiny_knot) as pair:
        database = database_url()
        first, second = (pair.tracker("--database", database) for _ in range(2))
        wait_until(lambda: pair.coverage().get("fence"))
        pair.worker("h", (0, 2))
        pair.worker("t", (2, 3))
        wait_until(lambda: pair.coverage()["covered"])
        follower, leader = sorted((first, second), key=lambda t: leads(pair, t))
        assert leads(pair, leader)
        assert not leads(pair, follower)
        reply = pair.client.post(f"{follower.url}/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["text"] == text
        fence = pair.coverage()["fence"]
        leader.kill()
        # the other one serves at once, and leads when the lease has run out
        reply = pair.client.post(f"{follower.url}/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["text"] == text
        wait_until(lambda: leads(pair, follower))
        wait_until(lambda: {n["node_id"] for n in pair.coverage()["nodes"] if n["silent_s"] < 2} == {"h", "t"})
        assert pair.coverage()["fence"] > fence
        assert pair.coverage()["covered"]


def leads(cluster: TrackedCluster, tracker: Process) -> bool:
    return bool(cluster.client.get(f"{tracker.url}/health").json()["leading"])
