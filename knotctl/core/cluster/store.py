"""One database under registry and ledger: SQLite in a file or PostgreSQL by URL, in units of work that can be rerun.

A unit of work is a function of a connection, run in one transaction and from the start again where the database could
not do it this time: a deadlock, a lost connection, a server that restarts. A commit whose answer was lost may have
happened, so every unit that writes must find what an earlier run of it wrote and change nothing then.
Source: man knot-ledger(7), DATABASE; SQLAlchemy Core.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from knotctl.core.errors import Conflict, KnotctlError, SourceError, UsageError, printable

T = TypeVar("T")
Unit = Callable[[sa.Connection], T]

# How long a unit is tried: longer than a PostgreSQL restart, shorter than what a client waits for.
_PATIENCE_S = 10.0
# A paused process must not keep others waiting for the rows that it locked; nothing but an audit reads for this long.
_POSTGRES = "-c lock_timeout=5s -c statement_timeout=30s -c idle_in_transaction_session_timeout=10s"
_BUSY, _LOCKED, _FULL, _CORRUPT, _NOT_A_DATABASE = 5, 6, 13, 11, 26
# serialization failure, deadlock, lock timeout, idle in transaction, shutdown, crash, start-up, too many connections
_AGAIN = {"40001", "40P01", "55P03", "25P03", "57P01", "57P02", "57P03", "53300"}

metadata = sa.MetaData()
_versions = sa.Table(
    "schema_versions",
    metadata,
    sa.Column("component", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Component:
    """Tables that are made together and carry one version. `append_only` names those whose rows never change."""

    name: str
    version: int
    tables: tuple[sa.Table, ...]
    append_only: tuple[sa.Table, ...] = ()


class Database:
    """An open database; `name` is its URL without the password. Threads share it."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.name = printable(engine.url.render_as_string(hide_password=True))
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite has one writer; queueing here is quicker than its polling, and fair.
        self._writer = threading.Lock() if self.is_sqlite else nullcontext()

    def write(self, unit: Unit[T]) -> T:
        """Return what the unit returns, with its writes committed; run again where it could not be done at first.

        Raises: what the unit raises, with nothing written; SourceError database-unavailable, disk-full, …
        """
        return self._run(unit, begin="IMMEDIATE", guard=self._writer)

    def read(self, unit: Unit[T]) -> T:
        """Return what the unit returns, all of it read from one state of the database."""
        return self._run(unit, begin="DEFERRED", guard=nullcontext())

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, unit: Unit[T], *, begin: str, guard: Any) -> T:
        deadline, tries = time.monotonic() + _PATIENCE_S, 0
        while True:
            try:
                with guard, self.engine.connect() as plain:
                    connection = plain.execution_options(sqlite_begin=begin)
                    if begin == "DEFERRED" and not self.is_sqlite:
                        connection = connection.execution_options(
                            isolation_level="REPEATABLE READ", postgresql_readonly=True
                        )
                    with connection.begin():
                        return unit(connection)
            except sa.exc.TimeoutError as e:
                what = "all connections are in use"
                raise SourceError("database-unavailable", f"{self.name}: {what}", hint="retry later") from e
            except DBAPIError as e:
                tries += 1
                if not _transient(e) or time.monotonic() > deadline:
                    raise self._named(e) from e
                # Full jitter: those who collided once must not collide again.
                time.sleep(random.uniform(0, min(1.0, 0.005 * 2**tries)))

    def _named(self, error: DBAPIError) -> KnotctlError:
        what = printable(" ".join(str(error.orig).split()), 300)
        state, code = _state(error)
        if code == _FULL or state == "53100":
            return SourceError("disk-full", f"{self.name}: {what}")
        if code in (_CORRUPT, _NOT_A_DATABASE):
            return SourceError("not-a-database", f"{self.name}: {what}")
        if isinstance(error, IntegrityError):
            return Conflict("books-refuse", f"{self.name}: {what}")
        if _transient(error):
            return SourceError("database-unavailable", f"{self.name}: {what}", hint="retry later")
        return SourceError("database-failed", f"{self.name}: {what}")


