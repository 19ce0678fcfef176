"""Proves that the books balance: every figure is worked out again from what it follows from, and compared.

One state of the database is read, so an audit while requests run is as good as one at rest.
Source: man knot-ledger(7), AUDIT: every code below is a heading there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import ISSUE
from knotctl.core.cluster.ledger import Hold, lines_of, operation_of, read_holds, shares_of
from knotctl.core.cluster.slashing import Evidence
from knotctl.core.cluster.store import Database
from knotctl.core.findings import Finding, Severity

_a, _e, _t, _h = tables.accounts.c, tables.entries.c, tables.transfers.c, tables.holds.c
_s, _v = tables.shares.c, tables.verdicts.c
# Requests looked at together: few round trips, little memory.
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Books:
    """What an audit read and found. Units: micro-credits; outstanding is what was issued and not paid out."""

    accounts: int
    transfers: int
    entries: int
    settled: int
    open_holds: int
    outstanding: int
    charged: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the books balance: no error was found."""
        return all(f.severity != Severity.ERROR for f in self.findings)


def audit(database: Database, advance: Callable[[int], None] = lambda _: None) -> Books:
    """Return what the books hold and every defect of them. Units: advance takes settled requests checked."""

    def unit(c: sa.Connection) -> Books:
        if c.dialect.name == "postgresql":
            c.execute(sa.text("SET LOCAL statement_timeout = 0"))
        findings = [*_sums(c), *_transfers(c), *_requests(c, advance), *_verdicts(c)]
        states = _numbers(c, sa.select(_h.state, sa.func.count()).group_by(_h.state))
        return Books(
            accounts=_count(c, tables.accounts),
            transfers=_count(c, tables.transfers),
            entries=_count(c, tables.entries),
            settled=states.get("settled", 0),
            open_holds=states.get("held", 0),
            outstanding=-int(c.scalar(sa.select(_a.balance).where(_a.account_id == ISSUE)) or 0),
            charged=int(c.scalar(sa.select(sa.func.sum(_h.charged))) or 0),
            findings=tuple(findings),
        )

    return database.read(unit)


def count_settled(database: Database) -> int:
    """Return how many settled requests an audit will check."""
    query = sa.select(sa.func.count()).where(_h.state == "settled")
    return database.read(lambda c: int(c.scalar(query) or 0))


def _sums(c: sa.Connection) -> Iterator[Finding]:
    """Balances against entries, held against open holds, and all of it against zero."""
    booked = _numbers(c, sa.select(_e.account_id, sa.func.sum(_e.amount)).group_by(_e.account_id))
    opened = sa.select(_h.account_id, sa.func.sum(_h.amount)).where(_h.state == "held").group_by(_h.account_id)
    held = _numbers(c, opened)
    total = 0
    for row in c.execute(sa.select(tables.accounts).order_by(_a.account_id)):
        total += row.balance
        name, entries, holds = row.account_id, booked.pop(row.account_id, 0), held.pop(row.account_id, 0)
        if row.balance != entries:
            yield _error("wrong-balance", f"account {name}: balance {row.balance}; its entries add up to {entries}")
        if row.held != holds:
            yield _error("wrong-held", f"account {name}: held {row.held}; its open holds add up to {holds}")
        if row.held < 0 or (row.balance < row.held and name != ISSUE):
            yield _error("overdrawn", f"account {name}: balance {row.balance}, held {row.held}")
    for name in sorted(booked.keys() | held.keys()):
        yield _error("missing-account", f"account {name}: it is booked on, and is not there")
    if total:
        yield _error("unbalanced-books", f"all balances: expected a sum of 0, found {total}")


def _transfers(c: sa.Connection) -> Iterator[Finding]:
    """Every transfer's lines add up to zero."""
    sums = sa.select(_e.transfer_id, sa.func.sum(_e.amount)).group_by(_e.transfer_id)
    for row in c.execute(sums.having(sa.func.sum(_e.amount) != 0).order_by(_e.transfer_id)):
        yield _error("unbalanced-transfer", f"transfer {row[0]}: its lines add up to {row[1]}")


