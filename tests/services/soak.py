"""Many streams at once over processes of a cluster, for a while, some clients leaving midway; and what is held after.

By hand: python tests/services/soak.py MODEL.knot [STREAMS] [SECONDS] [ROUNDS]
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from knotctl.core.knot.reader import open_knot
from knotctl.services.supervisor import Supervisor

WORDS = "Write a long and careful story about a fox, a river and the stars above the old town. "


@dataclass
class Processes:
    """A head and the nodes behind it: process ids and URLs by name."""

    head: str
    pids: dict[str, int]
    urls: dict[str, str]

    def busy(self) -> dict[str, float]:
        """What runs, waits or is kept for somebody, where that is not nothing."""
        found = {}
        for name, url in self.urls.items():
            text = httpx2.get(f"{url}/metrics").text
            for key, value in re.findall(r"^(knot_\w+)\S* (\S+)$", text, re.MULTILINE):
                if key in _IN_FLIGHT and float(value):
                    found[f"{name} {key}"] = float(value)
        return found

    def held(self) -> dict[str, Held]:
        """What each process holds now."""
        return {name: Held.of(pid) for name, pid in self.pids.items()}


_IN_FLIGHT = ("knot_requests_running", "knot_requests_waiting", "knot_sessions", "knot_frames_queued", "knot_kv_bytes")


@dataclass(frozen=True)
class Held:
    """Resources of a process. Units: bytes of private memory."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = {k: int(v) for k, v in re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", status, re.MULTILINE)}
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(1024 * (numbers["RssAnon"] + numbers["RssShmem"]), files, numbers["Threads"])


@contextmanager
def processes(knot: str, *, shards: int = 2, stations: int = 2, context: int = 8192) -> Iterator[Processes]:
    """A cluster of real processes, and a head over it that is another one."""
    with open_knot(knot) as k:
        n = k.header.config.n_layers
    commands = {f"shard {i}": ["shard-embed", knot, "--shard", f"{i}/{shards}", "--serve"] for i in range(shards)}
    for i in range(stations):
        span = f"{i * n // stations}:{(i + 1) * n // stations}"
        commands[f"station {i}"] = ["run-station", knot, "--layers", span, "--serve", "-c", str(context)]
        commands[f"station {i}"] += ["--residency", "auto"]
    with Supervisor(commands) as made:
        at = [x for c in made.children for x in (f"--{c.name.split()[0]}-at", c.url)]
        command = [sys.executable, "-m", "knotctl", "serve", knot, "--port", "0", "-c", str(context), "--json", *at]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as head:
            try:
                assert head.stdout is not None
                url = json.loads(head.stdout.readline())["url"]
                while httpx2.get(f"{url}/readyz").status_code != 200:
                    time.sleep(0.05)
                pids = {c.name: c.pid for c in made.children} | {"head": head.pid}
                yield Processes(url, pids, {c.name: c.url for c in made.children} | {"head": url})
            finally:
                head.terminate()
                head.wait(60)


@dataclass
class Tally:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def _client(url: str, model: str, number: int, end: float, tally: Tally) -> None:
    rng = random.Random(number)
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=1)) as http:
        while time.monotonic() < end:
            body = {
                "model": model, "prompt": WORDS * rng.choice((1, 1, 1, 4, 12)), "stream": True, "seed": number,
                "max_tokens": rng.choice((8, 32, 96)), "temperature": 0.8,
            }  # fmt: skip
            leaves = rng.randrange(1, 20) if number % 3 == 0 else None
            try:
                async with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
                    tally.ends[str(reply.status_code)] += 1
                    if reply.status_code == 429:
                        await reply.aread()
                        await asyncio.sleep(float(reply.headers["retry-after"]) * rng.uniform(0.5, 1))
                        continue
                    if reply.status_code != 200:
                        tally.wrong.append((await reply.aread()).decode())
                        return
                    said = 0
                    last = ""
                    async for line in reply.aiter_lines():
                        said += line.startswith("data:")
                        last = line or last
                        if '"error"' in line:
                            tally.wrong.append(line)
                        if said == leaves:
                            break
                    if leaves is None or said < leaves:
                        tally.ends["whole"] += 1
                        if last != "data: [DONE]":
                            tally.wrong.append(f"ended with {last[:200]!r}")
                    else:
                        tally.ends["left"] += 1
            except (httpx2.HTTPError, KeyError) as e:
                tally.wrong.append(repr(e))


def soak(made: Processes, *, streams: int, seconds: float) -> Tally:
    """Keep so many streams going for so long, a third of the clients leaving midway; returns when all is done."""
    model = httpx2.get(f"{made.head}/v1/models").json()["data"][0]["id"]
    tally = Tally()

    async def all_clients() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(_client(made.head, model, i, end, tally) for i in range(streams)))

    asyncio.run(all_clients())
    return tally


def settle(made: Processes, seconds: float = 60.0) -> dict[str, float]:
    """Wait until nothing is in flight; returns what is, where that takes too long."""
    end = time.monotonic() + seconds
    while (busy := made.busy()) and time.monotonic() < end:
        time.sleep(0.2)
    # connections that were kept for the next call are given up by now
    time.sleep(0.5)
    return busy


def main(knot: str, streams: int = 200, seconds: float = 120.0, rounds: int = 1) -> None:
    def show(what: str, held: dict[str, Held]) -> None:
        each = (f"{n} {h.memory / 2**20:.1f} MiB {h.files} fd {h.threads} thr" for n, h in held.items())
        print(what, *each, sep="; ", flush=True)

    with processes(knot, shards=8) as made:
        show("start", made.held())
        for i in range(rounds + 1):
            tally = soak(made, streams=streams, seconds=seconds if i else min(seconds, 20.0))
            busy = settle(made)
            print(dict(tally.ends), "wrong:", len(tally.wrong), tally.wrong[:3], "busy:", busy)
            show("warm" if not i else f"after {i}", made.held())


if __name__ == "__main__":
    arguments: list[Any] = [kind(a) for kind, a in zip((str, int, float, int), sys.argv[1:], strict=False)]
    main(*arguments)
