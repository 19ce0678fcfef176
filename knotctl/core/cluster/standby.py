"""Nodes without layers: idle ones in the order in which they are used, and those held down until their time comes."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import islice

from knotctl.core.cluster.holddown import HoldDown

# The order in which idle nodes are used: those that never failed first, then by fit.
_Key = tuple[bool, tuple[int, int, str]]


class Standby:
    """Who could be given layers. Units: seconds of the caller's clock."""

    def __init__(self, holds: HoldDown) -> None:
        self._holds = holds
        self._idle: list[_Key] = []  # sorted
        self._key: dict[str, _Key] = {}
        self._held_down: dict[str, tuple[int, int, str]] = {}
        self._let_go_at: list[tuple[float, str]] = []  # a heap; may name nodes that are gone

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, node_id: str, order: tuple[int, int, str], now: float, *, at_once: bool = False) -> None:
        """Take up a node, held down where its past says so unless it is to be used at once."""
        self.remove(node_id)
        until = self._holds.until(node_id)
        if until > now and not at_once:
            self._held_down[node_id] = order
            heapq.heappush(self._let_go_at, (until, node_id))
        else:
            self._add_idle(node_id, order)

    def remove(self, node_id: str) -> None:
        """Forget a node, where it is here."""
        self._held_down.pop(node_id, None)
        key = self._key.pop(node_id, None)
        if key is not None:
            del self._idle[bisect_left(self._idle, key)]

    def let_go(self, now: float) -> None:
        """End the hold-down of nodes that have waited."""
        while self._let_go_at and self._let_go_at[0][0] <= now:
            _, node_id = heapq.heappop(self._let_go_at)
            if node_id in self._held_down and self._holds.until(node_id) <= now:
                self._add_idle(node_id, self._held_down.pop(node_id))

    def idle(self, most: int) -> list[str]:
        """Return the first so many idle nodes in the order in which they are used."""
        return [node_id for _, (*_, node_id) in islice(self._idle, most)]

    def everybody(self) -> list[str]:
        """Return idle nodes and those held down, in the order of fit."""
        orders = [*(order for _, order in self._idle), *self._held_down.values()]
        return [node_id for *_, node_id in sorted(orders)]

    def held_down(self) -> frozenset[str]:
        """Return the nodes that are held down."""
        return frozenset(self._held_down)

    def _add_idle(self, node_id: str, order: tuple[int, int, str]) -> None:
        key = self._key[node_id] = self._holds.level(node_id) > 0, order
        insort(self._idle, key)
