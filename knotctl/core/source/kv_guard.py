"""A key-value level that fails no request: a breaker before it, writes behind it, finished before the process ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from knotctl.core.errors import SourceError
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.source.kv import KeyValue

log = logging.getLogger("knotctl.cache")

FAILURES = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
# An answer that took so long came too late, even if it came: the next ones would be waited for as long.
SLOW_SECONDS = 1.0
# Batches of writes that wait at most; a level that cannot keep up loses the rest, as it may lose anything.
MAX_WAITING = 256


class Breaker:
    """Says whether to try at all: not for a while after FAILURES in a row, then once, with a doubling pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_at = 0.0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether attempts are being held back."""
        return self._failures >= FAILURES

    def allow(self) -> bool:
        """Return whether to try now."""
        with self._lock:
            if self._failures < FAILURES:
                return True
            if self._clock() < self._closed_at:
                return False
            # One attempt decides; the others wait for what comes of it.
            self._closed_at = self._clock() + self._pause
            return True

    def succeeded(self) -> None:
        """Note that an attempt went well."""
        with self._lock:
            self._failures, self._pause = 0, FIRST_PAUSE_SECONDS

    def trip(self) -> bool:
        """Note that an attempt was waited for in vain, which is not to happen three times; as `failed`."""
        with self._lock:
            self._failures = max(self._failures, FAILURES - 1)
        return self.failed()

    def failed(self) -> bool:
        """Note that an attempt failed; returns whether this is what opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures > FAILURES:
                self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
            self._closed_at = self._clock() + self._pause
            return self._failures == FAILURES


class GuardedKv:
    """A level whose methods raise nothing: what fails is absent, and counted."""

    def __init__(self, kv: KeyValue, counts: CacheCounts) -> None:
        self.kv = kv
        self.counts = counts
        # A full disk fails every write and no read.
        self.reads, self.writes = Breaker(), Breaker()
        # One thread keeps the order of puts and deletes. The interpreter does not end before such threads have done
        # what they were given, so that a write outlives the request that caused it, and the process's last one too.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="knot-kv")
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values that are there, none where the level fails."""
        found: dict[bytes, bytes] = {}
        if keys:
            self._attempt(self.reads, lambda: found.update(self.kv.get_many(keys)))
        return found

    def put_later(self, make: Callable[[], Mapping[bytes, bytes]]) -> None:
        """Have the entries that `make` returns written by the level's own thread."""
        self._later(lambda: self.kv.put_many(make()))

    def delete_later(self, keys: Iterable[bytes]) -> None:
        """Have the keys deleted by the level's own thread, after the writes asked for before."""
        gone = list(keys)
        self._later(lambda: self.kv.delete_many(gone))

    def flush(self) -> None:
        """Wait until what was asked for is written, or was tried."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the writes and close the level."""
        self._thread.shutdown()
        with suppress(SourceError):
            self.kv.close()

    def _later(self, write: Callable[[], None]) -> None:
        if not self._waiting.acquire(blocking=False):
            self.counts.add("dropped")
            return
        try:
            self._thread.submit(self._write, write)
        except RuntimeError:  # closed meanwhile
            self._waiting.release()
            self.counts.add("dropped")

    def _write(self, write: Callable[[], None]) -> None:
        try:
            if not self._attempt(self.writes, write):
                self.counts.add("dropped")
        finally:
            self._waiting.release()

    def _attempt(self, breaker: Breaker, work: Callable[[], object]) -> bool:
        """Do the work unless the breaker holds it back; returns whether it was tried."""
        if not breaker.allow():
            return False
        started = time.monotonic()
        try:
            work()
            done, why = True, f"{self.kv.name}: slow"
        except SourceError as e:
            done, why = False, e.message
        if done and time.monotonic() - started <= SLOW_SECONDS:
            breaker.succeeded()
        else:
            self.counts.add("errors")
            if breaker.failed():
                log.warning("key-value level left out for now: %s", why)
        return True
