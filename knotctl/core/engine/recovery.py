"""What to do when a node on the route is lost: another replica, a replay of the tokens so far, or an end in words.

A (row, token) result does not depend on where it is computed, so a replay continues a stream token for token. No I/O
and no clock of its own: time comes in, decisions come out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from knotctl.core.engine.stream import Stream
from knotctl.core.errors import KnotctlError, RequestError

# A replica that failed is passed over for so long, doubled each time up to the most.
_FIRST_BAN, _MOST_BAN = 0.5, 15.0
# Between attempts, doubled each time; a station that its supervisor restarts is back within some seconds.
_FIRST_PAUSE, _MOST_PAUSE = 0.05, 1.0
# How long streams wait for a route to come back: long enough for a restart and its load, shorter than clients wait.
PATIENCE_SECONDS = 60.0
# A pass of one token a stream that takes so many times the usual, and so many seconds, is worth another route.
_SLOW_TIMES, _SLOW_SECONDS, _USUAL = 8.0, 2.0, 32
# Nodes that may die over one request at the same place of it before it is held to be the cause.
MAX_CRASHES = 2


class RouteLost(KnotctlError):
    """The pass was not computed and what the stations hold of its sessions is not known any more: replay.

    `crash` says that a node died with the work in hand, so that the work may be the cause.
    """

    http_status = 503

    def __init__(self, cause: KnotctlError, *, crash: bool = False) -> None:
        super().__init__(cause.code, cause.message, hint=cause.hint)
        self.crash = crash


@dataclass(slots=True)
class _Replica:
    url: str
    failures: int = 0
    banned_until: float = 0.0


class Replicas:
    """The nodes that can do the same work, in order of preference: the one that did it last, for as long as it does.

    Another one has none of the sessions, so that every change costs the streams a replay.
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        self._replicas = {url: _Replica(url) for url in urls}
        self._clock = clock
        self._last = urls[0] if urls else ""

    @property
    def urls(self) -> list[str]:
        """All of them."""
        return list(self._replicas)

    def order(self) -> list[str]:
        """Return them, those that are not banned first; where all are, the fault may be ours and none is left out."""
        now = self._clock()
        return sorted(self._replicas, key=lambda url: (self._banned(url, now), url != self._last))

    def usable(self) -> list[str]:
        """Return those that are not banned, in order."""
        now = self._clock()
        return [url for url in self.order() if not self._banned(url, now)]

    def _banned(self, url: str, now: float) -> float:
        return max(0.0, self._replicas[url].banned_until - now)

    def ban(self, url: str) -> None:
        """Pass over a node that failed, longer each time."""
        replica = self._replicas.get(url)
        if replica is not None:
            replica.failures += 1
            replica.banned_until = self._clock() + min(_MOST_BAN, _FIRST_BAN * 2 ** (replica.failures - 1))

    def restore(self, url: str) -> None:
        """Note that a node did its work."""
        replica = self._replicas[url]
        replica.failures, replica.banned_until = 0, 0.0
        self._last = url


class Pace:
    """How long a pass of one token a stream usually takes, and whether one took so long that another route is better.

    Units: seconds.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self.is_slow = False

    def note(self, seconds: float) -> None:
        """Take a pass into account."""
        if len(self._usual) == _USUAL and seconds > max(_SLOW_SECONDS, _SLOW_TIMES * statistics.median(self._usual)):
            self.is_slow = True
        self._usual.append(seconds)

    def begin(self) -> None:
        """Forget what was usual: the route is another one."""
        self._usual.clear()
        self.is_slow = False


@dataclass(slots=True)
class _Suspect:
    crashes: int
    at: int  # the position up to which the pass would have taken it


@dataclass(slots=True)
class Recovery:
    """The engine's memory of passes that were lost. Units: seconds on the clock's own scale."""

    clock: Callable[[], float]
    patience: float = PATIENCE_SECONDS
    recoveries: int = 0
    _since: float | None = None
    _pause: float = _FIRST_PAUSE
    _suspects: dict[int, _Suspect] = field(default_factory=dict)

    def turn(self, active: Sequence[Stream]) -> Sequence[Stream]:
        """Return who takes part in the next pass: a suspect is alone, so that it takes nobody with it."""
        for s in active:
            if s.crashes and id(s) not in self._suspects:
                # It comes from a head that died, or whose stations did: what it had so far is where that was.
                self._suspects[id(s)] = _Suspect(s.crashes, len(s.history))
        alone = [s for s in active if id(s) in self._suspects]
        return alone[:1] or active

    def passed(self, streams: Sequence[Stream]) -> None:
        """Note that a pass went through."""
        self._since, self._pause = None, _FIRST_PAUSE
        for s in streams:
            suspect = self._suspects.get(id(s))
            if suspect is not None and s.in_kv >= suspect.at:
                del self._suspects[id(s)]
                s.crashes = 0

    def left(self, stream: Stream) -> None:
        """Forget a stream that has ended."""
        self._suspects.pop(id(stream), None)

    def lost(self, pieces: Sequence[tuple[Stream, int]], error: RouteLost) -> list[tuple[Stream, KnotctlError]]:
        """Return who of a lost pass ends, and with what; the others replay after `pause()`.

        `pieces` are the pass's streams, each with the position that it would have come to.
        """
        now = self.clock()
        self.recoveries += 1
        if self._since is None:
            self._since = now
        if now - self._since > self.patience:
            return [(s, _no_route(error)) for s, _ in pieces]
        if not error.crash:
            return []
        for stream, end in pieces:
            suspect = self._suspects.setdefault(id(stream), _Suspect(0, end))
            # A node that is killed while a replay is on its way there says nothing about the place of the crash.
            if end >= suspect.at:
                suspect.crashes += 1
                stream.crashes = suspect.crashes
        return [
            (s, _poison(error)) for s, _ in pieces if len(pieces) == 1 and self._suspects[id(s)].crashes >= MAX_CRASHES
        ]

    def pause(self) -> float:
        """Return how long to wait before the next attempt, longer each time."""
        now, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
        return now


def _no_route(error: RouteLost) -> RequestError:
    return RequestError(
        "no-route", f"no station could be had for too long: {error.message}", status=503, hint="retry later"
    )


def _poison(error: RouteLost) -> KnotctlError:
    return KnotctlError(
        "poison-request", f"the stations that worked on this request died, {MAX_CRASHES} of them: {error.message}"
    )
