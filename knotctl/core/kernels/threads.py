"""The kernels' threads: a persistent pool that shares out a kernel's units (rows, tokens, heads) in grains.

A launch writes the job, opens its ticket (an odd number) and works on it like everyone else: whoever is free claims
the next grain, so a thread whose core is taken away for a while delays no other. Which thread computes a unit never
changes its result. Idle threads spin, then yield, and after some milliseconds sleep in Python until the next launch;
a sleeper that comes late joins the job or finds it closed. Hand-off measured on 2 cores of a Zen 4: 0.6 us.
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np

from knotctl.core.errors import UsageError
from knotctl.core.kernels.jit import Kernel, entry, inner
from knotctl.core.kernels.machine import REPORT, atomic_add, atomic_load, call, pause, sched_yield
from knotctl.core.kernels.simd import load_i64, store_i64

MAX_THREADS = 256
MAX_ARGS = 16

# Words of the pool, each group on a cache line of its own (in bytes from its start).
_TICKET, _INSIDE, _NEXT, _JOB, _ARGS, _REPORT, _WORKERS = 0, 64, 128, 192, 256, 256 + REPORT, 448
_POOL_BYTES = 512
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
_scratch = np.empty(0, np.uint8)
_scratch_bytes = 0  # of one thread
_scratch_base = 0


@inner
def _work(pool, who):
    """Run grains of the open job until none is left."""
    kernel, units, grain = load_i64(pool + _JOB), load_i64(pool + _JOB + 8), load_i64(pool + _JOB + 16)
    scratch = load_i64(pool + _JOB + 24) + who * load_i64(pool + _JOB + 32)
    begin = atomic_add(pool + _NEXT, grain)
    while begin < units:
        call(kernel, pool + _ARGS, scratch, begin, min(begin + grain, units))
        begin = atomic_add(pool + _NEXT, grain)


@entry("void(int64, int64)")
def _serve(pool, who):
    """Work on job after job; return when there was none for a while, or when there are to be fewer workers."""
    seen, idle = 0, 0
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
            elif idle < _SPINS + _YIELDS:
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
    store_i64(pool + _REPORT, 0)
    if units <= grain or atomic_load(pool + _WORKERS) == 0:
        call(kernel, args, scratch, 0, units)
        return load_i64(pool + _REPORT)
    store_i64(pool + _JOB, kernel)
    store_i64(pool + _JOB + 8, units)
    store_i64(pool + _JOB + 16, grain)
    store_i64(pool + _JOB + 24, scratch)
    store_i64(pool + _JOB + 32, stride)
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
    return load_i64(pool + _REPORT)


def _resize(n: int) -> None:
    """Let workers above n end; the lock is held."""
    _memory[_WORKERS_AT] = n
    while _sleeping:
        _sleeping.pop().release()
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


def run(kernel: Kernel, units: int, grain: int, args: tuple[int, ...], scratch_bytes: int = 0) -> int:
    """Call kernel(args, scratch, begin, end) over the units, at most `grain` a call; return what it reported, or 0.

    Units: scratch_bytes of each thread; a scratch begins at a multiple of 64.
    """
    with _lock:
        if len(_workers) < _count - 1 or scratch_bytes > _scratch_bytes:
            _prepare(scratch_bytes)
        if _sleeping and units > grain:
            while _sleeping:
                _sleeping.pop().release()
        return _launch.call(
            _pool, kernel.address, units, grain, _scratch_base, _scratch_bytes, *args, *_ZEROS[len(args)]
        )  # fmt: skip


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
