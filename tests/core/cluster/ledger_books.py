"""A ledger with a customer and a price, and crashes at chosen statements, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster.accounts import ISSUE, Accounts
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import MICRO, Price, Work
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database

MODEL = "coder-1.5b"
# A micro-credit a token of the prompt, two a generated one.
PRICE = Price(MICRO, 2 * MICRO)


class Crash(BaseException):
    """The process ends here: nothing of ours may catch it."""


def open_books(database: Database, account: str = "alice", credits: int = 10_000) -> Ledger:
    """A ledger in which the account has so many micro-credits and the model its price."""
    Accounts(database).open(account)
    Accounts(database).transfer(f"first-{account}", ISSUE, account, credits)
    ledger = Ledger(database)
    ledger.set_price(MODEL, PRICE)
    return ledger


def halves(tokens: int, *nodes: str) -> list[Work]:
    """So many tokens through 28 layers, 14 each on two nodes."""
    return [Work(n, 14, tokens) for n in nodes or ("n1", "n2")]


def check_books(database: Database) -> None:
    books = audit(database)
    assert not books.findings, [f"{f.code}: {f.message}" for f in books.findings]


def on_statement(database: Database, hook: Callable[[], None]) -> Callable[[], None]:
    """Call the hook before every statement and every commit; returns the function that ends it."""

    def before_cursor_execute(*_: Any) -> None:
        hook()

    def commit(*_: Any) -> None:
        hook()

    sa.event.listen(database.engine, "before_cursor_execute", before_cursor_execute)
    sa.event.listen(database.engine, "commit", commit)

    def end() -> None:
        sa.event.remove(database.engine, "before_cursor_execute", before_cursor_execute)
        sa.event.remove(database.engine, "commit", commit)

    return end


@contextmanager
def crashing_at(database: Database, statement: int) -> Iterator[list[bool]]:
    """The process ends before its statement of that number, from zero; yields whether it did."""
    left, crashed, me = [statement], [False], threading.get_ident()

    def hook() -> None:
        if threading.get_ident() == me:
            left[0] -= 1
            if left[0] < 0 and not crashed[0]:
                crashed[0] = True
                raise Crash

    end = on_statement(database, hook)
    try:
        yield crashed
    except Crash:
        pass
    finally:
        end()
