"""The control loop as a state machine: joins, leaves, answers and ticks in, directives out. No clock, no I/O.

The tracker feeds it from the network, the simulator from a scenario; both get the same decisions.
Source: man knot-cluster(7), OVER TIME.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from knotctl.core.cluster.capacity import Capacity, capacity_of
from knotctl.core.cluster.coverage import union
from knotctl.core.cluster.directives import Directive, DirectiveBook, MoveBudget
from knotctl.core.cluster.gaps import MOST_IDLE_LOOKED_AT, close_gaps
from knotctl.core.cluster.holddown import HoldDown
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.nodes import Node
from knotctl.core.cluster.placement import Placement
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.predict import fastest_route
from knotctl.core.cluster.reconcile import Holdings, Kind, Order, forced_drop
from knotctl.core.cluster.replicas import add_copies, level
from knotctl.core.cluster.standby import Standby
from knotctl.core.cluster.steps import improve, mend, stages_of
from knotctl.core.spans import LayerSpan

# A measured speed this far from the planned one changes plans; less is noise.
_NEWS = 0.2


@dataclass(slots=True)
class Member:
    """A node that is here. Units: seconds of the caller's clock."""

    node: Node
    capacity: Capacity
    joined_at: float
    flagged: bool = False
    served: bool = False


