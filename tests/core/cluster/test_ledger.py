"""The ledger's promises, one by one, on SQLite and on PostgreSQL: each step once, exact sums, no overdraft."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from ledger_books import MODEL, PRICE, check_books, crashing_at, halves, open_books

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.credits import Price, Usage, Work
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.usage import EarningsRow, UsageRow, earnings_rows, usage_rows
from knotctl.core.errors import KnotctlError


def refused(code: str, call: Callable[[], object]) -> KnotctlError:
    with pytest.raises(KnotctlError) as e:
        call()
    assert e.value.code == code, e.value.message
    return e.value


def test_a_request_holds_the_most_and_is_charged_what_it_used(database: Database) -> None:
    ledger, accounts = open_books(database), Accounts(database)
    hold, fresh = ledger.reserve("alice", "r1", MODEL, Usage(100, 500))
    assert (hold.amount, hold.state, fresh) == (1100, "held", True)
    assert accounts.get("alice").available == 8900
    done = ledger.settle("alice", "r1", Usage(100, 7), halves(107))
    assert (done.state, done.charged, done.closed_by) == ("settled", 114, "request")
    assert (accounts.get("alice").balance, accounts.get("alice").held) == (9886, 0)
    assert [accounts.get(f"node:{n}").balance for n in ("n1", "n2")] == [57, 57]
    check_books(database)


def test_the_bill_is_the_sum_of_the_shares_by_layers_times_tokens(database: Database) -> None:
    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(10, 90))
    # n2 died after 40 tokens; n3 replayed them and went on
    work = [Work("n1", 10, 100), Work("n2", 18, 40), Work("n3", 18, 100)]
    assert ledger.settle("alice", "r1", Usage(10, 90), work).charged == 190
    earned = {r.account_id: (r.layer_tokens, r.earned) for r in earnings_rows(database)}
    assert earned == {"node:n1": (1000, 54), "node:n2": (720, 39), "node:n3": (1800, 97)}
    check_books(database)


@pytest.mark.parametrize("step", ["reserve", "record", "settle", "release"])
def test_every_step_is_done_once_however_often_it_is_asked_for_and_wherever_it_crashed(
    database: Database, step: str
) -> None:
    ledger = open_books(database)
    balance = 10_000
    for statement in range(40):
        request = f"r{statement}"
        steps: dict[str, Callable[[], object]] = {
            "reserve": lambda r=request: ledger.reserve("alice", r, MODEL, Usage(5, 20), fingerprint="f"),
            "record": lambda r=request: ledger.record("alice", r, Usage(5, 3), halves(8)),
            "settle": lambda r=request: ledger.settle("alice", r, Usage(5, 10), halves(15)),
            "release": lambda r=request: ledger.release("alice", r),
        }
        for name, do in steps.items():
            if name == step:
                with crashing_at(database, statement) as crashed:
                    do()
                for _ in range(3):
                    do()
                break
            if name != "settle":
                do()
        hold = ledger.find("alice", request)
        assert hold is not None
        charged = {"reserve": 0, "record": 0, "settle": 25, "release": 11}[step]
        held = 45 if step in ("reserve", "record") else 0
        account = Accounts(database).get("alice")
        assert (hold.charged, account.balance) == (charged, balance - charged)
        assert account.held == held
        check_books(database)
        if held:
            ledger.settle("alice", request, Usage(0, 0), [])
        balance = Accounts(database).get("alice").balance
        if not crashed[0]:
            return
    pytest.fail("never got through without a crash")


def test_a_retry_finds_the_request_and_does_not_own_it(database: Database) -> None:
    ledger = open_books(database, credits=45)
    first, fresh = ledger.reserve("alice", "r1", MODEL, Usage(5, 20), fingerprint="body")
    # all of its credit is held by the first: the retry needs none
    again, owned = ledger.reserve("alice", "r1", MODEL, Usage(5, 20), fingerprint="body")
    assert (fresh, owned, again) == (True, False, first)
    error = refused("operation-mismatch", lambda: ledger.reserve("alice", "r1", MODEL, Usage(5, 20), fingerprint="x"))
    assert vars(error)["status"] == 422
    ledger.settle("alice", "r1", Usage(5, 2), halves(7))
    assert ledger.reserve("alice", "r1", MODEL, Usage(5, 20), fingerprint="body")[0].charged == 9


def test_the_same_id_of_two_accounts_is_two_requests(database: Database) -> None:
    ledger = open_books(database)
    open_books(database, "bob")
    assert ledger.reserve("alice", "r1", MODEL, Usage(5, 5))[1]
    assert ledger.reserve("bob", "r1", MODEL, Usage(5, 5))[1]


def test_ten_at_once_get_what_the_balance_is_enough_for(database: Database) -> None:
    ledger = open_books(database, credits=350)

    def reserve(i: int) -> bool:
        try:
            return ledger.reserve("alice", f"r{i}", MODEL, Usage(0, 50))[1]
        except KnotctlError as e:
            assert (e.code, vars(e)["status"]) == ("insufficient-credit", 402)
            return False

    with ThreadPoolExecutor(10) as pool:
        got = sum(pool.map(reserve, range(10)))
    assert got == 3
    assert Accounts(database).get("alice").held == 300
    check_books(database)


def test_one_of_many_that_reserve_the_same_request_owns_it(database: Database) -> None:
    ledger = open_books(database)
    with ThreadPoolExecutor(8) as pool:
        fresh = list(pool.map(lambda _: ledger.reserve("alice", "r1", MODEL, Usage(5, 20))[1], range(8)))
    assert sum(fresh) == 1
    assert Accounts(database).get("alice").held == 45


def test_a_closed_request_stays_as_it_was_closed(database: Database) -> None:
    ledger = open_books(database)
    for r in ("settled", "released"):
        ledger.reserve("alice", r, MODEL, Usage(5, 20))
    first = ledger.settle("alice", "settled", Usage(5, 2), halves(7))
    assert ledger.settle("alice", "settled", Usage(5, 20), halves(25, "x", "y")) == first
    assert ledger.release("alice", "settled") == first
    released = ledger.release("alice", "released")
    assert (released.state, released.charged) == ("released", 0)
    refused("hold-closed", lambda: ledger.settle("alice", "released", Usage(5, 2), halves(7)))
    for r in ("settled", "released"):
        refused("hold-closed", lambda r=r: ledger.record("alice", r, Usage(5, 3), halves(8)))
    refused("unknown-hold", lambda: ledger.settle("alice", "never", Usage(5, 2), halves(7)))
    refused("unknown-hold", lambda: ledger.record("alice", "never", Usage(5, 2), halves(7)))
    refused("unknown-hold", lambda: ledger.settle("bob", "settled", Usage(5, 2), halves(7)))
    check_books(database)


def test_what_was_recorded_is_charged_whoever_closes_it_and_however_late_less_is_said(database: Database) -> None:
    ledger = open_books(database)
    for r in ("a", "b", "c"):
        ledger.reserve("alice", r, MODEL, Usage(5, 20))
        ledger.record("alice", r, Usage(5, 10), halves(15))
        assert ledger.record("alice", r, Usage(5, 4), halves(9, "late")).usage == Usage(5, 10)
    assert ledger.settle("alice", "a", Usage(5, 4), halves(9, "late")).usage == Usage(5, 10)
    assert ledger.release("alice", "b").charged == 25
    seen = next(h for h in ledger.open_holds() if h.request_id == "c")
    closed = ledger.close_idle(seen)
    assert closed is not None
    assert (closed.charged, closed.closed_by) == (25, "sweep")
    assert {r.account_id for r in earnings_rows(database)} == {"node:n1", "node:n2"}
    check_books(database)


def test_a_charge_never_passes_what_was_reserved(database: Database) -> None:
    from knotctl.core.cluster.audit import audit

    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(5, 20))
    assert ledger.settle("alice", "r1", Usage(5, 30), halves(35)).charged == 45
    books = audit(database)
    assert books.ok
    assert [f.code for f in books.findings] == ["short-charge"]


def test_usage_without_anybody_s_work_is_refused_before_it_is_kept(database: Database) -> None:
    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(5, 20))
    refused("no-work", lambda: ledger.record("alice", "r1", Usage(5, 1), []))
    refused("no-work", lambda: ledger.settle("alice", "r1", Usage(5, 1), [Work("n1", 14, 0)]))
    assert ledger.settle("alice", "r1", Usage(0, 0), []).charged == 0
    check_books(database)


def test_a_request_keeps_the_price_that_it_was_reserved_at(database: Database) -> None:
    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(5, 20))
    assert ledger.set_price(MODEL, Price(10 * PRICE.prompt, 10 * PRICE.generated)) == 2
    assert ledger.set_price(MODEL, Price(10 * PRICE.prompt, 10 * PRICE.generated)) == 2
    assert ledger.settle("alice", "r1", Usage(5, 20), halves(25)).charged == 45
    assert ledger.reserve("alice", "r2", MODEL, Usage(5, 20))[0].amount == 450
    check_books(database)


def test_a_free_model_is_settled_without_a_line(database: Database) -> None:
    ledger = open_books(database)
    ledger.set_price("free", Price(0, 0))
    ledger.reserve("alice", "r1", "free", Usage(5, 20))
    assert ledger.settle("alice", "r1", Usage(5, 20), halves(25)).charged == 0
    check_books(database)


def test_a_node_that_asks_may_serve_itself(database: Database) -> None:
    ledger = open_books(database, "node:n1")
    ledger.reserve("node:n1", "r1", MODEL, Usage(0, 50))
    ledger.settle("node:n1", "r1", Usage(0, 50), halves(50))
    assert Accounts(database).get("node:n1").balance == 9950
    assert Accounts(database).get("node:n2").balance == 50
    ledger.reserve("node:n1", "r2", MODEL, Usage(0, 50))
    ledger.settle("node:n1", "r2", Usage(0, 50), halves(50, "n1"))
    assert Accounts(database).get("node:n1").balance == 9950
    check_books(database)


def test_what_cannot_be_reserved_is_said_and_leaves_nothing(database: Database) -> None:
    ledger = open_books(database, credits=44)
    refused("insufficient-credit", lambda: ledger.reserve("alice", "r1", MODEL, Usage(5, 20)))
    refused("unknown-account", lambda: ledger.reserve("mallory", "r1", MODEL, Usage(5, 20)))
    refused("unknown-model", lambda: ledger.reserve("alice", "r1", "gpt-9", Usage(5, 20)))
    for bad in ("", "a/b", "a b", "x" * 129, "é"):
        refused("bad-request-id", lambda bad=bad: ledger.reserve("alice", bad, MODEL, Usage(5, 1)))
    assert ledger.open_holds() == []
    assert Accounts(database).get("alice").held == 0


def test_a_transfer_is_booked_once_and_never_from_what_is_held(database: Database) -> None:
    ledger, accounts = open_books(database, credits=100), Accounts(database)
    accounts.open("bob")
    first = accounts.transfer("t1", "alice", "bob", 30)
    assert accounts.transfer("t1", "alice", "bob", 30) == first
    refused("operation-mismatch", lambda: accounts.transfer("t1", "alice", "bob", 31))
    ledger.reserve("alice", "r1", MODEL, Usage(0, 30))
    refused("insufficient-credit", lambda: accounts.transfer("t2", "alice", "bob", 11))
    accounts.transfer("t3", "alice", ISSUE, 10)
    assert [accounts.get(a).balance for a in ("alice", "bob")] == [60, 30]
    refused("unknown-account", lambda: accounts.transfer("t4", "bob", "nobody", 1))
    refused("unknown-account", lambda: accounts.transfer("t5", "nobody", "bob", 1))
    assert [e.amount for e in accounts.statement("alice")] == [-10, -30, 100]
    check_books(database)


def test_usage_is_summed_by_account_and_model_of_what_was_settled(database: Database) -> None:
    ledger = open_books(database)
    for r in ("a", "b", "c"):
        ledger.reserve("alice", r, MODEL, Usage(5, 20))
    ledger.settle("alice", "a", Usage(5, 2), halves(7))
    ledger.settle("alice", "b", Usage(5, 10), halves(15))
    assert usage_rows(database) == [UsageRow("alice", MODEL, 2, 10, 12, 34)]
    assert usage_rows(database, "bob") == []
    assert usage_rows(database, until_ms=1) == []
    assert earnings_rows(database, "node:n1") == [EarningsRow("node:n1", 2, 308, 18, 18)]


@pytest.mark.parametrize("table", ["transfers", "entries", "shares", "prices"])
def test_the_database_itself_refuses_to_rewrite_history(database: Database, table: str) -> None:
    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(5, 20))
    ledger.settle("alice", "r1", Usage(5, 2), halves(7))
    column = {"prices": "prompt", "shares": "amount", "entries": "amount", "transfers": "created_ms"}[table]
    for statement in (f"UPDATE {table} SET {column} = 1", f"DELETE FROM {table}"):
        with pytest.raises(KnotctlError, match="append-only"):
            database.write(lambda c, s=statement: c.execute(sa.text(s)))


def test_the_database_itself_refuses_an_overdraft(database: Database) -> None:
    open_books(database, credits=10)
    a = tables.accounts.c
    for values in ({"balance": -1}, {"held": 11}, {"held": -1}):
        change = sa.update(tables.accounts).where(a.account_id == "alice").values(**values)
        refused("books-refuse", lambda change=change: database.write(lambda c: c.execute(change)))


def test_prices_are_listed_by_their_last_revision(database: Database) -> None:
    ledger = Ledger(database)
    ledger.set_price("m", Price(1, 2))
    ledger.set_price("m", Price(3, 4))
    assert ledger.prices() == {"m": Price(3, 4)}
