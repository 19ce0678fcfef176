"""A model's nodes as the tracker that leads sees them: who is here, what they hold, what they are told to do.

The planner's controller decides; this keeps the registry in step with it, listens to heartbeats, and judges claims of
speed by what was measured. One thread at a time; no network.
Source: man knot-cluster(7), OVER TIME; man knot-service(5), TRACKER.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from knotctl.core.cluster.capacity import capacity_of, too_small
from knotctl.core.cluster.controller import Controller, Member
from knotctl.core.cluster.coverage import subtract, union
from knotctl.core.cluster.directives import Directive
from knotctl.core.cluster.figures import Figures
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Node, node_of
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.quantizations import CATALOGUE, NATIVE
from knotctl.core.cluster.registry import Lease, NodeRow, Registry
from knotctl.core.cluster.slashing import Evidence, SpeedSample
from knotctl.core.errors import RequestError, printable
from knotctl.core.spans import LayerSpan

# An epoch names the fence of the tracker that gave it: orders of one that was deposed are older than all of the next.
_EPOCHS = 1 << 32
# What is measured is judged by its latest part.
_SAMPLES = 25


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat says: the start of the process, the layers it serves, answers (epoch to done), and figures."""

    boot: str
    spans: tuple[LayerSpan, ...]
    answers: Mapping[int, bool] = field(default_factory=dict)
    figures: Figures | None = None


