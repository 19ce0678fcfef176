"""Where `core/source/http_call.py` is known to the engine's own: calls between nodes."""

from __future__ import annotations

from knotctl.core.source.http_call import Peer, Reply, TransportError

__all__ = ["Peer", "Reply", "TransportError"]
