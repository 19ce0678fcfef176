"""`knotctl ledger`: accounts, credits, prices, what was used and earned, and the proof that the books balance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knotctl.commands.console import print_json, print_table, progress
from knotctl.commands.options import Database, Json
from knotctl.core.errors import printable

if TYPE_CHECKING:
    from knotctl.core.cluster.store import Database as OpenDatabase

ledger = typer.Typer(no_args_is_help=True)

_Operation = Annotated[
    str | None,
    typer.Option("--operation", metavar="KEY", help="Book it once under this key, however often it is repeated."),
]
_Memo = Annotated[str, typer.Option("--memo", help="Words to keep with it.")]
_Credits = Annotated[str, typer.Argument(metavar="CREDITS", help="How many: 12, 0.25, 1,000.")]


@ledger.callback()
def _ledger() -> None:
    """Keep accounts, credits and prices, and prove that the books balance.

    A customer's account is a plain name, a node's is node:ID. Requests reserve the most that they can cost, are charged
    for what was delivered, and the charge is shared among the nodes by layers times tokens served. Credits are shown in
    credits; with --json every amount is a whole number of micro-credits, a millionth of a credit, and every time is in
    milliseconds since 1970.

    \b
    Examples:
    $ export KNOTCTL_DATABASE=postgresql://knotctl@db.example/knotctl
    $ knotctl ledger open alice
    $ knotctl ledger grant alice 100 --operation invoice-17
    $ knotctl ledger price coder-1.5b 0.10 0.40
    $ knotctl ledger transfer node:worker-1 system:issue 12.5 --memo "paid out"
    $ knotctl ledger audit || echo "the books do not balance"
    """


@ledger.command("open")
def open_account(
    account: Annotated[str, typer.Argument(help="The account's name, or node:ID.")],
    database: Database,
    json: Json = False,
) -> None:
    """Open an account, unless it is open."""
    from knotctl.core.cluster.accounts import Accounts

    with _opened(database) as db:
        _show([asdict(Accounts(db).open(account))], json, ("balance", "held"), one=True)


@ledger.command("accounts")
def accounts(database: Database, json: Json = False) -> None:
    """List accounts with what they have, and what of it open requests hold."""
    from knotctl.core.cluster.accounts import Accounts

    with _opened(database) as db:
        _show([asdict(a) for a in Accounts(db).all()], json, ("balance", "held"))


@ledger.command("grant")
def grant(
    account: Annotated[str, typer.Argument(help="An open account.")],
    credits: _Credits,
    database: Database,
    operation: _Operation = None,
    memo: _Memo = "",
    json: Json = False,
) -> None:
    """Issue credits to an account."""
    _transfer(database, "system:issue", account, credits, operation, memo, json)


@ledger.command("transfer")
def transfer(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The account that gives.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The account that gets; system:issue pays out.")],
    credits: _Credits,
    database: Database,
    operation: _Operation = None,
    memo: _Memo = "",
    json: Json = False,
) -> None:
    """Move credits that no open request holds; to system:issue, pay them out."""
    _transfer(database, source, target, credits, operation, memo, json)


@ledger.command("price")
def price(
    database: Database,
    model: Annotated[str | None, typer.Argument(help="The model; without it, all prices are listed.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="Credits a million tokens of the prompt.")] = None,
    generated: Annotated[str | None, typer.Argument(help="Credits a million generated tokens.")] = None,
    json: Json = False,
) -> None:
    """Set what a model costs from now on, or list prices; open requests keep theirs."""
    from knotctl.core.cluster.credits import Price, parse_credits
    from knotctl.core.cluster.ledger import Ledger
    from knotctl.core.errors import UsageError

    if model is not None and (prompt is None or generated is None):
        raise UsageError("bad-price", "price: expected MODEL PROMPT GENERATED, or nothing")
    with _opened(database) as db:
        if model is not None and prompt is not None and generated is not None:
            Ledger(db).set_price(model, Price(parse_credits(prompt), parse_credits(generated)))
        rows = [{"model": m, **asdict(p)} for m, p in Ledger(db).prices().items() if model in (None, m)]
    _show(rows, json, ("prompt", "generated"))


@ledger.command("statement")
def statement(
    account: Annotated[str, typer.Argument(help="The account.")],
    database: Database,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many entries at most.")] = 50,
    before: Annotated[int | None, typer.Option("--before", help="Only those before this transfer_id.")] = None,
    json: Json = False,
) -> None:
    """List what was booked on an account, newest first."""
    from knotctl.core.cluster.accounts import Accounts

    with _opened(database) as db:
        _show([asdict(e) for e in Accounts(db).statement(account, limit=limit, before=before)], json, ("amount",))


@ledger.command("usage")
def usage(
    database: Database,
    account: Annotated[str | None, typer.Option("--account", help="Only this account's.")] = None,
    since: Annotated[int, typer.Option("--since", metavar="MS", help="From this time, milliseconds since 1970.")] = 0,
    until: Annotated[int | None, typer.Option("--until", metavar="MS", help="To before this time.")] = None,
    json: Json = False,
) -> None:
    """Sum up settled requests by account and model."""
    from knotctl.core.cluster.usage import usage_rows

    limits = {"since_ms": since} | ({} if until is None else {"until_ms": until})
    with _opened(database) as db:
        _show([asdict(r) for r in usage_rows(db, account, **limits)], json, ("charged",))


@ledger.command("earnings")
def earnings(database: Database, json: Json = False) -> None:
    """Sum up what each node served, earned, and still has."""
    from knotctl.core.cluster.usage import earnings_rows

    with _opened(database) as db:
        _show([asdict(r) for r in earnings_rows(db)], json, ("earned", "balance"))


@ledger.command("holds")
def holds(database: Database, json: Json = False) -> None:
    """List open requests with what they reserved and have recorded so far."""
    from knotctl.core.cluster.ledger import Ledger

    with _opened(database) as db:
        rows = [
            {
                "account_id": h.account_id, "request_id": h.request_id, "model": h.model, "amount": h.amount,
                "prompt_tokens": h.usage.prompt, "generated_tokens": h.usage.generated,
            }
            for h in Ledger(db).open_holds()
        ]  # fmt: skip
    _show(rows, json, ("amount",))


@ledger.command("verdicts")
def verdicts(
    database: Database,
    node: Annotated[str | None, typer.Option("--node", help="Only this node's.")] = None,
    json: Json = False,
) -> None:
    """List what nodes forfeited for claims that they did not keep; with --json the evidence too."""
    from knotctl.core.cluster.forfeits import verdicts as read_verdicts

    with _opened(database) as db:
        found = read_verdicts(db, node)
    rows = [asdict(v) | {"claimed": v.evidence.claimed, "delivered": v.evidence.delivered} for v in found]
    _show(
        rows if json else [{k: v for k, v in r.items() if k != "evidence"} for r in rows], json, ("earned", "forfeited")
    )


@ledger.command("audit")
def audit(database: Database, json: Json = False) -> int:
    """Work every figure out again from what it follows from, and say what differs.

    Balances from entries, holds from open requests, bills from prices and usage, shares from layers times tokens,
    forfeits from their evidence, and all of it against zero; of one state of the database, while it is in use.

    Exit status: 0 when the books balance, 1 with a line a finding when they do not.
    """
    from knotctl.core.cluster.audit import audit as audit_books
    from knotctl.core.cluster.audit import count_settled
    from knotctl.core.cluster.credits import format_credits

    with _opened(database) as db, progress("audit", count_settled(db), unit="requests") as advance:
        books = audit_books(db, advance)
        name = db.name
    if json:
        findings = [{"code": f.code, "severity": f.severity, "message": f.message} for f in books.findings]
        print_json({"database": name, "ok": books.ok, **(asdict(books) | {"findings": findings})})
    else:
        for f in books.findings:
            print(f"{f.severity}: {f.code}: {printable(f.message, 1000)}")
        charged, outstanding = format_credits(books.charged), format_credits(books.outstanding)
        print(
            f"{name}: {'the books balance' if books.ok else 'THE BOOKS DO NOT BALANCE'}: {books.accounts} accounts, "
            f"{books.transfers} transfers, {books.settled} settled requests for {charged} credits, "
            f"{books.open_holds} open; {outstanding} credits outstanding"
        )
    return 0 if books.ok else 1


@contextmanager
def _opened(ref: str) -> Iterator[OpenDatabase]:
    from knotctl.core.cluster.store import open_database
    from knotctl.core.cluster.tables import LEDGER

    with open_database(ref, LEDGER) as database:
        yield database


def _transfer(
    database: str, source: str, target: str, credits: str, operation: str | None, memo: str, json: bool
) -> None:
    import secrets

    from knotctl.core.cluster.accounts import Accounts, check_account
    from knotctl.core.cluster.credits import format_credits, parse_credits

    check_account(source)
    check_account(target)
    amount, key = parse_credits(credits), operation or f"cli-{secrets.token_hex(8)}"
    with _opened(database) as db:
        number = Accounts(db).transfer(key, source, target, amount, memo)
    if json:
        document = {"transfer_id": number, "operation": key, "from": source, "to": target, "amount": amount}
        print_json(document)
    else:
        print(f"transfer {number}: {format_credits(amount)} credits from {source} to {target}, operation {key}")


def _show(rows: list[dict[str, Any]], json: bool, amounts: tuple[str, ...], *, one: bool = False) -> None:
    """Print rows as JSON, or as a table with amounts in credits."""
    from knotctl.core.cluster.credits import format_credits

    if json:
        print_json(rows[0] if one else rows)
        return
    for row in rows:
        row.update({a: format_credits(row[a]) for a in amounts})
        if "created_ms" in row:
            row["created"] = _day(row.pop("created_ms"))
    if rows:
        print_table(list(rows[0]), [[printable(v) if isinstance(v, str) else v for v in r.values()] for r in rows])


def _day(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
