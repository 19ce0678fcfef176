"""The kernels' threads: each unit computed once, whoever asks, however many there are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from knotctl.core.errors import UsageError
from knotctl.core.kernels import threads
from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.elementwise import add_rows
from knotctl.core.kernels.quantize import check_finite
from knotctl.core.kernels.threads import MAX_THREADS, Program, get_threads, record, run, set_threads


@pytest.fixture(autouse=True)
def count_kept() -> Iterator[None]:
    before = get_threads()
    yield
    set_threads(before)


def add_one(x: np.ndarray, grain: int) -> None:
    run(add_rows, len(x), grain, (address(x), address(ONES), x.shape[1]))


ONES = np.ones(5, np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_unit_is_computed_once_a_launch(count: int) -> None:
    set_threads(count)
    x = np.zeros((1000, 5), np.float32)
    for _ in range(500):
        add_one(x, 7)
    assert (x == 500).all()


def test_several_python_threads_may_ask_at_once() -> None:
    set_threads(2)
    arrays = [np.zeros((300, 5), np.float32) for _ in range(4)]

    def ask(x: np.ndarray) -> None:
        for _ in range(200):
            add_one(x, 10)

    askers = [threading.Thread(target=ask, args=(x,)) for x in arrays]
    for t in askers:
        t.start()
    for t in askers:
        t.join()
    assert all((x == 200).all() for x in arrays)


def test_threads_may_come_and_go() -> None:
    x = np.zeros((100, 5), np.float32)
    for count in (4, 1, 3, 2, 5, 1):
        set_threads(count)
        assert get_threads() == count
        add_one(x, 1)
        assert len(threads._workers) == count - 1
    assert (x == 6).all()


def test_idle_threads_sleep_and_wake() -> None:
    set_threads(2)
    x = np.zeros((100, 5), np.float32)
    add_one(x, 1)
    deadline = time.monotonic() + 30
    while not threads._sleeping and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads._sleeping, "an idle thread goes on spinning"
    add_one(x, 1)
    assert (x == 2).all()


def test_threads_that_are_to_rest_sleep_at_once() -> None:
    """Left alone they would yield thousands of times first."""
    set_threads(2)
    x = np.zeros((100, 5), np.float32)
    slept = 0
    for _ in range(200):
        add_one(x, 1)
        threads.rest()
        time.sleep(0.0005)
        slept += len(threads._sleeping)
    assert slept > 0
    assert (x == 200).all()


def test_a_forked_child_has_threads_of_its_own() -> None:
    set_threads(2)
    x = np.zeros((100, 5), np.float32)
    add_one(x, 1)
    child = os.fork()
    if child == 0:
        add_one(x, 1)
        os._exit(0 if (x == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    add_one(x, 1)
    assert (x == 2).all()


@pytest.mark.parametrize("count", [0, -1, MAX_THREADS + 1])
def test_a_number_of_threads_that_makes_no_sense_is_refused(count: int) -> None:
    with pytest.raises(UsageError) as e:
        set_threads(count)
    assert e.value.code == "bad-threads"


def test_an_address_is_where_the_bytes_are() -> None:
    x = np.arange(20, dtype=np.int16)
    for view in (x, x[3:], x.reshape(4, 5)[1:, 2:], np.frombuffer(b"abc", np.uint8)[1:]):
        assert address(view) == view.ctypes.data


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_program_does_again_what_was_recorded(count: int) -> None:
    set_threads(count)
    x, y = np.zeros((1000, 5), np.float32), np.zeros((3, 5), np.float32)
    program: Program[str] = Program()
    with record(program):
        add_one(x, 7)
        add_one(y, 7)
        add_one(x, 100)
    add_one(y, 7)  # no more recorded
    for _ in range(100):
        assert program.run() == 0
    assert (x == 202).all()
    assert (y == 102).all()


def test_a_program_stops_where_something_is_reported() -> None:
    x, y = np.ones((4, 5), np.float32), np.zeros((3, 5), np.float32)
    program: Program[str] = Program()
    with record(program):
        run(check_finite, 4, 1, (address(x), 5))
        add_one(y, 7)
    assert program.run() == 0
    x[2, 3] = np.nan
    assert program.run() == 1
    x[2, 3] = 0
    assert program.run() == 0
    assert (y == 3).all()


def test_marks_tell_where_the_time_went() -> None:
    x = np.zeros((200_000, 5), np.float32)
    program: Program[str] = Program()
    with record(program):
        program.mark("start")
        add_one(x[:1], 7)
        program.mark("short")
        add_one(x, 7)
        program.mark("long")
    began = time.perf_counter()
    program.run()
    took = time.perf_counter() - began
    spent = dict(program.spent())
    assert list(spent) == ["short", "long"]
    assert 0 < spent["short"] < spent["long"] < took


def test_another_threads_launches_are_not_recorded() -> None:
    x, y = np.zeros((10, 5), np.float32), np.zeros((10, 5), np.float32)
    program: Program[str] = Program()
    with record(program):
        other = threading.Thread(target=add_one, args=(y, 7))
        other.start()
        other.join()
        add_one(x, 7)
    program.run()
    assert (x == 2).all()
    assert (y == 1).all()
