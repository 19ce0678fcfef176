"""What was used and what was earned: the figures behind /v1/usage and `knotctl ledger usage`."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.store import Database

_h, _s, _a = tables.holds.c, tables.shares.c, tables.accounts.c


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one account used of one model. Units: charged in micro-credits."""

    account_id: str
    model: str
    requests: int
    prompt_tokens: int
    generated_tokens: int
    charged: int


@dataclass(frozen=True, slots=True)
class EarningsRow:
    """What one node did. Units: layer_tokens are layers times tokens; micro-credits."""

    account_id: str
    requests: int
    layer_tokens: int
    earned: int
    balance: int


def usage_rows(
    database: Database, account_id: str | None = None, *, since_ms: int = 0, until_ms: int = 1 << 62
) -> list[UsageRow]:
    """Return what was used by account and model in the settled requests closed from since to before until."""
    sums = [sa.func.count(), *(sa.func.sum(x) for x in (_h.prompt_tokens, _h.generated_tokens, _h.charged))]
    key = (_h.account_id, _h.model)
    query = sa.select(*key, *sums).group_by(*key).order_by(*key)
    query = query.where(_h.state == "settled", _h.closed_ms >= since_ms, _h.closed_ms < until_ms)
    if account_id is not None:
        query = query.where(_h.account_id == account_id)
    # PostgreSQL sums 64-bit columns to decimals.
    return database.read(lambda c: [UsageRow(r[0], r[1], *map(int, r[2:])) for r in c.execute(query)])


def earnings_rows(database: Database, account_id: str | None = None) -> list[EarningsRow]:
    """Return what each node did and earned by it, by account; balance is what payouts and forfeits left of it."""
    sums = (sa.func.count(), sa.func.sum(_s.layer_tokens), sa.func.sum(_s.amount), sa.func.max(_a.balance))
    query = sa.select(_s.account_id, *sums).join_from(tables.shares, tables.accounts)
    query = query.group_by(_s.account_id).order_by(_s.account_id)
    if account_id is not None:
        query = query.where(_s.account_id == account_id)
    return database.read(lambda c: [EarningsRow(r[0], *map(int, r[1:])) for r in c.execute(query)])
