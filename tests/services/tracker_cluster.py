"""A tracker and workers of the tiny model as real processes, to be killed, stopped and asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx2

from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.sweeper import Sweeper
from knotctl.core.kernels.threads import get_threads
from knotctl.core.knot.layer_bytes import model_layers
from knotctl.core.knot.reader import open_knot
from knotctl.core.model.budget import MAX_CHUNK, RUNTIME_BYTES, scratch_bytes
from knotctl.core.model.config import model_config
from knotctl.core.model.frame_room import frame_room
from knotctl.services.station import MAX_LOGITS

# Long for a machine that has other things to do; nothing waits for it that goes well.
PATIENCE = 120.0
CONTEXT = 512


class Process:
    """One knotctl process that says on stdout where it listens."""

    def __init__(self, argv: list[str], env: dict[str, str], program: list[str] | None = None) -> None:
        self.argv = argv
        command = [sys.executable, *(program or ["-m", "knotctl"]), *argv, "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env)
        self._about: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        if self._about is None:
            assert self._process.stdout is not None
            self._about = json.loads(self._process.stdout.readline())
        return str(self._about["url"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """SIGTERM, and the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_running:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


class TrackedCluster:
    """Use it with `with`: every process that was started ends with it."""

    def __init__(
        self, knot: Path, *, ref: str | None = None, env: dict[str, str] | None = None, key: str | None = None
    ) -> None:
        # what processes are told the model is: a copy at a store, or the file itself
        self.ref, self.key = ref or str(knot), key
        self._env = {"KNOTCTL_CLUSTER_TOKEN": "cluster-token-0001", "NUMBA_NUM_THREADS": "1"} | (env or {})
        self.trackers: list[Process] = []
        self.workers: dict[str, Process] = {}
        with open_knot(str(knot)) as k:
            self.model = model_layers(k.header, knot.stem)
        self.client = httpx2.Client(timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for process in (*self.workers.values(), *self.trackers):
            process.close()

    @property
    def url(self) -> str:
        return next(t.url for t in self.trackers if t.is_running)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def node_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._env['KNOTCTL_CLUSTER_TOKEN']}"}

    def tracker(self, *argv: str, port: int = 0) -> Process:
        options = ["--tracker-only", "--port", str(port), "--heartbeat", "0.2", "--monitor", "1", "--lease", "3"]
        process = Process(["serve", self.ref, *options, *argv], self._env)
        self.trackers.append(process)
        return process

    def budget(self, start: int, end: int) -> int:
        """The least --memory-budget with which a worker can be given these layers."""
        sizes = self.model.sizes_at(self.model.native or "")
        assert sizes is not None
        weights, room = sizes.span_bytes(start, end), 0
        with open_knot(self.ref) as knot:
            here = scratch_bytes(model_config("", knot.header.config), CONTEXT)
            for _ in range(4):  # what it needs beside them follows from what it has, on one thread
                overhead = frame_room(knot, room, MAX_CHUNK, MAX_LOGITS, CONTEXT)[1] - here + here // get_threads()
                room = int((weights + overhead) / 0.8) + 16
        return room + RUNTIME_BYTES

    def worker(
        self, name: str, layers: tuple[int, int], *argv: str, claim: float = 1.0, program: list[str] | None = None
    ) -> Process:
        trackers = [a for t in self.trackers for a in ("--tracker", t.url)]
        options = [
            "--node-id",
            name,
            "--memory-budget",
            str(self.budget(*layers)),
            "--benchmark",
            str(claim),
            "-c",
            str(CONTEXT),
            "--threads",
            "1",
        ]
        if name in self.workers:
            self.workers[name].close()
        self.workers[name] = Process(["run-station", self.ref, *trackers, *options, *argv], self._env, program)
        if len(self.workers) == 1:
            # What it compiles the others find in the cache.
            assert self.workers[name].url
        return self.workers[name]

    def coverage(self) -> dict[str, Any]:
        return dict(self.client.get(f"{self.url}/coverage", headers=self.node_headers).json())

    def node(self, name: str) -> dict[str, Any]:
        return next((n for n in self.coverage().get("nodes", ()) if n["node_id"] == name), {})

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx2.Response:
        return self.client.post(f"{self.url}{path}", json=body, headers=self.headers | headers)

    def streamed(self, body: dict[str, Any], at: int = 0, fault: Callable[[], None] = lambda: None) -> str:
        """The text of a stream that ended well; the fault comes behind that many of its pieces."""
        pieces: list[str] = []
        ended = False
        request = body | {"stream": True}
        url = f"{self.url}/v1/completions"
        with self.client.stream("POST", url, json=request, headers=self.headers) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                document = json.loads(line[6:])
                assert "error" not in document, document
                pieces.append(document["choices"][0]["text"])
                if len(pieces) == at:
                    fault()
        assert ended
        return "".join(pieces)

    def route(self, body: dict[str, Any]) -> list[str]:
        """The nodes that streams pass now, head first: of a stream that is begun and left."""
        seen: list[str] = []

        def look() -> None:
            about = self.coverage()
            spans = {n["node_id"]: n["layers"] for n in about["nodes"]}
            seen.extend(sorted((n for n in about["streams"] if spans.get(n)), key=lambda n: spans[n][0]))

        self.streamed(body, 3, look)
        return seen


def wait_until(what: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What `what` returns, once that is true."""
    end = time.monotonic() + patience
    while True:
        try:
            if found := what():
                return found
        except (httpx2.TransportError, KeyError):  # of a tracker that does not answer, or does not lead yet
            pass
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def sweep_all(database: Database) -> None:
    """Close what the dead left open, as a tracker does that saw it stand still for its time; nobody may be alive."""
    hours = iter((0.0, 3600.0))
    sweeper = Sweeper(Ledger(database), lambda: next(hours))
    sweeper.sweep()
    sweeper.sweep()