def _requests(c: sa.Connection, advance: Callable[[int], None]) -> Iterator[Finding]:
    """Every settled request: its bill by price and usage, its shares by its nodes' work, its lines by its shares."""
    booked = 0
    for batch in read_holds(c, "settled", _BATCH):
        operations = {operation_of(h): h for h in batch}
        numbers = _numbers(c, sa.select(_t.operation, _t.transfer_id).where(_t.operation.in_(operations)))
        booked += len(numbers)
        weights = _by_transfer(c, _s.transfer_id, _s.account_id, _s.layer_tokens, numbers.values())
        earned = _by_transfer(c, _s.transfer_id, _s.account_id, _s.amount, numbers.values())
        lines = _by_transfer(c, _e.transfer_id, _e.account_id, _e.amount, numbers.values())
        for operation, hold in operations.items():
            if (number := numbers.get(operation)) is None:
                yield _error("unbooked-request", f"{operation}: settled, and no transfer books it")
                continue
            bill = hold.price.bill(hold.usage)
            if hold.charged != min(bill, hold.amount):
                yield _error("wrong-bill", f"{operation}: charged {hold.charged}; its usage costs {bill}")
            elif bill > hold.amount:
                text = f"{operation}: its usage costs {bill}; only the {hold.amount} reserved were charged"
                yield Finding("short-charge", Severity.WARNING, text)
            yield from _compare(operation, hold, weights.get(number, {}), earned.get(number, {}), lines.get(number, {}))
        advance(len(batch))
    if booked != c.scalar(sa.select(sa.func.count()).where(_t.kind == "settle")):
        yield from _orphans(c)


def _orphans(c: sa.Connection) -> Iterator[Finding]:
    """Settlements that belong to no settled request: looked for only where there are more of them than requests."""
    operation = sa.literal("settle:") + _h.account_id + sa.literal("/") + _h.request_id
    known = sa.select(operation).where(_h.state == "settled")
    orphans = sa.select(_t.transfer_id, _t.operation).where(_t.kind == "settle", _t.operation.not_in(known))
    for row in c.execute(orphans.order_by(_t.transfer_id)):
        yield _error("orphan-settlement", f"transfer {row[0]}: {row[1]}: no settled request of that name")


def _compare(
    operation: str, hold: Hold, weights: dict[str, int], earned: dict[str, int], lines: dict[str, int]
) -> Iterator[Finding]:
    if hold.charged and not sum(weights.values()):
        yield _error("wrong-shares", f"{operation}: charged {hold.charged}, and nobody's work is kept")
        return
    shares = shares_of(hold, hold.usage, weights)
    for what, found, expected in (("share", earned, shares), ("line", lines, lines_of(hold.account_id, shares))):
        for account in sorted(expected.keys() | found.keys()):
            if found.get(account, 0) != expected.get(account, 0):
                text = f"{operation}: {what} of {account} {found.get(account, 0)}; expected {expected.get(account, 0)}"
                yield _error(f"wrong-{what}s", text)


def _verdicts(c: sa.Connection) -> Iterator[Finding]:
    """Every forfeit follows from its evidence and from what the node earned since the verdict before."""
    columns = (_t.transfer_id, _v.account_id, _v.earned_total, _v.earned, _v.evidence)
    query = sa.select(*columns, sa.func.coalesce(_e.amount, 0).label("amount")).select_from(tables.transfers)
    query = query.outerjoin(tables.verdicts, _v.transfer_id == _t.transfer_id)
    query = query.outerjoin(tables.entries, (_e.transfer_id == _t.transfer_id) & (_e.account_id == _v.account_id))
    earned = _numbers(c, sa.select(_s.account_id, sa.func.sum(_s.amount)).group_by(_s.account_id))
    judged: dict[str, int] = {}
    for row in c.execute(query.where(_t.kind == "slash").order_by(_t.transfer_id)):
        place, name = f"transfer {row.transfer_id}", row.account_id
        if row.evidence is None:
            yield _error("no-evidence", f"{place}: a forfeit without evidence")
            continue
        most = Evidence.from_json(row.evidence).penalty(row.earned)
        if not 0 <= -row.amount <= most:
            yield _error("wrong-forfeit", f"{place}: {name} forfeited {-row.amount}; its evidence allows {most}")
        if row.earned != row.earned_total - judged.get(name, 0) or row.earned_total > earned.get(name, 0):
            yield _error("wrong-forfeit", f"{place}: {name} had not earned {row.earned} to forfeit")
        judged[name] = row.earned_total


def _error(code: str, message: str) -> Finding:
    return Finding(code, Severity.ERROR, message)


def _count(c: sa.Connection, table: sa.Table) -> int:
    return int(c.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


def _numbers(c: sa.Connection, query: sa.Select[Any]) -> dict[str, int]:
    """Rows of a name and a number; PostgreSQL sums 64-bit columns to decimals."""
    return {r[0]: int(r[1]) for r in c.execute(query)}


def _by_transfer(
    c: sa.Connection, number: Any, account: Any, value: Any, numbers: Iterable[int]
) -> dict[int, dict[str, int]]:
    query = sa.select(number, account, value).where(number.in_(list(numbers))).order_by(number)
    return {n: {r[1]: int(r[2]) for r in rows} for n, rows in groupby(c.execute(query), key=lambda r: int(r[0]))}
