"""Reserve, record, settle, release: what a request may cost, what was delivered of it, and who is paid for it.

A request is known by its account and its id, and each step of it happens once, however often it is asked for:
`reserve` holds the most that it can cost, before any work; `record` keeps what was delivered so far, before it is
delivered; `settle` charges that and credits the nodes; `release` lets go of a request that delivered nothing.
A sweeper closes the holds of those who died, at what they recorded: so nothing is charged twice, nothing delivered is
free, and nothing stays held. Who finds its hold closed (Conflict hold-closed) must stop delivering.
Source: man knot-ledger(7), REQUESTS.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster import tables
from knotctl.core.cluster.accounts import ensure_accounts, move, node_account, post
from knotctl.core.cluster.credits import Price, Usage, Work, layer_tokens, split
from knotctl.core.cluster.store import Database, insert_new, wall_ms
from knotctl.core.errors import Conflict, RequestError, UsageError, printable

# A request that shows no sign of life for so long is closed. Trackers give several in that time, so this is how long a
# database may be away before a request that lives is taken for dead.
TTL_S = 60
_MAX_WORK = 4096
_REQUEST = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_h = tables.holds.c


@dataclass(frozen=True, slots=True)
class Hold:
    """One request as the ledger knows it: `held`, `settled` at `charged`, or `released`. Units: micro-credits."""

    account_id: str
    request_id: str
    model: str
    price: Price
    amount: int
    state: str
    beat: int
    ttl_s: int
    usage: Usage
    work: tuple[Work, ...]
    charged: int
    closed_by: str | None


class Ledger:
    """Prices and requests of a database; every method is safe to repeat, and to call from any thread or process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set_price(self, model: str, price: Price) -> int:
        """Set what requests reserved from now on cost; return the revision, the last one where nothing changes."""
        if not model or len(model) > 200 or not model.isprintable():
            raise UsageError("bad-model", f"model {printable(model)!r}: expected 1 to 200 printable characters")

        def unit(c: sa.Connection) -> int:
            last = _latest_price(c, model)
            if last and (last.prompt, last.generated) == (price.prompt, price.generated):
                return int(last.revision)
            revision = (last.revision if last else 0) + 1
            row = {"model": model, "revision": revision, "prompt": price.prompt, "generated": price.generated}
            if not insert_new(c, tables.prices, row | {"created_ms": wall_ms()}):
                raise Conflict("price-changed", f"price of {printable(model)}: set by another just now", hint="retry")
            return int(revision)

        return self._database.write(unit)

    def prices(self) -> dict[str, Price]:
        """Return the price of every model that has one."""
        p = tables.prices.c
        query = sa.select(p.model, p.prompt, p.generated).order_by(p.model, p.revision)
        return self._database.read(lambda c: {r.model: Price(r.prompt, r.generated) for r in c.execute(query)})

    def reserve(
        self, account_id: str, request_id: str, model: str, most: Usage, *, fingerprint: str = "", ttl_s: int = TTL_S
    ) -> tuple[Hold, bool]:
        """Return the request's hold, for the most that it can cost, and whether this call opened it.

        One call opens it, however many ask. The others are retries, which must not serve it a second time, and whose
        `fingerprint`, a digest of the request's body, must be the same.
        Raises: RequestError insufficient-credit, unknown-account, unknown-model, operation-mismatch.
        """
        if not _REQUEST.fullmatch(request_id) or not 0 < ttl_s <= 86400:
            raise UsageError("bad-request-id", f"request {printable(request_id)!r}: expected letters, digits and ._:-")

        # Told apart by what only this call knows: its own commit may have happened although its answer was lost.
        owner = secrets.token_hex(8)

        def unit(c: sa.Connection) -> Hold:
            price = _latest_price(c, model)
            if price is None:
                raise RequestError("unknown-model", f"model {printable(model)!r}: it has no price", status=404)
            amount = Price(price.prompt, price.generated).bill(most)
            # The account first: it is the row that requests of one customer meet at, and unknown ones end here.
            move(c, account_id, held=amount)
            row: dict[str, Any] = {"account_id": account_id, "request_id": request_id, "fingerprint": fingerprint}
            row |= {"owner": owner, "model": model, "revision": price.revision, "amount": amount, "ttl_s": ttl_s}
            row["opened_ms"] = wall_ms()
            if not insert_new(c, tables.holds, row):
                raise _Reserved
            return _hold(c, account_id, request_id)

        try:
            return self._database.write(unit), True
        except (_Reserved, RequestError) as e:
            # Asked for again: also one that the account could not pay for twice, and whose model has lost its price.
            hold = self.find(account_id, request_id)
            if hold is None:
                assert isinstance(e, RequestError)
                raise
        query = sa.select(_h.model, _h.fingerprint, _h.owner).where(_is(account_id, request_id))
        found = self._database.read(lambda c: c.execute(query).one())
        if (found.model, found.fingerprint) != (model, fingerprint):
            raise RequestError(
                "operation-mismatch", f"request {request_id}: reserved before, for another request", status=422
            )
        return hold, found.owner == owner

    def find(self, account_id: str, request_id: str) -> Hold | None:
        """Return a request's hold, None where there is none."""
        return self._database.read(lambda c: _find(c, account_id, request_id))

    def record(self, account_id: str, request_id: str, usage: Usage, work: Iterable[Work]) -> Hold:
        """Keep what the request has used so far and who served it, as a sign of life; call it before delivering it.

        What is less than recorded came late and changes nothing.
        Raises: Conflict hold-closed: deliver nothing more; RequestError unknown-hold; UsageError no-work.
        """
        work = _checked(usage, work)
        values = {"prompt_tokens": usage.prompt, "generated_tokens": usage.generated, "work": _dumped(work)}
        older = (_h.prompt_tokens <= usage.prompt) & (_h.generated_tokens <= usage.generated)
        change = sa.update(tables.holds).where(_is(account_id, request_id), _h.state == "held", older)

        def unit(c: sa.Connection) -> Hold:
            c.execute(change.values(**values, beat=_h.beat + 1))
            hold = _hold(c, account_id, request_id)
            if hold.state != "held":
                raise _closed(hold)
            return hold

        return self._database.write(unit)

    def settle(self, account_id: str, request_id: str, usage: Usage, work: Iterable[Work]) -> Hold:
        """Return the settled hold: the bill charged once, its shares credited to the nodes by layers times tokens.

        A request that was settled before, by its caller or by a sweeper, stays as it was settled. Never charged: more
        than was reserved; never forgotten: what was recorded.
        Raises: Conflict hold-closed where it was released; RequestError unknown-hold; UsageError no-work.
        """
        work = _checked(usage, work)

        def unit(c: sa.Connection) -> Hold:
            hold = _hold(c, account_id, request_id, lock=True)
            if hold.state == "released":
                raise _closed(hold)
            if hold.state == "held":
                recorded = usage.prompt < hold.usage.prompt or usage.generated < hold.usage.generated
                _settle(c, hold, *((hold.usage, hold.work) if recorded else (usage, work)), closed_by="request")
            return _hold(c, account_id, request_id)

        return self._database.write(unit)

    def release(self, account_id: str, request_id: str) -> Hold:
        """Return the hold, closed: released where nothing was recorded, else settled at what was.

        Raises: RequestError unknown-hold.
        """

        def unit(c: sa.Connection) -> Hold:
            _close(c, _hold(c, account_id, request_id, lock=True), closed_by="request")
            return _hold(c, account_id, request_id)

        return self._database.write(unit)

    def open_holds(self) -> list[Hold]:
        """Return every hold that is open, by account and request."""
        query = _holds().where(_h.state == "held").order_by(_h.account_id, _h.request_id)
        return self._database.read(lambda c: [_of_row(r) for r in c.execute(query)])

    def close_idle(self, seen: Hold) -> Hold | None:
        """Close a hold whose beat is still the one seen; return it closed, None where it lives or another closed it."""

        def unit(c: sa.Connection) -> Hold | None:
            hold = _hold(c, seen.account_id, seen.request_id, lock=True)
            if hold.state != "held" or hold.beat != seen.beat:
                return None
            _close(c, hold, closed_by="sweep")
            return _hold(c, seen.account_id, seen.request_id)

        return self._database.write(unit)


