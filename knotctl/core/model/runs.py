"""The layers that a worker holds: runs of them, loaded and dropped while others serve; a frame may pass any part.

Each run is a station over its own bytes. A part of one shares its weights and sessions; a session's keys and values
are those of the part alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from knotctl.core.errors import WrongIdentity, printable
from knotctl.core.model.config import ModelConfig
from knotctl.core.model.repeat import Repeater
from knotctl.core.model.station import Station, never
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame


class Serving(Protocol):
    """Layers that frames pass: a station's, or a part of what a worker holds."""

    @property
    def span(self) -> LayerSpan:
        """The layers."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's numbers."""
        ...

    def forward(self, frame: Frame, check: Callable[[], None] = ...) -> Frame:
        """Return the frame behind the layers."""
        ...


class Runs:
    """The stations of one worker. One thread at a time, as for a station."""

    def __init__(self, make: Callable[[LayerSpan], Station]) -> None:
        self._make = make
        self.stations: list[Station] = []
        self._parts: dict[tuple[int, LayerSpan], Station] = {}

    @property
    def spans(self) -> list[LayerSpan]:
        """The layers held, as disjoint runs, neighbours joined, in order."""
        joined: list[LayerSpan] = []
        for s in self.stations:
            if joined and joined[-1].end == s.span.start:
                joined[-1] = LayerSpan(joined[-1].start, s.span.end)
            else:
                joined.append(s.span)
        return joined

    def made(self, span: LayerSpan) -> list[Station]:
        """Return stations of those of these layers that are not held, their bytes read. Raises: what `make` does.

        From any thread, while others serve; `add` has them held.
        """
        return [self._make(part) for part in self._missing(span)]

    def add(self, stations: Sequence[Station]) -> None:
        """Hold what was made; what is held already stays as it is."""
        self.stations = sorted([*self.stations, *stations], key=lambda s: s.span)

    def drop(self, span: LayerSpan) -> None:
        """Hold these layers no more; what is left of a run that is cut goes on with its weights and its sessions.

        Sessions that have keys and values of dropped layers end.
        """
        kept: list[Station] = []
        for s in self.stations:
            if not _overlap(s.span, span):
                kept.append(s)
                continue
            rest = ((s.span.start, min(span.start, s.span.end)), (max(span.end, s.span.start), s.span.end))
            kept += [_kept(s, LayerSpan(a, b)) for a, b in rest if a < b]
            gone = [p for layer in s._layers if layer.index in span for p in layer.all]
            s.weights.release([*gone, s._head] if s._head and span.end >= s.span.end else gone)
        self.stations = kept
        self._parts.clear()

    def pinned(self, span: LayerSpan) -> set[bytes]:
        """Return the sessions that have keys and values of these layers, and would end with them."""
        held = (item for s in self.stations for item in list(s.sessions.items()))
        return {session for session, kv in held if _overlap(kv.shape.span, span)}

    def serving(self, span: LayerSpan) -> Chain:
        """Return what computes these layers. Raises: WrongIdentity where not all are held."""
        parts, at = [], span.start
        for station in self.stations:
            if at < span.end and station.span.start <= at < station.span.end:
                end = min(station.span.end, span.end)
                parts.append(self._part(station, LayerSpan(at, end)))
                at = end
        if at < span.end:
            held = ", ".join(map(str, self.spans)) or "none"
            raise WrongIdentity("wrong-identity", f"layers {span}: this worker has {held}", hint="ask for a new route")
        return Chain(parts)

    def length(self, request_id: bytes) -> int:
        """Return the tokens of a session that every run which has it holds."""
        held = [s.sessions[request_id].length for s in self.stations if request_id in s.sessions]
        return min(held, default=0)

    def forget(self, request_id: bytes) -> bool:
        """Drop a session; return whether it was there."""
        return sum(s.drop(request_id) for s in self.stations) > 0

    def sessions(self) -> set[bytes]:
        """Return the sessions that any run has."""
        return {session for s in self.stations for session in s.sessions}

    def _missing(self, span: LayerSpan) -> list[LayerSpan]:
        missing, at = [], span.start
        for s in sorted(self.stations, key=lambda s: s.span):
            if at < s.span.end and s.span.start < span.end:
                missing.append(LayerSpan(at, max(at, s.span.start)))
                at = max(at, s.span.end)
        missing.append(LayerSpan(min(at, span.end), span.end))
        return [m for m in missing if m]

    def _part(self, station: Station, span: LayerSpan) -> Station:
        if span == station.span:
            return station
        part = self._parts.get((id(station), span))
        if part is None:
            part = self._parts[id(station), span] = part_of(station, span)
        return part


class Chain:
    """Layers of a worker that follow one another, of one run or of several."""

    def __init__(self, parts: Sequence[Station]) -> None:
        self._parts = parts
        self.span = LayerSpan(parts[0].span.start, parts[-1].span.end)
        self.config: ModelConfig = parts[0].config

    def forward(self, frame: Frame, check: Callable[[], None] = never) -> Frame:
        """Return the frame behind the layers; as a station's. Raises: as that."""
        for segment in frame.segments:
            for part in self._parts:
                kv = part.sessions.get(segment.request_id)
                if kv is not None and kv.shape.span != part.span:
                    raise WrongIdentity(
                        "wrong-identity", f"session {segment.request_id.hex()}: has passed layers {kv.shape.span} "
                        f"here, not {part.span}", hint="another route is another session",
                    )  # fmt: skip
        for part in self._parts:
            frame = part.forward(frame, check)
        return frame


def _kept(station: Station, span: LayerSpan) -> Station:
    """Return what is left of a run, with the sessions that passed these layers alone."""
    part = part_of(station, span)
    passed = [(i, kv, kv.shape.span) for i, kv in station.sessions.items()]
    part.sessions = {i: kv for i, kv, its in passed if span.start <= its.start and its.end <= span.end}
    phases = [p for layer in part._layers for p in layer.all] + ([part._head] if part._head else [])
    part.plan = replace(
        station.plan, weight_bytes=sum(p.bytes for p in phases),
        pinned_bytes=min(sum(p.pinned_bytes for p in phases), station.plan.pinned_bytes),
        kv_bytes=station.plan.kv_tokens * part.kv_shape.token_bytes,
    )  # fmt: skip
    return part


def _overlap(a: LayerSpan, b: LayerSpan) -> bool:
    return a.start < b.end and b.start < a.end


def part_of(station: Station, span: LayerSpan) -> Station:
    """Return a station of some of another's layers that shares its weights, memory and sessions."""
    part = copy.copy(station)
    part.span = span
    start = station.span.start
    part._layers = station._layers[span.start - start : span.end - start]
    part._repeater = Repeater(part._layers, station.weights, station.config.hidden_size)
    part._head = station._head if span.end == station.config.n_layers else None
    part.kv_shape = replace(station.kv_shape, span=span)
    return part


def wrong_layers(asked: object, here: object) -> WrongIdentity:
    """Return the refusal of a frame that is for other layers than are here."""
    return WrongIdentity(
        "wrong-identity", f"frame: for layers {printable(asked)}; this station has {here}",
        hint="ask for the route again",
    )  # fmt: skip
