"""Closes the holds of those who died, by this process's own clock: no machine's time of day is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from knotctl.core.cluster.ledger import Hold, Ledger


class Sweeper:
    """Watches every open hold; one that shows no sign of life for its time to live is closed at what was recorded.

    Several may watch one database: a hold is closed once, and only at the beat that was seen standing still. A sweeper
    that starts gives every hold its whole time again, so clocks that jump and restarts close nothing too early.
    Units: clock in seconds, monotonic.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        # (account, request) -> the beat last seen and when it was first seen
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def sweep(self) -> list[Hold]:
        """Return the holds that this round closed; to be called every few seconds."""
        # Before the read: time that passes during it counts for the holds, not against them.
        now = self._clock()
        closed, seen = [], {}
        for hold in self._ledger.open_holds():
            key = (hold.account_id, hold.request_id)
            beat, since = self._seen.get(key, (-1, now))
            seen[key] = (hold.beat, since if beat == hold.beat else now)
            if now - seen[key][1] >= hold.ttl_s and (done := self._ledger.close_idle(hold)):
                closed.append(done)
        self._seen = seen
        return closed
