"""The row cache: what it gives is what the knot holds, whichever level it comes from; what is bad is never used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import SourceError
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.source.kv import open_kv
from knotctl.core.spans import VocabSpan
from knotctl.core.tensor.open_rows import open_rows
from knotctl.core.tensor.records import RecordKind
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.row_ram import ENTRY_OVERHEAD, RamRows
from knotctl.core.tensor.rows import KnotRows, Row, coalesced, decode, embedding_table, knot_rows

ROWS = [3, 17, 18, 19, 200, 5, 17]


@pytest.fixture
def make(knot: Knot, tmp_path: Path) -> Iterator[Callable[..., RowLevels]]:
    """`make(budget=…, kv=True)` is a row cache over the tiny knot; with kv, over one SQLite file."""
    made: list[RowLevels] = []

    def build(budget: int = 1 << 20, kv: bool = False) -> RowLevels:
        level = open_kv(str(tmp_path / "rows.db")) if kv else None
        made.append(RowLevels(knot.id, embedding_table(knot), knot_rows(knot), budget=budget, kv=level))
        return made[-1]

    yield build
    for levels in made:
        levels.close()


def numbers(knot: Knot, taken: Mapping[int, Row], rows: Collection[int]) -> np.ndarray:
    return decode(embedding_table(knot), [taken[row] for row in rows])


def truth(knot: Knot, rows: Collection[int]) -> np.ndarray:
    return numbers(knot, knot_rows(knot).take(rows), rows)


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


# ---- levels


def test_every_level_gives_the_knot_s_numbers(knot: Knot, make: Callable[..., RowLevels]) -> None:
    expected = truth(knot, ROWS).tobytes()
    first = make(kv=True)
    assert numbers(knot, first.take(ROWS), ROWS).tobytes() == expected
    assert numbers(knot, first.take(ROWS), ROWS).tobytes() == expected
    assert first.kv is not None
    first.kv.flush()
    second = make(kv=True)
    assert numbers(knot, second.take(ROWS), ROWS).tobytes() == expected
    assert {entry.kind for entry in second.take(ROWS).values()} == {RecordKind.FLOATS}


def test_a_warm_row_reads_nothing_and_a_lost_memory_is_filled_from_the_key_value_level(
    knot: Knot, make: Callable[..., RowLevels]
) -> None:
    source: Any = knot.source
    levels, n = make(kv=True), len(set(ROWS))
    levels.take(ROWS)
    assert source.bytes == n * embedding_table(knot).row_bytes
    cold = source.reads
    levels.take(ROWS)
    assert levels.kv is not None
    levels.kv.flush()
    again = make(kv=True)
    again.take(ROWS)
    again.take(ROWS)
    assert source.reads == cold
    assert again.kv is not None
    assert (again.ram.counts["hits"], again.ram.counts["misses"], again.kv.counts["hits"]) == (n, n, n)


def test_a_knot_of_other_bytes_shares_nothing(
    knot: Knot, make: Callable[..., RowLevels], tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    levels = make(kv=True)
    levels.take(ROWS)
    levels.close()
    table = embedding_table(knot)
    other = RowLevels("00" * 16, table, knot_rows(knot), kv=open_kv(str(tmp_path / "rows.db")))
    other.take(ROWS)
    assert other.kv is not None
    assert other.kv.counts["hits"] == 0
    other.close()


@pytest.mark.parametrize("level", ["ram", "kv"])
@pytest.mark.parametrize("fault", ["length", "digest", "kind", "identity", "index", "empty"])
def test_a_bad_entry_is_a_miss_deleted_counted_and_mended(
    knot: Knot, make: Callable[..., RowLevels], level: str, fault: str
) -> None:
    levels = make(kv=True)
    good, table = levels.take([5])[5], embedding_table(knot)
    assert levels.kv is not None
    levels.kv.flush()
    stranger = RowLevels("00" * 16, table, knot_rows(knot))
    whole = levels.record(5, good if level == "ram" else Row(RecordKind.FLOATS, truth(knot, [5]).tobytes()))
    bad = {
        "length": whole[:-4],
        "digest": flip(whole),
        "kind": levels.record(5, Row(RecordKind.FLOATS if level == "ram" else RecordKind.STORED, good.data)),
        "identity": stranger.record(5, good),
        "index": levels.record(6, good),
        "empty": b"",
    }[fault]
    if level == "ram":
        levels.ram.put(5, bad)
        counts = levels.ram.counts
    else:
        levels.ram.clear()
        levels.kv.kv.put_many({levels._key(5): bad})
        counts = levels.kv.counts
    before = dict(counts.to_json())
    assert numbers(knot, levels.take([5]), [5]).tobytes() == truth(knot, [5]).tobytes()
    assert counts["poisoned"] == before["poisoned"] + 1
    levels.kv.flush()
    levels.ram.clear()
    hits = levels.kv.counts["hits"]
    levels.take([5])
    assert levels.kv.counts["hits"] == hits + 1, "the second read is a hit"


def test_memory_stays_within_its_budget_and_keeps_what_was_used_last(
    knot: Knot, make: Callable[..., RowLevels]
) -> None:
    size = len(make().record(0, next(iter(knot_rows(knot).take([0]).values())))) + ENTRY_OVERHEAD
    levels = make(budget=10 * size)
    for row in range(50):
        levels.take([row, 0])
        assert levels.ram.counts.bytes <= levels.ram.budget
    assert len(levels.ram) == 10
    assert levels.ram.counts["evictions"] == 40
    assert levels.ram.get(0) is not None
    assert levels.ram.get(49) is not None
    assert levels.ram.get(39) is None


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "clear"]), st.integers(0, 9), st.integers(0, 900))))
def test_the_bytes_of_the_memory_level_are_those_of_its_records(steps: list[tuple[str, int, int]]) -> None:
    ram = RamRows(3000, CacheCounts("ram"))
    for step, row, size in steps:
        match step:
            case "put":
                ram.put(row, bytes(size))
            case "get":
                ram.get(row)
            case "delete":
                ram.delete([row])
            case _:
                ram.clear()
        assert ram.counts.bytes == sum(len(r) + ENTRY_OVERHEAD for r in ram._records.values()) <= 3000


def test_a_record_larger_than_the_budget_is_not_kept(knot: Knot, make: Callable[..., RowLevels]) -> None:
    levels = make(budget=10)
    levels.take(ROWS)
    assert len(levels.ram) == levels.ram.counts.bytes == 0


def test_rows_asked_for_at_once_by_many_are_read_once(knot: Knot, make: Callable[..., RowLevels]) -> None:
    source: Any = knot.source
    levels, start = make(), threading.Barrier(8)

    def ask(n: int) -> bytes:
        start.wait(10)
        rows = [(n + i) % 40 for i in range(40)]
        return numbers(knot, levels.take(rows), range(40)).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {truth(knot, range(40)).tobytes()}
    # and once more by `truth`
    assert source.bytes == 2 * 40 * embedding_table(knot).row_bytes


def test_a_failed_read_fails_those_who_wait_for_it_and_nobody_after(
    knot: Knot, make: Callable[..., RowLevels], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = make()

    def fail(*_: object) -> None:
        raise SourceError("read-failed", "as told")

    with monkeypatch.context() as m:
        m.setattr(levels._below, "take", fail)
        with pytest.raises(SourceError):
            levels.take([1, 2])
    assert set(levels.take([1, 2])) == {1, 2}
    assert not levels._coming


def test_invalidated_rows_are_read_again(knot: Knot, make: Callable[..., RowLevels]) -> None:
    source: Any = knot.source
    levels = make(kv=True)
    levels.take([1, 2])
    assert levels.kv is not None
    levels.kv.flush()
    assert levels.invalidate([1, 9]) == 1
    levels.kv.flush()
    before = source.bytes
    levels.take([1, 2])
    assert source.bytes == before + embedding_table(knot).row_bytes
    assert levels.invalidate() == 2


# ---- the knot below


def test_near_rows_come_in_one_read_and_those_between_are_kept(knot: Knot) -> None:
    source: Any = knot.source
    table = embedding_table(knot)
    below = KnotRows(source, table, gap_bytes=4 * table.row_bytes)
    levels = RowLevels(knot.id, table, below)
    taken = levels.take([10, 13, 30])
    assert source.reads == 2
    assert source.bytes == 5 * table.row_bytes
    assert numbers(knot, taken, [10, 13, 30]).tobytes() == truth(knot, [10, 13, 30]).tobytes()
    before = source.bytes
    levels.take([11, 12])
    assert source.bytes == before, "what came along is not fetched a second time"
    levels.close()


def test_every_row_is_fetched_once_in_whatever_order_they_are_asked_for(knot: Knot) -> None:
    source: Any = knot.source
    table = embedding_table(knot)
    levels = RowLevels(knot.id, table, KnotRows(source, table, gap_bytes=8 * table.row_bytes))
    rows = np.random.default_rng(3).permutation(table.rows).tolist()
    for at in range(0, len(rows), 7):
        levels.take(rows[at : at + 7])
    assert source.bytes == table.rows * table.row_bytes
    levels.close()


@given(st.lists(st.integers(0, 99)), st.integers(0, 9), st.integers(1, 30), st.sets(st.integers(0, 99)))
def test_runs_hold_all_rows_and_no_gap_is_wider(rows: list[int], gap: int, most: int, known: set[int]) -> None:
    runs = coalesced(rows, gap, most, known - set(rows))
    assert not {r for run in runs for r in range(run.start, run.end)} & known - set(rows)
    runs = coalesced(rows, gap, most)
    inside = [row for run in runs for row in range(run.start, run.end)]
    assert len(inside) == len(set(inside))
    assert set(rows) <= set(inside)
    assert all(len(run) <= most and run.start in rows and run.end - 1 in rows for run in runs)
    assert len(inside) - len(set(rows)) <= gap * len(set(rows))


def test_a_shard_gives_the_same_partial_through_any_levels(knot: Knot, tmp_path: Path) -> None:
    span = VocabSpan(0, 300)
    plain = Shard(knot, span).rows(ROWS)
    for kv in (None, str(tmp_path / "rows.db")):
        for budget in (0, 1 << 20):
            shard = Shard(knot, span, open_rows(knot, span, budget=budget, kv=kv))
            for _ in range(2):
                assert shard.rows(ROWS).tobytes() == plain.tobytes()
            shard.close()
