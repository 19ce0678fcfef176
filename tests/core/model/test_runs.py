"""What a worker holds: runs of layers that come and go while the others serve, and compute what stations compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from running import embed

from knotctl.core.errors import WrongIdentity
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.runs import Runs
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.counted import CountedSource
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind

A, B = bytes(15) + b"a", bytes(15) + b"b"


@pytest.fixture
def knot(tiny: Callable[[str], Path]) -> Iterator[Knot]:
    """One of three layers."""
    with open_knot(str(tiny("tiny"))) as k:
        yield k


@pytest.fixture
def counted(knot: Knot) -> CountedSource:
    knot.source = CountedSource(knot.source)
    return knot.source


@pytest.fixture
def runs(knot: Knot, counted: CountedSource) -> Runs:
    return Runs(lambda span: Station(knot, StationSpec(span, Residency.RESIDENT, kv_tokens=64, batch_tokens=8)))


def load(runs: Runs, start: int, end: int) -> None:
    runs.add(runs.made(LayerSpan(start, end)))


def states(knot: Knot, session: bytes, n: int = 4, position: int = 0) -> Frame:
    x = np.random.default_rng(n + position).standard_normal((n, knot.header.config.hidden_size), np.float32)
    segments = (Segment(session, position, n),)
    return Frame(Kind.HIDDEN, bytes.fromhex(knot.id), segments, x, {"logits": "all"})


def test_only_what_is_missing_is_loaded_and_parts_of_runs_serve(knot: Knot, runs: Runs) -> None:
    load(runs, 1, 2)
    load(runs, 0, 3)
    assert runs.spans == [LayerSpan(0, 3)]
    assert [s.span for s in runs.stations] == [LayerSpan(0, 1), LayerSpan(1, 2), LayerSpan(2, 3)]
    whole = Station(knot, StationSpec(LayerSpan(0, 3), batch_tokens=8))
    frame = embed(knot, [5, 17, 200])
    assert runs.serving(LayerSpan(0, 3)).forward(frame).payload.tobytes() == whole.forward(frame).payload.tobytes()


@pytest.mark.parametrize("dropped", [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)])
def test_a_run_that_is_cut_goes_on_without_a_read_and_lets_its_bytes_go(
    knot: Knot, runs: Runs, counted: CountedSource, dropped: tuple[int, int]
) -> None:
    load(runs, 0, 3)
    (ledger,) = {id(s.weights): s.weights.ledger for s in runs.stations}.values()
    gone = LayerSpan(*dropped)
    left = [LayerSpan(k, k + 1) for k in range(3) if k not in gone]
    alone = {s: Station(knot, StationSpec(s, Residency.RESIDENT, kv_tokens=64, batch_tokens=8)) for s in left}
    reads = counted.reads
    runs.drop(gone)
    assert counted.reads == reads
    assert ledger.held == sum(s.weights.ledger.held for s in alone.values())
    assert sum(s.plan.pinned_bytes for s in runs.stations) == ledger.held
    for (span, station), session in zip(alone.items(), (A, B), strict=False):
        frame = states(knot, session)
        assert runs.serving(span).forward(frame).payload.tobytes() == station.forward(frame).payload.tobytes()
    with pytest.raises(WrongIdentity):
        runs.serving(gone)
    # and it can come back
    load(runs, 0, 3)
    assert runs.spans == [LayerSpan(0, 3)]


def test_sessions_of_kept_layers_alone_outlive_a_drop(knot: Knot, runs: Runs) -> None:
    load(runs, 0, 3)
    first, last = LayerSpan(0, 1), LayerSpan(0, 3)
    runs.serving(first).forward(states(knot, A))
    runs.serving(last).forward(states(knot, B))
    assert runs.pinned(LayerSpan(1, 3)) == {B}
    assert runs.pinned(first) == {A, B}
    runs.drop(LayerSpan(1, 3))
    assert runs.sessions() == {A}
    assert runs.length(A) == 4
    station = Station(knot, StationSpec(first, batch_tokens=8))
    station.forward(states(knot, A))
    later = states(knot, A, 3, 4)
    assert runs.serving(first).forward(later).payload.tobytes() == station.forward(later).payload.tobytes()
    assert runs.forget(A)
    assert not runs.sessions()
