"""`knotctl ledger` and `knotctl keys`: what scripts rely on, on both databases, and every refusal's exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knotctl.cli import main
from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.cluster.credits import Usage, Work
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import open_database
from knotctl.core.cluster.tables import LEDGER


@pytest.fixture
def url(database_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh database that KNOTCTL_DATABASE names."""
    fresh = database_url()
    monkeypatch.setenv("KNOTCTL_DATABASE", fresh)
    return fresh


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`run("ledger", …)` is the JSON document of a command that succeeded."""

    def call(*argv: str) -> Any:
        assert main([*argv, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call


def test_from_an_empty_database_to_a_bill_and_a_clean_audit(url: str, run: Callable[..., Any]) -> None:
    made = run("keys", "create", "alice", "--label", "laptop")
    assert (made["account"], made["scopes"], made["state"]) == ("alice", ["infer"], "active")
    granted = run("ledger", "grant", "alice", "100", "--operation", "invoice-17")
    assert granted == run("ledger", "grant", "alice", "100", "--operation", "invoice-17")
    assert run("ledger", "price", "m", "1", "2") == [{"model": "m", "prompt": 1_000_000, "generated": 2_000_000}]
    with open_database(url, LEDGER) as database:
        account = KeyStore(database).authenticate(made["key"], Scope.INFER).account_id
        ledger = Ledger(database)
        ledger.reserve(account, "r1", "m", Usage(10, 50))
        ledger.reserve(account, "r2", "m", Usage(10, 50))
        ledger.settle(account, "r1", Usage(10, 20), [Work("n1", 28, 30)])
    assert [h["request_id"] for h in run("ledger", "holds")] == ["r2"]
    accounts = {a["account_id"]: (a["balance"], a["held"]) for a in run("ledger", "accounts")}
    assert accounts == {"alice": (99_999_950, 110), "node:n1": (50, 0), "system:issue": (-100_000_000, 0)}
    assert [e["amount"] for e in run("ledger", "statement", "alice")] == [-50, 100_000_000]
    assert run("ledger", "usage")[0]["charged"] == 50
    assert run("ledger", "earnings")[0]["layer_tokens"] == 28 * 30
    run("ledger", "transfer", "node:n1", "system:issue", "0.00005")
    books = run("ledger", "audit")
    assert (books["ok"], books["settled"], books["open_holds"], books["findings"]) == (True, 1, 1, [])
    assert books["outstanding"] == 99_999_950


def test_what_people_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "alice", "--expires", "90d", "--scopes", "infer,metrics"]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key.startswith("knk_")
    assert key not in printed.err
    assert main(["ledger", "grant", "alice", "1,250.5"]) == 0
    for command in (["keys", "list"], ["ledger", "accounts"], ["ledger", "statement", "alice"], ["ledger", "audit"]):
        assert main(command) == 0
    shown = capsys.readouterr().out
    assert key.split("_")[2] not in shown
    assert "1,250.5" in shown
    assert "the books balance: 2 accounts, 1 transfers" in shown


def test_keys_are_revoked(url: str, run: Callable[..., Any]) -> None:
    key = run("keys", "create", "alice")
    assert run("keys", "revoke", key["key_id"])["state"] == "revoked"
    assert [k["state"] for k in run("keys", "list", "--account", "alice")] == ["revoked"]
    assert "key" not in run("keys", "list")[0]


def test_an_audit_that_finds_something_exits_1_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    path = tmp_path / "ledger.db"
    assert main(["ledger", "open", "alice", "--database", str(path)]) == 0
    with sqlite3.connect(path) as c:
        c.execute("UPDATE accounts SET balance = 7")
    capsys.readouterr()
    assert main(["ledger", "audit", "--database", str(path)]) == 1
    out = capsys.readouterr().out
    assert "error: wrong-balance: account alice: balance 7; its entries add up to 0" in out
    assert "THE BOOKS DO NOT BALANCE" in out


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["ledger", "accounts"], 2, "--database"),
        (["ledger", "accounts", "--database", "oracle://h/d"], 2, "expected a path"),
        (["ledger", "grant", "nobody", "5"], 2, "there is none of that name"),
        (["ledger", "grant", "alice", "-5"], 2, "no such option"),
        (["ledger", "grant", "alice", "five"], 2, "expected a number"),
        (["ledger", "transfer", "a b", "alice", "5"], 2, "account 'a b'"),
        (["ledger", "price", "m", "1"], 2, "expected MODEL PROMPT GENERATED"),
        (["keys", "create", "alice", "--scopes", "root"], 2, "scope 'root'"),
        (["keys", "create", "alice", "--expires", "soon"], 2, "duration 'soon'"),
        (["keys", "revoke", "nothing"], 2, "none of that id"),
        (["keys", "create", "alice", "--database", "/nonexistent/x.db"], 4, "No such file"),
        (["ledger"], 2, "Usage: knotctl ledger"),
        (["keys", "frobnicate"], 2, "frobnicate"),
    ],
)
def test_refusals(argv: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "--database" not in argv and said != "--database" and argv[1:2] != [] and argv[1] != "frobnicate":
        argv = [*argv, "--database", str(tmp_path / "ledger.db")]
    assert main(argv) == status
    assert said.lower() in capsys.readouterr().err.lower()
