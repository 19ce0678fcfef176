"""Trackers that meet at every statement: two serve the same requests, one sweeps, any may die between two statements.

A schedule lets one thread do one statement at a time, in an order drawn from a seed; a thread that waits for another's
lock is passed over until it comes back. Each thread has its own connections, as a process has.
KNOTCTL_INTERLEAVINGS sets how many schedules are tried.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from ledger_books import MODEL, Crash, check_books, halves, on_statement, open_books

from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.ledger import Hold, Ledger
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.sweeper import Sweeper
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.errors import KnotctlError

SCHEDULES = int(os.environ.get("KNOTCTL_INTERLEAVINGS", "25"))
REQUESTS = 3
MOST = Usage(10, 40)  # 90 micro-credits
CREDITS = 200  # enough for two of three at once
# A statement takes a millisecond; one that takes this long waits for a lock, and another thread goes on meanwhile.
_BLOCKED_S = 0.02


class Turnstile:
    """Lets threads through one statement at a time, in an order drawn from a generator."""

    def __init__(self, draw: random.Random, crash_rate: float) -> None:
        self._draw, self._crash_rate = draw, crash_rate
        self._change = threading.Condition()
        self._waiting: set[str] = set()
        self._let_through: set[str] = set()
        self._running: set[str] = set()
        self.passed = 0

    def gate(self) -> None:
        """Wait for this thread's turn; some turns are its last."""
        me = threading.current_thread().name
        with self._change:
            if me not in self._running:
                return  # not one of the threads of this schedule
            self._waiting.add(me)
            self._change.notify_all()
            while me not in self._let_through:
                self._change.wait()
            self._let_through.discard(me)
            self.passed += 1
            if self._draw.random() < self._crash_rate:
                raise Crash

    def run(self, actors: dict[str, Callable[[], None]]) -> None:
        """Run every actor to its end; what one of them raises is raised here."""
        faults: list[BaseException] = []

        def body(name: str, actor: Callable[[], None]) -> None:
            try:
                actor()
            except BaseException as e:
                faults.append(e)
            finally:
                with self._change:
                    self._running.discard(name)
                    self._change.notify_all()

        self._running = set(actors)
        threads = [threading.Thread(target=body, args=item, name=item[0]) for item in actors.items()]
        for thread in threads:
            thread.start()
        with self._change:
            while self._running:
                if not self._waiting:
                    self._change.wait(30)
                    continue
                chosen = self._draw.choice(sorted(self._waiting))
                self._waiting.discard(chosen)
                self._let_through.add(chosen)
                self._change.notify_all()
                self._change.wait_for(lambda c=chosen: c in self._waiting or c not in self._running, _BLOCKED_S)
        for thread in threads:
            thread.join(30)
        if faults:
            raise faults[0]


@dataclass
class Seen:
    """What the outside saw: what was acknowledged, which nothing that happens later may contradict."""

    owners: dict[str, int] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    closed: dict[str, set[tuple[str, int]]] = field(default_factory=dict)

    def saw_closed(self, hold: Hold) -> None:
        self.closed.setdefault(hold.request_id, set()).add((hold.state, hold.charged))


def tracker(ledger: Ledger, account: str, seed: int, seen: Seen) -> None:
    """Serve every request, whoever else does; what crashed is tried again or left."""
    draw = random.Random(seed)
    for i in draw.sample(range(REQUESTS), REQUESTS):
        request = f"r{i}"
        for _ in range(draw.randint(1, 3)):
            try:
                _serve(ledger, account, request, draw, seen)
                break
            except Crash:
                continue  # the process started again, and its client asked again
            except KnotctlError as e:
                assert e.code in ("insufficient-credit", "hold-closed"), e.message
                break


def _serve(ledger: Ledger, account: str, request: str, draw: random.Random, seen: Seen) -> None:
    hold, fresh = ledger.reserve(account, request, MODEL, MOST)
    if fresh:
        seen.owners[request] = seen.owners.get(request, 0) + 1
    if hold.state != "held":
        seen.saw_closed(hold)
        return
    # Also one that does not own it goes on: the worst that a mistaken tracker could do.
    for generated in sorted(draw.sample(range(1, 41), 2)):
        ledger.record(account, request, Usage(10, generated), halves(10 + generated))
        seen.delivered[request] = max(seen.delivered.get(request, 0), generated)
    if draw.random() < 0.2:
        seen.saw_closed(ledger.release(account, request))
    else:
        seen.saw_closed(ledger.settle(account, request, Usage(10, 40), halves(50)))


def sweep(ledger: Ledger, seed: int, seen: Seen) -> None:
    """A sweeper whose clock runs so fast that every hold that it sees twice is idle."""
    draw, now = random.Random(seed), [0.0]
    sweeper = Sweeper(ledger, lambda: now[0])
    for _ in range(4):
        now[0] += draw.choice([0, 1000])
        try:
            for hold in sweeper.sweep():
                seen.saw_closed(hold)
        except Crash:
            sweeper = Sweeper(ledger, lambda: now[0])


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_no_schedule_and_no_crash_charges_twice_delivers_for_free_or_leaves_a_hold(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "postgres":
        url = request.getfixturevalue("postgres").new_database()
    else:
        url = str(request.getfixturevalue("tmp_path") / "ledger.db")
    # One database a thread, as processes have; opened once for all schedules.
    databases = [open_database(url, LEDGER) for _ in range(3)]
    passed = 0
    try:
        # SQLite's writers come one after the other whatever the schedule: fewer say as much.
        for seed in range(SCHEDULES if kind == "postgres" else max(1, SCHEDULES // 3)):
            try:
                passed += _run_schedule(databases, seed)
            except BaseException as e:
                e.add_note(f"schedule of seed {seed} on {kind}")
                raise
        check_books(databases[0])
    finally:
        for database in databases:
            database.close()
    print(f"{kind}: {passed} statements scheduled")
    assert passed > 50


def _run_schedule(databases: list[Database], seed: int) -> int:
    account = f"alice{seed}"
    ledger = open_books(databases[0], account, CREDITS)
    draw, seen = random.Random(seed), Seen()
    turnstile = Turnstile(draw, crash_rate=draw.choice([0, 0.02, 0.1]))
    ends = [on_statement(d, turnstile.gate) for d in databases]
    try:
        turnstile.run({
            "a": lambda: tracker(Ledger(databases[0]), account, seed, seen),
            "b": lambda: tracker(Ledger(databases[1]), account, seed + 10**6, seen),
            "s": lambda: sweep(Ledger(databases[2]), seed, seen),
        })  # fmt: skip
    finally:
        for end in ends:
            end()
    now = [0.0]
    sweeper = Sweeper(ledger, lambda: now[0])
    sweeper.sweep()
    now[0] = 1000.0
    for hold in sweeper.sweep():
        seen.saw_closed(hold)
    holds = [h for i in range(REQUESTS) if (h := ledger.find(account, f"r{i}"))]
    assert all(h.state in ("settled", "released") for h in holds), holds
    for hold in holds:
        assert seen.owners.get(hold.request_id, 0) <= 1, "two own one request"
        # Whoever saw it closed saw the same.
        assert seen.closed.get(hold.request_id, set()) <= {(hold.state, hold.charged)}
        assert hold.usage.generated >= seen.delivered.get(hold.request_id, 0), "delivered for free"
        assert hold.charged == min(hold.amount, hold.usage.prompt + 2 * hold.usage.generated)
    found = Accounts(databases[0]).get(account)
    assert (found.balance, found.held) == (CREDITS - sum(h.charged for h in holds), 0)
    return turnstile.passed
