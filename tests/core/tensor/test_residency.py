"""Weights that pass through: mapped or read, ahead of their use where the source is remote; what is held is counted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from store_doubles import FaultyStore

from knotctl.core.engine.session import EngineSpec, local_stages
from knotctl.core.errors import Cancelled, SourceError, UsageError
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import HUGE_PAGE
from knotctl.core.source.ranged import HEAD_BYTES
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.open_rows import STORE_BUDGET
from knotctl.core.tensor.passing import EDGES_BYTES, Io, Way
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind

TOKENS = 5


@pytest.fixture
def path(tiny: Callable[[str], Path]) -> Path:
    return tiny("tiny")


@pytest.fixture
def local(path: Path) -> Iterator[Knot]:
    with open_knot(str(path)) as knot:
        yield knot


@pytest.fixture
def store(path: Path) -> Iterator[FaultyStore]:
    store = FaultyStore()
    store.put("tiny.knot", path.read_bytes())
    yield store
    store.close()


@pytest.fixture
def remote(store: FaultyStore) -> Iterator[Knot]:
    with open_knot(f"{store.url}/models/tiny.knot") as knot:
        yield knot


def station(knot: Knot, **spec: object) -> Station:
    return Station(knot, StationSpec(LayerSpan(0, knot.header.config.n_layers), kv_tokens=64, batch_tokens=8, **spec))  # type: ignore[arg-type]


def frame(knot: Knot, tokens: int = TOKENS, position: int = 0) -> Frame:
    x = np.random.default_rng(position).standard_normal((tokens, knot.header.config.hidden_size)).astype(np.float32)
    return Frame(Kind.HIDDEN, bytes.fromhex(knot.id), (Segment(bytes(16), position, tokens),), x)


def logits(knot: Knot, s: Station) -> bytes:
    return s.forward(frame(knot)).payload.tobytes()


def tight(knot: Knot, room: int) -> int:
    """A budget that leaves so much room for weights, without a mapping's edges."""
    plan = station(knot, io=Io.PREAD).plan
    return plan.total_bytes - plan.passing_bytes + room


def test_mapped_or_read_the_weights_give_the_same_bytes(local: Knot) -> None:
    mapped, read = station(local, io=Io.MMAP), station(local, io=Io.PREAD)
    assert (mapped.plan.way, read.plan.way, station(local).plan.way) == (Way.MAP, Way.READ, Way.MAP)
    assert logits(local, mapped) == logits(local, read)
    assert mapped.weights.ledger.peak == read.weights.ledger.peak
    for room in (40_000, 12_000):
        tiled = station(local, io=Io.MMAP, memory_budget=tight(local, room) + EDGES_BYTES)
        assert logits(local, tiled) == logits(local, read)
        assert any(u.tiles > 2 for u in tiled.uses)
        assert tiled.plan.total_bytes <= (tiled.plan.budget_bytes or 0)


def test_of_a_mapping_no_page_is_resident_but_those_of_the_phase_in_use(tiny_large: Path) -> None:
    with open_knot(str(tiny_large)) as knot:
        s = station(knot)
        seen = []
        for layer in s._layers:
            for phase in layer.all:
                with s.weights.hold(phase) as held:
                    assert held.vector("attn_norm_weight").any() if phase is layer.attn else True
                    _ = [int(part.max()) for part in held.parts.values()]
                    seen.append((resident(tiny_large), phase.bytes))
                assert resident(tiny_large) == 0
        assert all(here >= size // 4096 * 4096 for here, size in seen)
        assert all(here <= size + 2 * HUGE_PAGE <= size + EDGES_BYTES for here, size in seen)


def resident(path: Path) -> int:
    """Bytes of this process's mapping of a file that are resident."""
    text = Path("/proc/self/smaps").read_text()
    return sum(int(n) * 1024 for n in re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text))


