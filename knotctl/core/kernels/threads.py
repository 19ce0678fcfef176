"""The kernels' threads: a persistent pool that shares out a kernel's units (rows, tokens, heads) in grains.

A launch writes the job, opens its ticket (an odd number) and works on it like everyone else: whoever is free claims
the next grain, so a thread whose core is taken away for a while delays no other. Which thread computes a unit never
changes its result. Idle threads spin, then yield, and after some milliseconds sleep in Python until the next launch;
a sleeper that comes late joins the job or finds it closed. Hand-off measured on 2 cores of a Zen 4: 0.6 us.

A token of a small model is some five hundred launches of a few microseconds each, as long as Python takes to ask for
one; `record` therefore keeps them as a Program, which runs again in one call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from knotctl.core.errors import UsageError
from knotctl.core.kernels.jit import Kernel, entry, inner
from knotctl.core.kernels.machine import REPORT, atomic_add, atomic_load, call, clock_gettime, pause, sched_yield
from knotctl.core.kernels.simd import load_i64, store_i64

MAX_THREADS = 256
MAX_ARGS = 16

# Words of the pool, each group on a cache line of its own (in bytes from its start).
_TICKET, _INSIDE, _NEXT, _JOB, _ARGS, _WORKERS, _RESTS = 0, 64, 128, 192, 256, 448, 456
_POOL_BYTES = 512
# A launch as a program's row: the arguments, room for the report, then kernel, units and grain. A row without a kernel
# is a mark: it takes the time.
_KERNEL = REPORT + 8
_ROW_BYTES = _KERNEL + 24
# Spins before yielding: with other processes on the cores, 2000 cost least (100 and no yield at all were far worse).
_SPINS = 2000
# Yields before sleeping, of about 0.3 us each on an idle core: long enough for the Python code between two kernels.
_YIELDS = 20_000

_lock = threading.Lock()  # one job at a time, whichever Python thread asks
_count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_THREADS)
_workers: list[threading.Thread] = []
_sleeping: list[threading.Semaphore] = []
_memory = np.zeros(_POOL_BYTES // 8 + 8, np.int64)
_pool = -(-_memory.ctypes.data // 64) * 64
_WORKERS_AT = (_pool - _memory.ctypes.data + _WORKERS) // 8
_RESTS_AT = _WORKERS_AT + 1
_scratch = np.empty(0, np.uint8)
_scratch_bytes = 0  # of one thread
_scratch_base = 0


@inner
def _work(pool, who):
    """Run grains of the open job until none is left."""
    kernel, units, grain = load_i64(pool + _JOB), load_i64(pool + _JOB + 8), load_i64(pool + _JOB + 16)
    scratch = load_i64(pool + _JOB + 24) + who * load_i64(pool + _JOB + 32)
    args = load_i64(pool + _JOB + 40)
    begin = atomic_add(pool + _NEXT, grain)
    while begin < units:
        call(kernel, args, scratch, begin, min(begin + grain, units))
        begin = atomic_add(pool + _NEXT, grain)


@inner
def _share_out(pool, kernel, units, grain, args, scratch, stride):
    """Run a job on all threads and return what it reported."""
    store_i64(args + REPORT, 0)
    if units <= grain or atomic_load(pool + _WORKERS) == 0:
        call(kernel, args, scratch, 0, units)
        return load_i64(args + REPORT)
    store_i64(pool + _JOB, kernel)
    store_i64(pool + _JOB + 8, units)
    store_i64(pool + _JOB + 16, grain)
    store_i64(pool + _JOB + 24, scratch)
    store_i64(pool + _JOB + 32, stride)
    store_i64(pool + _JOB + 40, args)
    store_i64(pool + _NEXT, 0)
    atomic_add(pool + _TICKET, 1)
    _work(pool, 0)
    atomic_add(pool + _TICKET, 1)
    spins = 0
    while atomic_load(pool + _INSIDE) != 0:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            sched_yield()
    return load_i64(args + REPORT)


@entry("void(int64, int64)")
def _serve(pool, who):
    """Work on job after job; return when there was none for a while, or when there are to be fewer workers."""
    seen, idle = 0, 0
    rests = atomic_load(pool + _RESTS)
    while who <= atomic_load(pool + _WORKERS):
        ticket = atomic_load(pool + _TICKET)
        if ticket & 1 and ticket != seen:
            # Announce, then look again: the launcher closes the ticket first and then waits for those inside.
            atomic_add(pool + _INSIDE, 1)
            if atomic_load(pool + _TICKET) == ticket:
                _work(pool, who)
                seen = ticket
            atomic_add(pool + _INSIDE, -1)
            idle = 0
        else:
            idle += 1
            if idle < _SPINS:
                pause()
            elif idle < _SPINS + _YIELDS and atomic_load(pool + _RESTS) == rests:
                sched_yield()
            else:
                return


@entry("int64(" + "int64, " * 21 + "int64)")
def _launch(
    pool, kernel, units, grain, scratch, stride, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15
):
    args = pool + _ARGS
    store_i64(args + 0, a0)
    store_i64(args + 8, a1)
    store_i64(args + 16, a2)
    store_i64(args + 24, a3)
    store_i64(args + 32, a4)
    store_i64(args + 40, a5)
    store_i64(args + 48, a6)
    store_i64(args + 56, a7)
    store_i64(args + 64, a8)
    store_i64(args + 72, a9)
    store_i64(args + 80, a10)
    store_i64(args + 88, a11)
    store_i64(args + 96, a12)
    store_i64(args + 104, a13)
    store_i64(args + 112, a14)
    store_i64(args + 120, a15)
    return _share_out(pool, kernel, units, grain, args, scratch, stride)


@entry("int64(int64, int64, int64, int64, int64)")
def _launch_all(pool, rows, count, scratch, stride):
    """Run a program's rows; return 0, or 1 more than the row that reported something, behind which none has run."""
    for i in range(count):
        row = rows + _ROW_BYTES * i
        kernel = load_i64(row + _KERNEL)
        if kernel == 0:
            clock_gettime(time.CLOCK_MONOTONIC, row)
        elif _share_out(pool, kernel, load_i64(row + _KERNEL + 8), load_i64(row + _KERNEL + 16), row, scratch, stride):
            return i + 1
    return 0