@dataclass(slots=True)
class Seen:
    """A node between heartbeats. Units: seconds of the clock."""

    row: NodeRow
    at: float
    samples: deque[SpeedSample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    judged: int = 0
    figures: Figures | None = None


class Fleet:
    """The state of the tracker that leads, rebuilt from the registry when it begins to lead."""

    def __init__(
        self, model: ModelLayers, policy: Policy, registry: Registry, lease: Lease, *,
        silent_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.model, self.policy = model, policy
        self.silent_s = silent_s
        self._registry, self._lease, self._clock = registry, lease, clock
        self._known = frozenset((*CATALOGUE, *model.quantizations, NATIVE))
        self.seen: dict[str, Seen] = {}
        self.controller = Controller(model, policy)
        self.controller.directives.next_epoch = lease.fence * _EPOCHS
        now = clock()
        for row in registry.nodes():
            self.seen[row.node_id] = Seen(row, now)
            if row.quarantine is None:
                node = replace(self._node(row.document), measured_tokens_per_s=row.measured)
                self.controller.join(node, now, row.held)

    @property
    def now(self) -> float:
        """The clock's time."""
        return self._clock()

    def register(self, document: Mapping[str, Any], url: str, boot: str, held: Iterable[LayerSpan]) -> str:
        """Take up a node, anew where it was known; return its id. Raises: FormatError bad-node, …"""
        node = self._node(document)
        now = self._clock()
        spans = tuple(union(held))
        before = self.seen.get(node.node_id)
        row = NodeRow(node.node_id, url, boot, dict(document), spans)
        if before is not None:
            # What was found out about a node outlives its process: a liar cannot restart itself honest.
            row = replace(row, measured=before.row.measured)
            node = replace(node, measured_tokens_per_s=row.measured)
        self.seen[node.node_id] = Seen(row, now, *((before.samples, before.judged) if before else ()))
        self.controller.join(node, now, spans)
        self._save({node.node_id})
        return node.node_id

    def heartbeat(self, node_id: str, beat: Beat) -> list[Directive]:
        """Take what a node says, and return what it is to do. Raises: RequestError unknown-node: register (again)."""
        seen = self.seen.get(node_id)
        if seen is None or seen.row.boot != beat.boot:
            raise RequestError("unknown-node", f"node {printable(node_id)}: not registered", status=404)
        seen.at = now = self._clock()
        seen.figures = beat.figures or seen.figures
        for epoch, done in beat.answers.items():
            self.controller.answer(node_id, epoch, now, done=done)
        if node_id in self.controller.members:
            books = self.controller.books
            booked = union([*books.held[node_id], *books.dropping[node_id]])
            loading = books.loading[node_id]
            real = union(beat.spans)
            if subtract(booked, real) or subtract(real, [*booked, *loading]):
                # It lost layers, or did late what nobody waited for any more: what it says counts.
                self.controller.join(self.controller.members[node_id].node, now, real)
        self._save()
        return self.controller.deliver(node_id)

    def confirm(self, node_id: str, epoch: int) -> bool:
        """Say whether a node may carry out now what it was told."""
        allowed = self.controller.confirm(node_id, epoch)
        self._save()
        return allowed

    def leave(self, node_id: str) -> bool:
        """Forget a node; return whether it was known."""
        if self.seen.pop(node_id, None) is None:
            return False
        self.controller.leave(node_id, self._clock())
        self._save(gone=[node_id])
        return True

    def expire(self) -> list[str]:
        """Forget the nodes that were silent for too long; return them."""
        now = self._clock()
        silent = [i for i, s in self.seen.items() if now - s.at > self.silent_s]
        for node_id in silent:
            del self.seen[node_id]
            self.controller.leave(node_id, now)
        if silent:
            self._save(gone=silent)
        return silent

    def tick(self) -> None:
        """Look at everything, as is due every `policy.monitor_s`."""
        self.controller.tick(self._clock())
        self._save()

    def quarantine(self, node_id: str, why: str | None) -> None:
        """Keep streams off a node that answered wrongly, or let them come again."""
        if (seen := self.seen.get(node_id)) is not None and seen.row.quarantine != why:
            seen.row = replace(seen.row, quarantine=why)
            if why is not None and node_id in self.controller.members:
                # Its layers count no more, so that others load them; it gets none.
                self.controller.leave(node_id, self._clock())
            self._save({node_id})

    def measured(self, node_id: str, sample: SpeedSample) -> Evidence | None:
        """Take a measurement; return the evidence where it proves that the claim is a lie, each verdict's own."""
        seen = self.seen.get(node_id)
        member = self.controller.members.get(node_id)
        if seen is None or member is None:
            return None
        seen.samples.append(sample)
        seen.judged += 1
        evidence = Evidence(node_id, max(1, round(member.node.tokens_per_s * 1000)), tuple(seen.samples))
        if len(seen.samples) < 3:
            return None
        rate = max(0.001, evidence.delivered / 1000)
        seen.row = replace(seen.row, measured=rate)
        self.controller.measured(node_id, rate, self._clock())
        self._save({node_id})
        if evidence.flagged and seen.judged >= _SAMPLES // 5:
            # Each verdict is of measurements of its own.
            seen.judged = 0
            return evidence
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the coverage document: map, gaps, nodes and what they are told."""
        books, members = self.controller.books, self.controller.members
        nodes = []
        for node_id, seen in sorted(self.seen.items()):
            member = members.get(node_id)
            held, loading, dropping = (part.get(node_id, []) for part in (books.held, books.loading, books.dropping))
            nodes.append(
                {
                    "node_id": node_id, "url": seen.row.url, "vram_bytes": seen.row.document.get("vram_bytes"),
                    "layers": _json(held), "loading": _json(loading), "dropping": _json(dropping),
                    "benchmark_tokens_per_sec": seen.row.document.get("benchmark_tokens_per_sec"),
                    "measured_tokens_per_sec": seen.row.measured,
                    "flagged": bool(member and member.flagged), "quarantine": seen.row.quarantine,
                    "most_layers": self._most_layers(seen, member), "why": self.why(node_id),
                    "hold_down_level": self.controller.holds.level(node_id),
                    "silent_s": round(self._clock() - seen.at, 3),
                }
            )  # fmt: skip
        return {
            "model": self.model.name,
            "n_layers": self.model.n_layers,
            "covered": books.coverage.covered,
            "gaps": _json(books.coverage.gaps()),
            "critical": _json(sorted(self.controller.critical)),
            "coverage_map": books.coverage.to_json(),
            "nodes": nodes,
            "timeouts": self.controller.timeouts,
        }

    def why(self, node_id: str) -> str:
        """Return in words why a node has the layers that it has, or none."""
        seen = self.seen[node_id]
        if seen.row.quarantine is not None:
            return f"quarantined: {seen.row.quarantine}"
        if node_id in self.controller.members:
            return self.controller.why(node_id)
        c = capacity_of(self._node(seen.row.document), self.model, self.policy)
        return c if isinstance(c, str) else too_small(c) or "not planned with"

    def _most_layers(self, seen: Seen, member: Member | None) -> int:
        """How many layers a node has room for at the most."""
        if member is not None:
            return member.capacity.most_layers
        c = capacity_of(self._node(seen.row.document), self.model, self.policy)
        return 0 if isinstance(c, str) else c.most_layers

    def _node(self, document: Mapping[str, Any]) -> Node:
        return node_of(dict(document), self.model, self._known, "node")

    def _save(self, changed: Iterable[str] = (), gone: Iterable[str] = ()) -> None:
        """Write what has changed; a tracker that finds itself deposed says so here, and has changed nothing."""
        changed = set(changed)
        held = self.controller.books.held
        for node_id, seen in self.seen.items():
            spans = tuple(held.get(node_id, ()))
            if spans != seen.row.held:
                seen.row = replace(seen.row, held=spans)
                changed.add(node_id)
        gone = list(gone)
        if changed or gone:
            self._registry.save(self._lease, [self.seen[i].row for i in sorted(changed)], gone)


def _json(spans: Iterable[LayerSpan]) -> list[list[int]]:
    return [[s.start, s.end] for s in spans]
