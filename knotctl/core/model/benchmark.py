"""How fast this machine runs a model, measured before it has any byte of it: real layers' shapes over zeros.

Decoding reads every weight once a token, so what counts is how many bytes there are, not which.
"""

from __future__ import annotations

import secrets
import time

import numpy as np

from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind

# More than any cache holds, so that memory is measured; and long enough to be more than a burst.
_LEAST_BYTES = 96 << 20
_LEAST_SECONDS, _LEAST_TOKENS, _MOST_TOKENS = 0.5, 8, 256


class _Zeros:
    """A source of a knot's size that holds zeros."""

    def __init__(self, size: int) -> None:
        self.name, self.size, self.identity = "zeros", size, "zeros"

    def read(self, offset: int, length: int) -> bytes:
        """Return zeros."""
        return bytes(length)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill with zeros."""
        out[:] = bytes(len(out))

    def close(self) -> None:
        """Hold nothing."""


def measure_speed(knot: Knot, layer_bytes: int, head_bytes: int, most_bytes: int) -> float:
    """Return tokens a second of the whole model on this machine, head included, by some of its layers.

    Units: bytes of a layer, of the output matrix, and at most of what is held for it.
    """
    n_layers = knot.header.config.n_layers
    count = max(1, min(n_layers, -(-_LEAST_BYTES // max(1, layer_bytes)), most_bytes // max(1, layer_bytes)))
    zeros = Knot(knot.header, _Zeros(knot.source.size))
    # The head is not computed: where the model has no more layers than these, its bytes are added to the time.
    spec = StationSpec(LayerSpan(0, count), Residency.RESIDENT, kv_tokens=_MOST_TOKENS, batch_tokens=1)
    station = Station(zeros, spec)
    session = secrets.token_bytes(16)
    x = np.full((1, station.config.hidden_size), 0.5, np.float32)
    started, tokens = 0.0, -1  # the first one is not counted: it compiles and warms
    while tokens < _MOST_TOKENS - 1:
        if tokens == 0:
            started = time.perf_counter()
        if tokens >= _LEAST_TOKENS and time.perf_counter() - started > _LEAST_SECONDS:
            break
        segment = (Segment(session, tokens + 1, 1),)
        station.forward(Frame(Kind.HIDDEN, bytes.fromhex(knot.id), segment, x, {"logits": "none"}))
        tokens += 1
    seconds = (time.perf_counter() - started) / tokens
    return count * layer_bytes / (n_layers * layer_bytes + head_bytes) / seconds
