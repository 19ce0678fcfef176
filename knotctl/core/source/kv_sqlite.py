"""The key-value level in an SQLite file, shared by the processes of a host: write-ahead log, short waits.

Losing the last writes in a power cut is allowed (synchronous=NORMAL); a broken file is not: WAL survives kill -9.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from knotctl.core.errors import SourceError, printable
from knotctl.core.source.kv import TIMEOUT_SECONDS

# In the file's header, so that another program's database given by mistake is not written to.
_APPLICATION_ID = 0x4B4E4F54
_SCHEMA = 1
_CREATE = """
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB NOT NULL, written INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS entries_written ON entries (written);
"""
# Below every limit on the variables of a statement.
_KEYS_AT_ONCE = 500
# An entry from the future was written before the clock was set back: how old it is nobody knows.
_SKEW_SECONDS = 60
# 4 GiB: the rows of a vocabulary of 152,064 at 3,584 columns take 2.1 GB.
MAX_BYTES = 4 << 30
_PURGE_EVERY = 256


class SqliteKv:
    """Values in one file; one connection reads, one writes, each used by one thread at a time."""

    def __init__(self, path: Path, ttl_seconds: int, *, max_bytes: int = MAX_BYTES) -> None:
        self.name = printable(path)
        self._ttl = ttl_seconds
        self._writes = 0
        self._locks = threading.Lock(), threading.Lock()
        opened: list[sqlite3.Connection] = []
        try:
            opened.append(_connect(path))
            opened.append(_connect(path))
            self._reader, self._writer = opened
            self._claim(max_bytes)
        except sqlite3.Error as e:
            for connection in opened:
                connection.close()
            raise SourceError(
                "kv-failed", f"{self.name}: cannot use it as a key-value level: {e}", hint="name another file"
            ) from e

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that are there and not expired. Raises: SourceError kv-failed."""
        found: dict[bytes, bytes] = {}
        now = int(time.time())
        remaining = iter(keys)
        with self._locks[0], self._failing():
            while part := list(islice(remaining, _KEYS_AT_ONCE)):
                marks = ",".join("?" * len(part))
                query = f"SELECT key, value FROM entries WHERE key IN ({marks}) AND written BETWEEN ? AND ?"
                for key, value in self._reader.execute(query, [*part, now - self._ttl, now + _SKEW_SECONDS]):
                    # Who else writes to the file may have put text or a number there.
                    found[bytes(key)] = value if isinstance(value, bytes) else b""
        return found

    def put_many(self, items: Mapping[bytes, bytes]) -> None:
        """Keep the values for a day. Raises: SourceError kv-failed, also where the disk or the file's room is full."""
        now = int(time.time())
        rows = [(key, value, now) for key, value in items.items()]
        with self._locks[1], self._failing():
            self._writes += 1
            if self._writes % _PURGE_EVERY == 0:
                self._purge(now)
            try:
                self._replace(rows)
            except sqlite3.OperationalError as e:
                if e.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                # Our own cap, or the disk's: room within the file is made by the oldest tenth.
                self._writer.execute(
                    "DELETE FROM entries WHERE key IN "
                    "(SELECT key FROM entries ORDER BY written LIMIT (SELECT count(*) / 10 + 1 FROM entries))"
                )
                self._replace(rows)

    def delete_many(self, keys: Iterable[bytes]) -> None:
        """Forget the keys. Raises: SourceError kv-failed."""
        with self._locks[1], self._failing():
            self._writer.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        for lock, connection in zip(self._locks, (self._reader, self._writer), strict=True):
            with lock:
                connection.close()

    def _claim(self, max_bytes: int) -> None:
        db = self._writer
        questions = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        owner, schema, tables = (db.execute(q).fetchone()[0] for q in questions)
        if (owner, schema) != (_APPLICATION_ID, _SCHEMA) and tables:
            raise sqlite3.DatabaseError("it is another program's database, or another version's")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_SCHEMA};{_CREATE}")
        page = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {max(16, max_bytes // page)}")
        self._purge(int(time.time()))

    def _purge(self, now: int) -> None:
        expired = (now - self._ttl, now + _SKEW_SECONDS)
        self._writer.execute("DELETE FROM entries WHERE written NOT BETWEEN ? AND ?", expired)

    def _replace(self, rows: Sequence[tuple[bytes, bytes, int]]) -> None:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            self._writer.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise SourceError("kv-failed", f"{self.name}: {e}") from e


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
