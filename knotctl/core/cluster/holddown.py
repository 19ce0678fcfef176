"""Hold-down of flapping nodes: who leaves soon after it came waits for layers, each time twice as long."""

from __future__ import annotations

from knotctl.core.cluster.policy import Policy

# Doubling further changes nothing below the cap.
_MOST_LEVELS = 32


class HoldDown:
    """How often each node left early, and until when it is left alone. Units: seconds of the caller's clock."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._levels: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def left(self, node_id: str, now: float, up_s: float, *, served: bool) -> None:
        """Note that a node left after so long: early raises its level, a stable stay in which it served clears it."""
        if up_s < self._policy.stable_s:
            self.failed(node_id, now)
        elif served:
            self._levels.pop(node_id, None)
            self._until.pop(node_id, None)

    def failed(self, node_id: str, now: float) -> None:
        """Note that a node did not do what it was told in time: as bad as leaving early."""
        level = self._levels[node_id] = min(_MOST_LEVELS, self._levels.get(node_id, 0) + 1)
        wait = min(self._policy.hold_down_most_s, self._policy.hold_down_s * 2 ** (level - 1))
        self._until[node_id] = now + wait

    def until(self, node_id: str) -> float:
        """Return the time from which a node may be given layers again; 0 for a node of good standing."""
        return self._until.get(node_id, 0.0)

    def level(self, node_id: str) -> int:
        """Return how often in a row a node failed."""
        return self._levels.get(node_id, 0)
