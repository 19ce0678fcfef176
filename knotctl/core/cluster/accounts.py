"""Accounts and what is booked on them: double entries, each operation once, no balance below what it holds.

A customer's account is a plain name, a node's is `node:ID`; credits come from `system:issue`, the one account that may
owe, and what liars forfeit goes to `system:forfeits`. The balances of all accounts add up to zero at any time.
Source: man knot-ledger(7), ACCOUNTS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.credits import check_amount
from knotctl.core.cluster.store import Database, insert_new, wall_ms
from knotctl.core.errors import RequestError, UsageError, printable

ISSUE = "system:issue"
FORFEITS = "system:forfeits"
_CUSTOMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
_NODE = re.compile(r"node:[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}", re.ASCII)
_OPERATION = re.compile(r"[A-Za-z0-9._:@/+-]{1,300}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Account:
    """What an account has. Units: micro-credits; `held` is the part of the balance that open requests reserved."""

    account_id: str
    balance: int
    held: int

    @property
    def available(self) -> int:
        """What can be spent."""
        return self.balance - self.held


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an account's statement. Units: amount in micro-credits, created_ms since 1970."""

    transfer_id: int
    kind: str
    operation: str
    memo: str
    amount: int
    created_ms: int


class Accounts:
    """Accounts of a database, and transfers between them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, account_id: str) -> Account:
        """Return the account, opened where it was not."""
        check_account(account_id)

        def unit(c: sa.Connection) -> Account:
            ensure_accounts(c, account_id)
            return account_of(c, account_id)

        return self._database.write(unit)

    def get(self, account_id: str) -> Account:
        """Return an account. Raises: RequestError unknown-account."""
        return self._database.read(lambda c: account_of(c, account_id))

    def all(self) -> list[Account]:
        """Return every account, by id."""
        query = sa.select(tables.accounts).order_by(tables.accounts.c.account_id)
        return self._database.read(lambda c: [_account(r) for r in c.execute(query)])

    def transfer(self, operation: str, source: str, target: str, amount: int, memo: str = "") -> int:
        """Book an amount from one account to another, once an operation; return the number of the transfer.

        A node's or customer's credits can be moved as far as no hold has reserved them.
        Raises: RequestError unknown-account, insufficient-credit, operation-mismatch; UsageError bad-amount, …
        """
        check_amount(amount, "transfer")
        if amount == 0 or source == target:
            raise UsageError("bad-amount", "transfer: expected an amount above 0 and two accounts")
        check_operation(operation)
        kind = {ISSUE: "grant"}.get(source, "payout" if target == ISSUE else "transfer")
        lines = {source: -amount, target: amount}

        def unit(c: sa.Connection) -> int:
            if ISSUE in lines:
                ensure_accounts(c, ISSUE)
            return post(c, f"{kind}:{operation}", kind, lines, memo=memo)

        return self._database.write(unit)

    def statement(self, account_id: str, *, limit: int = 100, before: int | None = None) -> list[Entry]:
        """Return an account's latest entries, newest first; those before a transfer where one is named."""
        e, t = tables.entries.c, tables.transfers.c
        query = sa.select(t.transfer_id, t.kind, t.operation, t.memo, e.amount, t.created_ms).join_from(
            tables.entries, tables.transfers
        )
        query = query.where(e.account_id == account_id).order_by(e.transfer_id.desc()).limit(limit)
        if before is not None:
            query = query.where(e.transfer_id < before)

        def unit(c: sa.Connection) -> list[Entry]:
            account_of(c, account_id)
            return [Entry(*row) for row in c.execute(query)]

        return self._database.read(unit)


def node_account(node_id: str) -> str:
    """Return the account of a node."""
    return f"node:{node_id}"


def check_account(account_id: str) -> None:
    """Refuse what names no account. Raises: UsageError bad-account."""
    if account_id not in (ISSUE, FORFEITS) and not _CUSTOMER.fullmatch(account_id) and not _NODE.fullmatch(account_id):
        raise UsageError(
            "bad-account",
            f"account {printable(account_id)!r}: expected letters, digits and any of ._@- after the first, or node:ID",
        )


