"""A cluster in simulated time: the controller that the tracker runs, against nodes that crash, slow down and lie.

What is true of the nodes is kept here, apart from what the controller believes; coverage is measured on the truth.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.coverage import CoverageMap, subtract, union
from knotctl.core.cluster.directives import Directive
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.cluster.report import Recorder, Report
from knotctl.core.cluster.scenario import Actor, Scenario
from knotctl.core.spans import LayerSpan

# Seconds until a node asks for its directives, until silence is taken for death, until a load has passed its probe.
HEARTBEAT_S, DETECT_S, PROBE_S = 2.0, 15.0, 1.0
# Spread of a measured speed around the true one.
_NOISE = 0.05


@dataclass(slots=True)
class _Body:
    """A node as it is: what it really holds, whether it is up, and what it is busy with."""

    actor: Actor
    life: random.Random
    noise: random.Random  # apart from life, so that a policy that measures more often changes nobody's life
    up: bool = False
    stay: int = 0  # rises with every crash: what was under way is void
    held: list[LayerSpan] = field(default_factory=list)
    kept: list[LayerSpan] = field(default_factory=list)
    kept_until: float = 0.0
    busy_until: float = 0.0
    started: set[int] = field(default_factory=set)
    slow_factor: float = 1.0


def _draws(seed: int, actor: Actor) -> tuple[random.Random, random.Random]:
    life, noise = (random.Random(f"{seed}/{what}/{actor.node.node_id}") for what in ("life", "noise"))
    return life, noise


class Simulation:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self.scenario, self.policy = scenario, policy
        self.model = scenario.model
        self.controller = Controller(scenario.model, policy)
        self.truth = CoverageMap(scenario.model.n_layers)
        self.bodies = {a.node.node_id: _Body(a, *_draws(scenario.seed, a)) for a in scenario.actors}
        self.now = 0.0
        self.end = scenario.hours * 3600
        self.log = Recorder(scenario, policy, self.controller)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Report:
        """Return what happened; `advance` is told of every simulated hour."""
        for body in self.bodies.values():
            self._at(body.actor.joins_at, lambda b=body: self._come(b))  # type: ignore[misc]
        for event in self.scenario.events:
            for node_id in event.node_ids:
                body = self.bodies[node_id]
                if event.kind == "leave":
                    self._at(event.at_s, lambda b=body, e=event: self._crash(b, e.for_s))  # type: ignore[misc]
                else:
                    self._at(event.at_s, lambda b=body, e=event: self._slow(b, e.factor, e.for_s))  # type: ignore[misc]
        self._at(self.policy.monitor_s, self._tick)
        hour = 1
        while self._queue and self._queue[0][0] <= self.end:
            at, _, act = heapq.heappop(self._queue)
            while at >= hour * 3600:
                self.now = hour * 3600.0
                self.log.passed(self.now)
                self.log.hour(self.truth, self.now)
                advance(1)
                hour += 1
            self.now = at
            self.log.passed(at)
            act()
        self.now = self.end
        self.log.passed(self.end)
        return self.log.finish(self.truth, self.end)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, act))

    def _tick(self) -> None:
        self._send(self.controller.tick(self.now))
        self._at(self.now + self.policy.monitor_s, self._tick)

    # What happens to nodes.

    def _come(self, body: _Body) -> None:
        if body.up:
            return
        body.up = True
        stay = body.stay
        if body.kept and self.now <= body.kept_until:
            self._hold(body, body.kept)
        body.kept = []
        if body.actor.up_s is not None:
            stays = body.life.expovariate(1 / body.actor.up_s)
            self._at(self.now + stays, lambda: self._crash(body, None, stay))
        self.log.joined(self.now, body.actor)
        self._send(self.controller.join(body.actor.node, self.now, body.held))
        if body.held:
            self._at(self.now + PROBE_S, lambda: self._probe(body, stay))

    def _crash(self, body: _Body, for_s: float | None, stay: int | None = None) -> None:
        """A node is gone; the tracker notices later."""
        if not body.up or (stay is not None and stay != body.stay):
            return
        body.up = False
        body.stay += 1
        body.kept, body.kept_until = body.held, self.now + body.actor.keeps_s
        for span in body.held:
            self.truth.remove(span)
        body.held, body.busy_until = [], 0.0
        body.started.clear()
        self.log.crashed(self.now, self.truth, body.actor)
        gone = body.stay
        self._at(self.now + DETECT_S, lambda: self._missed(body, gone))
        if for_s is not None or body.actor.up_s is not None:
            away = for_s if for_s is not None else body.life.expovariate(1 / body.actor.down_s)
            self._at(self.now + away, lambda: self._come(body))

    def _missed(self, body: _Body, stay: int) -> None:
        if body.stay == stay and not body.up:
            self._send(self.controller.leave(body.actor.node.node_id, self.now))

    def _slow(self, body: _Body, factor: float, for_s: float | None) -> None:
        body.slow_factor = factor
        self._at(self.now + body.noise.uniform(0, 300), lambda: self._probe(body, body.stay))
        if for_s is not None:
            self._at(self.now + for_s, lambda: self._slow(body, 1.0, None))

    def _probe(self, body: _Body, stay: int) -> None:
        """The tracker measures a node that serves."""
        if not body.up or body.stay != stay or not body.held:
            return
        factor = body.actor.true_factor * body.slow_factor
        seen = body.actor.node.tokens_per_s * factor * body.noise.uniform(1 - _NOISE, 1 + _NOISE)
        self._send(self.controller.measured(body.actor.node.node_id, seen, self.now))
        self.log.probed(self.now, body.actor)

    # What nodes are told and do.

    def _send(self, directives: Iterable[Directive]) -> None:
        for d in directives:
            if d.order.kind is Kind.LOAD:
                self.log.loading(self.now, d, bool(self.bodies[d.order.node_id].held))
        for node_id in dict.fromkeys(d.order.node_id for d in directives):
            body = self.bodies[node_id]
            self._at(self.now + HEARTBEAT_S, lambda b=body, s=body.stay: self._heartbeat(b, s))  # type: ignore[misc]

    def _heartbeat(self, body: _Body, stay: int) -> None:
        if not body.up or body.stay != stay:
            return
        for d in self.controller.deliver(body.actor.node.node_id):
            if d.epoch not in body.started:
                body.started.add(d.epoch)
                self._start(body, d)

    def _start(self, body: _Body, d: Directive) -> None:
        span, stay = d.order.span, body.stay
        if d.order.kind is Kind.DROP:
            body.held = subtract(body.held, [span])
            self.truth.remove(span)
            self.log.dropped(self.now, self.truth, span)
            self._at(self.now + PROBE_S, lambda: self._done(body, d, stay))
        elif not body.actor.mute:
            size = self.controller.members[body.actor.node.node_id].capacity.bytes_of(span.start, span.end)
            self.log.carried(size)
            begin = max(self.now, body.busy_until)
            body.busy_until = begin + size / self.policy.link_bytes_per_s + PROBE_S
            self._at(body.busy_until, lambda: self._done(body, d, stay))

    def _done(self, body: _Body, d: Directive, stay: int) -> None:
        if not body.up or body.stay != stay:
            return
        if d.order.kind is Kind.LOAD:
            if d not in self.controller.directives.open_for(d.order.node_id):
                return  # it came too late, and the tracker has told somebody else
            self._hold(body, [d.order.span])
        self._send(self.controller.answer(d.order.node_id, d.epoch, self.now))
        if d.order.kind is Kind.LOAD:
            self._probe(body, stay)

    def _hold(self, body: _Body, spans: Iterable[LayerSpan]) -> None:
        for span in spans:
            self.truth.add(span)
        body.held = union([*body.held, *spans])
        self.log.gained(self.now, self.truth)


def simulate(scenario: Scenario, advance: Callable[[int], None] = lambda _: None) -> list[Report]:
    """Return a report for each of the scenario's policies, over the same events."""
    return [Simulation(scenario, policy).run(advance) for _, policy in scenario.policies]


def document_of(scenario: Scenario, reports: Iterable[Report]) -> dict[str, Any]:
    """Return the document of `plan-coverage --simulate --json`."""
    return {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "hours": scenario.hours,
        "model": scenario.model.name,
        "n_layers": scenario.model.n_layers,
        "nodes": len(scenario.actors),
        "policies": [
            {"name": name, "policy": dict(policy.to_json()), **report.to_json()}
            for (name, policy), report in zip(scenario.policies, reports, strict=True)
        ],
    }
