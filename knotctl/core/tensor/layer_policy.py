"""What a layer warden holds of a run of layers: a fixed part, chosen beforehand.

Stations sweep their layers in a cycle, and a cyclic sweep over more than fits defeats every policy that learns from
use: LRU would give each tensor up just before its turn. A fixed part is hit every sweep; the rest passes through.
Source: seed 000 section 4 for what is resident; DESIGN decision 6.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from itertools import groupby

from knotctl.core.errors import ModelError
from knotctl.core.gguf.names import OUTPUT, OUTPUT_NORM, PHASES, ROPE_FREQS, TOKEN_EMBD, knot_name, layer_tensors
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.reader import Knot
from knotctl.core.spans import LayerSpan

DEFAULT_BUDGET = 1 << 30
# Vectors and small matrices: not worth a read of their own.
SMALL_BYTES = 1 << 20
_ENDS = frozenset(map(knot_name, (TOKEN_EMBD, OUTPUT_NORM, OUTPUT)))


def is_resident(entry: TensorEntry) -> bool:
    """Return whether a tensor stays whatever else there is: norms, embedding and output, anything small."""
    return "norm" in entry.name or entry.name in _ENDS or entry.length < SMALL_BYTES


def span_tensors(knot: Knot, span: LayerSpan) -> list[list[TensorEntry]]:
    """Return the tensors that stations within a span can ask for, phase by phase, in the order of the payload.

    Raises: ModelError bad-span.
    """
    config = knot.header.config
    if not 0 < len(span) <= config.n_layers - span.start:
        raise ModelError("bad-span", f"{knot.source.name}: layers {span}: the model has {config.n_layers}")
    phase = {
        t.knot: (layer, name)
        for layer in range(span.start, span.end)
        for name in PHASES
        for t in layer_tensors(name, layer)
    }
    wanted = {knot_name(ROPE_FREQS)}
    if span.start == 0 or (span.end == config.n_layers and config.tied_embedding):
        wanted.add(knot_name(TOKEN_EMBD))
    if span.end == config.n_layers:
        wanted |= {knot_name(OUTPUT_NORM), knot_name(OUTPUT)}
    entries = [e for e in knot.header.tensors if e.name in phase or e.name in wanted]
    entries.sort(key=lambda e: e.offset)
    # The output norm and matrix are used together, as a phase is.
    groups = groupby(entries, key=lambda e: phase.get(e.name, (-1, e.name.split("_")[0])))
    return [list(group) for _, group in groups]


def held_runs(phases: Sequence[Sequence[TensorEntry]], budget: int) -> list[list[TensorEntry]]:
    """Return what is held within the budget: runs of tensors that touch, none longer than a phase.

    What is resident comes first, the smallest first; then whole phases in the order of use, each that still fits.
    """
    held: set[str] = set()
    left = budget

    def hold(entries: Iterable[TensorEntry]) -> None:
        nonlocal left
        new = [e for e in entries if e.name not in held and e.length]
        size = sum(_pages(e.length) for e in new)
        if size <= left:
            left -= size
            held.update(e.name for e in new)

    for entry in sorted((e for phase in phases for e in phase if is_resident(e)), key=lambda e: e.length):
        hold([entry])
    for phase in phases:
        hold(phase)
    runs: list[list[TensorEntry]] = []
    for phase in phases:
        for entry in (e for e in phase if e.name in held):
            if runs and runs[-1][-1].end == entry.offset and runs[-1][0] in phase:
                runs[-1].append(entry)
            else:
                runs.append([entry])
    return runs


def _pages(length: int) -> int:
    """Return the bytes that a mapping of so many takes."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
