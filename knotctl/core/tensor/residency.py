"""Which weights are in memory: the one place that loads, holds and evicts them, and that counts what is held.

A phase is loaded as one range read into one reused buffer, multiplied with, and evicted. Where it is larger than the
buffer its matrices come row tile by row tile instead; a (row, token) result does not depend on the tiling (DESIGN
decision 5). Pinned phases stay; which ones is fixed beforehand, since a cyclic sweep defeats every policy that learns
from use (LRU would evict each phase just before its turn comes again).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from knotctl.core.errors import BudgetError
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.kernels.matmul import Activations, activation_kind, matmul, quantize
from knotctl.core.sizes import format_size
from knotctl.core.source.base import ByteSource, SharedSource
from knotctl.core.spans import ByteRange
from knotctl.core.tensor.arena import Arena, Floats
from knotctl.core.tensor.views import TensorView

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Phase:
    """Weights that are used together: a phase of a layer, or the output head (layer None).

    `tensors` maps a role (`attn_q_weight`) to its view, in the order of use.
    """

    layer: int | None
    name: str
    tensors: dict[str, TensorView]

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(len(t.range) for t in self.tensors.values())

    @property
    def smallest_tile(self) -> int:
        """Bytes that must be held at once at the least: every vector, and one row of the widest matrix."""
        vectors = sum(len(t.range) for t in self.tensors.values() if t.rows == 1)
        return vectors + max((t.row_bytes for t in self.tensors.values() if t.rows > 1), default=0)


class Input:
    """Activations [tokens, columns] that several matrices multiply with: quantised once for each kind of weight."""

    def __init__(self, x: Floats, arena: Arena) -> None:
        self.x = x
        self._arena = arena
        self._kinds: dict[str, Activations] = {}

    def for_weights(self, tensor: TensorView) -> Activations:
        """Return the activations in the form that the tensor's type multiplies with."""
        kind = activation_kind(tensor.qtype)
        if kind not in self._kinds:
            self._kinds[kind] = quantize(self.x, tensor.qtype, self._arena.bytes)
        return self._kinds[kind]


