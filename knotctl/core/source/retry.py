"""Trying again what may go better: with jitter, so that many workers do not come back at once, and with a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from knotctl.core.errors import SourceError

_Result = TypeVar("_Result")

ATTEMPTS = 6
# A store that is busy says so for seconds; who waits longer than this wants to know.
DEADLINE_S = 60.0
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0
_sleep = time.sleep


class Transient(Exception):
    """An attempt failed in a way that may pass: a busy server, a broken connection."""

    def __init__(self, code: str, what: str, *, after_s: float | None = None) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.after_s = after_s  # when the server asks to be tried again


def with_retries(name: str, attempt: Callable[[], _Result]) -> _Result:
    """Return what the attempt gives, tried again while it is Transient.

    Raises: SourceError with the code and the words of the last attempt; whatever else the attempt raises.
    """
    began = time.monotonic()
    delay = _FIRST_DELAY_S
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except Transient as e:
            wait = max(random.uniform(0.5, 1.0) * delay, e.after_s or 0.0)
            if number == ATTEMPTS or time.monotonic() + wait - began > DEADLINE_S:
                tries = "once" if number == 1 else f"{number} times"
                raise SourceError(e.code, f"{name}: {e.what}; tried {tries}") from e
            _sleep(wait)
            delay = min(delay * 2, _MAX_DELAY_S)
    raise AssertionError("unreachable")
