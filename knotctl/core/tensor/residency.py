"""Which weights are in memory: the one place that loads, holds and evicts them, and that counts what is held.

A phase is loaded as one range, multiplied with, and evicted (passing.py says how). Where it is larger than what may be
loaded at once its matrices come row tile by row tile instead; a (row, token) result does not depend on the tiling
(DESIGN decision 5). Pinned phases stay; which ones is fixed beforehand, since a cyclic sweep defeats every policy that
learns from use (LRU would evict each phase just before its turn comes again).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from knotctl.core.errors import BudgetError
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.kernels.matmul import Activations, activation_kind, matmul, quantize
from knotctl.core.kernels.threads import recorded
from knotctl.core.sizes import format_size
from knotctl.core.source.base import ByteSource, SharedSource
from knotctl.core.spans import ByteRange
from knotctl.core.tensor.arena import Arena, Floats
from knotctl.core.tensor.passing import Bytes, Ledger, Load, Way, passage, read_load
from knotctl.core.tensor.views import TensorView


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
    def ranges(self) -> list[ByteRange]:
        """Where its tensors lie."""
        return [t.range for t in self.tensors.values()]

    @property
    def vectors(self) -> dict[str, TensorView]:
        """Its norms and biases."""
        return {role: t for role, t in self.tensors.items() if t.rows == 1}

    @property
    def vector_bytes(self) -> int:
        """Bytes of its vectors as float32."""
        return sum(4 * t.columns for t in self.vectors.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes it takes in memory for good: as stored, and its vectors as numbers."""
        return self.bytes + self.vector_bytes

    @property
    def smallest_tile(self) -> int:
        """Bytes that must be held at once at the least: its vectors as numbers, and them as stored or a matrix row."""
        stored = sum(len(t.range) for t in self.vectors.values())
        row = max((t.row_bytes for t in self.tensors.values() if t.rows > 1), default=0)
        return self.vector_bytes + max(stored, row)


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


class HeldPhase:
    """A phase between load and evict: its vectors as numbers, its matrices multiplied with, tile by tile or whole."""

    __slots__ = ("_loaded_ms", "_phase", "_started", "_use", "_vectors", "_weights", "parts")

    def __init__(
        self,
        phase: Phase,
        use: PhaseUse,
        parts: dict[str, Bytes],
        vectors: dict[str, Floats],
        tiled_by: Weights | None = None,
    ) -> None:
        self._phase = phase
        self._use = use
        # None where the phase is whole: the weights that keep it must go when nobody else has them
        self._weights = tiled_by
        self.parts = parts
        self._vectors = vectors
        self._started = self._loaded_ms = 0.0

    def __enter__(self) -> Self:
        self._started, self._loaded_ms = time.perf_counter(), self._use.load_ms
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        passed, loaded = (time.perf_counter() - self._started) * 1e3, self._use.load_ms - self._loaded_ms
        self._use.compute_ms += passed - loaded
        if (program := recorded()) is not None:
            program.mark(self._use)

    def __contains__(self, role: str) -> bool:
        return role in self._phase.tensors

    def vector(self, role: str) -> Floats:
        """Return a vector (norm weights, a bias) as float32 [columns]."""
        values = self._vectors.get(role)
        if values is None:
            values = self._vectors[role] = numbers(self._phase.tensors[role], self.parts[role])
        return values

    def multiply(self, role: str, x: Input, out: Floats) -> Floats:
        """Write x times the matrix, transposed as stored, to out and return it. Shapes: out [tokens, rows]."""
        tensor = self._phase.tensors[role]
        whole, acts = self.parts.get(role), x.for_weights(tensor)
        if whole is not None:
            matmul(tensor.qtype, whole, tensor.columns, acts, 0, out)
            return out
        assert self._weights is not None
        for start, tile in self._weights.tiles(self._phase, tensor):
            with self._weights.loaded(self._use, [tile]) as (blocks,):
                matmul(tensor.qtype, blocks, tensor.columns, acts, start, out)
        return out


