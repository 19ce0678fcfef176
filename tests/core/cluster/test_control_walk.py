"""The control loop under any order of events: safe always, and covered once things are left alone.

A failure prints its seed; `walk(seed)` repeats it.
"""

from __future__ import annotations

import random

import pytest
from cluster_samples import GB, a_model, a_node, least_time

from knotctl.core.cluster.controller import Controller
from knotctl.core.cluster.coverage import union
from knotctl.core.cluster.directives import Directive
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.reconcile import Kind
from knotctl.core.spans import LayerSpan


class Walk:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        n = self.draw.randint(3, 16)
        layers = (
            self.draw.randint(1, 3) * GB
            if self.draw.random() < 0.5
            else [self.draw.randint(1, 3) * GB for _ in range(n)]
        )
        self.model = a_model(
            n, layers, embedding_bytes=self.draw.choice([0, GB]), head_bytes=self.draw.choice([0, 2 * GB])
        )
        policy = Policy(
            kv_headroom=0, improve_s=60,
            moves_per_minute=self.draw.choice([4, 60]), hold_down_s=self.draw.choice([0, 30]),
            spare=self.draw.choice(["hotspots", "copies"]),
        )  # fmt: skip
        self.controller = Controller(self.model, policy)
        self.now = 0.0
        self.loads: list[float] = []
        self.over: set[str] = set()

    def given(self, directives: list[Directive]) -> None:
        """Check what was ordered at the moment it was ordered."""
        books = self.controller.books
        for d in directives:
            if d.order.kind is Kind.DROP:
                held_by_others = books.coverage.least(d.order.span) >= 1
                assert held_by_others or (d.order.forced and not books.coverage.covered), "drops a last copy"
            else:
                self.loads.append(self.now)
        recent = [t for t in self.loads if t > self.now - 60]
        assert len(recent) <= self.controller.policy.moves_per_minute
        self.check()

    def check(self) -> None:
        books = self.controller.books
        counts = [sum(k in s for spans in books.held.values() for s in spans) for k in range(self.model.n_layers)]
        assert counts == books.coverage.counts
        for node_id, member in self.controller.members.items():
            present = union([*books.held[node_id], *books.loading[node_id], *books.dropping[node_id]])
            size = sum(member.capacity.bytes_of(s.start, s.end) for s in present)
            assert size <= member.capacity.usable_bytes or node_id in self.over, f"{node_id}: over its memory"
        assert set(books.held) == set(self.controller.members)
        assert set(self.controller.placement.places) <= set(self.controller.members)

    def step(self) -> None:
        draw, controller = self.draw, self.controller
        self.now += draw.choice([0.0, 1.0, 20.0, 300.0])
        members = sorted(controller.members)
        kind = draw.choice(
            ["join", "join", "leave", "answer", "answer", "answer", "tick", "measured", "deliver", "confirm"]
        )
        node_id = draw.choice(members) if members else "n0"
        if kind == "join":
            node_id = f"n{draw.randrange(8)}"
            a = draw.randrange(self.model.n_layers)
            held = [LayerSpan(a, draw.randint(a + 1, self.model.n_layers))] if draw.random() < 0.3 else []
            self.over.discard(node_id)
            if held:
                self.over.add(node_id)
            self.given(controller.join(a_node(node_id, draw.uniform(1, 30), draw.uniform(1, 50)), self.now, held))
        elif kind == "leave":
            self.given(controller.leave(node_id, self.now))
        elif kind == "answer":
            for d in controller.directives.open_for(node_id)[:1]:
                self.given(controller.answer(node_id, d.epoch, self.now, done=draw.random() < 0.8))
            self.given(controller.answer(node_id, 10**9, self.now))
        elif kind == "tick":
            self.given(controller.tick(self.now))
        elif kind == "measured":
            self.given(controller.measured(node_id, draw.uniform(0.1, 60), self.now))
        elif kind == "confirm":
            for d in controller.directives.open_for(node_id):
                controller.confirm(node_id, d.epoch)
            self.check()
        else:
            controller.deliver(node_id)
            self.check()

    def come_to_rest(self) -> None:
        """Let every node do what it is told until nothing was left to do for longer than any hold-down."""
        quiet = 0
        for _ in range(400):
            quiet += 1
            for node_id in sorted(self.controller.members):
                for d in self.controller.directives.open_for(node_id):
                    quiet = 0
                    self.given(self.controller.answer(node_id, d.epoch, self.now))
            self.now += 61
            given = self.controller.tick(self.now)
            self.given(given)
            if given:
                quiet = 0
            if quiet * 61 > self.controller.policy.hold_down_most_s:
                return
        raise AssertionError("directives without end")


def walk(seed: int) -> None:
    w = Walk(seed)
    for _ in range(60):
        w.step()
    w.come_to_rest()
    capacities = {i: m.capacity for i, m in w.controller.members.items()}
    fits = {i for i in capacities if i not in w.over}
    if least_time({i: capacities[i] for i in sorted(fits)}, w.model, 0) is not None:
        assert w.controller.books.coverage.covered, "could be covered, and is not"


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_safe_always_and_covered_once_left_alone(start: int) -> None:
    for seed in range(start, start + 20):
        try:
            walk(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