class _Reserved(Exception):
    """Leaves a unit of work, and undoes it: the request is there already."""


def operation_of(hold: Hold) -> str:
    """Return the operation under which a hold is settled."""
    return f"settle:{hold.account_id}/{hold.request_id}"


def read_holds(c: sa.Connection, state: str, batch: int) -> Iterator[list[Hold]]:
    """Yield the holds in a state, by account and request, so many at a time."""
    after = ("", "")
    while True:
        place = sa.tuple_(_h.account_id, _h.request_id) > sa.tuple_(*map(sa.literal, after))
        query = _holds().where(_h.state == state, place).order_by(_h.account_id, _h.request_id).limit(batch)
        if not (holds := [_of_row(r) for r in c.execute(query)]):
            return
        yield holds
        after = (holds[-1].account_id, holds[-1].request_id)


def shares_of(hold: Hold, usage: Usage, weights: Mapping[str, int]) -> dict[str, int]:
    """Return what each account earns by a request; it adds up to what is charged, the bill within what was reserved.

    Shapes: weights are layers times tokens by account.
    """
    return split(min(hold.price.bill(usage), hold.amount), weights)


def lines_of(account_id: str, shares: Mapping[str, int]) -> dict[str, int]:
    """Return the lines that book these shares against the account; a node that asks may serve itself."""
    lines = dict(shares)
    lines[account_id] = lines.get(account_id, 0) - sum(shares.values())
    return {a: n for a, n in lines.items() if n}