@pytest.fixture(scope="session")
def tiny_large(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model under a name that no other mapping of the process has."""
    path = tmp_path_factory.mktemp("mapped") / "alone.knot"
    path.write_bytes(tiny("tiny").read_bytes())
    return path


def test_what_is_no_local_file_is_not_mapped(remote: Knot) -> None:
    assert station(remote).plan.way is Way.READ_AHEAD
    with pytest.raises(UsageError, match="--io mmap"):
        station(remote, io=Io.MMAP)
    counted = CountedSource(remote.source)
    assert not counted.local
    assert not counted.mappable


def loads_behind_the_head(s: Station) -> int:
    """How many of the station's phases are not within what a store keeps of its first answer."""
    phases = [p for layer in s._layers for p in layer.all] + ([s._head] if s._head else [])
    return sum(max(r.end for r in p.ranges) > HEAD_BYTES for p in phases)


def test_the_next_phase_is_fetched_while_one_is_in_use_and_each_once(remote: Knot, store: FaultyStore) -> None:
    s = station(remote)
    assert s.plan.way is Way.READ_AHEAD
    order = [p for layer in s._layers for p in layer.all]
    before = len(store.requests)
    s.weights.expect(order)
    for done, phase in enumerate(order):
        with s.weights.hold(phase):
            # without computing anything: the server is asked for what comes next all the same
            arrived(store, before, order[: done + 2])
    time.sleep(0.05)
    arrived(store, before, order)
    assert s.weights.ledger.held == 0
    assert s.weights.ledger.peak == max(a.bytes + b.bytes for a, b in pairwise(order))
    assert s.weights.ledger.peak <= s.plan.passing_bytes


def arrived(store: FaultyStore, before: int, phases: list) -> None:  # type: ignore[type-arg]
    """Wait for the requests of exactly these phases."""
    expected = sum(max(r.end for r in p.ranges) > HEAD_BYTES for p in phases)
    end = time.monotonic() + 10
    while len(store.requests) - before < expected and time.monotonic() < end:
        time.sleep(0.001)
    assert len(store.requests) - before == expected


def test_reading_ahead_changes_no_byte_and_asks_for_nothing_twice(
    local: Knot, remote: Knot, store: FaultyStore
) -> None:
    whole = logits(local, station(local))
    s = station(remote)
    before = len(store.requests)
    assert logits(remote, s) == whole
    assert len(store.requests) - before == loads_behind_the_head(s)
    for room in (400_000, 24_000):
        budget = tight(local, room)
        tiled = station(remote, memory_budget=budget)
        assert logits(remote, tiled) == whole
        assert tiled.weights.ledger.peak <= tiled.plan.passing_bytes <= room
        assert tiled.weights.ledger.held == 0


def test_a_read_that_fails_in_the_background_is_the_error_of_its_own_phase(remote: Knot, store: FaultyStore) -> None:
    s = station(remote)
    expected = logits(remote, s)
    order = [p for layer in s._layers for p in layer.all if max(r.end for r in p.ranges) > HEAD_BYTES]
    s.weights.expect(order)
    store.faults += ["", "403"]
    with s.weights.hold(order[0]):
        pass
    with pytest.raises(SourceError) as e, s.weights.hold(order[1]):
        pytest.fail("its bytes did not come")
    assert e.value.code == "permission-denied"
    assert s.weights.ledger.held == 0
    assert logits(remote, s) == expected


def test_a_pass_that_is_given_up_leaves_no_read_in_a_buffer_that_is_used_again(
    remote: Knot, store: FaultyStore
) -> None:
    s = station(remote)
    expected = logits(remote, s)
    for after in range(1, 12, 2):
        calls = iter(range(after))

        def check(calls: Iterator[int] = calls) -> None:
            if next(calls, None) is None:
                raise Cancelled("cancelled", "gone")

        with pytest.raises(Cancelled):
            s.forward(frame(remote, 2, TOKENS), check)
        # what was on its way arrives in the buffer that the next pass fills second
        assert logits(remote, s) == expected
        assert s.weights.ledger.held == 0
        assert s.weights.ledger.peak <= s.plan.passing_bytes


def test_pinned_weights_leave_room_for_two_buffers_where_much_streams(local: Knot, remote: Knot) -> None:
    fluid = station(remote).plan
    total = sum(p.pinned_bytes for p in [q for layer in station(local)._layers for q in layer.all])
    little = station(remote, memory_budget=tight(remote, 2 * fluid.buffer_bytes + total // 4), residency=Residency.AUTO)
    assert (little.plan.residency, little.plan.way) == (Residency.PINNED, Way.READ_AHEAD)
    assert little.plan.total_bytes <= (little.plan.budget_bytes or 0)
    expected = logits(local, station(local))
    assert logits(remote, little) == expected
    assert little.weights.ledger.peak <= little.plan.passing_bytes + little.plan.pinned_bytes
    # where less than two buffers would stream, what a second one would take is better pinned
    most = station(remote, memory_budget=fluid.total_bytes + fluid.weight_bytes - 2 * fluid.buffer_bytes,
                   residency=Residency.PINNED)  # fmt: skip
    assert (most.plan.residency, most.plan.way) == (Residency.PINNED, Way.READ)
    assert logits(remote, most) == expected


def test_a_station_that_holds_everything_reads_nothing_again(remote: Knot, store: FaultyStore) -> None:
    s = station(remote, residency=Residency.RESIDENT)
    before = len(store.requests)
    first = logits(remote, s)
    assert logits(remote, s) == first
    assert len(store.requests) == before
    assert s.weights.ledger.held == s.plan.pinned_bytes == s.weights.ledger.peak


def test_vectors_of_what_stays_are_decoded_once(local: Knot) -> None:
    s = station(local, residency=Residency.RESIDENT)
    attn = s._layers[0].attn
    with s.weights.hold(attn) as first, s.weights.hold(attn) as again:
        assert first.vector("attn_norm_weight") is again.vector("attn_norm_weight")
    assert (
        s.weights.ledger.held
        == sum(u.bytes for u in s.uses)
        + sum(4 * t.columns for layer in s._layers for p in [*layer.all] for t in p.vectors.values())
        + 4 * local.header.config.hidden_size
    )


def test_the_rows_that_shards_keep_of_a_store_come_out_of_the_budget(remote: Knot, local: Knot) -> None:
    for knot, kept in ((remote, STORE_BUDGET), (local, 0)):
        stages = local_stages(knot, EngineSpec(shards=3, context=64, memory_budget=64 << 20))
        rows = [s.source.ram.budget for s in stages._shards if isinstance(s.source, RowLevels)]
        assert len(rows) == (3 if kept else 0)
        assert kept - 3 <= sum(rows) <= kept
        assert sum(s.plan.budget_bytes or 0 for s in stages.stations) == (64 << 20) - kept
