"""What a node delivers, measured by the tracker: tokens through its layers, less what the way there takes.

The tokens go together, as a prompt's do, which flatters the node: who is found slow like this is slow.
"""

from __future__ import annotations

import secrets
import time

import numpy as np

from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.slashing import SpeedSample
from knotctl.core.engine.hop import send_frame
from knotctl.core.source.http_call import Peer
from knotctl.core.spans import LayerSpan
from knotctl.core.wire.frame import Frame, Segment, encode_frame
from knotctl.core.wire.layout import Kind

PROBE_TOKENS = 16
_WAYS = 3


def measure(peer: Peer, model: ModelLayers, knot_id: str, span: LayerSpan, seconds: float) -> SpeedSample:
    """Return so many tokens of the whole model in the time that it would take at the rate of these layers.

    Raises: RemoteError, TransportError.
    """
    ways = []
    for _ in range(_WAYS):
        started = time.perf_counter()
        peer.call("GET", "/livez", seconds=seconds)
        ways.append(time.perf_counter() - started)
    session = secrets.token_bytes(16)
    x = np.random.default_rng(0).standard_normal((PROBE_TOKENS, model.hidden_size), np.float32)
    segments = (Segment(session, 0, PROBE_TOKENS),)
    meta = {"layers": [span.start, span.end], "logits": "none"}
    body = encode_frame(Frame(Kind.HIDDEN, bytes.fromhex(knot_id), segments, x, meta))
    try:
        started = time.perf_counter()
        send_frame(peer, "/forward", body, seconds=seconds)
        taken = time.perf_counter() - started - min(ways)
    finally:
        peer.call("DELETE", f"/sessions/{session.hex()}", seconds=seconds)
    share = (model.work[span.end] - model.work[span.start]) / model.total_work
    return SpeedSample(PROBE_TOKENS, max(1, round(max(taken, 1e-6) / share * 1e6)))
