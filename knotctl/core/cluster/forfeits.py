"""Nodes that lie about their speed: what they earned under the claim is taken back, and the evidence stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import FORFEITS, account_of, ensure_accounts, node_account, post
from knotctl.core.cluster.slashing import Evidence
from knotctl.core.cluster.store import Database
from knotctl.core.errors import RequestError

_v, _e, _s, _t = tables.verdicts.c, tables.entries.c, tables.shares.c, tables.transfers.c


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement of a node. Units: micro-credits; earned since the one before, forfeited of that."""

    transfer_id: int
    account_id: str
    earned: int
    forfeited: int
    evidence: Evidence
    created_ms: int


def slash(database: Database, operation: str, evidence: Evidence) -> Verdict:
    """Return the verdict on a node that the evidence convicts, booked once an operation.

    Of what it earned since its last verdict it forfeits the part that it did not deliver of its claim, as far as it has
    not been paid out.
    Raises: RequestError not-proved, operation-mismatch.
    """
    if not evidence.flagged:
        raise RequestError(
            "not-proved",
            f"node {evidence.node_id}: {evidence.delivered} of {evidence.claimed} milli-tokens a second in "
            f"{len(evidence.samples)} measurements prove nothing",
            status=409,
        )
    account, key = node_account(evidence.node_id), f"slash:{operation}"

    def unit(c: sa.Connection) -> Verdict:
        ensure_accounts(c, account, FORFEITS)
        # Every settlement that pays the node locks its account: what is summed after this is whole.
        c.execute(sa.select(tables.accounts.c.balance).where(tables.accounts.c.account_id == account).with_for_update())
        if (done := _verdict(c, key)) is not None:
            if done.evidence != evidence:
                raise RequestError("operation-mismatch", f"operation {key}: booked before, otherwise", status=422)
            return done
        total = int(c.scalar(sa.select(sa.func.sum(_s.amount)).where(_s.account_id == account)) or 0)
        earned = total - int(c.scalar(sa.select(sa.func.max(_v.earned_total)).where(_v.account_id == account)) or 0)
        amount = min(evidence.penalty(earned), account_of(c, account).available)
        transfer_id = post(c, key, "slash", {account: -amount, FORFEITS: amount}, memo="speed")
        row = {"transfer_id": transfer_id, "account_id": account, "earned_total": total, "earned": earned}
        c.execute(tables.verdicts.insert().values(**row, evidence=evidence.to_json()))
        verdict = _verdict(c, key)
        assert verdict is not None
        return verdict

    return database.write(unit)


def verdicts(database: Database, node_id: str | None = None) -> list[Verdict]:
    """Return the verdicts on a node, or on all, oldest first."""
    query = _verdicts()
    if node_id is not None:
        query = query.where(_v.account_id == node_account(node_id))
    return database.read(lambda c: [_of_row(r) for r in c.execute(query)])


def _verdicts() -> sa.Select[Any]:
    # The node's line is the negative one; a node that had nothing has no line.
    line = sa.and_(_e.transfer_id == _v.transfer_id, _e.account_id == _v.account_id)
    forfeited = sa.func.coalesce(-_e.amount, 0).label("forfeited")
    columns = (_v.transfer_id, _v.account_id, _v.earned, forfeited, _v.evidence, _t.created_ms)
    rows = sa.select(*columns).join_from(tables.verdicts, tables.transfers)
    return rows.outerjoin(tables.entries, line).order_by(_v.transfer_id)


def _verdict(c: sa.Connection, operation: str) -> Verdict | None:
    row = c.execute(_verdicts().where(_t.operation == operation)).first()
    return None if row is None else _of_row(row)


def _of_row(row: sa.Row[Any]) -> Verdict:
    evidence = Evidence.from_json(row.evidence)
    return Verdict(row.transfer_id, row.account_id, row.earned, row.forfeited, evidence, row.created_ms)
