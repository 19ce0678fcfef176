"""The tables of the ledger: accounts, keys, prices, holds, and what is never rewritten: transfers, entries, shares.

Amounts are whole micro-credits. The constraints are the last defence: no code, ours or another's, can overdraw an
account, hold more than it has, book an operation twice or change what was booked.
"""

from __future__ import annotations

import sqlalchemy as sa

from knotctl.core.cluster.credits import MAX_ISSUED
from knotctl.core.cluster.store import Component, metadata

# SQLite numbers rows by itself only where the type is INTEGER.
_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _account(*, key: bool = False) -> sa.Column[str]:
    return sa.Column("account_id", sa.ForeignKey("accounts.account_id"), primary_key=key, nullable=False)


accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("account_id", sa.Text, primary_key=True),
    sa.Column("balance", sa.BigInteger, nullable=False, default=0),
    # The part of the balance that open holds have reserved.
    sa.Column("held", sa.BigInteger, nullable=False, default=0),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.CheckConstraint("held >= 0", name="held_is_no_debt"),
    # Only system:issue, where credits come from, may owe.
    sa.CheckConstraint(
        f"balance >= held OR (account_id = 'system:issue' AND balance >= -{MAX_ISSUED})", name="no_overdraft"
    ),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.LargeBinary(32), nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    _account(),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger),
    sa.Column("revoked_ms", sa.BigInteger),
)

# A price is never changed: a new one follows it, and each hold keeps the revision that it was opened under.
prices = sa.Table(
    "prices",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("revision", sa.Integer, primary_key=True),
    sa.Column("prompt", sa.BigInteger, nullable=False),
    sa.Column("generated", sa.BigInteger, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)

holds = sa.Table(
    "holds",
    metadata,
    _account(key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("fingerprint", sa.Text, nullable=False),
    # Known only to the call that opened it, which serves the request.
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("ttl_s", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False, default="held"),
    # Rises with every sign of life; a sweeper closes a hold only at the beat that it saw standing still.
    sa.Column("beat", sa.BigInteger, nullable=False, default=0),
    # What was delivered so far, and who did it, as JSON [[node, layers, tokens], …].
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("generated_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("work", sa.Text, nullable=False, default="[]"),
    sa.Column("charged", sa.BigInteger, nullable=False, default=0),
    # What closed it: request, sweep.
    sa.Column("closed_by", sa.Text),
    sa.Column("opened_ms", sa.BigInteger, nullable=False),
    sa.Column("closed_ms", sa.BigInteger),
    sa.ForeignKeyConstraint(["model", "revision"], ["prices.model", "prices.revision"]),
    sa.CheckConstraint("state IN ('held', 'settled', 'released')", name="known_state"),
    sa.CheckConstraint("charged >= 0 AND charged <= amount", name="no_charge_beyond_the_hold"),
)
_is_open = holds.c.state == "held"
sa.Index("open_holds", holds.c.account_id, sqlite_where=_is_open, postgresql_where=_is_open)
sa.Index("holds_closed", holds.c.account_id, holds.c.closed_ms)

transfers = sa.Table(
    "transfers",
    metadata,
    sa.Column("transfer_id", _SERIAL, primary_key=True, autoincrement=True),
    # Whoever repeats an operation finds it here and books nothing.
    sa.Column("operation", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("memo", sa.Text, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

entries = sa.Table(
    "entries",
    metadata,
    sa.Column("transfer_id", sa.ForeignKey("transfers.transfer_id"), primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.account_id"), primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
)
sa.Index("entries_of_account", entries.c.account_id, entries.c.transfer_id)

# What each node did for a settled request, the weight that its bill was split by, and what it earned by that.
shares = sa.Table(
    "shares",
    metadata,
    sa.Column("transfer_id", sa.ForeignKey("transfers.transfer_id"), primary_key=True),
    sa.Column("account_id", sa.ForeignKey("accounts.account_id"), primary_key=True),
    sa.Column("layer_tokens", sa.BigInteger, nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
)
sa.Index("shares_of_account", shares.c.account_id)

# Why a node forfeited what it did: the claim and every measurement, enough to judge it again.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("transfer_id", sa.ForeignKey("transfers.transfer_id"), primary_key=True),
    _account(),
    # All that it ever earned until then: the next verdict judges what came after. Not told by transfers' numbers, which
    # are given out before transfers are committed.
    sa.Column("earned_total", sa.BigInteger, nullable=False),
    sa.Column("earned", sa.BigInteger, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
)

LEDGER = Component(
    "ledger",
    1,
    (accounts, api_keys, prices, holds, transfers, entries, shares, verdicts),
    append_only=(prices, transfers, entries, shares, verdicts),
)
