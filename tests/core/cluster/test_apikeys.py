"""API keys: shown once, kept as digests, each scope by itself, off as soon as they are revoked or expired."""

from __future__ import annotations

import re
import time

import pytest
import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.apikeys import KeyStore, Scope, parse_scopes
from knotctl.core.cluster.store import Database
from knotctl.core.errors import KnotctlError


def status(store: KeyStore, text: str, scope: Scope = Scope.INFER) -> int:
    try:
        store.authenticate(text, scope)
    except KnotctlError as e:
        return int(vars(e)["status"])
    return 200


def test_a_key_opens_its_scopes_and_no_other(database: Database) -> None:
    store = KeyStore(database)
    text, key = store.create("alice", [Scope.INFER, Scope.METRICS], label="laptop")
    assert re.fullmatch(r"knk_[a-z2-7]{13}_[a-z2-7]{52}", text)
    assert store.authenticate(text, Scope.INFER) == key
    assert {s: status(store, text, s) for s in Scope} == {"infer": 200, "metrics": 200, "admin": 403, "worker": 403}
    assert Accounts(database).get("alice").balance == 0


def test_what_is_no_key_is_refused_alike(database: Database) -> None:
    store = KeyStore(database)
    text, _ = store.create("alice", [Scope.INFER])
    other, _ = store.create("bob", [Scope.INFER])
    mixed = text[:18] + other[18:]
    flipped = text[:-1] + ("a" if text[-1] != "a" else "b")
    messages = set()
    for wrong in (
        "",
        "knk_",
        mixed,
        flipped,
        text + "a",
        text[:-1],
        text.upper(),
        f" {text}",
        "é",
        "\udc80",
        text + "\n",
    ):
        assert status(store, wrong) == 401
        with pytest.raises(KnotctlError) as e:
            store.authenticate(wrong, Scope.INFER)
        messages.add(e.value.message)
    assert len(messages) == 1


def test_a_revoked_key_opens_nothing_from_then_on(database: Database) -> None:
    store = KeyStore(database)
    text, key = store.create("alice", [Scope.INFER])
    other, _ = store.create("alice", [Scope.INFER])
    revoked = store.revoke(f"knk_{key.key_id}")
    assert (status(store, text), status(store, other)) == (401, 200)
    assert revoked.revoked_ms is not None
    assert store.revoke(key.key_id) == revoked
    assert store.revoke(text) == revoked
    with pytest.raises(KnotctlError, match="none of that id"):
        store.revoke("aaaaaaaaaaaaa")


def test_an_expired_key_opens_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = KeyStore(database), time.time_ns
    text, key = store.create("alice", [Scope.INFER], lifetime_s=60)
    assert status(store, text) == 200
    monkeypatch.setattr(time, "time_ns", lambda: real() + 61 * 10**9)
    assert status(store, text) == 401
    assert key.state(time.time_ns() // 10**6) == "expired"


def test_no_secret_is_in_the_database_or_in_what_a_log_would_show(database: Database) -> None:
    store = KeyStore(database)
    text, key = store.create("alice", [Scope.INFER])
    secret = text.rpartition("_")[2]
    rows = database.read(lambda c: c.execute(sa.select(tables.api_keys)).all())
    assert secret not in repr(rows)
    assert secret.encode() not in b"".join(bytes(r.sha256) for r in rows)
    assert secret not in repr(key)
    with pytest.raises(KnotctlError) as e:
        store.authenticate(text[:-1] + "1", Scope.INFER)
    assert secret[:20] not in e.value.message


def test_keys_differ_and_are_listed_oldest_first(database: Database) -> None:
    store = KeyStore(database)
    texts = [store.create(account, [Scope.INFER])[0] for account in ("alice", "bob", "alice")]
    assert len(set(texts)) == len({t.split("_")[1] for t in texts}) == 3
    assert len(store.all()) == 3
    assert {k.account_id for k in store.all("alice")} == {"alice"}


def test_what_makes_no_key_is_refused(database: Database) -> None:
    store = KeyStore(database)
    for account, scopes, label, code in (
        ("", [Scope.INFER], "", "bad-account"),
        ("system:root", [Scope.INFER], "", "bad-account"),
        ("a/b", [Scope.INFER], "", "bad-account"),
        ("alice", [], "", "no-scope"),
        ("alice", [Scope.INFER], "two\nlines", "bad-label"),
    ):
        with pytest.raises(KnotctlError) as e:
            store.create(account, scopes, label=label)
        assert e.value.code == code
    assert store.all() == []


def test_scopes_as_people_write_them() -> None:
    assert parse_scopes("infer, metrics") == [Scope.INFER, Scope.METRICS]
    with pytest.raises(KnotctlError, match="'root'"):
        parse_scopes("infer,root")
