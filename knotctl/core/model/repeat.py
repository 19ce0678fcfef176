"""Passes that differ in nothing but numbers: recorded once, and from then on repeated in one call.

A token of a small model is some five hundred launches of kernels, and asking for one from Python takes about as long as
running it. Where all weights stay in memory and each session brings one token, the next pass is the same launches at
the same addresses: x, the positions and what the caches hold are other numbers, which the kernels read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from knotctl.core.kernels.threads import Program, record
from knotctl.core.model.budget import REPEATED_ROWS
from knotctl.core.model.forward import Pass, forward
from knotctl.core.model.phases import LayerPhases
from knotctl.core.tensor.arena import Floats
from knotctl.core.tensor.residency import PhaseUse, Weights


class Repeater:
    """Runs the passes of a station's layers; one thread at a time."""

    def __init__(self, layers: Sequence[LayerPhases], weights: Weights, hidden_size: int) -> None:
        self._layers = layers
        self._weights = weights
        self._stay = weights.keeps(p for layer in layers for p in layer.all)
        # Where a repeated pass finds its rows and their positions.
        self._x = np.empty((REPEATED_ROWS, hidden_size), np.float32)
        self._positions = np.empty(REPEATED_ROWS, np.int64)
        # Of the last pass: where its sessions' caches lay, and its program where that was recorded.
        self._places: list[tuple[int, int]] = []
        self._program: Program[PhaseUse | None] | None = None

    def forward(self, x: Floats, p: Pass, check: Callable[[], None]) -> None:
        """Run a pass, in place, as forward.py's `forward` does; a repeated one calls `check` once."""
        single = len(p.batch) == p.tokens <= REPEATED_ROWS
        places = [r.kv.place for r in p.batch] if single and self._stay else []
        again = places == self._places != []
        if not again:
            self._places, self._program = places, None
            forward(x, p, self._layers, self._weights, check)
            return
        mine, positions = self._x[: p.tokens], self._positions[: p.tokens]
        mine[:], positions[:] = x, p.positions
        if self._program is None:
            self._program = self._record(mine, replace(p, positions=positions), check)
        else:
            check()
            if self._program.run():
                # Some number was not finite: the plain way finds it again, and says where.
                forward(x, p, self._layers, self._weights, check)
                return
            for use, seconds in self._program.spent():
                if use is not None:
                    use.compute_ms += seconds * 1e3
        x[:] = mine

    def _record(self, x: Floats, p: Pass, check: Callable[[], None]) -> Program[PhaseUse | None] | None:
        program: Program[PhaseUse | None] = Program()
        program.mark(None)
        with record(program):
            forward(x, p, self._layers, self._weights, check)
        return program if program.whole else None