@dataclass(slots=True)
class PhaseUse:
    """What a phase cost so far. Units: bytes loaded at a time, milliseconds in all, tiles of one sweep."""

    layer: int | None
    phase: str
    bytes: int
    tiles: int = 0
    load_ms: float = 0.0
    compute_ms: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Bytes of weights held now and at most. Every load and eviction is entered here."""

    held: int = 0
    peak: int = 0

    def enter(self, count: int) -> None:
        """Note that so many bytes were loaded (or, negative, evicted)."""
        self.held += count
        self.peak = max(self.peak, self.held)


class HeldPhase:
    """A phase between load and evict: its vectors decoded, its matrices multiplied with, tile by tile or whole."""

    def __init__(self, weights: Weights, phase: Phase, use: PhaseUse, whole: dict[str, Bytes]) -> None:
        self._weights = weights
        self._phase = phase
        self._use = use
        self._whole = whole

    def __contains__(self, role: str) -> bool:
        return role in self._phase.tensors

    def vector(self, role: str) -> Floats:
        """Return a vector (norm weights, a bias) as float32 [columns]."""
        tensor = self._phase.tensors[role]
        values: Floats = decode_rows(tensor.qtype, self._whole[role], tensor.columns)[0]
        return values

    def multiply(self, role: str, x: Input, out: Floats) -> Floats:
        """Write x times the matrix, transposed as stored, to out and return it.

        Shapes: out [tokens, n], the first n rows of the matrix.
        """
        tensor, acts = self._phase.tensors[role], None
        for start, blocks in self._tiles(role, tensor, out.shape[1]):
            acts = acts or x.for_weights(tensor)
            matmul(tensor.qtype, blocks, tensor.columns, acts, start, out)
        return out

    def _tiles(self, role: str, tensor: TensorView, rows: int) -> Iterator[tuple[int, Bytes]]:
        if role in self._whole:
            yield 0, self._whole[role][: rows * tensor.row_bytes]
            return
        room = self._weights.buffer_bytes - sum(b.nbytes for b in self._whole.values())
        step = max(1, room // tensor.row_bytes)
        for start in range(0, rows, step):
            with self._weights.loaded(self._use, [tensor.row_range(start, min(rows, start + step))]) as (blocks,):
                yield start, blocks


class Weights:
    """The weights of one station: pinned phases stay in memory, the others pass through one buffer.

    Units: buffer_bytes, what one load may hold; 0 where everything is pinned.
    """

    def __init__(self, source: ByteSource, phases: Sequence[Phase], *, buffer_bytes: int, pinned_bytes: int) -> None:
        self.source = source
        self.ledger = Ledger()
        self.buffer_bytes = buffer_bytes
        self.uses = {id(p): PhaseUse(p.layer, p.name, p.bytes) for p in phases}
        self._phases = list(phases)
        self._pinned: dict[int, dict[str, Bytes]] = {}
        self._shared = source if isinstance(source, SharedSource) else None
        self._buffer: Bytes | None = None
        self._filled = 0
        self._pin(pinned_bytes)
        for p in phases:
            if id(p) not in self._pinned and p.smallest_tile > buffer_bytes:
                raise BudgetError(
                    "budget-too-small",
                    f"{source.name}: phase {p.name} of layer {p.layer}: its smallest row tile is "
                    f"{format_size(p.smallest_tile)}; the budget leaves {format_size(buffer_bytes)} for weights",
                )

    def _pin(self, budget: int) -> None:
        # First come, first pinned: each phase saves its own bytes a sweep, whichever it is, so any fixed choice that
        # fills the budget is as good as another; the first ones need no second read of the knot at start.
        for phase in self._phases:
            if phase.bytes <= budget and id(phase) not in self._pinned:
                use = self.uses[id(phase)]
                block = np.empty(phase.bytes, np.uint8)
                started = time.perf_counter()
                parts = self._read([t.range for t in phase.tensors.values()], block)
                self._pinned[id(phase)] = dict(zip(phase.tensors, parts, strict=True))
                use.load_ms += (time.perf_counter() - started) * 1e3
                self.ledger.enter(phase.bytes)
                budget -= phase.bytes

    def _read(self, ranges: Sequence[ByteRange], block: Bytes) -> list[Bytes]:
        """Fill block with the ranges one after the other, neighbours in one read; return each range's part of it."""
        at = 0
        for r in merged(ranges):
            self.source.read_into(r.start, block.data[at : at + len(r)])
            at += len(r)
        ends = list(accumulate(len(r) for r in ranges))
        return [block[end - len(r) : end] for r, end in zip(ranges, ends, strict=True)]

    @property
    def pinned(self) -> list[PhaseUse]:
        """The phases that stay in memory, and what they cost so far."""
        return [self.uses[key] for key in self._pinned]

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[HeldPhase]:
        """Load a phase (or, where it is larger than the buffer, its vectors), yield it, and evict it."""
        use = self.uses[id(phase)]
        started, loaded_before = time.perf_counter(), use.load_ms
        pinned = self._pinned.get(id(phase))
        try:
            if pinned is not None:
                use.tiles = 1
                yield HeldPhase(self, phase, use, pinned)
            elif (parts_elsewhere := self._in_shared_memory(phase)) is not None:
                # Nothing is held here: the memory is the warden's, and counted by it.
                use.tiles = 1
                yield HeldPhase(self, phase, use, parts_elsewhere)
            elif phase.bytes <= self.buffer_bytes:
                use.tiles = 0
                with self.loaded(use, [t.range for t in phase.tensors.values()]) as parts:
                    yield HeldPhase(self, phase, use, dict(zip(phase.tensors, parts, strict=True)))
            else:
                use.tiles = 0
                vectors = [role for role, t in phase.tensors.items() if t.rows == 1]
                with self.loaded(use, [phase.tensors[role].range for role in vectors], tile=False) as parts:
                    yield HeldPhase(self, phase, use, dict(zip(vectors, parts, strict=True)))
        finally:
            use.compute_ms += (time.perf_counter() - started) * 1e3 - (use.load_ms - loaded_before)

    def _in_shared_memory(self, phase: Phase) -> dict[str, Bytes] | None:
        """Return the phase's parts where its source has them in memory, whole."""
        if self._shared is None:
            return None
        parts = {}
        for role, t in phase.tensors.items():
            data = self._shared.view(t.range.start, len(t.range))
            if data is None:
                return None
            parts[role] = np.frombuffer(data, np.uint8)
        return parts

    @contextmanager
    def loaded(self, use: PhaseUse, ranges: Sequence[ByteRange], *, tile: bool = True) -> Iterator[list[Bytes]]:
        """Read ranges of the knot into the free end of the buffer, yield their bytes, and let them go."""
        started = time.perf_counter()
        if self._buffer is None:
            self._buffer = np.empty(self.buffer_bytes, np.uint8)
        first, size = self._filled, sum(len(r) for r in ranges)
        parts = self._read(ranges, self._buffer[first : first + size])
        self._filled = first + size
        self.ledger.enter(size)
        use.tiles += tile
        use.load_ms += (time.perf_counter() - started) * 1e3
        try:
            yield parts
        finally:
            self._filled = first
            self.ledger.enter(-size)


def merged(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Return the ranges with neighbours that touch made one, so that a phase is one read."""
    out: list[ByteRange] = []
    for r in ranges:
        if out and out[-1].end == r.start:
            out[-1] = ByteRange(out[-1].start, r.end)
        else:
            out.append(r)
    return out
