"""Who is registered with the trackers of a model: rows that all trackers read and one may write, by lease and fence.

The tracker with the lease renews it; another takes it over once it has seen it stand still for its whole time, by its
own clock, under a higher fence. Every write names its writer's fence and is refused below the newest, so that a tracker
that was paused while another took over changes nothing when it wakes.
Source: man knot-cluster(7), TRACKERS.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from knotctl.core.cluster.store import Component, Database, insert_new, metadata
from knotctl.core.errors import Conflict
from knotctl.core.spans import LayerSpan

# Longer than a stall of a database or a collector; while nobody leads, streams go on and nodes wait for orders.
LEASE_S = 10.0

_leases = sa.Table(
    "tracker_leases",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    # Where the tracker that leads is reached.
    sa.Column("url", sa.Text, nullable=False),
    # Rises with every renewal.
    sa.Column("beat", sa.BigInteger, nullable=False, default=0),
)
_nodes = sa.Table(
    "tracker_nodes",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("boot", sa.Text, nullable=False),
    # What it registered with, as JSON.
    sa.Column("document", sa.Text, nullable=False),
    # The layers that streams may use, as JSON [[start, end], …]; what is being loaded or dropped is not among them.
    sa.Column("held", sa.Text, nullable=False),
    # Why no stream may use it, where none may.
    sa.Column("quarantine", sa.Text),
    sa.Column("measured", sa.Float),
)
# What the model answers to the probe: the first route that passed says it, every other one must say the same.
_answers = sa.Table(
    "known_answers",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("answer", sa.Text, nullable=False),
)
REGISTRY = Component("registry", 1, (_leases, _nodes, _answers))
_l, _n = _leases.c, _nodes.c


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A registered node. Units: measured in tokens a second of its benchmark's kind, None before enough is known."""

    node_id: str
    url: str
    boot: str
    document: Mapping[str, Any]
    held: tuple[LayerSpan, ...] = ()
    quarantine: str | None = None
    measured: float | None = None


class Lease:
    """One tracker's claim to be the writer of a model's registry. Units: seconds of `clock`, monotonic."""

    def __init__(
        self, database: Database, model: str, url: str, *, ttl_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.model = model
        self.fence = 0
        self.leader_url = ""
        self._database, self._url, self._ttl, self._clock = database, url, ttl_s, clock
        self._owner = secrets.token_hex(8)
        self._renewed: float | None = None
        self._seen: tuple[int, int, float] = (-1, -1, 0.0)  # fence, beat, since when

    @property
    def leading(self) -> bool:
        """Whether this tracker leads now: never when another one could have taken over."""
        return self._renewed is not None and self._clock() - self._renewed < self._ttl / 2

    def tick(self) -> bool:
        """Renew the lease, or take it where its holder is gone; return whether this tracker leads. Call it often."""
        now = self._clock()  # before the write: the time that it takes counts against us
        is_late = now - self._seen[2] >= self._ttl

        def unit(c: sa.Connection) -> sa.Row[Any]:
            row = self._row(c)
            if row is None:
                insert_new(c, _leases, {"model": self.model, "fence": 1, "owner": self._owner, "url": self._url})
            elif row.owner == self._owner:
                self._change(c, beat=row.beat + 1)
            elif row.owner == "" or (is_late and (row.fence, row.beat) == self._seen[:2]):
                self._change(c, fence=row.fence + 1, owner=self._owner, url=self._url, beat=0)
            found = self._row(c)
            assert found is not None
            return found

        row = self._database.write(unit)
        self.leader_url = row.url
        if row.owner == self._owner:
            self.fence, self._renewed = row.fence, now
            return True
        self._renewed = None
        if (row.fence, row.beat) != self._seen[:2]:
            self._seen = row.fence, row.beat, now
        return False

    def release(self) -> None:
        """Let another tracker lead at once."""

        def unit(c: sa.Connection) -> None:
            row = self._row(c)
            if row is not None and row.owner == self._owner:
                self._change(c, owner="")

        self._database.write(unit)
        self._renewed = None

    def check(self, c: sa.Connection) -> None:
        """Refuse the unit of work unless this tracker still leads. Raises: Conflict lease-lost."""
        row = self._row(c)
        if row is None or row.owner != self._owner or row.fence != self.fence:
            raise Conflict("lease-lost", "tracker: another one leads by now", hint="ask that one")

    def _row(self, c: sa.Connection) -> sa.Row[Any] | None:
        return c.execute(sa.select(_leases).where(_l.model == self.model).with_for_update()).first()

    def _change(self, c: sa.Connection, **values: Any) -> None:
        c.execute(sa.update(_leases).where(_l.model == self.model).values(**values))


class Registry:
    """The nodes of one model, as the database has them."""

    def __init__(self, database: Database, model: str) -> None:
        self._database, self._model = database, model

    def nodes(self) -> list[NodeRow]:
        """Return every registered node, by id."""
        query = sa.select(_nodes).where(_n.model == self._model).order_by(_n.node_id)
        return self._database.read(lambda c: [_of_row(r) for r in c.execute(query)])

    def save(self, lease: Lease, changed: Iterable[NodeRow], gone: Iterable[str] = ()) -> None:
        """Write rows and take others away, all or nothing. Raises: Conflict lease-lost."""
        rows = [_values(row) | {"model": self._model} for row in changed]
        ids = [*gone, *(r["node_id"] for r in rows)]

        def unit(c: sa.Connection) -> None:
            lease.check(c)
            c.execute(sa.delete(_nodes).where(_n.model == self._model, _n.node_id.in_(ids)))
            if rows:
                c.execute(_nodes.insert(), rows)

        self._database.write(unit)

    def known_answer(self, answer: str) -> str:
        """Return what the model answers to the probe: this, where none was known before."""

        def unit(c: sa.Connection) -> str:
            insert_new(c, _answers, {"model": self._model, "answer": answer})
            return str(c.scalar(sa.select(_answers.c.answer).where(_answers.c.model == self._model)))

        return self._database.write(unit)


def _values(row: NodeRow) -> dict[str, Any]:
    return {
        "node_id": row.node_id, "url": row.url, "boot": row.boot, "document": json.dumps(dict(row.document)),
        "held": json.dumps([[s.start, s.end] for s in row.held]), "quarantine": row.quarantine,
        "measured": row.measured,
    }  # fmt: skip


def _of_row(row: sa.Row[Any]) -> NodeRow:
    held = tuple(LayerSpan(a, b) for a, b in json.loads(row.held))
    return NodeRow(row.node_id, row.url, row.boot, json.loads(row.document), held, row.quarantine, row.measured)
