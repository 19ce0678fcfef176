"""Repeated passes: the bytes of plain ones, whoever comes and goes, and only where everything stays where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from running import REQUEST, TOKENS, embed

from knotctl.core.errors import CheckFailed
from knotctl.core.kernels.threads import Program
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.kv import KvType
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Mode


@pytest.fixture(params=["tiny", "tiny-llama", "tiny-qwen3"])
def knot(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Knot]:
    with open_knot(str(tiny(request.param))) as k:
        yield k


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an entry for each pass that was repeated."""
    runs: list[int] = []
    run = Program.run

    def counted(self: Program[object]) -> int:
        runs.append(1)
        return run(self)

    monkeypatch.setattr(Program, "run", counted)
    return runs


def station(knot: Knot, residency: Residency, **spec: object) -> Station:
    span = LayerSpan(0, knot.header.config.n_layers)
    return Station(knot, StationSpec(span, residency, **spec))  # type: ignore[arg-type]


def step(knot: Knot, token: int, positions: dict[bytes, int]) -> Frame:
    """A frame with a token of each session."""
    frames = [embed(knot, [token + i], position) for i, position in enumerate(positions.values())]
    segments = tuple(Segment(key, position, 1, Mode.DECODE) for key, position in positions.items())
    return Frame(frames[0].kind, frames[0].knot_id, segments, np.concatenate([f.payload for f in frames]))


@pytest.mark.parametrize("kv_type", KvType)
def test_a_repeated_pass_has_the_bytes_of_a_plain_one(knot: Knot, repeated: list[int], kv_type: KvType) -> None:
    # room grows by 1 and 8 tokens: the caches move
    plain = station(knot, Residency.FLUID, kv_type=kv_type, kv_tokens=300)
    fast = station(knot, Residency.RESIDENT, kv_type=kv_type, kv_tokens=300)
    sessions = {bytes([i]) * 16: 0 for i in range(3)}
    for i in range(40):
        here = sessions if 10 <= i < 30 else dict(list(sessions.items())[:1])  # others come and go
        frame = step(knot, TOKENS[i % len(TOKENS)], here)
        assert fast.forward(frame).payload.tobytes() == plain.forward(frame).payload.tobytes()
        sessions |= {key: position + 1 for key, position in here.items()}
    assert len(repeated) >= 20
    assert {u.phase for u in fast.uses if u.compute_ms > 0} == {u.phase for u in plain.uses}


def test_only_what_stays_in_memory_is_repeated(knot: Knot, repeated: list[int]) -> None:
    for s in (station(knot, Residency.FLUID), station(knot, Residency.RESIDENT)):
        for position in range(0, 12, 2):
            s.forward(embed(knot, TOKENS[:2], position))  # more than one token of a session
    s = station(knot, Residency.FLUID)
    for position in range(6):
        s.forward(embed(knot, TOKENS[:1], position))
    assert not repeated


def test_a_number_that_is_not_finite_is_named_as_in_a_plain_pass(knot: Knot, repeated: list[int]) -> None:
    fast, plain = station(knot, Residency.RESIDENT), station(knot, Residency.FLUID)
    told = []
    for s in (fast, plain):
        for position in range(4):
            s.forward(embed(knot, TOKENS[:1], position))
        s.sessions[REQUEST]._data[:, :, :, 1] = np.nan
        with pytest.raises(CheckFailed) as error:
            s.forward(embed(knot, TOKENS[:1], 4))
        told.append(str(error.value))
        s.sessions[REQUEST]._data[:, :, :, 1] = 0
    assert told[0] == told[1]
    frame = embed(knot, TOKENS[:1], 4)
    assert fast.forward(frame).payload.tobytes() == plain.forward(frame).payload.tobytes()
    assert len(repeated) == 4


def test_a_pass_that_is_given_up_leaves_the_next_one_right(knot: Knot, repeated: list[int]) -> None:
    plain, s = station(knot, Residency.FLUID), station(knot, Residency.RESIDENT)
    for position in range(8):
        frame = embed(knot, TOKENS[:1], position)
        if position in (1, 2, 4):
            with pytest.raises(ZeroDivisionError):
                s.forward(frame, lambda: 1 / 0)
        assert s.forward(frame).payload.tobytes() == plain.forward(frame).payload.tobytes()
    assert repeated
