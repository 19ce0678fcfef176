"""API keys: made at random, shown once, kept as digests, bound to an account, scoped, revocable, and checked.

A key reads `knk_ID_SECRET`. It is found by its id, which is no secret, and compared in constant time by the SHA-256 of
the whole; a slow hash would protect nothing, because the secret is 256 random bits.
Source: man knot-ledger(7), KEYS.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import check_account, ensure_accounts
from knotctl.core.cluster.store import Database, wall_ms
from knotctl.core.errors import RequestError, UsageError, printable

# 60 bits of id, so that ids do not meet; 256 of secret. Letters and digits alone: a double click takes the whole key.
_ID_BYTES, _SECRET_BYTES = 8, 32
_KEY = re.compile(r"knk_([a-z2-7]{13})_([a-z2-7]{52})", re.ASCII)
_NO_DIGEST = bytes(32)
_k = tables.api_keys.c


class Scope(StrEnum):
    """What a key opens, each scope by itself: generation, administration, work as a node, reading metrics."""

    INFER = "infer"
    ADMIN = "admin"
    WORKER = "worker"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept, without its secret. Units: milliseconds since 1970."""

    key_id: str
    account_id: str
    scopes: frozenset[Scope]
    label: str
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None

    def state(self, now_ms: int) -> str:
        """Return `active`, `expired` or `revoked`."""
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "active"


class KeyStore:
    """The keys of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self, account_id: str, scopes: Iterable[Scope], *, label: str = "", lifetime_s: int | None = None
    ) -> tuple[str, ApiKey]:
        """Return a new key of an account, opened where it was not, and its record: the text is not kept anywhere.

        Raises: UsageError bad-account, bad-label, no-scope.
        """
        check_account(account_id)
        chosen = frozenset(scopes)
        if not chosen:
            raise UsageError("no-scope", f"API key: expected at least one of {', '.join(Scope)}")
        if len(label) > 100 or not label.isprintable():
            raise UsageError("bad-label", f"label {printable(label)!r}: expected at most 100 printable characters")
        key_id, secret = _random_word(_ID_BYTES), _random_word(_SECRET_BYTES)
        text = f"knk_{key_id}_{secret}"
        now = wall_ms()
        expires = None if lifetime_s is None else now + 1000 * lifetime_s
        key = ApiKey(key_id, account_id, chosen, label, now, expires, None)
        row = {"key_id": key_id, "account_id": account_id, "scopes": " ".join(sorted(chosen)), "label": label}
        row |= {"sha256": _digest(text)}  # type: ignore[dict-item]

        def unit(c: sa.Connection) -> None:
            ensure_accounts(c, account_id)
            # Where the commit's answer was lost, the unit is run again and finds its own row.
            if c.scalar(sa.select(_k.key_id).where(_k.key_id == key_id)) is None:
                c.execute(tables.api_keys.insert().values(**row, created_ms=now, expires_ms=expires))

        self._database.write(unit)
        return text, key

    def all(self, account_id: str | None = None) -> list[ApiKey]:
        """Return every key, of one account where it is named, oldest first."""
        query = sa.select(tables.api_keys).order_by(_k.created_ms, _k.key_id)
        if account_id is not None:
            query = query.where(_k.account_id == account_id)
        return self._database.read(lambda c: [_of_row(r) for r in c.execute(query)])

    def revoke(self, key: str) -> ApiKey:
        """Return a key, named by its id or its whole text, that opens nothing from now on.

        Raises: RequestError unknown-key.
        """
        key_id = m[1] if (m := _KEY.fullmatch(key)) else key.removeprefix("knk_")
        change = sa.update(tables.api_keys).where(_k.key_id == key_id, _k.revoked_ms.is_(None))

        def unit(c: sa.Connection) -> ApiKey:
            c.execute(change.values(revoked_ms=wall_ms()))
            row = c.execute(sa.select(tables.api_keys).where(_k.key_id == key_id)).first()
            if row is None:
                # Not printed: what was given may be a secret, mistyped.
                raise RequestError("unknown-key", "API key: there is none of that id", status=404)
            return _of_row(row)

        return self._database.write(unit)

    def authenticate(self, presented: str, scope: Scope) -> ApiKey:
        """Return the key that was presented, where it is good for the scope. It is read anew each time: revoked is off.

        Raises: RequestError invalid-key (401), missing-scope (403).
        """
        m = _KEY.fullmatch(presented)
        query = sa.select(tables.api_keys).where(_k.key_id == (m[1] if m else ""))
        row = self._database.read(lambda c: c.execute(query).first())
        # The same comparison for a key that is not there: the time tells nothing of either.
        right = hmac.compare_digest(_digest(presented), bytes(row.sha256) if row is not None else _NO_DIGEST)
        if row is None or not right or _of_row(row).state(wall_ms()) != "active":
            raise RequestError("invalid-key", "API key: not a valid one", status=401)
        key = _of_row(row)
        if scope not in key.scopes:
            raise RequestError("missing-scope", f"API key {key.key_id}: it has no scope {scope}", status=403)
        return key


def parse_scopes(text: str) -> list[Scope]:
    """Return the scopes written `infer,metrics`. Raises: UsageError bad-scope."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    for word in words:
        if word not in list(Scope):
            raise UsageError("bad-scope", f"scope {printable(word)!r}: expected some of {', '.join(Scope)}")
    return [Scope(w) for w in words]


def _random_word(count: int) -> str:
    return base64.b32encode(secrets.token_bytes(count)).decode().rstrip("=").lower()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _of_row(row: sa.Row[Any]) -> ApiKey:
    scopes = frozenset(Scope(s) for s in row.scopes.split())
    return ApiKey(
        row.key_id, row.account_id, scopes, row.label, row.created_ms, row.expires_ms, row.revoked_ms
    )  # fmt: skip
