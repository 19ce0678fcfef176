"""Merging partial embeddings: the owners' rows bit for bit, and a missing or second owner found by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import CheckFailed, FrameError, KnotctlError, UsageError, WrongIdentity
from knotctl.core.spans import VocabSpan
from knotctl.core.wire.frame import Frame, Segment, encode_frame, parse_frame
from knotctl.core.wire.layout import Flags, Kind, Mode
from knotctl.core.wire.merge import merge_partials, partial_meta

VOCAB, WIDTH = 40, 8
TABLE = np.random.default_rng(3).standard_normal((VOCAB, WIDTH), np.float32)
# A row of negative zeros: 0 + -0.0 is 0.0, so that adding would not give these bits back.
TABLE[7] = -0.0
R1, R2 = b"\x01" * 16, b"\x02" * 16


def partial(tokens: list[int], index: int, count: int, segments: tuple[Segment, ...] | None = None) -> Frame:
    vocab = VocabSpan.shard(index, count, VOCAB)
    rows = np.array([TABLE[t] if t in vocab else np.zeros(WIDTH, np.float32) for t in tokens], np.float32)
    segments = segments or (Segment(R1, 3, len(tokens)),)
    return Frame(Kind.PARTIAL, bytes(16), segments, rows, {"route": "r", **partial_meta(tokens, vocab)}, Flags.LAST)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), st.integers(1, 8), st.randoms())
def test_all_shards_in_any_order_give_the_table_s_rows(tokens: list[int], count: int, order: Any) -> None:
    parts = [parse_frame(encode_frame(partial(tokens, i, count))) for i in range(count)]
    order.shuffle(parts)
    merged = merge_partials(parts)
    assert merged.payload.tobytes() == TABLE[tokens].tobytes()
    assert (merged.kind, merged.flags, dict(merged.meta)) == (Kind.HIDDEN, Flags.LAST, {"route": "r"})
    assert merged.segments == parts[0].segments


def test_a_negative_zero_keeps_its_sign() -> None:
    merged = merge_partials([partial([7], i, 2) for i in range(2)])
    assert np.signbit(merged.payload).all()


def test_an_all_zero_row_that_is_owned_is_no_missing_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", np.zeros((VOCAB, WIDTH), np.float32))
    assert not merge_partials([partial([1, 30], i, 2) for i in range(2)]).payload.any()
    with pytest.raises(CheckFailed, match="positions 4"):
        merge_partials([partial([1, 30], 0, 2)])


def test_a_missing_shard_is_named_by_the_positions_it_leaves_empty() -> None:
    parts = [partial([1, 39, 38, 2, 37], i, 4) for i in range(3)]
    with pytest.raises(CheckFailed, match=r"3 of 5 tokens \(positions 4:6 7\)") as e:
        merge_partials(parts)
    assert (e.value.code, e.value.exit_code) == ("no-owner", 1)


def test_degrade_zeroes_only_those_positions_and_says_which() -> None:
    tokens = [1, 39, 38, 2, 37]
    segments = (Segment(R1, 3, 2), Segment(R2, 10, 3, Mode.VERIFY))
    merged = merge_partials([partial(tokens, i, 4, segments) for i in range(3)], degrade=True)
    assert merged.flags == Flags.LAST | Flags.DEGRADED
    assert merged.meta["zeroed"] == [[R1.hex(), 4, 5], [R2.hex(), 10, 11], [R2.hex(), 12, 13]]
    assert np.array_equal(merged.payload[[0, 3]], TABLE[[1, 2]])
    assert not merged.payload[[1, 2, 4]].any()
    assert merge_partials([partial(tokens, i, 4) for i in range(4)], degrade=True).flags == Flags.LAST


def test_an_id_in_the_padding_has_no_owner_even_with_all_shards() -> None:
    with pytest.raises(CheckFailed, match="positions 4"):
        merge_partials([partial([1, VOCAB + 3], i, 4) for i in range(4)])


@pytest.mark.parametrize("parts", [[(0, 2), (0, 2)], [(0, 2), (1, 2), (2, 3)]])
def test_two_owners_are_refused_even_with_degrade(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckFailed) as e:
        merge_partials([partial([1, 30], *p) for p in parts], degrade=True)
    assert e.value.code == "two-owners"


@pytest.mark.parametrize(
    ("change", "code", "error"),
    [
        ({"knot_id": b"x" * 16}, "wrong-identity", WrongIdentity),
        ({"segments": (Segment(R1, 4, 2),)}, "wrong-identity", WrongIdentity),
        ({"segments": (Segment(R2, 3, 2),)}, "wrong-identity", WrongIdentity),
        ({"payload": np.zeros((2, 4), np.float32)}, "wrong-identity", WrongIdentity),
        ({"kind": Kind.HIDDEN}, "wrong-kind", UsageError),
        ({"meta": {}}, "bad-owned", FrameError),
        ({"meta": {"owned": "all"}}, "bad-owned", FrameError),
        ({"meta": {"owned": [[0, 3]]}}, "bad-owned", FrameError),
        ({"meta": {"owned": [[1, 1]]}}, "bad-owned", FrameError),
        ({"meta": {"owned": [[1, 2], [0, 1]]}}, "bad-owned", FrameError),
        ({"meta": {"owned": [[0.0, 2.0]]}}, "bad-owned", FrameError),
        ({"meta": {"owned": []}}, "bad-owned", FrameError),  # its rows are not zero
    ],
)
def test_frames_that_do_not_belong_together_are_refused(
    change: dict[str, Any], code: str, error: type[KnotctlError]
) -> None:
    with pytest.raises(error) as e:
        merge_partials([partial([1, 30], 0, 2), replace(partial([1, 30], 1, 2), **change)])
    assert e.value.code == code


def test_nothing_to_merge_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        merge_partials([])


def test_what_a_degraded_shard_zeroed_is_carried_on() -> None:
    part = partial([1, 2], 0, 1)
    part = replace(part, flags=Flags.DEGRADED, meta={**part.meta, "zeroed": [[R1.hex(), 3, 4]]})
    merged = merge_partials([part])
    assert merged.flags == Flags.DEGRADED
    assert merged.meta["zeroed"] == [[R1.hex(), 3, 4]]