def _wake() -> None:
    while _sleeping:
        _sleeping.pop().release()


def _resize(n: int) -> None:
    """Let workers above n end; the lock is held."""
    _memory[_WORKERS_AT] = n
    _wake()
    for thread in _workers[n:]:
        thread.join()
    del _workers[n:]


def _worker(who: int) -> None:
    serve = _serve.call
    bell = threading.Semaphore(0)
    while who <= _memory[_WORKERS_AT]:
        serve(_pool, who)
        _sleeping.append(bell)
        # Whoever lowers the number does so before ringing the bells, so one of the two is always seen.
        if who <= _memory[_WORKERS_AT]:
            bell.acquire()


def set_threads(n: int) -> None:
    """Use n threads from now on, the caller's among them."""
    global _count
    if not 1 <= n <= MAX_THREADS:
        raise UsageError("bad-threads", f"threads {n}: expected 1 to {MAX_THREADS}")
    with _lock:
        _count = n
        _resize(min(n - 1, len(_workers)))


def get_threads() -> int:
    """Return the number of threads that kernels use."""
    return _count


def rest() -> None:
    """Have idle threads sleep now and not some milliseconds later: whoever is to work meanwhile needs their cores."""
    _memory[_RESTS_AT] += 1


def _prepare(scratch_bytes: int) -> None:
    """Start the threads that are missing and make each one's scratch large enough; the lock is held."""
    global _scratch, _scratch_bytes, _scratch_base
    if scratch_bytes > _scratch_bytes or _scratch.size < _scratch_bytes * _count + 64:
        _scratch_bytes = -(-max(scratch_bytes, _scratch_bytes, 1) // 4096) * 4096
        _scratch = np.empty(_scratch_bytes * _count + 64, np.uint8)
        _scratch_base = -(-_scratch.ctypes.data // 64) * 64
    while len(_workers) < _count - 1:
        who = len(_workers) + 1
        _workers.append(threading.Thread(target=_worker, args=(who,), name=f"kernel-{who}", daemon=True))
        _memory[_WORKERS_AT] = who
        _workers[-1].start()


_ZEROS = [(0,) * (MAX_ARGS - n) for n in range(MAX_ARGS + 1)]
Label = TypeVar("Label")


class Program(Generic[Label]):
    """Launches in the order in which they ran while they were recorded, to be run again in one call.

    Everything they read and write must lie where it lay; what is to differ from run to run is read from memory.
    `whole` is False where something was done without a launch, so that running them again would miss it.
    """

    def __init__(self) -> None:
        self.whole = True
        self._launches: list[tuple[int, ...]] = []
        self._labels: list[tuple[int, Label]] = []
        self._scratch_bytes = 0
        self._rows = np.empty((0, _ROW_BYTES // 8), np.int64)

    def note(self, kernel: Kernel, units: int, grain: int, args: tuple[int, ...], scratch_bytes: int) -> None:
        """Add a launch."""
        self._launches.append((*args, *_ZEROS[len(args)], 0, kernel.address, units, grain))
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)

    def mark(self, label: Label) -> None:
        """Add a mark: what has run since the last one counts as the label's."""
        self._labels.append((len(self._launches), label))
        self._launches.append((0,) * (_ROW_BYTES // 8))

    def run(self) -> int:
        """Run all launches; returns what the first one that reported something reported, or 0."""
        if len(self._rows) != len(self._launches):
            self._rows = np.array(self._launches, np.int64)
        with _lock:
            _prepare(self._scratch_bytes)
            _wake()
            at = _launch_all.call(_pool, self._rows.ctypes.data, len(self._rows), _scratch_base, _scratch_bytes)
        return int(self._rows[at - 1, REPORT // 8]) if at else 0

    def spent(self) -> Iterator[tuple[Label, float]]:
        """Yield each label but the first and the seconds between its mark and the one before, of the last run."""
        clock = self._rows[[row for row, _ in self._labels], :2]
        passed = np.diff(clock, axis=0) @ (1.0, 1e-9)
        return zip((label for _, label in self._labels[1:]), passed.tolist(), strict=True)


_programs: dict[int, Program[Any]] = {}  # being recorded, by the thread that does


@contextmanager
def record(program: Program[Any]) -> Iterator[None]:
    """Add to a program what this thread launches meanwhile."""
    _programs[threading.get_ident()] = program
    try:
        yield
    finally:
        del _programs[threading.get_ident()]


def recorded() -> Program[Any] | None:
    """Return the program that this thread records, if any: whoever works without a launch says so in it."""
    return _programs.get(threading.get_ident()) if _programs else None


def run(kernel: Kernel, units: int, grain: int, args: tuple[int, ...], scratch_bytes: int = 0) -> int:
    """Call kernel(args, scratch, begin, end) over the units, at most `grain` a call; return what it reported, or 0.

    Units: scratch_bytes of each thread; a scratch begins at a multiple of 64.
    """
    with _lock:
        if len(_workers) < _count - 1 or scratch_bytes > _scratch_bytes:
            _prepare(scratch_bytes)
        if units > grain:
            _wake()
        result: int = _launch.call(
            _pool, kernel.address, units, grain, _scratch_base, _scratch_bytes, *args, *_ZEROS[len(args)]
        )  # fmt: skip
    if _programs and (program := recorded()) is not None:
        program.note(kernel, units, grain, args, scratch_bytes)
    return result


def _forget() -> None:
    """In a forked child: the threads did not come along, and the parent's job is not ours."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()
    _sleeping.clear()
    _memory[:] = 0


def _stop() -> None:
    """Let no thread run compiled code while the interpreter takes it away."""
    if _lock.acquire(timeout=1):  # else a daemon thread computes still, and ends with the process
        _resize(0)
        _lock.release()


os.register_at_fork(after_in_child=_forget)
atexit.register(_stop)
