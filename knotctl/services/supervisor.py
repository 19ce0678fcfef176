"""Starts the processes of a cluster on this machine, restarts those that die or hang, and stops them all.

A child says on stdout where it listens (`--json`), keeps that port when it is started again, and ends when its stdin
does, so that none outlives a parent that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from knotctl.core.errors import SourceError
from knotctl.core.source.http_call import Peer, TransportError

log = logging.getLogger("knotctl.supervisor")

# A child that lived so long is started again at once; one that dies young waits, longer each time.
_STEADY_SECONDS = 10.0
_FIRST_WAIT, _MOST_WAIT = 0.2, 5.0
# A child that answers nothing for so many probes hangs and is killed.
_PROBE_EVERY, _PROBE_SECONDS, _PROBE_MISSES = 2.0, 2.0, 4
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@dataclass(slots=True)
class Child:
    """One process: its knotctl arguments without --listen, and what it is now."""

    name: str
    argv: Sequence[str]
    listen: str = "127.0.0.1:0"
    url: str = ""
    process: subprocess.Popen[str] | None = None
    started: float = 0.0
    due: float | None = None
    wait: float = _FIRST_WAIT
    restarts: int = 0
    misses: int = 0
    probed: float = field(default=0.0)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self.process is not None
        return self.process.pid


class Supervisor:
    """Use it with `with`: the children listen when it is entered (not yet ready), and have ended when it is left."""

    def __init__(self, commands: Mapping[str, Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        self.children = [Child(name, argv) for name, argv in commands.items()]
        self._env = dict(os.environ) | dict(env or {})
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="knotctl-supervisor", daemon=True)

    @property
    def restarts(self) -> int:
        """How many times a child was started again."""
        return sum(c.restarts for c in self.children)

    def __enter__(self) -> Self:
        try:
            for child in self.children:
                self._spawn(child)
            for child in self.children:
                self._hear(child)
        except BaseException:
            self._end()
            raise
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._watcher.join()
        self._end()

    def _spawn(self, child: Child) -> None:
        argv = [sys.executable, "-m", "knotctl", *child.argv, "--listen", child.listen, "--json", "--until-eof"]
        child.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env,
            start_new_session=True,  # Ctrl-C is for the parent, which drains before it ends them
        )  # fmt: skip
        child.started, child.due, child.misses = time.monotonic(), None, 0

    def _hear(self, child: Child) -> None:
        """Take a new child's one line: where it listens.

        Raises: SourceError child-failed, after which the child is no more.
        """
        assert child.process is not None
        assert child.process.stdout is not None
        timer = threading.Timer(_START_SECONDS, child.process.kill)
        timer.start()
        try:
            about: dict[str, Any] = json.loads(child.process.stdout.readline())
            child.url = str(about["url"])
        except (ValueError, KeyError):
            # its stdout is at its end, so it is about to be; what it ends with is what it has to say
            status = _ended(child.process, 5.0)
            raise SourceError(
                "child-failed", f"{child.name}: did not start: {_ending(status)}", hint="its own words are above"
            ) from None
        finally:
            timer.cancel()
        child.listen = child.url.partition("://")[2]

    def _watch(self) -> None:
        while not self._stopping.wait(0.05):
            now = time.monotonic()
            for child in self.children:
                try:
                    self._look_at(child, now)
                except Exception:
                    # one child's trouble must not end the care for the others
                    log.exception("%s: could not be looked after", child.name)

    def _look_at(self, child: Child, now: float) -> None:
        assert child.process is not None
        if child.due is not None:
            if now >= child.due:
                child.restarts += 1
                self._spawn(child)
                threading.Thread(target=self._hear_again, args=(child,), daemon=True).start()
            return
        status = child.process.poll()
        if status is not None:
            _close_pipes(child.process)
            child.wait = _FIRST_WAIT if now - child.started > _STEADY_SECONDS else min(2 * child.wait, _MOST_WAIT)
            child.due = now + (0.0 if now - child.started > _STEADY_SECONDS else child.wait)
            log.warning("%s: %s; starting it again in %.1f s", child.name, _ending(status), child.due - now)
        elif now - child.probed > _PROBE_EVERY:
            child.probed = now
            threading.Thread(target=self._probe, args=(child, child.process), daemon=True).start()

    def _hear_again(self, child: Child) -> None:
        try:
            self._hear(child)
        except SourceError as e:
            log.warning("%s", e.message)  # the watcher finds it dead

    def _probe(self, child: Child, process: subprocess.Popen[str]) -> None:
        peer = Peer(child.url)
        try:
            peer.call("GET", "/livez", seconds=_PROBE_SECONDS)
            child.misses = 0
        except TransportError as e:
            # one that refuses is starting or dead, which the watcher sees; one that says nothing hangs
            child.misses += e.code == "timeout"
            if child.misses >= _PROBE_MISSES and child.process is process:
                log.warning("%s: answers nothing any more; killing it", child.name)
                process.kill()
        finally:
            peer.close()

    def _end(self) -> None:
        """End all children: first by their stdin and SIGTERM, then by SIGKILL."""
        running = [c.process for c in self.children if c.process is not None]
        for process in running:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        end = time.monotonic() + _STOP_SECONDS
        for process in running:
            _ended(process, max(0.0, end - time.monotonic()))
            _close_pipes(process)


def _ended(process: subprocess.Popen[str], seconds: float) -> int:
    """Return a process's status; it is killed where it has not ended by itself in time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _ending(status: int) -> str:
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
