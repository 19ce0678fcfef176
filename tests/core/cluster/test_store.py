"""The store: units of work rerun where the database could not, and every failure of it has a name."""

from __future__ import annotations

import itertools
import random
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from databases import PrivatePostgres
from ledger_books import MODEL, check_books, halves, open_books

from knotctl.core.cluster import store, tables
from knotctl.core.cluster.credits import Usage
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Component, Database, open_database
from knotctl.core.cluster.tables import LEDGER
from knotctl.core.errors import KnotctlError


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(KnotctlError) as e:
        call()
    return e.value.code


@pytest.mark.parametrize(
    "ref",
    ["mysql://h/d", "sqlite://", "sqlite:///:memory:", "sqlite:///x.db?mode=ro", "://", "postgresql+asyncpg://h/d"],
)
def test_what_is_no_database_is_refused(ref: str) -> None:
    assert code_of(lambda: open_database(ref)) == "bad-database"


def test_a_password_is_in_no_message() -> None:
    with pytest.raises(KnotctlError) as e:
        open_database("mysql://alice:s3cret@h/d")
    assert "s3cret" not in e.value.message


def test_a_sqlite_database_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    open_database(str(path), LEDGER).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_there_and_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but some notes that matter" * 50)
    before = path.read_bytes()
    assert code_of(lambda: open_database(str(path), LEDGER)) == "not-a-database"
    assert path.read_bytes() == before
    assert code_of(lambda: open_database(str(tmp_path / "none" / "x.db"), LEDGER)) == "write-failed"


def test_a_database_of_another_version_is_refused(database_url: Callable[[], str]) -> None:
    url = database_url()
    open_database(url, LEDGER).close()
    later = Component("ledger", 2, LEDGER.tables)
    assert code_of(lambda: open_database(url, later)) == "wrong-schema"
    open_database(url, LEDGER).close()


def test_trackers_that_start_together_make_the_tables_once(database_url: Callable[[], str]) -> None:
    url, faults, barrier = database_url(), [], threading.Barrier(6)

    def start() -> None:
        barrier.wait()
        try:
            open_database(url, LEDGER).close()
        except Exception as e:
            faults.append(e)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_full_disk_is_said_before_any_work_is_promised(tmp_path: Path) -> None:
    with open_database(str(tmp_path / "ledger.db"), LEDGER) as database:
        ledger = open_books(database)
        ledger.reserve("alice", "r1", MODEL, Usage(5, 20))

        # The database may not grow, as on a full disk: the same result code.
        @sa.event.listens_for(database.engine, "begin")
        def full(c: sa.Connection) -> None:
            c.exec_driver_sql("PRAGMA max_page_count = 1")

        wide = "x" * 4000
        assert code_of(lambda: ledger.reserve("alice", "r2", MODEL, Usage(5, 20), fingerprint=wide)) == "disk-full"
        sa.event.remove(database.engine, "begin", full)
        assert [h.request_id for h in ledger.open_holds()] == ["r1"]


def test_a_sqlite_database_that_another_keeps_locked_is_waited_for_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    with open_database(str(path), LEDGER) as database:
        ledger = open_books(database)
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        timer.start()
        assert ledger.reserve("alice", "r1", MODEL, Usage(5, 20))[1]
        timer.join()
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(store, "_PATIENCE_S", 0.1)
        database.engine.dispose()
        sa.event.listen(database.engine, "connect", lambda c, _: c.execute("PRAGMA busy_timeout=50").close())
        assert code_of(lambda: ledger.reserve("alice", "r2", MODEL, Usage(5, 20))) == "database-unavailable"
        other.close()


def test_a_postgres_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PATIENCE_S", 0.1)
    url = f"postgresql://knotctl:s3cret@/none?host={tmp_path}"
    with pytest.raises(KnotctlError) as e:
        open_database(url, LEDGER)
    assert e.value.code == "database-unavailable"
    assert "s3cret" not in e.value.message


def test_connections_that_the_server_ends_are_made_again_and_nothing_is_done_twice(postgres: PrivatePostgres) -> None:
    with open_database(postgres.new_database(), LEDGER) as database, open_database(postgres.new_database()) as admin:
        ledger, ending, ended = open_books(database, credits=10**6), threading.Event(), 0
        draw = random.Random(1)
        others = sa.text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'knotctl' AND pid <> pg_backend_pid()"
        )

        def end_connections() -> None:
            nonlocal ended
            # Odd moments, far enough apart that a unit gets through in between on a busy machine.
            while not ending.wait(draw.uniform(0.05, 0.4)):
                ended += len(admin.read(lambda c: c.execute(others).all()))

        ender = threading.Thread(target=end_connections)
        ender.start()
        try:
            serve(ledger, lambda: ended >= 10)
        finally:
            ending.set()
            ender.join()
        assert ledger.open_holds() == []
        check_books(database)


def test_a_server_that_crashes_and_comes_back_is_waited_for(postgres: PrivatePostgres) -> None:
    with open_database(postgres.new_database(), LEDGER) as database:
        ledger, faults, back = open_books(database, credits=10**6), [], threading.Event()

        def work() -> None:
            try:
                serve(ledger, back.is_set)
            except BaseException as e:
                faults.append(e)

        worker = threading.Thread(target=work)
        worker.start()
        for _ in range(2):
            time.sleep(0.2)
            postgres.crash()
            postgres.start()
        back.set()
        worker.join()
        assert faults == []
        assert ledger.open_holds() == []
        check_books(database)


def serve(ledger: Ledger, enough: Callable[[], bool]) -> None:
    """Requests of 9 micro-credits, one after the other; each owned by this caller although answers were lost."""
    for i in itertools.count():
        if enough():
            return
        assert ledger.reserve("alice", f"r{i}", MODEL, Usage(5, 20))[1]
        ledger.record("alice", f"r{i}", Usage(5, 1), halves(6))
        assert ledger.settle("alice", f"r{i}", Usage(5, 2), halves(7)).charged == 9


def test_a_unit_that_fails_leaves_nothing(database: Database) -> None:
    open_books(database)

    def unit(c: sa.Connection) -> None:
        c.execute(tables.accounts.insert().values(account_id="ghost", created_ms=0))
        raise KnotctlError("stop", "stop")

    assert code_of(lambda: database.write(unit)) == "stop"
    assert database.read(lambda c: c.scalar(sa.select(tables.accounts.c.balance).filter_by(account_id="ghost"))) is None


def test_a_paused_tracker_keeps_nobody_waiting_for_the_rows_it_locked(
    postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, paused, let_go = postgres.new_database(), threading.Event(), threading.Event()
    with open_database(url, LEDGER) as database:
        ledger = open_books(database)
        monkeypatch.setattr(store, "_POSTGRES", "-c idle_in_transaction_session_timeout=300ms")
        with open_database(url, LEDGER) as stopped:
            runs = []

            def unit(c: sa.Connection) -> None:
                row = sa.select(tables.accounts).where(tables.accounts.c.account_id == "alice")
                c.execute(row.with_for_update()).one()
                runs.append(c)
                if len(runs) == 1:
                    paused.set()
                    let_go.wait(30)  # as under SIGSTOP, in the middle of a transaction
                c.execute(row).one()

            thread = threading.Thread(target=stopped.write, args=(unit,))
            thread.start()
            assert paused.wait(10)
            assert ledger.reserve("alice", "r1", MODEL, Usage(5, 20))[1]
            let_go.set()
            thread.join(30)
            # It found its transaction ended, and did the unit again.
            assert len(runs) == 2
