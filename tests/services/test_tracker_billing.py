"""Requests that are sent again, left, or cut off by the death of their tracker: each is charged once, for what it got.

KNOTCTL_BILLED_REQUESTS and KNOTCTL_BILLED_KILLS make it longer; -s shows what became of them.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tracker_cluster import TrackedCluster, sweep_all, wait_until

from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import MICRO, Price, Usage
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.tokens.sampler import SamplingParams

REQUESTS = int(os.environ.get("KNOTCTL_BILLED_REQUESTS", "120"))
KILLS = int(os.environ.get("KNOTCTL_BILLED_KILLS", "3"))
CLIENTS = 6
ACCOUNT = "customer"
GRANT = 10_000 * MICRO
# Refusals that another try does not change, and how long a client tries.
FINAL = {"already-served", "not-served"}
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One of the requests that clients ask, and the tokens that it must be answered with."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass(slots=True)
class Attempt:
    """What one try brought: tokens (None of a refusal), whether that was all, and the refusal's code."""

    tokens: int | None = None
    is_whole: bool = False
    code: str = ""


@pytest.fixture(scope="module")
def wanted(tiny_knot: Path) -> list[Wanted]:
    """Some requests, and what the engine makes of them by itself."""
    draw, found = random.Random(11), []
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        for seed in range(16):
            prompt = [draw.randrange(400) for _ in range(draw.randint(1, 12))]
            most = draw.randint(1, 30)
            stream = engine.submit(prompt, SamplingParams(temperature=0.9, seed=seed, logprobs=1), most)
            body = {
                "model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0.9, "seed": seed, "logprobs": 1,
            }  # fmt: skip
            found.append(Wanted(body, [s.token for s in stream]))
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Database, str]]:
    """A database by its reference and open, and the customer's key."""
    is_postgres = request.param == "postgres"
    ref = request.getfixturevalue("postgres").new_database() if is_postgres else str(tmp_path / "billing.db")
    with open_database(ref, LEDGER) as database:
        Accounts(database).open(ACCOUNT)
        Accounts(database).open(ISSUE)
        Accounts(database).transfer("grant", ISSUE, ACCOUNT, GRANT)
        Ledger(database).set_price("tiny", Price(1_000_000, 3_000_000))
        yield ref, database, KeyStore(database).create(ACCOUNT, [Scope.INFER])[0]


class Client:
    """Sends one request under one key until it is answered or refused for good, as an impatient one does."""

    def __init__(self, http: httpx2.Client, urls: list[str], key: str) -> None:
        self._http, self._urls = http, urls
        self._headers = {"authorization": f"Bearer {key}"}

    def ask(self, number: int, wanted: Wanted) -> list[Attempt]:
        draw = random.Random(number)
        headers = self._headers | {"idempotency-key": f"r{number}"}
        attempts: list[Attempt] = []
        end = time.monotonic() + PATIENCE
        # Some leave behind so many tokens, and ask again; some ask twice at once.
        leave_at = draw.choice([None, None, 0, draw.randint(1, 12)])
        body = wanted.body | {"stream": leave_at is not None or draw.random() < 0.6}
        if draw.random() < 0.1:
            with ThreadPoolExecutor(2) as pool:
                attempts += pool.map(lambda d: self._try(d, headers, body, None), [random.Random(1), draw])
        while not attempts or not (attempts[-1].is_whole or attempts[-1].code in FINAL):
            if attempts and (time.monotonic() > end or sum(a.code == "in-progress" for a in attempts) > 4):
                break
            attempts.append(self._try(draw, headers, body, leave_at))
            leave_at = None
            time.sleep(draw.uniform(0, 0.3))
        if attempts[-1].is_whole and draw.random() < 0.2:
            attempts.append(self._try(draw, headers, body, None))  # as if the answer had been lost
        return attempts

    def _try(self, draw: random.Random, headers: dict[str, str], body: dict[str, Any], leave_at: int | None) -> Attempt:
        attempt = Attempt()
        url = f"{draw.choice(self._urls)}/v1/completions"
        try:
            with self._http.stream("POST", url, json=body, headers=headers) as reply:
                if reply.status_code != 200:
                    attempt.code = json.loads(reply.read())["error"]["code"]
                elif body["stream"]:
                    self._read(attempt, reply, leave_at)
                else:
                    document = json.loads(reply.read())
                    attempt.tokens, attempt.is_whole = document["usage"]["completion_tokens"], True
        except httpx2.TransportError as e:
            attempt.code = type(e).__name__
        return attempt

    def _read(self, attempt: Attempt, reply: httpx2.Response, leave_at: int | None) -> None:
        attempt.tokens = 0
        for line in reply.iter_lines():
            if leave_at is not None and attempt.tokens >= leave_at:
                attempt.code = "left"
                return
            if line == "data: [DONE]":
                attempt.is_whole = True
            elif line.startswith("data: "):
                document = json.loads(line[6:])
                if "error" in document:
                    attempt.code = document["error"]["code"]
                    return
                attempt.tokens += len((document["choices"][0]["logprobs"] or {}).get("tokens", ()))


