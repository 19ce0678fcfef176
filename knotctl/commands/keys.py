"""`knotctl keys`: make, list and revoke API keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knotctl.commands.console import print_json, print_table, say
from knotctl.commands.options import Database, Json
from knotctl.core.errors import UsageError, printable

if TYPE_CHECKING:
    from knotctl.core.cluster.apikeys import ApiKey

keys = typer.Typer(no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Make, list and revoke API keys.

    A key belongs to an account, which its requests are charged to, and opens what its scopes name: infer for the API,
    worker for joining as a node, metrics for reading metrics, admin for everything that changes a cluster. It is shown
    once, when it is made; the database keeps a digest of it.

    \b
    Examples:
    $ export KNOTCTL_DATABASE=ledger.db
    $ knotctl keys create alice --label laptop > alice.key
    $ knotctl keys list
    $ knotctl keys revoke knk_abcdefghijklm
    """


@keys.command("create")
def create(
    account: Annotated[str, typer.Argument(help="The account, opened where it is not: a name, or node:ID.")],
    database: Database,
    scopes: Annotated[
        str, typer.Option("--scopes", metavar="LIST", help="What it opens: some of infer,admin,worker,metrics.")
    ] = "infer",
    label: Annotated[str, typer.Option("--label", help="Words to know it by.")] = "",
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="DURATION", help="How long it is good: 90d, 12h; else for ever.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a key and print it, this once."""
    from knotctl.core.cluster.apikeys import KeyStore, parse_scopes
    from knotctl.core.cluster.store import open_database
    from knotctl.core.cluster.tables import LEDGER

    chosen, lifetime = parse_scopes(scopes), None if expires is None else duration_s(expires)
    with open_database(database, LEDGER) as opened:
        text, key = KeyStore(opened).create(account, chosen, label=label, lifetime_s=lifetime)
    if json:
        print_json({"key": text, **_document(key)})
    else:
        say(f"key {key.key_id} of {key.account_id}, for {', '.join(sorted(key.scopes))}: it is not shown again")
        print(text)


@keys.command("list")
def list_keys(
    database: Database,
    account: Annotated[str | None, typer.Option("--account", help="Only this account's.")] = None,
    json: Json = False,
) -> None:
    """List keys, without their secrets."""
    from knotctl.core.cluster.apikeys import KeyStore
    from knotctl.core.cluster.store import open_database
    from knotctl.core.cluster.tables import LEDGER

    with open_database(database, LEDGER) as opened:
        found = [_document(k) for k in KeyStore(opened).all(account)]
    if json:
        print_json(found)
    else:
        columns = ("key_id", "account", "scopes", "state", "label")
        print_table(columns, [[k[c] if c != "scopes" else ",".join(k[c]) for c in columns] for k in found])


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, with or without knk_ before it.")],
    database: Database,
    json: Json = False,
) -> None:
    """Revoke a key: from now on it opens nothing."""
    from knotctl.core.cluster.apikeys import KeyStore
    from knotctl.core.cluster.store import open_database
    from knotctl.core.cluster.tables import LEDGER

    with open_database(database, LEDGER) as opened:
        revoked = KeyStore(opened).revoke(key)
    if json:
        print_json(_document(revoked))
    else:
        print(f"key {revoked.key_id} of {revoked.account_id}: revoked")


def duration_s(text: str) -> int:
    """Return the seconds of `90d`, `12h`, `30m` or `45s`. Raises: UsageError bad-duration."""
    m = re.fullmatch(r"(\d{1,6})([smhd])", text.strip(), re.ASCII)
    if m is None or not int(m[1]):
        raise UsageError("bad-duration", f"duration {printable(text, 40)!r}: expected one such as 90d, 12h or 30m")
    return int(m[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[m[2]]


def _document(key: ApiKey) -> dict[str, Any]:
    import time

    return {
        "key_id": key.key_id,
        "account": key.account_id,
        "scopes": sorted(key.scopes),
        "label": key.label,
        "state": key.state(time.time_ns() // 1_000_000),
        "created_ms": key.created_ms,
        "expires_ms": key.expires_ms,
        "revoked_ms": key.revoked_ms,
    }
