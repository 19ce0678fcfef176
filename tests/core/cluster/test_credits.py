"""Credits: bills are rounded once, shares add up to them exactly, and amounts read back as they are written."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.cluster.credits import (
    MAX_AMOUNT,
    MAX_TOKENS,
    MICRO,
    Price,
    Usage,
    Work,
    format_credits,
    layer_tokens,
    parse_credits,
    split,
)
from knotctl.core.errors import KnotctlError

AMOUNTS = st.integers(0, MAX_AMOUNT)
TOKENS = st.integers(0, MAX_TOKENS)
WEIGHTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 1 << 40), min_size=1, max_size=12)


@given(AMOUNTS, WEIGHTS)
def test_shares_add_up_to_the_bill_and_none_is_off_by_a_whole_unit(amount: int, weights: dict[str, int]) -> None:
    total = sum(weights.values())
    if not total:
        if amount:
            with pytest.raises(KnotctlError, match="expected nodes that served it"):
                split(amount, weights)
        return
    shares = split(amount, weights)
    assert sum(shares.values()) == amount
    assert all(abs(shares[n] - Fraction(amount * w, total)) < 1 for n, w in weights.items())
    assert all(shares[n] == 0 for n, w in weights.items() if w == 0)


@given(AMOUNTS, WEIGHTS.filter(lambda w: sum(w.values()) > 0), st.randoms(use_true_random=False))
def test_shares_depend_on_nothing_but_the_weights(amount: int, weights: dict[str, int], random: object) -> None:
    items = list(weights.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert split(amount, dict(items)) == split(amount, weights)


def test_what_division_leaves_goes_to_the_largest_remainders_then_the_lowest_ids() -> None:
    assert split(10, {"c": 1, "b": 1, "a": 1}) == {"a": 4, "b": 3, "c": 3}
    assert split(11, {"a": 5, "b": 1}) == {"a": 9, "b": 2}


def test_layers_times_tokens_are_summed_by_node_with_replays() -> None:
    work = [Work("b", 14, 10), Work("a", 14, 6), Work("c", 14, 10)]
    assert layer_tokens(work) == {"a": 84, "b": 140, "c": 140}
    assert layer_tokens([Work("a", 14, 6), Work("a", 2, 5)]) == {"a": 94}


@given(st.integers(0, MICRO * 1000), st.integers(0, MICRO * 1000), TOKENS, TOKENS)
def test_a_bill_is_the_exact_price_rounded_up_once(prompt: int, generated: int, p: int, g: int) -> None:
    exact = Fraction(prompt * p + generated * g, 1_000_000)
    if exact > MAX_AMOUNT:
        return
    assert 0 <= Price(prompt, generated).bill(Usage(p, g)) - exact < 1


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_more_usage_never_costs_less(p: int, g: int, more_p: int, more_g: int) -> None:
    price = Price(150_000, 600_000)
    least, most = sorted([p, more_p]), sorted([g, more_g])
    assert price.bill(Usage(least[0], most[0])) <= price.bill(Usage(least[1], most[1]))


@given(AMOUNTS)
def test_amounts_read_back_as_they_are_written(amount: int) -> None:
    assert parse_credits(format_credits(amount)) == amount


@pytest.mark.parametrize(
    ("text", "amount"), [("0", 0), ("12", 12_000_000), ("0.000001", 1), ("1,250.5", 1_250_500_000), (" 3 ", 3_000_000)]
)
def test_credits_as_people_write_them(text: str, amount: int) -> None:
    assert parse_credits(text) == amount


@pytest.mark.parametrize(
    "text", ["", "-1", "1e3", "0.0000001", "1.", ".5", "12,50", "٣", "1_000", "99999999999", "10000000000", "nan"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(KnotctlError) as e:
        parse_credits(text)
    assert e.value.code == "bad-amount"


@pytest.mark.parametrize(
    "make",
    [lambda: Price(-1, 0), lambda: Price(0, MAX_AMOUNT + 1), lambda: Usage(-1, 0), lambda: Usage(0, MAX_TOKENS + 1),
     lambda: Work("a", 0, 1), lambda: Work("a", 1, -1), lambda: Price(MAX_AMOUNT, 0).bill(Usage(MAX_TOKENS, 0))],
)  # fmt: skip
def test_figures_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(KnotctlError):
        make()  # type: ignore[operator]
