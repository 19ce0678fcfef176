"""A subset is a slice of its own, a share, or a size; slices together are the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import UsageError
from knotctl.core.knot.subset import Subset


@given(st.integers(1, 40), st.integers(0, 100))
def test_slices_partition_the_pieces(slices: int, count: int) -> None:
    chosen = [i for n in range(1, slices + 1) for i in Subset.parse(f"{n}/{slices}").choose([7] * count)]
    assert chosen == list(range(count))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 100))
def test_a_share_is_at_least_what_was_asked_and_no_piece_more(sizes: list[int], percent: int) -> None:
    chosen = Subset.parse(f"{percent}%").choose(sizes)
    assert chosen == sorted(set(chosen))
    got, wanted = sum(sizes[i] for i in chosen), percent / 100 * sum(sizes)
    assert got >= wanted or len(chosen) == len(sizes)
    assert got - max(sizes) < wanted


def test_a_size_is_drawn_anew_each_time() -> None:
    subset = Subset.parse("10KiB")
    draws = {tuple(subset.choose([1024] * 1000)) for _ in range(5)}
    assert all(len(d) == 10 for d in draws)
    assert len(draws) > 1
    assert subset.expected(1 << 30) == 10 << 10


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1/0", "-1/3", "1/", "0%", "101%", "%", "0", "0B", "ten", "1/2/3"])
def test_what_is_no_subset_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Subset.parse(text)
