"""A live cluster of a real model at an S3 store: workers of unequal memory, one of which lies, killed during streams.

Any two of the five may die, in turn, while the official client reads; with PostgreSQL also one of two trackers. By hand
on another model, with more pairs of workers (all ten at the most), and with the times that it took:

    KNOTCTL_LIVE_MODEL=coder-1.5b KNOTCTL_LIVE_PAIRS=10 pytest -s tests/services/test_live_cluster.py
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from store_doubles import free_port, point_s3_at, program, serve
from tracker_cluster import TrackedCluster, in_background, sweep_all, wait_until

from knotctl.cli import main
from knotctl.core.cluster.accounts import FORFEITS, ISSUE, Accounts, node_account
from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import MICRO, Price, Usage
from knotctl.core.cluster.forfeits import verdicts
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.tables import LEDGER

MODEL = os.environ.get("KNOTCTL_LIVE_MODEL", "smollm2")
# Besides the head and what follows it on the route of the moment: so many pairs by name.
PAIRS = int(os.environ.get("KNOTCTL_LIVE_PAIRS", "0"))
ACCOUNT = "customer"
GRANT = 1000 * MICRO
LENGTH = 96
LIAR = "liar"
# What of the model each worker has room for, as shares of its layers: any three of them can cover it.
ROOM = {"a": 0.5, "b": 0.45, "c": 0.4, "d": 0.36, LIAR: 0.42}
QUESTIONS = (
    ("Write a Python function that reverses a string, and explain each of its lines.", 0.0),
    ("Tell a long story of a lighthouse keeper. Say “fertig” in the end. 😀", 0.9),
    ("List the planets of the solar system and say something about each.", 0.7),
)
SEED = 7


@dataclass(slots=True)
class Answer:
    """One stream of the client, while it comes and when it has come."""

    key: str
    at: str
    pieces: list[str] = field(default_factory=list)
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Streams:
    """The three questions, side by side, by the official client; `urls` are the trackers in turn."""

    _numbers = itertools.count()

    def __init__(self, urls: list[str], key: str) -> None:
        self.answers = [
            Answer(f"live-{next(self._numbers)}", url) for _, url in zip(QUESTIONS, itertools.cycle(urls), strict=False)
        ]
        self._threads = [
            in_background(lambda a=a, q=q: self._read(a, key, *q))  # type: ignore[misc]
            for a, q in zip(self.answers, QUESTIONS, strict=True)
        ]

    def _read(self, answer: Answer, key: str, question: str, temperature: float) -> None:
        try:
            with openai.OpenAI(base_url=f"{answer.at}/v1", api_key=key, max_retries=0, timeout=180) as client:
                for chunk in client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": question}],
                    max_tokens=LENGTH,
                    temperature=temperature,
                    seed=SEED,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"Idempotency-Key": answer.key},
                ):
                    if chunk.usage is not None:
                        answer.usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
                    answer.pieces += [c.delta.content for c in chunk.choices if c.delta.content]
        except openai.APIError as e:
            answer.error = e

    def wait_for(self, more: int) -> None:
        """Until every stream that runs has so many pieces more, so that a fault finds it on its way."""
        wanted = {id(a): len(a.pieces) + more for a in self.answers}
        wait_until(
            lambda: all(
                len(a.pieces) >= wanted[id(a)] or not t.is_alive()
                for a, t in zip(self.answers, self._threads, strict=True)
            )
        )

    def join(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), [a.text for a in self.answers]
        return self.answers


class Live:
    """The cluster, its books, and what must come of every question."""

    def __init__(self, cluster: TrackedCluster, database: Database, expected: list[dict[str, Any]]) -> None:
        self.cluster, self.database, self.expected = cluster, database, expected
        self.served: list[Answer] = []
        self.rooms = {n: max(2, round(share * cluster.model.n_layers)) for n, share in ROOM.items()}

    def start(self, name: str) -> None:
        claim = 1e5 if name == LIAR else 1.0 + len(name) / 10 + list(ROOM).index(name) / 10
        self.cluster.worker(name, (0, self.rooms[name]), claim=claim)

    def streams(self, *urls: str) -> Streams:
        assert self.cluster.key is not None
        return Streams(list(urls) or [self.cluster.url], self.cluster.key)

    def check(self, streams: Streams) -> None:
        """Every stream came whole, is `generate`'s token for token, and was charged for exactly that."""
        for answer, expected in zip(streams.join(), self.expected, strict=True):
            assert answer.error is None, answer.error
            assert answer.text == expected["text"]
            usage = Usage(len(expected["prompt_tokens"]), len(expected["tokens"]))
            assert answer.usage == usage
            hold = Ledger(self.database).find(ACCOUNT, f"key:{answer.key}")
            assert hold is not None
            assert (hold.state, hold.usage, hold.charged) == ("settled", usage, hold.price.bill(usage))
            self.served.append(answer)

    def route(self) -> list[str]:
        """The nodes that streams pass at this moment, head first."""
        about = self.cluster.coverage()
        spans = {n["node_id"]: n["layers"] for n in about["nodes"]}
        return sorted((n for n in about["streams"] if spans.get(n)), key=lambda n: spans[n][0])

    def wait_for_all(self) -> None:
        wait_until(lambda: self.cluster.coverage()["covered"])
        wait_until(lambda: {n["node_id"] for n in self.cluster.coverage()["nodes"] if n["silent_s"] < 3} == set(ROOM))

    def kill(self, names: Callable[[], list[str]], streams: Streams) -> None:
        """Kill two nodes in turn during streams; the gaps close, and who died comes back."""
        dead: list[str] = []
        for n in range(2):
            streams.wait_for(6)
            dead.append(next(name for name in [*names()[n:], *names(), *ROOM] if name not in dead))
            began = time.monotonic()
            self.cluster.workers[dead[-1]].kill()
            watch = in_background(lambda b=began, d=list(dead): self._watch(b, d))  # type: ignore[misc]
        self.check(streams)
        watch.join()
        wait_until(lambda: self._is_mended(dead))
        for name in dead:
            self.start(name)
        self.wait_for_all()

    def _is_mended(self, dead: list[str]) -> bool:
        about = self.cluster.coverage()
        return bool(about["covered"]) and not {n["node_id"] for n in about["nodes"]} & set(dead)

    def _watch(self, began: float, dead: list[str]) -> None:
        gaps: list[Any] = []

        def is_mended() -> bool:
            about = self.cluster.coverage()
            if about["gaps"] and about["gaps"] not in gaps:
                gaps.append(about["gaps"])
            return bool(about["covered"]) and dead[-1] not in {n["node_id"] for n in about["nodes"]}

        wait_until(is_mended)
        say(f"killed {dead}: gaps {gaps or 'none'}, covered without it after {time.monotonic() - began:.2f} s")


