"""The key-value level under a cache: bytes by key, kept for a day, lost without harm.

Two stores have this shape, an SQLite file and a Redis or Valkey server, and pass one suite. What they hold is not
trusted: whoever reads checks each value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from knotctl.core.errors import UsageError, printable

TTL_SECONDS = 24 * 3600
# A level that takes longer than reading the store itself is of no use: such an answer counts as none.
TIMEOUT_SECONDS = 0.25

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


class KeyValue(Protocol):
    """Values by key. Every method may raise SourceError, whose code is kv-failed."""

    name: str

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that are there and not expired."""
        ...

    def put_many(self, items: Mapping[bytes, bytes]) -> None:
        """Keep the values for a day."""
        ...

    def delete_many(self, keys: Iterable[bytes]) -> None:
        """Forget the keys."""
        ...

    def close(self) -> None:
        """Give back what the level holds."""
        ...


def open_kv(ref: str, *, ttl_seconds: int = TTL_SECONDS) -> KeyValue:
    """Return the level that a path or URL names: `rows.db`, `sqlite:///rows.db`, `redis://host:6379/0`, `valkey://…`.

    As SQLAlchemy has it, `sqlite:///` is followed by the path: `sqlite:////var/rows.db` is absolute. A server need not
    answer yet.
    Raises: UsageError, SourceError where a file cannot be opened or is another program's.
    """
    scheme = _SCHEME.match(ref)
    if scheme is None or scheme[1] == "sqlite":
        from knotctl.core.source.kv_sqlite import SqliteKv

        path = ref if scheme is None else ref.removeprefix("sqlite:///")
        if not path or _SCHEME.match(path):
            raise UsageError("bad-kv", f"{printable(ref)}: expected sqlite:///PATH")
        return SqliteKv(Path(path), ttl_seconds)
    if scheme[1] in ("redis", "rediss", "valkey", "valkeys"):
        try:
            from knotctl.core.source.kv_redis import RedisKv
        except ImportError as e:
            hint = "pip install 'knotctl[redis]'"
            raise UsageError("no-redis", f"{shown(ref)}: the Python package redis is missing", hint=hint) from e

        return RedisKv(re.sub("^valkey", "redis", ref), shown(ref), ttl_seconds)
    raise UsageError("bad-kv", f"{shown(ref)}: expected a path, sqlite:///PATH, redis://HOST:PORT/N or valkey://…")


def shown(url: str) -> str:
    """Return the URL as it may be printed: the user part and the query can hold a password."""
    parts = urlsplit(url)
    return printable(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))
