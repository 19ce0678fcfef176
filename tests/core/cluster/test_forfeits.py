"""Forfeits: what a liar earned since its last verdict goes, once, as far as it is there, and the evidence stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from ledger_books import MODEL, check_books, halves, open_books

from knotctl.core.cluster.accounts import FORFEITS, ISSUE, Accounts
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.forfeits import slash, verdicts
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.slashing import Evidence, SpeedSample
from knotctl.core.cluster.store import Database
from knotctl.core.errors import KnotctlError

# claims 100 tokens a second and delivers 2
LIE = Evidence("n1", 100_000, tuple(SpeedSample(20, 10_000_000) for _ in range(5)))


def earn(ledger: Ledger, request: str, tokens: int = 1000) -> None:
    """n1 and n2 earn a micro-credit a token each."""
    ledger.reserve("alice", request, MODEL, Usage(0, tokens))
    ledger.settle("alice", request, Usage(0, tokens), halves(tokens))


def test_a_liar_forfeits_what_it_did_not_deliver_of_what_it_earned_since_the_last_verdict(database: Database) -> None:
    ledger, accounts = open_books(database, credits=100_000), Accounts(database)
    earn(ledger, "r1")
    first = slash(database, "v1", LIE)
    assert (first.earned, first.forfeited, first.evidence) == (1000, 980, LIE)
    assert slash(database, "v1", LIE) == first
    assert slash(database, "v2", LIE).forfeited == 0
    earn(ledger, "r2")
    earn(ledger, "r3", 500)
    assert slash(database, "v3", LIE).forfeited == 1470
    assert [accounts.get(a).balance for a in ("node:n1", "node:n2", FORFEITS)] == [50, 2500, 2450]
    assert [v.earned for v in verdicts(database, "n1")] == [1000, 0, 1500]
    assert verdicts(database, "n2") == []
    check_books(database)


def test_what_was_paid_out_is_gone(database: Database) -> None:
    ledger, accounts = open_books(database, credits=100_000), Accounts(database)
    earn(ledger, "r1")
    accounts.transfer("paid", "node:n1", ISSUE, 900)
    assert slash(database, "v1", LIE).forfeited == 100
    assert accounts.get("node:n1").balance == 0
    check_books(database)


def test_evidence_that_proves_nothing_takes_nothing(database: Database) -> None:
    open_books(database)
    honest = Evidence("n1", 3000, LIE.samples)
    with pytest.raises(KnotctlError) as e:
        slash(database, "v1", honest)
    assert e.value.code == "not-proved"
    assert verdicts(database) == []


def test_another_verdict_under_the_same_operation_is_refused(database: Database) -> None:
    open_books(database)
    slash(database, "v1", LIE)
    with pytest.raises(KnotctlError) as e:
        slash(database, "v1", Evidence("n1", 200_000, LIE.samples))
    assert e.value.code == "operation-mismatch"


def test_verdicts_and_earnings_that_meet_lose_nothing(database: Database) -> None:
    ledger = open_books(database, credits=1_000_000)
    with ThreadPoolExecutor(6) as pool:
        earning = [pool.submit(earn, ledger, f"r{i}", 100) for i in range(20)]
        judging = [pool.submit(slash, database, f"v{i // 2}", LIE) for i in range(10)]
        for done in earning + judging:
            done.result()
    slash(database, "last", LIE)
    found = verdicts(database)
    # Everything that it earned was judged, each micro-credit once.
    assert sum(v.earned for v in found) == 2000
    assert len({v.transfer_id for v in found}) == 6
    check_books(database)
