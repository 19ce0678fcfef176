"""A worker's side of its tracker: it registers, says what it holds, and does what it is told, while it serves.

A directive is known by its epoch, done once, and answered in the next heartbeat. A DROP waits until no session is
pinned to its layers, and is asked about once more before it is carried out.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knotctl.core.engine.hop import RemoteError
from knotctl.core.errors import KnotctlError, as_error, printable
from knotctl.core.spans import LayerSpan
from knotctl.services.tracker_client import Trackers, node_path
from knotctl.services.worker import WorkerService

log = logging.getLogger("knotctl.agent")

_FIRST_PAUSE, _MOST_PAUSE = 0.2, 5.0
# Between looks at whether sessions still hold layers that are to be dropped.
_LOOK_SECONDS = 0.1
_GOODBYE_SECONDS = 5.0
_EPOCHS = 1 << 32


@dataclass(frozen=True, slots=True)
class Told:
    """A directive as it came."""

    epoch: int
    kind: str
    span: LayerSpan

    @classmethod
    def parse(cls, entry: object) -> Told | None:
        """Return the directive of an entry, None where it is none that is known here."""
        match entry:
            case {"epoch": int(epoch), "kind": ("LOAD_SHARD" | "DROP_SHARD") as kind, "layers": [int(a), int(b)]}:
                return cls(epoch, kind, LayerSpan(a, b)) if 0 <= a < b else None
        return None


class Agent:
    """Runs in two threads from `start` to `leave`: one that talks, and one that loads and drops."""

    def __init__(self, service: WorkerService, trackers: Trackers, document: Mapping[str, Any], url: str) -> None:
        self._service, self._trackers, self._url = service, trackers, url
        self._document = dict(document)
        self.node_id = str(document["node_id"])
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._has_news = False
        self._todo: dict[int, Told] = {}
        self._answers: dict[int, bool] = {}
        self._fence = 0
        self._newest = -1
        self._registered = False
        self._idle: str | None = None
        self._goodbye: threading.Thread | None = None
        self._threads = [
            threading.Thread(target=self._talk, name="knotctl-agent", daemon=True),
            threading.Thread(target=self._act, name="knotctl-directives", daemon=True),
        ]

    def start(self) -> None:
        """Begin to talk to the tracker."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the tracker has heard that this node has left, a while at most."""
        if self._goodbye is not None:
            self._goodbye.join(_GOODBYE_SECONDS)

    def leave(self) -> None:
        """Leave the tracker, so that no stream is sent here any more; those that run go on. Once."""
        if self._ended.is_set():
            return
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._goodbye = threading.Thread(target=self._say_goodbye, name="knotctl-leave", daemon=True)
        self._goodbye.start()

    def _say_goodbye(self) -> None:
        try:
            self._trackers.call("DELETE", node_path(self.node_id))
        except KnotctlError as e:
            # A tracker that has ended, as that of `serve --workers` has, needs no leave taken.
            if e.code != "unreachable":
                log.warning("%s: could not take leave: %s", self.node_id, e.message)

    def _talk(self) -> None:
        pause = _FIRST_PAUSE
        while not self._ended.is_set():
            try:
                interval = self._beat() if self._registered else self._register()
                pause = _FIRST_PAUSE
            except KnotctlError as e:
                if isinstance(e, RemoteError) and e.code == "unknown-node":
                    self._registered = False
                    continue
                log.warning("%s: tracker: %s", self.node_id, e.message)
                interval, pause = pause, min(2 * pause, _MOST_PAUSE)
            with self._changed:
                self._changed.wait_for(lambda: self._has_news or self._ended.is_set(), interval)
                self._has_news = False

    def _register(self) -> float:
        about = self._about()
        # What a tracker told an earlier registration is void: what is held counts.
        with self._changed:
            self._todo.clear()
            self._answers.clear()
        reply = self._trackers.call("POST", "/nodes", {"node": self._document, "url": self._url} | about)
        self._registered = True
        log.info("%s: registered with %s", self.node_id, self._trackers.url)
        return min(0.05, float(reply.get("interval_s", 1.0)))

    def _beat(self) -> float:
        with self._changed:
            answers = dict(self._answers)
        said = self._about() | {"answers": [[epoch, done] for epoch, done in sorted(answers.items())]}
        reply = self._trackers.call("POST", node_path(self.node_id, "/heartbeat"), said)
        with self._changed:
            for epoch in answers:
                self._answers.pop(epoch, None)
            for entry in reply.get("directives", ()):
                self._take(Told.parse(entry))
        self._note_idle(reply.get("why"))
        return float(reply.get("interval_s", 1.0))

    def _note_idle(self, why: object) -> None:
        """Say once why this node has no layers, for whoever runs it."""
        idle = why if isinstance(why, str) and not self._service.runs.spans and not self._todo else None
        news = None if idle is None else re.sub(r"\d+", "", idle)  # a countdown is none
        if idle is not None and news != self._idle:
            log.warning("%s: no layers: %s", self.node_id, printable(idle, 400))
        self._idle = news

    def _about(self) -> dict[str, Any]:
        # Only what is proved is said to be held.
        spans = [[s.start, s.end] for s in self._service.runs.spans]
        return {"boot": self._service.boot_id, "layers": spans, "figures": self._service.figures()}

    def _take(self, told: Told | None) -> None:
        """Note a directive that is new; one of a tracker that was deposed is none. The lock is held."""
        if told is None or told.epoch // _EPOCHS < self._fence or told.epoch in self._todo:
            return
        if told.epoch <= self._newest:
            return
        self._fence, self._newest = told.epoch // _EPOCHS, told.epoch
        self._todo[told.epoch] = told
        self._changed.notify_all()

    def _act(self) -> None:
        while not self._ended.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._ended.is_set())
                waiting = list(self._todo.values())
            if not any(self._try(told) for told in waiting if not self._ended.is_set()):
                self._ended.wait(_LOOK_SECONDS)

    def _try(self, told: Told) -> bool:
        """Carry a directive out; False where it has to wait."""
        try:
            done = self._load(told) if told.kind == "LOAD_SHARD" else self._drop(told)
        except Exception as e:
            log.warning("%s: %s %s: %s", self.node_id, told.kind, told.span, printable(as_error(e).message))
            done = False
        if done is None:
            return False
        with self._changed:
            if self._todo.pop(told.epoch, None) is not None:
                self._answers[told.epoch] = done
            self._has_news = True
            self._changed.notify_all()
        return True

    def _load(self, told: Told) -> bool:
        log.info("%s: loading layers %s", self.node_id, told.span)
        self._service.load(told.span)
        return True

    def _drop(self, told: Told) -> bool | None:
        if self._service.pins(told.span):
            return None
        try:
            reply = self._trackers.call("POST", node_path(self.node_id, "/confirm"), {"epoch": told.epoch})
        except RemoteError as e:
            if e.status in (502, 503, 504):
                return None  # nobody can say now: what is held stays
            raise
        if not reply.get("confirmed"):
            with self._changed:
                self._todo.pop(told.epoch, None)  # it was withdrawn, and wants no answer
            return True
        log.info("%s: dropping layers %s", self.node_id, told.span)
        return True if self._service.drop(told.span) else None