def check_operation(key: str) -> None:
    """Refuse what can be no operation key. Raises: UsageError bad-operation."""
    if not _OPERATION.fullmatch(key):
        raise UsageError(
            "bad-operation", f"operation {printable(key)!r}: expected 1 to 300 letters, digits and any of ._:@/+-"
        )


def ensure_accounts(connection: sa.Connection, *account_ids: str) -> None:
    """Open the accounts that are not, in order of their ids."""
    now = wall_ms()
    rows = [{"account_id": a, "balance": 0, "held": 0, "created_ms": now} for a in sorted(account_ids)]
    insert_new(connection, tables.accounts, *rows)


def account_of(connection: sa.Connection, account_id: str) -> Account:
    """Return an account. Raises: RequestError unknown-account."""
    row = connection.execute(sa.select(tables.accounts).where(tables.accounts.c.account_id == account_id)).first()
    if row is None:
        raise RequestError(
            "unknown-account",
            f"account {printable(account_id)!r}: there is none of that name",
            status=404,
            hint="knotctl ledger open opens one",
        )
    return _account(row)


def move(connection: sa.Connection, account_id: str, *, balance: int = 0, held: int = 0) -> None:
    """Change an account's balance and what of it is held, or neither where it would hold more than it has.

    The condition and the change are one statement: of two that fit only alone, one is refused, however they meet.
    Raises: RequestError insufficient-credit, unknown-account.
    """
    a = tables.accounts.c
    change = sa.update(tables.accounts).where(a.account_id == account_id)
    if balance < 0 or held > 0:
        change = change.where((a.balance + balance >= a.held + held) | (a.account_id == ISSUE))
    if connection.execute(change.values(balance=a.balance + balance, held=a.held + held)).rowcount == 0:
        have = account_of(connection, account_id)
        raise RequestError(
            "insufficient-credit",
            f"account {account_id}: expected {max(held, -balance)} micro-credits available, found {have.available}",
            status=402,
        )


def post(
    connection: sa.Connection,
    operation: str,
    kind: str,
    lines: Mapping[str, int],
    *,
    memo: str = "",
    unhold: Mapping[str, int] | None = None,
) -> int:
    """Book a transfer whose lines add up to zero, unless its operation is booked; return its number.

    Accounts change in order of their id, so that two transfers never wait for each other in a circle.
    Raises: RequestError operation-mismatch where the operation was booked with other lines; as `move`.
    """
    assert sum(lines.values()) == 0, "a transfer that makes or loses credits"
    lines = {account: lines[account] for account in sorted(lines) if lines[account]}
    row = {"operation": operation, "kind": kind, "memo": memo, "created_ms": wall_ms()}
    new = insert_new(connection, tables.transfers, row)
    query = sa.select(tables.transfers.c.transfer_id).where(tables.transfers.c.operation == operation)
    transfer_id: int = connection.scalars(query).one()
    if not new:
        e = tables.entries.c
        booked = connection.execute(sa.select(e.account_id, e.amount).where(e.transfer_id == transfer_id)).all()
        if {r.account_id: r.amount for r in booked} != lines:
            raise RequestError(
                "operation-mismatch", f"operation {printable(operation)}: booked before, with other amounts", status=422
            )
        return transfer_id
    held = dict(unhold or {})
    for account in sorted(lines.keys() | held.keys()):
        move(connection, account, balance=lines.get(account, 0), held=-held.get(account, 0))
    if lines:
        booking = [{"transfer_id": transfer_id, "account_id": a, "amount": n} for a, n in lines.items()]
        connection.execute(tables.entries.insert(), booking)
    return transfer_id


def _account(row: sa.Row[Any]) -> Account:
    return Account(row.account_id, row.balance, row.held)