class Weights:
    """The weights of one station: pinned phases stay in memory, the others pass through it.

    Units: buffer_bytes, what one load may take; 0 where everything is pinned.
    """

    def __init__(
        self, source: ByteSource, phases: Sequence[Phase], *, buffer_bytes: int, pinned_bytes: int, way: Way = Way.READ
    ) -> None:
        self.source = source
        self.ledger = Ledger()
        self.buffer_bytes = buffer_bytes
        self.uses = {id(p): PhaseUse(p.layer, p.name, p.bytes) for p in phases}
        self._phases = list(phases)
        self._pinned: dict[int, HeldPhase] = {}
        self._shared = source if isinstance(source, SharedSource) else None
        self._found: dict[int, dict[str, Bytes] | None] = {}
        self._passage = passage(way, source, self.ledger, buffer_bytes)
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
            if phase.pinned_bytes <= budget:
                use = self.uses[id(phase)]
                started = time.perf_counter()
                stored = read_load(self.source, phase.ranges, np.empty(phase.bytes, np.uint8))
                parts = dict(zip(phase.tensors, stored, strict=True))
                vectors = {role: numbers(t, parts[role]) for role, t in phase.vectors.items()}
                self._pinned[id(phase)] = HeldPhase(phase, use, parts, vectors)
                use.load_ms += (time.perf_counter() - started) * 1e3
                use.tiles = 1
                self.ledger.enter(phase.pinned_bytes)
                budget -= phase.pinned_bytes

    @property
    def pinned(self) -> list[PhaseUse]:
        """The phases that stay in memory, and what they cost so far."""
        return [self.uses[key] for key in self._pinned]

    def keeps(self, phases: Iterable[Phase]) -> bool:
        """Return whether all of these stay in memory, where they lie."""
        return all(id(p) in self._pinned for p in phases)

    def release(self, phases: Iterable[Phase]) -> None:
        """Hold these phases no more: they are not asked for again."""
        for phase in phases:
            self.uses.pop(id(phase), None)
            if self._pinned.pop(id(phase), None) is not None:
                self.ledger.enter(-phase.pinned_bytes)

    def expect(self, phases: Iterable[Phase]) -> None:
        """Be told which phases will be held from now on, in order: what passes through may be read ahead."""
        self._passage.expect(self._loads(phases))

    def hold(self, phase: Phase) -> AbstractContextManager[HeldPhase]:
        """Load a phase (or, where it is larger than a load may be, its vectors), give it, and evict it."""
        pinned = self._pinned.get(id(phase))
        return pinned if pinned is not None else self._held(phase)

    @contextmanager
    def _held(self, phase: Phase) -> Iterator[HeldPhase]:
        use = self.uses[id(phase)]
        use.tiles = 0
        parts = self._found.pop(id(phase)) if id(phase) in self._found else self._in_shared_memory(phase)
        if parts is not None:
            # Nothing is held here: the memory is the warden's, and counted by it.
            use.tiles = 1
            with HeldPhase(phase, use, parts, {}) as held:
                yield held
        elif phase.bytes <= self.buffer_bytes:
            with HeldPhase(phase, use, {}, {}) as held, self.loaded(use, phase.ranges) as stored:
                held.parts = dict(zip(phase.tensors, stored, strict=True))
                yield held
        else:
            vectors: dict[str, Floats] = {}
            with HeldPhase(phase, use, {}, vectors, self) as held:
                if phase.vectors:
                    with self.loaded(use, [t.range for t in phase.vectors.values()], tile=False) as stored:
                        for (role, t), part in zip(phase.vectors.items(), stored, strict=True):
                            vectors[role] = numbers(t, part)
                        self.ledger.enter(phase.vector_bytes)
                try:
                    yield held
                finally:
                    self.ledger.enter(-phase.vector_bytes)

    @contextmanager
    def loaded(self, use: PhaseUse, load: Load, *, tile: bool = True) -> Iterator[list[Bytes]]:
        """Yield the bytes of ranges of the knot, and let them go."""
        started = time.perf_counter()
        try:
            stored = self._passage.take(load)
            use.tiles += tile
            use.load_ms += (time.perf_counter() - started) * 1e3
            yield stored
        finally:
            self._passage.release()

    def tiles(self, phase: Phase, tensor: TensorView) -> Iterator[tuple[int, ByteRange]]:
        """Yield the first row and the bytes of each tile that a matrix of a phase is loaded in."""
        step = max(1, (self.buffer_bytes - phase.vector_bytes) // tensor.row_bytes)
        step = step // 16 * 16 or step  # the kernels' own tile
        for start in range(0, tensor.rows, step):
            yield start, tensor.row_range(start, min(tensor.rows, start + step))

    def _loads(self, phases: Iterable[Phase]) -> Iterator[Load]:
        """Yield what `hold` and `multiply` will load for these phases."""
        for phase in phases:
            if id(phase) in self._pinned:
                continue
            self._found[id(phase)] = self._in_shared_memory(phase)
            if self._found[id(phase)] is not None:
                continue
            if phase.bytes <= self.buffer_bytes:
                yield phase.ranges
            else:
                if phase.vectors:
                    yield [t.range for t in phase.vectors.values()]
                for tensor in phase.tensors.values():
                    if tensor.rows > 1:
                        yield from ([tile] for _, tile in self.tiles(phase, tensor))

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


def numbers(vector: TensorView, stored: Bytes) -> Floats:
    """Return a vector as float32 [columns]."""
    values: Floats = decode_rows(vector.qtype, stored, vector.columns)[0]
    return values
