"""Slashing: a lie is convicted, slowness and bad luck are not, and a verdict can be worked out again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.cluster.slashing import Evidence, SpeedSample
from knotctl.core.errors import KnotctlError

SECOND = 1_000_000


def evidence(claimed: float, *rates: float) -> Evidence:
    """A claim, and a sample of 20 tokens at each rate; tokens a second."""
    samples = tuple(SpeedSample(20, round(20 * SECOND / r)) for r in rates)
    return Evidence("node-1", round(claimed * 1000), samples)


def test_a_node_that_claims_100_and_delivers_2_is_flagged_and_forfeits_98_percent() -> None:
    liar = evidence(100, 2, 2, 2, 2, 2)
    assert (liar.flagged, liar.delivered) == (True, 2000)
    assert liar.penalty(1_000_000) == 980_000


@pytest.mark.parametrize("rates", [(50,) * 5, (100,) * 5, (130,) * 5])
def test_half_of_the_claim_is_slow_and_no_lie(rates: tuple[float, ...]) -> None:
    assert not evidence(100, *rates).flagged
    assert evidence(100, *rates).penalty(1000) == 0


def test_stalls_and_bursts_do_not_move_the_verdict() -> None:
    assert not evidence(100, 1, 1, 90, 95, 92).flagged
    assert evidence(100, 2, 2, 2, 5000, 5000).flagged


def test_too_little_proves_nothing() -> None:
    assert not evidence(100, 2, 2, 2, 2).flagged
    few = Evidence("node-1", 100_000, tuple(SpeedSample(1, SECOND) for _ in range(63)))
    assert not few.flagged


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**9)), min_size=1, max_size=9),
       st.integers(0, 10**15))  # fmt: skip
def test_a_penalty_is_at_most_what_was_earned(claimed: int, samples: list[tuple[int, int]], earned: int) -> None:
    found = Evidence("n", claimed, tuple(SpeedSample(*s) for s in samples))
    assert 0 <= found.penalty(earned) <= earned
    assert Evidence.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "make",
    [lambda: Evidence("n", 0, (SpeedSample(1, 1),)), lambda: Evidence("n", 1, ()),
     lambda: Evidence("n", 1, (SpeedSample(1, 0),)), lambda: Evidence("n", 1, (SpeedSample(-1, 1),))],
)  # fmt: skip
def test_evidence_without_claim_or_measurement_is_refused(make: object) -> None:
    with pytest.raises(KnotctlError) as e:
        make()  # type: ignore[operator]
    assert e.value.code == "bad-evidence"