class Controller:
    """One model's cluster. `now` never goes back; every method returns the directives that are to be sent."""

    def __init__(self, model: ModelLayers, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self.members: dict[str, Member] = {}
        self.placement = Placement(model)
        self.books = Holdings(model.n_layers)
        self.directives = DirectiveBook()
        self.holds = HoldDown(policy)
        self.budget = MoveBudget(policy)
        self.standby = Standby(self.holds)
        self.critical: set[LayerSpan] = set()
        # Nodes that are not where they should be: to be looked at now, when a load has come, with the next tick.
        self._moving: set[str] = set()
        self._blocked: set[str] = set()
        self._throttled: set[str] = set()
        self._improved_at = 0.0
        self._news = False  # since the last look at what could be faster
        self._tried: set[object] = set()  # chains looked for in vain
        self.now = 0.0
        self.timeouts = 0

    def join(self, node: Node, now: float, held: Iterable[LayerSpan] = ()) -> list[Directive]:
        """Take up a node with the layers that it holds and serves; again, where it registers anew."""
        self.now = now
        spans = sorted(held, key=len)
        if (known := self.members.get(node.node_id)) is not None:
            if union(spans) != self.books.held[node.node_id] or self.books.loading[node.node_id]:
                # It was restarted before it was missed, and what it was loading is lost.
                self.holds.left(node.node_id, now, now - known.joined_at, served=known.served)
            self._forget(node.node_id)
        c = capacity_of(node, self.model, self.policy)
        if isinstance(c, str) or c.most_layers < 1:
            return []
        self.members[node.node_id] = Member(node, c, now, served=bool(spans))
        self.books.join(node.node_id, spans)
        if spans and c.fits(spans[-1].start, spans[-1].end):
            self.placement.put(c, spans[-1], "came back with these layers")
        else:
            self._make_idle(node.node_id)
        return self._react()

    def leave(self, node_id: str, now: float) -> list[Directive]:
        """Forget a node that left or is silent."""
        self.now = now
        member = self.members.get(node_id)
        if member is None:
            return []
        self.holds.left(node_id, now, now - member.joined_at, served=member.served)
        self._forget(node_id)
        return self._react()

    def answer(self, node_id: str, epoch: int, now: float, *, done: bool = True) -> list[Directive]:
        """Take a node's answer to a directive; an answer that comes too late changes nothing."""
        self.now = now
        directive = self.directives.answer(node_id, epoch)
        if directive is None:
            return []
        self._book(directive, done=done)
        # An answer brings no room for a gap: only what waits for it is looked at again.
        return self._give() if done else self._react()

    def measured(self, node_id: str, tokens_per_s: float, now: float) -> list[Directive]:
        """Take the speed that a node was seen to have, in tokens of its benchmark model."""
        member = self.members.get(node_id)
        if member is None:
            return []
        before = member.node.planned_tokens_per_s
        member.node = replace(member.node, measured_tokens_per_s=tokens_per_s)
        member.flagged = tokens_per_s < self.policy.lie_ratio * member.node.tokens_per_s
        if abs(member.node.planned_tokens_per_s - before) > _NEWS * before:
            self._use(node_id, replace_speed(member, self.model, self.policy))
        return []

    def tick(self, now: float) -> list[Directive]:
        """Look at everything, as is due every `policy.monitor_s`: what is late, uneven, or could be faster."""
        self.now = now
        for directive in self.directives.expired(now):
            self.timeouts += 1
            if directive.order.closes_gap:
                self.critical.add(directive.order.span)
            self._book(directive, done=False)
        if self.policy.rebalance == "continuous":
            self.standby.let_go(now)
            if self.placement.coverage.covered:
                self._tried.clear()
            if self.placement.coverage.covered and now - self._improved_at >= self.policy.improve_s:
                self._improved_at = now
                if self._news:
                    self._improve()
        self._moving |= self._throttled | self._blocked
        return self._react() or self._unlock()

    def why(self, node_id: str) -> str:
        """Return in words why a member has the layers that it has, or none."""
        place = self.placement.places.get(node_id)
        if place is not None:
            return place.why
        waits = self.holds.until(node_id) - self.now
        if waits > 0:
            return f"left or failed lately: held down for {waits:.0f} s more"
        if self.placement.coverage.covered:
            return "on standby: every layer that fits it has its node, and copies come a few at a time"
        return "fits into none of the gaps"

    def deliver(self, node_id: str) -> list[Directive]:
        """Return what a node's heartbeat is answered with; a DROP that would hurt by now is withdrawn."""
        kept = []
        for directive in self.directives.open_for(node_id):
            new = self.directives.hand_out(directive)
            if not new or not self._withdrawn(directive):
                kept.append(directive)
        return kept

    def confirm(self, node_id: str, epoch: int) -> bool:
        """Say whether a node that is about to carry out a directive still may: the last look before a DROP."""
        found = [d for d in self.directives.open_for(node_id) if d.epoch == epoch]
        return bool(found) and not self._withdrawn(found[0])

    def _withdrawn(self, directive: Directive) -> bool:
        """Take a DROP back where its layers have nobody else by now; say whether that was so."""
        order = directive.order
        if order.kind is not Kind.DROP or order.forced or self.books.coverage.least(order.span) > 0:
            return False
        self.directives.answer(order.node_id, directive.epoch)
        self.books.withdraw(order)
        self._blocked.add(order.node_id)
        return True

    def _react(self) -> list[Directive]:
        """Close gaps, place idle nodes, and give the orders that can be given."""
        static = self.policy.rebalance == "static"
        covered = self.placement.coverage
        if not self.books.coverage.covered and not static:
            self._take_back()
        if not covered.covered:
            good = [i for i in self.standby.idle(MOST_IDLE_LOOKED_AT) if self._trusted(i)]
            self._changed(close_gaps(self.placement, self._capacities(good), fixed=self.members if static else ()))
        if not covered.covered and not static:
            self._mend([i for i in self.members if self._trusted(i)])
        if not covered.covered:
            # Nobody else can: a node that was held down, or failed before, is better than none.
            pool = self._capacities(self.standby.everybody())
            self._changed(close_gaps(self.placement, pool, fixed=self.members if static else ()))
        if not covered.covered and not static:
            self._mend(self.members)
        if len(self.standby) and (covered.covered or static):
            most = len(self.standby) if static else self.budget.left(self.now, for_gap=False)
            self._changed(add_copies(self.placement, self._capacities(self.standby.idle(most)), self.policy))
        return self._give()

    def _take_back(self) -> None:
        """Rely no more on nodes that failed before for what nobody serves now: they may load it, others shall too."""
        for gap in self.books.coverage.gaps():
            for node_id, place in list(self.placement.places.items()):
                overlaps = place.span.start < gap.end and gap.start < place.span.end
                if overlaps and not self._trusted(node_id):
                    self.placement.remove(node_id)
                    self._make_idle(node_id)

    def _trusted(self, node_id: str) -> bool:
        """Whether a node has served since it last failed, or never failed."""
        return self.members[node_id].served or not self.holds.level(node_id)

    def _give(self) -> list[Directive]:
        given: list[Directive] = []
        for node_id in sorted(self._moving):
            self._blocked.discard(node_id)
            self._throttled.discard(node_id)
            place = self.placement.places.get(node_id)
            orders = self.books.orders_for(place, self.members[node_id].capacity)
            for order in orders:
                if self.budget.take(order, self.now):
                    given.append(self._issue(order))
                else:
                    self._throttled.add(node_id)
            if not orders and not self.directives.open_for(node_id) and not self.books.settled(node_id, place):
                self._blocked.add(node_id)
        self._moving.clear()
        return given

    def _unlock(self) -> list[Directive]:
        """Where a plan covers a model that has a gap, and its nodes wait for each other, let one go first."""
        if self.books.coverage.covered or not self.placement.coverage.covered or not self.directives.idle:
            return []
        capacities = {i: self.members[i].capacity for i in self._blocked}
        orders = forced_drop(self.books, sorted(self._blocked), self.placement.places, capacities)
        return [self._issue(order) for order in orders]

    def _issue(self, order: Order) -> Directive:
        self.books.begin(order)
        return self.directives.issue(order, self._deadline(order))

    def _deadline(self, order: Order) -> float:
        """When an order must be done: what its bytes take on the link, with patience, after what the node has to do."""
        c = self.members[order.node_id].capacity
        spans = self.books.loading[order.node_id] if order.kind is Kind.LOAD else ()
        seconds = sum(c.bytes_of(s.start, s.end) for s in spans) / self.policy.link_bytes_per_s
        return self.now + self.policy.directive_timeout_s + self.policy.load_patience * seconds

    def _book(self, directive: Directive, *, done: bool) -> None:
        order = directive.order
        node_id = order.node_id
        self.books.finish(order, done=done)
        self._moving.add(node_id)
        if done and order.kind is Kind.LOAD:
            self.members[node_id].served = True
            if node_id not in self.placement.places:
                self._keep_what_it_has(node_id, "has it after all")
            self._moving |= self._blocked
            self.critical = {s for s in self.critical if not self.books.coverage.least(s)}
        elif order.kind is Kind.LOAD:
            # Others get its layers, and it waits as if it had left; what it serves it goes on serving.
            self.holds.failed(node_id, self.now)
            self.placement.remove(node_id)
            if self.books.held[node_id]:
                self._keep_what_it_has(node_id, "keeps what it has: its last load failed")
            else:
                self._make_idle(node_id)

    def _keep_what_it_has(self, node_id: str, why: str) -> None:
        longest = max(self.books.held[node_id], key=len)
        self.placement.put(self.members[node_id].capacity, longest, why)
        self._changed([node_id])

    def _improve(self) -> None:
        self._news = False
        before = {i: self.books.held[i] for i in self.members}
        capacities = {i: m.capacity for i, m in self.members.items()}
        spans = self.placement.spans()
        improve(self.placement, capacities, self.policy, before, self.standby.held_down(), thorough=False)
        self._changed(i for i, p in self.placement.places.items() if spans.get(i) != p.span)
        route = fastest_route(stages_of(self.placement), self.model, self.policy.hop(self.model.hidden_size)) or ()
        most = self.budget.left(self.now, for_gap=False)
        self._changed(level(self.placement, self.policy, {c.node_id for c, _ in route}, most))

    def _mend(self, node_ids: Iterable[str]) -> None:
        """Look for another chain of these nodes where gaps remain; once for the same nodes and gaps."""
        if self.placement.coverage.covered:
            return
        capacities = {i: self.members[i].capacity for i in sorted(node_ids)}
        rooms = frozenset((i, c.usable_bytes, c.quantization) for i, c in capacities.items())
        tried = rooms, tuple(self.placement.coverage.gaps())
        if tried in self._tried:
            return
        if sum(c.most_layers for c in capacities.values()) < self.model.n_layers:
            return
        spans = self.placement.spans()
        mend(self.placement, capacities, self.policy)
        if not self.placement.coverage.covered:
            self._tried.add(tried)
        self._changed(i for i, p in self.placement.places.items() if spans.get(i) != p.span)

    def _changed(self, node_ids: Iterable[str]) -> None:
        """Note nodes whose place changed: they are idle no more, and have orders to be given."""
        for node_id in list(node_ids):
            self._news = True
            self._moving.add(node_id)
            self.standby.remove(node_id)
            self.members[node_id].capacity = self.placement.places[node_id].capacity

    def _capacities(self, node_ids: Iterable[str]) -> list[Capacity]:
        return [self.members[i].capacity for i in node_ids]

    def _make_idle(self, node_id: str) -> None:
        static = self.policy.rebalance == "static"
        self.standby.add(node_id, self.members[node_id].capacity.order, self.now, at_once=static)

    def _use(self, node_id: str, c: Capacity) -> None:
        """Plan with another capacity of a node from now on."""
        self._news = True
        self.standby.remove(node_id)
        place = self.placement.places.get(node_id)
        self.members[node_id].capacity = c
        if place is not None:
            self.placement.put(c, place.span, place.why)
        else:
            self._make_idle(node_id)

    def _forget(self, node_id: str) -> None:
        self._news = True
        self.standby.remove(node_id)
        self.placement.remove(node_id)
        self.books.leave(node_id)
        self.directives.forget(node_id)
        for group in (self._moving, self._blocked, self._throttled):
            group.discard(node_id)
        del self.members[node_id]


def replace_speed(member: Member, model: ModelLayers, policy: Policy) -> Capacity:
    """Return a member's capacity at the speed that its node is planned with now."""
    found = capacity_of(member.node, model, policy)
    assert isinstance(found, Capacity)
    return replace(member.capacity, node=member.node, step=found.step, prefill_step=found.prefill_step)
