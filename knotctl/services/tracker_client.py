"""Calls to a model's trackers: any of them will do, so the next one is asked where one does not answer."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from knotctl.core.engine.hop import RemoteError, remote_error
from knotctl.core.errors import UsageError
from knotctl.core.source.http_call import Peer, TransportError

_CALL_SECONDS = 10.0


class Trackers:
    """The trackers of a model, the one that answered last first. From any thread."""

    def __init__(self, urls: Sequence[str], *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        if not urls:
            raise UsageError("usage", "--tracker: expected at least one URL")
        self._peers = [Peer(url, token=token, tls=tls) for url in urls]
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The tracker that answered last."""
        return self._peers[0].url

    def call(
        self, method: str, path: str, document: dict[str, Any] | None = None, *,
        seconds: float = _CALL_SECONDS, check: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the JSON object that a tracker answers with.

        Raises: RemoteError: a tracker's refusal, or that none answers; what `check` raises.
        """
        body = b"" if document is None else json.dumps(document).encode()
        error: RemoteError | None = None
        for peer in list(self._peers):
            try:
                headers = {"content-type": "application/json"}
                reply = peer.call(method, path, body, seconds=seconds, check=check, headers=headers)
            except TransportError as e:
                error = RemoteError(e.code, e.message, url=peer.url, status=503, down=True)
            else:
                if reply.status < 400:
                    self._prefer(peer)
                    found = json.loads(reply.body or b"{}")
                    return found if isinstance(found, dict) else {}
                error = remote_error(peer.url, reply)
                if error.status not in (502, 503, 504):
                    self._prefer(peer)
                    raise error
        assert error is not None
        raise error

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()

    def _prefer(self, peer: Peer) -> None:
        if self._peers[0] is not peer:
            with self._lock:
                self._peers.sort(key=lambda p: p is not peer)


def node_path(node_id: str, what: str = "") -> str:
    """Return the path of a node at its tracker."""
    return f"/nodes/{quote(node_id, safe='')}{what}"
