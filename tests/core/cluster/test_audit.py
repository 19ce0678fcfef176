"""The audit finds every way in which books can be wrong: each is made by hand, past the ledger and its constraints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_books import MODEL, halves, open_books

from knotctl.core.cluster import audit as audit_module
from knotctl.core.cluster.audit import audit
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.forfeits import slash
from knotctl.core.cluster.slashing import Evidence, SpeedSample
from knotctl.core.cluster.store import Database

# SQL that makes the books wrong -> the codes that say so. r1 is settled, r2 open; n1 has a verdict.
WRONGS = {
    "UPDATE accounts SET balance = balance + 1 WHERE account_id = 'alice'": {"wrong-balance", "unbalanced-books"},
    "UPDATE accounts SET held = held + 1 WHERE account_id = 'alice'": {"wrong-held"},
    "UPDATE accounts SET balance = -5 WHERE account_id = 'node:n2'": {
        "overdrawn", "wrong-balance", "unbalanced-books",
    },
    "DELETE FROM accounts WHERE account_id = 'node:n2'": {"missing-account", "unbalanced-books"},
    "UPDATE entries SET amount = amount + 1 WHERE account_id = 'node:n2'": {
        "wrong-balance", "unbalanced-transfer", "wrong-lines",
    },
    "UPDATE shares SET amount = amount - 1 WHERE account_id = 'node:n2'": {"wrong-shares"},
    "UPDATE shares SET layer_tokens = 3 * layer_tokens WHERE account_id = 'node:n2'": {"wrong-shares", "wrong-lines"},
    "DELETE FROM shares": {"wrong-shares", "wrong-forfeit"},
    "UPDATE holds SET charged = charged - 1 WHERE request_id = 'r1'": {"wrong-bill"},
    "UPDATE holds SET generated_tokens = generated_tokens - 1 WHERE request_id = 'r1'": {
        "wrong-bill", "wrong-shares", "wrong-lines",
    },
    "UPDATE prices SET generated = 2 * generated": {"wrong-bill", "wrong-shares", "wrong-lines"},
    "UPDATE holds SET state = 'released', charged = 0 WHERE request_id = 'r1'": {"orphan-settlement"},
    "UPDATE holds SET state = 'released' WHERE request_id = 'r2'": {"wrong-held"},
    "UPDATE transfers SET operation = 'settle:alice/other' WHERE kind = 'settle'": {
        "orphan-settlement", "unbooked-request",
    },
    "DELETE FROM verdicts": {"no-evidence"},
    "UPDATE verdicts SET evidence = replace(evidence, '100000', '4000')": {"wrong-forfeit"},
    "UPDATE verdicts SET earned = earned + 1": {"wrong-forfeit"},
}  # fmt: skip


@pytest.fixture
def books(database: Database) -> Database:
    ledger = open_books(database)
    ledger.reserve("alice", "r1", MODEL, Usage(10, 40))
    ledger.settle("alice", "r1", Usage(10, 30), halves(40))
    ledger.reserve("alice", "r2", MODEL, Usage(10, 40))
    slash(database, "v1", Evidence("n1", 100_000, tuple(SpeedSample(20, 10_000_000) for _ in range(5))))
    return database


def tamper(database: Database, statement: str) -> None:
    """Run SQL with every guard taken away, as one who owns the database could."""

    def unit(c: sa.Connection) -> None:
        if database.is_sqlite:
            for (name,) in c.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'").all():
                c.exec_driver_sql(f"DROP TRIGGER {name}")
            c.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        else:
            c.exec_driver_sql("ALTER TABLE accounts DROP CONSTRAINT no_overdraft")
            c.exec_driver_sql("SET LOCAL session_replication_role = replica")
        c.exec_driver_sql(statement)

    if database.is_sqlite:
        with database.engine.connect() as c:
            c.exec_driver_sql("ROLLBACK")
            c.exec_driver_sql("PRAGMA foreign_keys = OFF")
            c.exec_driver_sql("BEGIN")
            unit(c)
            c.exec_driver_sql("COMMIT")
            c.exec_driver_sql("BEGIN")
    else:
        database.write(unit)


def test_sound_books_have_no_finding(books: Database) -> None:
    found = audit(books)
    assert (found.ok, found.findings) == (True, ())
    assert (found.settled, found.open_holds, found.charged, found.outstanding) == (1, 1, 70, 10_000)
    assert (found.transfers, found.entries) == (3, 7)


@pytest.mark.parametrize("statement", WRONGS)
def test_every_wrong_is_found_and_named(books: Database, statement: str) -> None:
    tamper(books, statement)
    found = audit(books)
    assert {f.code for f in found.findings} == WRONGS[statement], [f.message for f in found.findings]
    assert not found.ok


def test_every_code_is_tried_here_and_has_its_heading_in_the_manual() -> None:
    source = Path(audit_module.__file__).read_text()
    codes = set(re.findall(r'(?:_error|Finding)\(\s*"([a-z-]+)"', source)) | {"wrong-shares", "wrong-lines"}
    assert codes == set().union(*WRONGS.values()) | {"short-charge"}
    page = (Path(__file__).parents[3] / "man" / "knot-ledger.7").read_text()
    assert codes == {
        c.replace("\\-", "-") for c in re.findall(r"^\.B ([a-z\\-]+)$", page.partition(".SH AUDIT")[2], re.M)
    }
