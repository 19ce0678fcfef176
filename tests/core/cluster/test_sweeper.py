"""The sweeper closes what shows no sign of life, by its own clock, and nothing else."""

from __future__ import annotations

import pytest
from ledger_books import MODEL, check_books, halves, open_books

from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.sweeper import Sweeper


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_hold_without_a_sign_of_life_is_closed_at_what_was_recorded(database: Database) -> None:
    ledger, clock = open_books(database), Clock()
    for r in ("dead", "silent", "alive"):
        ledger.reserve("alice", r, MODEL, Usage(5, 20), ttl_s=60)
    ledger.record("alice", "dead", Usage(5, 3), halves(8))
    sweeper = Sweeper(ledger, clock)
    assert sweeper.sweep() == []
    clock.now = 59
    ledger.record("alice", "alive", Usage(5, 3), halves(8))
    assert sweeper.sweep() == []
    clock.now = 60
    closed = {h.request_id: (h.state, h.charged, h.closed_by) for h in sweeper.sweep()}
    assert closed == {"dead": ("settled", 11, "sweep"), "silent": ("released", 0, "sweep")}
    clock.now = 118
    assert sweeper.sweep() == []
    clock.now = 119
    assert [h.request_id for h in sweeper.sweep()] == ["alive"]
    assert Accounts(database).get("alice").held == 0
    check_books(database)


def test_a_hold_has_its_own_time_to_live(database: Database) -> None:
    ledger, clock = open_books(database), Clock()
    ledger.reserve("alice", "short", MODEL, Usage(5, 20), ttl_s=10)
    ledger.reserve("alice", "long", MODEL, Usage(5, 20), ttl_s=1000)
    sweeper = Sweeper(ledger, clock)
    sweeper.sweep()
    clock.now = 999
    assert [h.request_id for h in sweeper.sweep()] == ["short"]


def test_a_sweeper_that_starts_gives_every_hold_its_whole_time(database: Database) -> None:
    ledger, clock = open_books(database), Clock()
    ledger.reserve("alice", "r", MODEL, Usage(5, 20), ttl_s=60)
    Sweeper(ledger, clock).sweep()
    clock.now = 10**6
    assert Sweeper(ledger, clock).sweep() == []


def test_the_time_of_day_is_not_asked(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    ledger, clock = open_books(database), Clock()
    ledger.reserve("alice", "r", MODEL, Usage(5, 20), ttl_s=60)
    sweeper, real = Sweeper(ledger, clock), time.time_ns
    for hours in (0, 2, -2, 48):
        monkeypatch.setattr(time, "time_ns", lambda h=hours: real() + h * 3600 * 10**9)
        monkeypatch.setattr(time, "time", lambda h=hours: real() / 1e9 + h * 3600)
        assert sweeper.sweep() == []


def test_two_sweepers_close_a_hold_once(database: Database) -> None:
    ledger, clock = open_books(database), Clock()
    ledger.reserve("alice", "r", MODEL, Usage(5, 20), ttl_s=60)
    ledger.record("alice", "r", Usage(5, 3), halves(8))
    first, second = Sweeper(ledger, clock), Sweeper(ledger, clock)
    seen = ledger.open_holds()[0]
    first.sweep()
    second.sweep()
    clock.now = 60
    assert len(first.sweep() + second.sweep()) == 1
    assert ledger.close_idle(seen) is None
    check_books(database)


def test_a_sign_of_life_between_look_and_close_saves_the_hold(database: Database) -> None:
    ledger = open_books(database)
    ledger.reserve("alice", "r", MODEL, Usage(5, 20))
    seen = ledger.open_holds()[0]
    ledger.record("alice", "r", Usage(0, 0), [])
    assert ledger.close_idle(seen) is None
    assert ledger.open_holds()[0].state == "held"