@contextmanager
def killed(cluster: TrackedCluster, options: list[str], is_done: threading.Event, times: int) -> Iterator[None]:
    """One tracker after the other dies at any moment and is started again at its place, so many times."""
    draw, failed = random.Random(3), []

    def work() -> None:
        try:
            for _ in range(times):
                is_done.wait(draw.uniform(1.0, 3.0))
                if is_done.is_set():
                    return
                old = draw.choice([t for t in cluster.trackers if t.is_running])
                port = int(old.url.rsplit(":", 1)[1])
                old.kill()
                assert cluster.tracker(*options, port=port).url
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    assert not failed, failed


@pytest.mark.timeout(REQUESTS * 3 + 240)
def test_no_retry_leaving_or_kill_charges_twice_serves_for_free_or_leaves_a_hold(
    tiny_knot: Path, wanted: list[Wanted], books: tuple[str, Database, str], postgres: Any
) -> None:
    ref, database, key = books
    options = ["--database", ref, "--api-keys"]
    began = time.monotonic()
    with TrackedCluster(tiny_knot, key=key) as cluster:
        for _ in range(1 + ref.startswith("postgresql")):
            cluster.tracker(*options)
        for name, layers in (("h1", (0, 2)), ("h2", (0, 3)), ("t1", (2, 3))):
            cluster.worker(name, layers)
        wait_until(lambda: cluster.coverage()["covered"])
        urls = [t.url for t in cluster.trackers]
        is_done = threading.Event()
        limits = httpx2.Limits(max_connections=None)
        with (
            httpx2.Client(timeout=90, trust_env=False, limits=limits) as http,
            killed(cluster, options, is_done, KILLS),
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            client = Client(http, urls, key)
            tries = list(pool.map(lambda n: client.ask(n, wanted[n % len(wanted)]), range(REQUESTS)))
        deaths = sum(not t.is_running for t in cluster.trackers)
        assert deaths >= 1
        wait_until(lambda: not any(cluster.coverage()["streams"].values()))
    # Every tracker is gone: what it left open a later one closes.
    left = len(Ledger(database).open_holds())
    sweep_all(database)
    outcomes = check(database, wanted, tries)
    print(
        f"\nbilling: {REQUESTS} requests in {sum(map(len, tries))} tries, {deaths} trackers killed, "
        f"{time.monotonic() - began:.0f} s: {dict(outcomes)}; {left} holds left to sweep; "
        f"refusals {dict(Counter(a.code for t in tries for a in t if a.code))}"
    )
    # The faults happened: some were cut off, some refused as a repetition.
    assert outcomes["whole"] > REQUESTS / 2
    assert outcomes["in part"]


def check(database: Database, wanted: list[Wanted], tries: list[list[Attempt]]) -> Counter[str]:
    """Hold what clients got against what they paid, request by request and in sum."""
    ledger, outcomes, charged = Ledger(database), Counter[str](), 0
    for number, attempts in enumerate(tries):
        asked = wanted[number % len(wanted)]
        hold = ledger.find(ACCOUNT, f"key:r{number}")
        got = [a.tokens for a in attempts if a.tokens is not None]
        what = f"r{number}: {attempts}: {hold}"
        assert len([n for n in got if n]) <= 1, f"served twice: {what}"
        tokens = max(got, default=0)
        if hold is None:
            assert not tokens, f"served without a hold: {what}"
            outcomes["never begun"] += 1
            continue
        if hold.state == "released":
            assert not tokens, f"served for free: {what}"
            assert not hold.charged, what
            outcomes["released"] += 1
            continue
        assert hold.state == "settled", what
        assert hold.charged == hold.price.bill(hold.usage), what
        charged += hold.charged
        if any(a.is_whole for a in attempts):
            assert hold.usage == Usage(len(asked.body["prompt"]), tokens), what
            assert tokens == len(asked.tokens), what
            outcomes["whole"] += 1
        else:
            assert tokens <= hold.usage.generated <= len(asked.tokens), what
            outcomes["in part"] += 1
    assert not ledger.open_holds()
    account = Accounts(database).get(ACCOUNT)
    assert account.held == 0
    assert GRANT - account.balance == charged
    earned = sum(a.balance for a in Accounts(database).all() if a.account_id.startswith("node:"))
    assert earned == charged
    report = audit(database)
    assert report.ok, report.findings
    return outcomes