def open_database(ref: str, *components: Component) -> Database:
    """Return the database of a path, `sqlite:///PATH` or `postgresql://USER@HOST/NAME`, its tables made where absent.

    Raises: UsageError bad-database, missing-extra; SourceError.
    """
    database = Database(_engine(ref))
    try:
        database.write(lambda c: _make(c, components))
    except BaseException:
        database.close()
        raise
    return database


def insert_new(connection: sa.Connection, table: sa.Table, *rows: Mapping[str, Any]) -> int:
    """Insert rows unless those with their keys are there; return how many were new.

    On PostgreSQL this waits for a transaction that is inserting the same key, and sees its row once that commits.
    """
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    insert = make(table).values([dict(row) for row in rows]).on_conflict_do_nothing()
    return connection.execute(insert.execution_options(preserve_rowcount=True)).rowcount


def wall_ms() -> int:
    """Return the time of day in milliseconds since 1970: for people to read, never to decide by."""
    return time.time_ns() // 1_000_000


def _engine(ref: str) -> sa.Engine:
    try:
        url = sa.make_url(ref) if "://" in ref else sa.URL.create("sqlite", database=ref)
    except (ArgumentError, ValueError):
        raise _bad(ref) from None
    if url.drivername == "sqlite":
        return _sqlite(url)
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise _bad(url.render_as_string(hide_password=True))
    try:
        # The server takes the last of two: what the URL says goes before what is said here.
        options = f"{_POSTGRES} {url.query.get('options', '')}".strip()
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            connect_args={"connect_timeout": 5, "application_name": "knotctl", "options": options},
            pool_size=8,
            max_overflow=8,
        )
    except ModuleNotFoundError:
        raise UsageError(
            "missing-extra", "PostgreSQL: psycopg is not installed", hint="pip install 'knotctl[postgres]'"
        ) from None


def _sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:" or url.query:
        raise _bad(str(url))
    path = Path(url.database).expanduser()
    try:
        # Digests of keys and everybody's balance: its owner's to read.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as e:
        raise SourceError("write-failed", f"{printable(path)}: {e.strerror}") from e
    engine = sa.create_engine(url.set(database=str(path.absolute())), pool_size=8, max_overflow=8)

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        # The driver must begin nothing by itself: a transaction that starts as a reader cannot always become a writer.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'DEFERRED')}")

    return engine


def _bad(ref: str) -> UsageError:
    return UsageError(
        "bad-database",
        f"database {printable(ref)!r}: expected a path, sqlite:///PATH or postgresql://USER@HOST/NAME",
    )


def _make(connection: sa.Connection, components: tuple[Component, ...]) -> None:
    """Make what is absent; one process at a time, because trackers start together."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x4B4E4F54)))  # "KNOT"
    metadata.create_all(connection, tables=[_versions])
    for component in components:
        stored = connection.scalar(sa.select(_versions.c.version).where(_versions.c.component == component.name))
        if stored is None:
            metadata.create_all(connection, tables=component.tables)
            for table in component.append_only:
                _forbid_changes(connection, table.name)
            connection.execute(_versions.insert().values(component=component.name, version=component.version))
        elif stored != component.version:
            raise SourceError(
                "wrong-schema",
                f"database: tables of {component.name}: expected version {component.version}, found {stored}",
                hint="it was made by another version of knotctl",
            )


def _forbid_changes(connection: sa.Connection, table: str) -> None:
    """Let the database itself refuse to rewrite history, whoever asks."""
    if connection.dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    connection.exec_driver_sql(
        "CREATE OR REPLACE FUNCTION knot_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '%% is append-only', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation'; "
        "END $$"
    )
    connection.exec_driver_sql(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION knot_append_only()"
    )


def _state(error: DBAPIError) -> tuple[str, int]:
    """PostgreSQL's SQLSTATE and SQLite's primary result code, empty and 0 where there is none."""
    return getattr(error.orig, "sqlstate", None) or "", getattr(error.orig, "sqlite_errorcode", 0) & 0xFF


def _transient(error: DBAPIError) -> bool:
    state, code = _state(error)
    # A connection that broke, or could not be made, has no code.
    lost = error.connection_invalidated or (isinstance(error, sa.exc.OperationalError) and not state and not code)
    return state in _AGAIN or state.startswith("08") or code in (_BUSY, _LOCKED) or lost
