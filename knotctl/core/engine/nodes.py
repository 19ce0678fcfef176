"""What other nodes say of themselves, believed only as far as it fits the model here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from knotctl.core.engine.hop import RemoteError, remote_error
from knotctl.core.errors import SourceError, UsageError, WrongIdentity, printable
from knotctl.core.knot.reader import Knot
from knotctl.core.source.http_call import Peer, TransportError
from knotctl.core.spans import LayerSpan, VocabSpan

_ASK_SECONDS = 5.0
# A node that answers and loads may have many gigabytes to fetch; one that does not answer is waited for less.
LOAD_SECONDS = 1800.0
# A pass that many requests share goes in one frame: a piece of a prompt, and of each other request a token and a draft.
LEAST_BATCH = 128


@dataclass(frozen=True, slots=True)
class NodeAbout:
    """A node's /health: who it is, what it holds. Units: bytes; tokens."""

    url: str
    role: str
    ready: bool
    boot: str
    knot_id: str
    spans: list[list[int]]
    kv_tokens: int = 0
    batch_tokens: int = 0
    held: dict[str, int] = field(default_factory=dict)
    loading: bool = False

    @property
    def span(self) -> LayerSpan:
        """The layers of a station."""
        return LayerSpan(*self.spans[0])

    @property
    def vocab(self) -> VocabSpan:
        """The ids of a shard."""
        return VocabSpan(*self.spans[0])

    @classmethod
    def ask(cls, peer: Peer, seconds: float = _ASK_SECONDS) -> NodeAbout:
        """Return what a node says. Raises: RemoteError."""
        try:
            reply = peer.call("GET", "/health", seconds=seconds)
        except TransportError as e:
            raise RemoteError(e.code, e.message, url=peer.url, down=True) from e
        if reply.status not in (200, 503):
            raise remote_error(peer.url, reply)
        try:
            return cls._of(peer.url, json.loads(reply.body))
        except (ValueError, RecursionError):
            raise RemoteError("bad-answer", f"{peer.url}: /health: not what a node says", url=peer.url) from None

    @classmethod
    def _of(cls, url: str, document: Any) -> NodeAbout:
        match document:
            case {
                "status": str(status), "role": str(role), "boot": str(boot), "knot_id": str(knot_id),
                "spans": [[int(start), int(end)]], "bytes": dict(held),
            } if 0 <= start < end:  # fmt: skip
                numbers = [document.get(key, 0) for key in ("kv_tokens", "batch_tokens")]
                if all(type(n) is int and n >= 0 for n in numbers):
                    known = {k: v for k, v in held.items() if type(v) is int}
                    ready, loading, spans = status == "ok", status == "loading", [[start, end]]
                    return cls(url, role, ready, boot, knot_id, spans, numbers[0], numbers[1], known, loading)
        raise ValueError("not a node")


def discover(
    knot: Knot,
    shards: Sequence[Sequence[str]],
    stations: Sequence[Sequence[str]],
    peers: Callable[[str], Peer],
    wait_seconds: float,
) -> tuple[list[list[NodeAbout]], list[list[NodeAbout]]]:
    """Return what the nodes say, once all are ready; together they must be this model, whole.

    Raises: SourceError not-ready, RemoteError; WrongIdentity; UsageError bad-shards, bad-stations.
    """
    end = time.monotonic() + wait_seconds
    found = [[[_await(peers(url), end) for url in urls] for urls in group] for group in (shards, stations)]
    for node in (a for group in found for replicas in group for a in replicas):
        if node.knot_id != knot.id:
            raise WrongIdentity(
                "wrong-identity", f"{node.url}: expected knot {knot.id}, found {printable(node.knot_id, 40)}"
            )
        if node.role in ("entry", "middle", "exit", "whole") and node.batch_tokens < LEAST_BATCH:
            raise UsageError(
                "bad-stations",
                f"{node.url}: takes frames of {node.batch_tokens} tokens; expected at least {LEAST_BATCH}",
                hint="run-station --batch",
            )  # fmt: skip
    config = knot.header.config
    for what, group, size in (("shards", found[0], config.vocab_size), ("stations", found[1], config.n_layers)):
        spans = [replicas[0].spans[0] for replicas in group if replicas]
        edges = [0, *(s[1] for s in spans)]
        equal = all(a.spans == replicas[0].spans for replicas in group for a in replicas)
        if len(spans) != len(group) or not equal or [s[0] for s in spans] != edges[:-1] or edges[-1] != size:
            shown = ", ".join(f"{a}:{b}" for a, b in spans)
            raise UsageError(
                f"bad-{what}", f"{what} {shown}: expected spans that meet end to end from 0 to {size}, replicas alike"
            )
    return found[0], found[1]


def _check_token(peer: Peer) -> None:
    """Ask for what /health tells without a token, so that a wrong one is known now and not within a request."""
    try:
        reply = peer.call("GET", "/metrics", seconds=_ASK_SECONDS)
    except TransportError as e:
        raise RemoteError(e.code, e.message, url=peer.url, down=True) from e
    if reply.status != 200:
        raise remote_error(peer.url, reply)


def _await(peer: Peer, end: float) -> NodeAbout:
    while True:
        try:
            about = NodeAbout.ask(peer)
        except RemoteError as e:
            if not e.down or time.monotonic() > end:
                raise
        else:
            if about.ready:
                _check_token(peer)
                return about
            if time.monotonic() > end + (LOAD_SECONDS if about.loading else 0.0):
                raise SourceError("not-ready", f"{peer.url}: the {about.role} did not get ready")
        time.sleep(0.1)