def say(line: str) -> None:
    print(f"live: {line}", flush=True)


@pytest.fixture(scope="module")
def stored(knot_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The model as an object of an S3 store, and as a file."""
    knot = knot_of(MODEL)
    folder = tmp_path_factory.mktemp("store")
    (folder / "models").mkdir()
    os.link(knot, folder / "models" / f"{MODEL}.knot")
    port = free_port()
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", "testing,testing-secret", "--config", os.devnull]
    with pytest.MonkeyPatch.context() as patch:
        for url in serve([program("rclone"), "serve", "s3", *address, str(folder)], port):
            point_s3_at(patch, url)
            yield f"s3://models/{MODEL}.knot", knot


@pytest.fixture(scope="module")
def expected(stored: tuple[str, Path]) -> list[dict[str, Any]]:
    """What `knotctl generate` says to the questions."""
    import contextlib
    import io

    found = []
    for question, temperature in QUESTIONS:
        options = ["--chat", "-n", str(LENGTH), "--temp", str(temperature), "--top-k", "0", "--top-p", "1"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["generate", str(stored[1]), question, *options, "-s", str(SEED), "--json"]) == 0
        found.append(json.loads(out.getvalue()))
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def live(
    request: pytest.FixtureRequest, stored: tuple[str, Path], expected: list[dict[str, Any]], tmp_path: Path
) -> Iterator[Live]:
    """One tracker on SQLite, or two on PostgreSQL; five workers that are on their way."""
    ref, knot = stored
    is_postgres = request.param == "postgres"
    url = request.getfixturevalue("postgres").new_database() if is_postgres else str(tmp_path / "live.db")
    with open_database(url, LEDGER) as database:
        Accounts(database).open(ACCOUNT)
        Accounts(database).open(ISSUE)
        Accounts(database).transfer("grant", ISSUE, ACCOUNT, GRANT)
        Ledger(database).set_price(MODEL, Price(1_000_000, 3_000_000))
        key, _ = KeyStore(database).create(ACCOUNT, [Scope.INFER])
        with TrackedCluster(knot, ref=ref, key=key) as cluster:
            for _ in range(1 + is_postgres):
                cluster.tracker("--database", url, "--api-keys")
            made = Live(cluster, database, expected)
            began = time.monotonic()
            for name in ROOM:
                made.start(name)
            made.wait_for_all()
            say(f"{request.param}: five workers cover {MODEL} after {time.monotonic() - began:.1f} s: {shape(cluster)}")
            yield made


def shape(cluster: TrackedCluster) -> str:
    nodes = cluster.coverage()["nodes"]
    return ", ".join(f"{n['node_id']} {n['layers']} of {n['most_layers']}" for n in nodes)


@pytest.mark.model
def test_streams_survive_two_deaths_the_liar_is_found_and_the_books_balance(live: Live) -> None:
    cluster, database = live.cluster, live.database
    streams = live.streams()
    live.check(streams)  # all is well
    # The liar is fast by its own account, so that it serves and earns; what it forfeits is what it did not deliver.
    wait_until(lambda: live.check(live.streams()) or any(v.forfeited for v in verdicts(database, LIAR)))
    verdict = next(v for v in verdicts(database, LIAR) if v.forfeited)
    assert verdict.evidence.flagged
    assert verdict.forfeited == verdict.evidence.penalty(verdict.earned) > 0.9 * verdict.earned
    about = cluster.node(LIAR)
    assert about["flagged"]
    assert about["measured_tokens_per_sec"] < about["benchmark_tokens_per_sec"] / 10
    say(
        f"liar: claims {verdict.evidence.claimed / 1000:g} tokens/s, delivers {verdict.evidence.delivered / 1000:.1f}: "
        f"forfeits {verdict.forfeited} of {verdict.earned} micro-credits"
    )
    if len(cluster.trackers) == 2:
        kill_the_leader(live)
    live.kill(live.route, live.streams(cluster.url))
    pairs = list(itertools.combinations(ROOM, 2))
    for pair in random.Random(1).sample(pairs, min(PAIRS, len(pairs))):
        live.kill(lambda p=list(pair): p, live.streams(cluster.url))  # type: ignore[misc]
    check_the_books(live)


def kill_the_leader(live: Live) -> None:
    """Streams at the other tracker go on; those of the one that died break off, and can be asked for anew."""
    cluster = live.cluster

    def leads(tracker: Any) -> bool:
        return bool(cluster.client.get(f"{tracker.url}/health").json()["leading"])

    leader, other = sorted(cluster.trackers, key=lambda t: not leads(t))
    assert leads(leader)
    mine, theirs = live.streams(other.url), live.streams(leader.url)
    # both on their way, and on a fast machine not at their end yet
    wait_until(lambda: all(any(a.pieces for a in s.answers) for s in (mine, theirs)))
    began = time.monotonic()
    leader.kill()
    live.check(mine)
    broken = [a for a in theirs.join() if a.usage is None]
    assert broken and all(a.error is not None for a in broken)
    live.check(live.streams(other.url))
    wait_until(lambda: leads(other))
    say(f"leader killed: the other tracker leads after {time.monotonic() - began:.1f} s")
    cluster.tracker(*leader.argv[leader.argv.index("--database") :])
    live.wait_for_all()


def check_the_books(live: Live) -> None:
    """What customers paid is what nodes earned, to the last unit; nothing is held; the audit finds nothing."""
    database = live.database
    wait_until(lambda: not live.cluster.coverage()["streams"])
    sweep_all(database)
    assert not Ledger(database).open_holds()
    books = audit(database)
    assert books.ok, books
    accounts = Accounts(database)
    customer = accounts.get(ACCOUNT)
    assert customer.held == 0
    earned = sum(a.balance for a in accounts.all() if a.account_id in {node_account(n) for n in ROOM} | {FORFEITS})
    assert earned == GRANT - customer.balance > 0
    assert {v.account_id for v in verdicts(database)} == {node_account(LIAR)}
    say(
        f"{len(live.served)} streams token for token as `generate`; {books.settled} settled for {books.charged} "
        f"micro-credits = {earned} with nodes; audit: {'balanced' if books.ok else books.findings}"
    )
