"""What a simulation shows: time uncovered, what was moved, how even it is; one report a policy, comparable."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from knotctl.core.cluster.capacity import Capacity, capacity_of
from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.coverage import CoverageMap
from knotctl.core.cluster.directives import Directive
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.predict import fastest_route, times_of
from knotctl.core.cluster.scenario import Actor, Scenario
from knotctl.core.cluster.speed import milliseconds
from knotctl.core.cluster.steps import stages_of
from knotctl.core.spans import LayerSpan


@dataclass(frozen=True, slots=True)
class Report:
    """One policy's results, from when the model was first covered. Units: seconds, bytes, counts.

    The time uncovered is the sum of four: impossible, the nodes that were up had no room for the model; unnoticed, a
    node was gone and not yet missed; loading, every gap was being loaded; neglected, some gap was not.
    """

    first_covered_s: float | None
    uncovered_s: float
    impossible_s: float
    unnoticed_s: float
    loading_s: float
    neglected_s: float
    outages: int
    longest_outage_s: float
    loads: int
    moves: int
    drops: int
    drops_that_opened_a_gap: int
    bytes_loaded: int
    loads_per_hour: float
    moves_per_hour: float
    most_loads_in_a_minute: int
    timeouts: int
    liars: int
    liars_found: int
    found_after_s: float | None
    accused: int
    copies: tuple[int, float, int]
    balance: float
    token_ms: float | None
    hours: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as the document shows it."""
        found = {name: getattr(self, name) for name in self.__slots__}
        least, middle, most = found.pop("copies")
        return found | {"copies": {"least": least, "median": middle, "most": most}, "hours": list(self.hours)}


