"""What is decided when a node is lost, on a clock of the test's own."""

from __future__ import annotations

import pytest

from knotctl.core.engine import recovery
from knotctl.core.engine.recovery import Pace, Recovery, Replicas, RouteLost
from knotctl.core.engine.stream import Stream
from knotctl.core.errors import KnotctlError, RequestError
from knotctl.core.tokens.sampler import SamplingParams


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def stream(length: int = 10) -> Stream:
    return Stream(list(range(length)), SamplingParams(seed=1), 5, frozenset())


def lost(*, crash: bool = False) -> RouteLost:
    return RouteLost(KnotctlError("unreachable", "http://a:1: refused"), crash=crash)


def test_a_replica_that_failed_is_passed_over_longer_each_time_and_forgiven_when_it_works(clock: Clock) -> None:
    replicas = Replicas(["a", "b"], clock)
    assert replicas.order() == ["a", "b"]
    waits = []
    for _ in range(8):
        replicas.ban("a")
        assert replicas.order() == ["b", "a"]
        before = clock.now
        while replicas.order()[0] == "b":
            clock.now += 0.25
        waits.append(clock.now - before)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.5, 15.0)
    replicas.restore("a")
    replicas.ban("a")
    clock.now += 0.5
    assert replicas.order() == ["a", "b"]


def test_the_replica_that_works_is_kept_when_another_ones_time_comes(clock: Clock) -> None:
    """Going back would cost every stream a replay, and fail again where that one is gone for good."""
    replicas = Replicas(["a", "b", "c"], clock)
    replicas.ban("a")
    assert replicas.usable() == ["b", "c"]
    replicas.restore("b")
    clock.now += 100
    assert replicas.order() == replicas.usable() == ["b", "a", "c"]
    replicas.ban("b")
    assert replicas.order() == ["a", "c", "b"]


def test_a_route_is_slow_where_a_pass_takes_many_times_the_usual_and_long() -> None:
    pace = Pace()

    def slow_after(*seconds: float) -> bool:
        for s in seconds:
            pace.note(s)
        return pace.is_slow

    assert not slow_after(100.0), "what is usual is not known yet"
    assert not slow_after(*[0.1] * 40)
    assert not slow_after(0.79, 1.9)
    assert slow_after(2.1)
    pace.begin()
    assert not slow_after(100.0)
    assert not slow_after(*[1.0] * 40)
    assert not slow_after(7.9)
    assert slow_after(8.1)


def test_where_all_are_banned_the_one_whose_time_comes_first_is_tried(clock: Clock) -> None:
    replicas = Replicas(["a", "b"], clock)
    replicas.ban("a")
    replicas.ban("a")
    replicas.ban("b")
    assert replicas.order() == ["b", "a"]
    replicas.ban("elsewhere")


def test_streams_replay_until_patience_ends(clock: Clock) -> None:
    care = Recovery(clock, patience=60)
    one, two = stream(), stream()
    pauses = []
    for _ in range(20):
        assert care.lost([(one, 10), (two, 10)], lost()) == []
        pauses.append(care.pause())
        clock.now += 2.9
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.05, 1.0)
    clock.now += 10
    ((first, why), (second, _)) = care.lost([(one, 10), (two, 10)], lost())
    assert (first, second) == (one, two)
    assert isinstance(why, RequestError)
    assert (why.code, why.status) == ("no-route", 503)
    care.passed([])
    assert care.lost([(one, 10)], lost()) == []
    assert care.pause() == 0.05


def test_after_a_crash_its_streams_go_one_by_one_and_the_cause_ends_alone(clock: Clock) -> None:
    care = Recovery(clock)
    guilty, innocent, other = stream(), stream(), stream()
    active = [guilty, innocent, other]
    assert care.turn(active) == active
    assert care.lost([(guilty, 10), (innocent, 10)], lost(crash=True)) == []
    assert care.turn(active) == [guilty]
    ((ended, why),) = care.lost([(guilty, 10)], lost(crash=True))
    assert (ended, why.code) == (guilty, "poison-request")
    care.left(guilty)
    active = [innocent, other]
    assert care.turn(active) == [innocent]
    innocent.in_kv = 10
    care.passed([innocent])
    assert care.turn(active) == active


def test_a_node_that_dies_while_a_replay_is_on_its_way_is_no_second_crash(clock: Clock) -> None:
    care = Recovery(clock)
    s = stream(500)
    assert care.lost([(s, 500)], lost(crash=True)) == []
    for at in (64, 128, 300):
        assert care.lost([(s, at)], lost(crash=True)) == []
    s.in_kv = 128
    care.passed([s])
    assert care.turn([stream(), s]) == [s], "it is not past the place yet"
    assert [why.code for _, why in care.lost([(s, 500)], lost(crash=True))] == ["poison-request"]
    assert recovery.MAX_CRASHES == 2


def test_a_route_lost_without_a_crash_makes_nobody_a_suspect(clock: Clock) -> None:
    care = Recovery(clock)
    streams = [stream(), stream()]
    for _ in range(10):
        assert care.lost([(s, 10) for s in streams], lost()) == []
        assert care.turn(streams) == streams
    assert care.recoveries == 10
