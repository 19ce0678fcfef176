"""One frame to another node and its answer back: retried once where the way spoiled it, an error where it was refused.

Engine to station, station to station and engine to shard all go through here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from knotctl.core.errors import FrameError, RequestError, printable
from knotctl.core.source.http_call import Peer, Reply, TransportError
from knotctl.core.wire.frame import Frame, parse_frame

FRAME_TYPE = "application/x-knot-frame"
# Who could not answer, where that is not the node that was asked.
FAILED_HEADER = "x-knot-failed"
# How long whoever asks will wait, for the nodes behind.
PATIENCE_HEADER = "x-knot-patience-ms"
# Answers that say: your bytes came damaged.
_DAMAGED = frozenset(("bad-body-crc", "bad-header-crc", "bad-magic", "bad-zstd", "truncated", "trailing-bytes"))


class RemoteError(RequestError):
    """What another node answered instead of a frame, or that it did not answer; `url` names that node.

    `down` says that nothing came back at all, so that the node may be dead, and `sent` that it may have begun to work.
    """

    exit_code: ClassVar[int] = 4

    def __init__(
        self, code: str, message: str, *, url: str, status: int = 502, hint: str | None = None,
        down: bool = False, sent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(code, message, status=status, hint=hint)
        self.url = url
        self.down = down
        self.sent = sent
        self.headers = {FAILED_HEADER: url} | ({"x-knot-down": "sent" if sent else "unsent"} if down else {})


@dataclass(frozen=True, slots=True)
class Answer:
    """A frame that came back, and its bytes; no frame where none was asked for (status 204)."""

    frame: Frame | None
    body: bytes


def send_frame(
    peer: Peer,
    path: str,
    body: bytes,
    *,
    seconds: float,
    check: Callable[[], None] = lambda: None,
    request_id: str = "-",
    on_sent: Callable[[], None] = lambda: None,
    on_retry: Callable[[], None] = lambda: None,
) -> Answer:
    """Return what a node answers a frame with.

    A connection that broke, or bytes that came damaged either way, are tried once more on another connection: nodes
    keep the answer to a step, so that it is not computed twice.
    Raises: RemoteError; what `check` raises.
    """
    end = time.monotonic() + seconds
    retried = False
    broke: TransportError | None = None
    while True:
        left = max(0.0, end - time.monotonic())
        headers = {
            "content-type": FRAME_TYPE, "x-request-id": request_id, PATIENCE_HEADER: str(int(left * 1000)),
        }  # fmt: skip
        try:
            reply = peer.call("POST", path, body, seconds=left, check=check, headers=headers, on_sent=on_sent)
            if reply.status == 204:
                return Answer(None, b"")
            if reply.status == 200:
                return Answer(parse_frame(reply.body), reply.body)
            error = remote_error(peer.url, reply)
            if error.code not in _DAMAGED or retried:
                raise error
        except TransportError as e:
            # Gone when it is asked again: it died over the first one.
            why = broke if broke is not None and e.code == "unreachable" else e
            if retried or e.code == "timeout":
                raise RemoteError(why.code, why.message, url=peer.url, down=True, sent=why.sent) from e
            broke = e
        except FrameError as e:
            if retried:
                raise RemoteError("bad-answer", f"{peer.url}: {e.message}", url=peer.url, down=True, sent=True) from e
        retried = True
        on_retry()


def remote_error(url: str, reply: Reply) -> RemoteError:
    """Return a node's refusal as an error: its own code and words where it has sent any."""
    code, message, hint = "refused", f"status {reply.status}", None
    try:
        document = json.loads(reply.body[: 1 << 16])["error"]
        code, message, hint = str(document["code"]), str(document["message"]), document.get("hint")
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    failed = reply.headers.get(FAILED_HEADER)
    down = reply.headers.get("x-knot-down")
    return RemoteError(
        printable(code, 60),
        printable(message, 1000) if failed else f"{url}: {printable(message, 1000)}",
        url=failed or url,
        status=reply.status if 400 <= reply.status < 600 else 502,
        hint=None if hint is None else printable(hint),
        down=down is not None,
        sent=down == "sent",
    )