class Recorder:
    """Counts while a simulation runs."""

    def __init__(self, scenario: Scenario, policy: Policy, controller: Controller) -> None:
        self.model, self.policy, self.controller = scenario.model, policy, controller
        self.room: dict[str, int] = {}
        for a in scenario.actors:
            c = capacity_of(a.node, scenario.model, policy)
            self.room[a.node.node_id] = c.most_layers if isinstance(c, Capacity) and not a.mute else 0
        self.room_up = 0
        self.first_covered: float | None = None
        self.since = 0.0
        self.covered = False
        self.outage_began = 0.0
        self.uncovered_s = self.impossible_s = self.unnoticed_s = self.loading_s = self.neglected_s = 0.0
        self.longest = 0.0
        self.outages = self.loads = self.moves = self.drops = self.opened = self.bytes = self.most_loads = 0
        self.minute: deque[float] = deque()
        self.liars = sum(a.true_factor < policy.lie_ratio for a in scenario.actors)
        self.true_factor = {a.node.node_id: a.true_factor for a in scenario.actors}
        self.came: dict[str, float] = {}
        self.found: dict[str, float] = {}
        self.accused: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.before = (0, 0, 0.0)

    def joined(self, now: float, actor: Actor) -> None:
        """A node came up."""
        self.room_up += self.room[actor.node.node_id]
        self.came.setdefault(actor.node.node_id, now)

    def crashed(self, now: float, truth: CoverageMap, actor: Actor) -> None:
        """A node went down with all it held."""
        self.room_up -= self.room[actor.node.node_id]
        self._look(now, truth)

    def gained(self, now: float, truth: CoverageMap) -> None:
        """A node began to serve layers."""
        self._look(now, truth)

    def loading(self, now: float, d: Directive, serving: bool) -> None:
        """A LOAD was given; a move where the node serves other layers already."""
        self.loads += 1
        self.moves += serving
        self.minute.append(now)
        while self.minute[0] <= now - 60:
            self.minute.popleft()
        self.most_loads = max(self.most_loads, len(self.minute))

    def carried(self, size: int) -> None:
        """A node began to fetch so many bytes."""
        self.bytes += size

    def dropped(self, now: float, truth: CoverageMap, span: LayerSpan) -> None:
        """A node let go of layers."""
        self.drops += 1
        self.opened += truth.least(span) < 1
        self._look(now, truth)

    def probed(self, now: float, actor: Actor) -> None:
        """The tracker measured a node."""
        node_id = actor.node.node_id
        member = self.controller.members.get(node_id)
        if member is None or not member.flagged:
            return
        if self.true_factor[node_id] < self.policy.lie_ratio:
            self.found.setdefault(node_id, now - self.came[node_id])
        else:
            self.accused.add(node_id)

    def hour(self, truth: CoverageMap, now: float) -> None:
        """Close an hour's row."""
        loads, moved, uncovered = self.before
        self.rows.append({
            "hour": len(self.rows) + 1,
            "nodes": len(self.controller.members),
            "uncovered_s": round(self.uncovered_s - uncovered, 3),
            "loads": self.loads - loads,
            "bytes_loaded": self.bytes - moved,
            "least_copies": min(truth.counts),
            "median_copies": median(truth.counts),
            "token_ms": self._token_ms(),
        })  # fmt: skip
        self.before = (self.loads, self.bytes, self.uncovered_s)

    def finish(self, truth: CoverageMap, end: float) -> Report:
        """Return the report at the end."""
        self._end_outage(end)
        hours = end / 3600
        rates = self.controller.placement.coverage.rates
        times = [r["token_ms"] for r in self.rows if r["token_ms"] is not None]
        return Report(
            first_covered_s=None if self.first_covered is None else round(self.first_covered, 3),
            uncovered_s=round(self.uncovered_s, 3),
            impossible_s=round(self.impossible_s, 3),
            unnoticed_s=round(self.unnoticed_s, 3),
            loading_s=round(self.loading_s, 3),
            neglected_s=round(self.neglected_s, 3),
            outages=self.outages,
            longest_outage_s=round(self.longest, 3),
            loads=self.loads,
            moves=self.moves,
            drops=self.drops,
            drops_that_opened_a_gap=self.opened,
            bytes_loaded=self.bytes,
            loads_per_hour=round(self.loads / hours, 3),
            moves_per_hour=round(self.moves / hours, 3),
            most_loads_in_a_minute=self.most_loads,
            timeouts=self.controller.timeouts,
            liars=self.liars,
            liars_found=len(self.found),
            found_after_s=round(median(self.found.values()), 1) if self.found else None,
            accused=len(self.accused),
            copies=(min(truth.counts), median(truth.counts), max(truth.counts)),
            balance=round(min(rates) / max(1, median(rates)), 4),
            token_ms=round(sum(times) / len(times), 3) if times else None,
            hours=tuple(self.rows),
        )

    def _token_ms(self) -> float | None:
        route = fastest_route(stages_of(self.controller.placement), self.model, self.policy.hop(self.model.hidden_size))
        return milliseconds(times_of(route, self.model, self.policy).token) if route else None

    def passed(self, now: float) -> None:
        """Let time go by in the state that things are in: to be called before anything changes."""
        if self.first_covered is not None and not self.covered:
            passed, books = now - self.since, self.controller.books
            self.uncovered_s += passed
            if self.room_up < self.model.n_layers:
                self.impossible_s += passed
            elif books.coverage.covered:
                self.unnoticed_s += passed
            elif books.expected.covered:
                self.loading_s += passed
            else:
                self.neglected_s += passed
        self.since = now

    def _look(self, now: float, truth: CoverageMap) -> None:
        if truth.covered == self.covered:
            return
        self.covered = truth.covered
        if not self.covered:
            self.outages += 1
            self.outage_began = now
        elif self.first_covered is None:
            self.first_covered = now
        else:
            self._end_outage(now, over=True)

    def _end_outage(self, now: float, *, over: bool = False) -> None:
        if over or (not self.covered and self.first_covered is not None):
            self.longest = max(self.longest, now - self.outage_began)
