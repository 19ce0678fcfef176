"""Directives on their way: each with an epoch, a deadline and an answer; and the limit on loads a minute."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.reconcile import Kind, Order

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Directive:
    """An order given to a node. A higher epoch is newer; an answer to another epoch is none to this.

    Units: deadline in seconds of the caller's clock.
    """

    epoch: int
    order: Order
    deadline: float


class DirectiveBook:
    """The directives that wait for an answer. Epochs rise over all nodes, so that a log of them has one order."""

    def __init__(self, first_epoch: int = 1) -> None:
        self.next_epoch = first_epoch
        self._open: dict[str, dict[int, Directive]] = {}
        self._handed_out: set[int] = set()
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; may name what was answered

    def issue(self, order: Order, deadline: float) -> Directive:
        """Return the directive that gives an order, and wait for its answer until then."""
        directive = Directive(self.next_epoch, order, deadline)
        self.next_epoch += 1
        self._open.setdefault(order.node_id, {})[directive.epoch] = directive
        heapq.heappush(self._deadlines, (deadline, directive.epoch, order.node_id))
        return directive

    def hand_out(self, directive: Directive) -> bool:
        """Note that a node is told of a directive; False where it was before, and may have acted."""
        if directive.epoch in self._handed_out:
            return False
        self._handed_out.add(directive.epoch)
        return True

    def answer(self, node_id: str, epoch: int) -> Directive | None:
        """Close a directive and return it; None where none of that node and epoch is open, as after a timeout."""
        self._handed_out.discard(epoch)
        return self._open.get(node_id, {}).pop(epoch, None)

    def open_for(self, node_id: str) -> list[Directive]:
        """Return what a node was told and has not answered, oldest first: what its heartbeat is answered with."""
        return list(self._open.get(node_id, {}).values())

    @property
    def idle(self) -> bool:
        """Whether nobody was told anything that is not answered."""
        return not any(self._open.values())

    def forget(self, node_id: str) -> None:
        """Drop what a node that left was told."""
        self._handed_out.difference_update(self._open.pop(node_id, ()))

    def expired(self, now: float) -> list[Directive]:
        """Close and return the directives whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, epoch, node_id = heapq.heappop(self._deadlines)
            if (directive := self.answer(node_id, epoch)) is not None:
                late.append(directive)
        return late


class MoveBudget:
    """At most so many LOADs a minute: what closes a gap may take all, everything else half, so that no gap waits."""

    def __init__(self, policy: Policy) -> None:
        self._most = policy.moves_per_minute
        self._given: deque[float] = deque()

    def left(self, now: float, *, for_gap: bool) -> int:
        """Return how many more LOADs may be given now."""
        while self._given and self._given[0] <= now - _MINUTE:
            self._given.popleft()
        most = self._most if for_gap else max(1, self._most // 2)
        return max(0, most - len(self._given))

    def take(self, order: Order, now: float) -> bool:
        """Say whether an order may be given now, and count it."""
        if order.kind is Kind.DROP:
            return True
        if not self.left(now, for_gap=order.closes_gap):
            return False
        self._given.append(now)
        return True