def _close(c: sa.Connection, hold: Hold, *, closed_by: str) -> None:
    if hold.state == "held" and hold.usage != Usage(0, 0):
        _settle(c, hold, hold.usage, hold.work, closed_by=closed_by)
    elif hold.state == "held":
        move(c, hold.account_id, held=-hold.amount)
        _finish(c, hold, state="released", closed_by=closed_by)


def _settle(c: sa.Connection, hold: Hold, usage: Usage, work: tuple[Work, ...], *, closed_by: str) -> None:
    weights = {node_account(node): n for node, n in layer_tokens(work).items()}
    shares = shares_of(hold, usage, weights)
    if shares:
        ensure_accounts(c, *shares)
    lines = lines_of(hold.account_id, shares)
    transfer_id = post(c, operation_of(hold), "settle", lines, memo=hold.model, unhold={hold.account_id: hold.amount})
    if weights:
        rows = [
            {"transfer_id": transfer_id, "account_id": a, "layer_tokens": n, "amount": shares[a]}
            for a, n in weights.items()
        ]
        c.execute(tables.shares.insert(), rows)
    values = {"prompt_tokens": usage.prompt, "generated_tokens": usage.generated, "work": _dumped(work)}
    _finish(c, hold, state="settled", closed_by=closed_by, charged=sum(shares.values()), **values)


def _finish(c: sa.Connection, hold: Hold, **values: Any) -> None:
    change = sa.update(tables.holds).where(_is(hold.account_id, hold.request_id), _h.state == "held")
    assert c.execute(change.values(**values, beat=_h.beat + 1, closed_ms=wall_ms())).rowcount == 1


def _checked(usage: Usage, work: Iterable[Work]) -> tuple[Work, ...]:
    """Work as it can be kept: a sweeper that has to settle it must be able to."""
    work = tuple(work)
    if len(work) > _MAX_WORK:
        raise UsageError("bad-work", f"work: expected at most {_MAX_WORK} parts, found {len(work)}")
    if usage != Usage(0, 0) and not any(w.tokens for w in work):
        raise UsageError("no-work", f"{usage}: expected nodes that served it, found none")
    return work


def _closed(hold: Hold) -> Conflict:
    what = f"{hold.state} by {hold.closed_by}"
    return Conflict("hold-closed", f"request {hold.request_id}: {what}", hint="deliver nothing more of it")


def _dumped(work: tuple[Work, ...]) -> str:
    return json.dumps([[w.node_id, w.layers, w.tokens] for w in work], separators=(",", ":"))


def _is(account_id: str, request_id: str) -> sa.ColumnElement[bool]:
    return (_h.account_id == account_id) & (_h.request_id == request_id)


def _latest_price(c: sa.Connection, model: str) -> sa.Row[Any] | None:
    p = tables.prices.c
    return c.execute(sa.select(tables.prices).where(p.model == model).order_by(p.revision.desc()).limit(1)).first()


def _holds() -> sa.Select[Any]:
    p = tables.prices.c
    columns = (p.prompt.label("prompt_price"), p.generated.label("generated_price"))
    return sa.select(tables.holds, *columns).join_from(tables.holds, tables.prices)


def _of_row(row: sa.Row[Any]) -> Hold:
    return Hold(
        row.account_id, row.request_id, row.model, Price(row.prompt_price, row.generated_price), row.amount, row.state,
        row.beat, row.ttl_s, Usage(row.prompt_tokens, row.generated_tokens),
        tuple(Work(*w) for w in json.loads(row.work)), row.charged, row.closed_by,
    )  # fmt: skip


def _find(c: sa.Connection, account_id: str, request_id: str, *, lock: bool = False) -> Hold | None:
    query = _holds().where(_is(account_id, request_id))
    row = c.execute(query.with_for_update(of=tables.holds) if lock else query).first()
    return None if row is None else _of_row(row)


def _hold(c: sa.Connection, account_id: str, request_id: str, *, lock: bool = False) -> Hold:
    hold = _find(c, account_id, request_id, lock=lock)
    if hold is None:
        what = f"request {printable(request_id)!r} of {printable(account_id)}: it was not reserved"
        raise RequestError("unknown-hold", what, status=404)
    return hold
