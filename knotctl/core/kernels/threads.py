"""The kernels' threads: a persistent pool that splits a kernel's units (rows, tokens, heads) into equal parts.

Which thread computes a unit never changes its result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from knotctl.core.errors import UsageError

MAX_THREADS = 256

_Job = Callable[[], object]
_lock = threading.Lock()  # one parallel region at a time, whichever Python thread asks
_count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_THREADS)
_jobs: list[SimpleQueue[_Job]] = []
_done: SimpleQueue[BaseException | None] = SimpleQueue()


def set_threads(n: int) -> None:
    """Use n threads from now on, the caller's among them."""
    global _count
    if not 1 <= n <= MAX_THREADS:
        raise UsageError("bad-threads", f"threads {n}: expected 1 to {MAX_THREADS}")
    _count = n


def get_threads() -> int:
    """Return the number of threads that kernels use."""
    return _count


def _work(jobs: SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        try:
            job()
            _done.put(None)
        except BaseException as e:
            _done.put(e)


def _forget() -> None:
    """In a forked child: the threads did not come along."""
    global _lock, _done
    _lock, _done = threading.Lock(), SimpleQueue()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget)


def run(kernel: Callable[..., object], units: int, *args: Any, grain: int = 1) -> None:
    """Call kernel(*args, part, begin, end) over the units, on all threads where there are at least two grains."""
    parts = min(_count, max(1, units // grain))
    if parts == 1:
        kernel(*args, 0, 0, units)
        return
    with _lock:
        while len(_jobs) < parts - 1:
            queue: SimpleQueue[_Job] = SimpleQueue()
            threading.Thread(target=_work, args=(queue,), name=f"kernel-{len(_jobs)}", daemon=True).start()
            _jobs.append(queue)
        for part in range(1, parts):
            begin, end = part * units // parts, (part + 1) * units // parts
            _jobs[part - 1].put(lambda p=part, b=begin, e=end: kernel(*args, p, b, e))  # type: ignore[misc]
        errors: list[BaseException] = []
        try:
            kernel(*args, 0, 0, units // parts)
        finally:
            errors = [e for _ in range(1, parts) if (e := _done.get()) is not None]
        if errors:
            raise errors[0]
