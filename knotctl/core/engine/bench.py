"""Measures what a user would feel: prompt and generated tokens per second, and the memory that took.

Tests are named as in llama.cpp's bench: `pp512` is a prompt of 512 tokens, `tg128` 128 generated ones, `tg128@d4096`
the same behind 4096 tokens of context, `tg128x8` by 8 sessions together (their sum). Drafts are off unless asked for.
A peer (llama-server) is measured in the same run, turn by turn: machines are noisy, ratios hold.
"""

from __future__ import annotations

import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from knotctl.core.engine.session import Engine
from knotctl.core.errors import UsageError
from knotctl.core.tokens.sampler import SamplingParams


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One row of a bench: prompt tokens or generated ones, behind so much context, in so many sessions."""

    prompt: int
    generate: int
    depth: int = 0
    sessions: int = 1

    @property
    def name(self) -> str:
        """The row's name: pp512, tg128, tg128@d4096, tg128x8."""
        what = f"tg{self.generate}" if self.generate else f"pp{self.prompt}"
        return what + (f"@d{self.depth}" if self.depth else "") + (f"x{self.sessions}" if self.sessions > 1 else "")

    @property
    def context(self) -> int:
        """Tokens of context that all its sessions need together."""
        return self.sessions * (self.prompt + self.depth + self.generate + 8)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the test of a name. Raises: UsageError bad-test."""
        m = re.fullmatch(r"(pp|tg)(\d{1,7})(?:@d(\d{1,7}))?(?:x(\d{1,3}))?", text)
        if m is None or int(m[2]) == 0 or m[4] == "0":
            raise UsageError("bad-test", f"test {text!r}: expected pp512, tg128, tg128@d4096 or tg128x8")
        size = int(m[2])
        pp = m[1] == "pp"
        return cls(size if pp else 0, 0 if pp else size, int(m[3] or 0), int(m[4] or 1))


class Runner(Protocol):
    """Something that runs a test once and says how fast it was."""

    def run(self, test: BenchTest) -> float:
        """Return tokens per second of one run."""
        ...


@dataclass(slots=True)
class BenchResult:
    """The runs of one test, ours and the peer's. Units: tokens per second."""

    test: BenchTest
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Our mean rate."""
        return statistics.fmean(self.ours)

    @property
    def stdev(self) -> float:
        """Standard deviation of our runs."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else 0.0

    @property
    def ratio(self) -> float | None:
        """Our median rate over the peer's, None without a peer."""
        return statistics.median(self.ours) / statistics.median(self.peer) if self.peer else None

    def to_json(self) -> dict[str, object]:
        """Return the row of `bench --json`."""
        row: dict[str, object] = {"test": self.test.name, "tokens_per_s": self.mean, "stdev": self.stdev}
        row["runs"] = self.ours
        if self.peer:
            row |= {"peer_tokens_per_s": statistics.fmean(self.peer), "peer_runs": self.peer, "ratio": self.ratio}
        return row


def bench_prompt(count: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Return token ids that look like nothing in particular: the same for every engine, in no order that repeats."""
    low = min(512, vocab_size // 8)
    return [low + (i * 7919 + salt * 104729 + 1013) % (vocab_size - 2 * low) for i in range(count)]


class EngineRunner:
    """Runs tests on an engine of ours."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, test: BenchTest) -> float:
        """Return tokens per second of one run."""
        greedy = SamplingParams(temperature=0.0, seed=0)
        vocab = self._engine.knot.header.config.vocab_size
        n = max(1, test.generate)
        streams = [
            self._engine.submit(
                bench_prompt(test.prompt + test.depth or 1, vocab, salt),
                greedy,
                n + bool(test.generate),
                ignore_stop=True,
            )
            for salt in range(test.sessions)
        ]
        for stream in streams:
            for _ in stream:
                pass
        times = [s.timings for s in streams]
        first, last = [t.first or 0.0 for t in times], [t.last or 0.0 for t in times]
        if test.generate:
            # the tokens behind the first one, from when the last session had its first
            return test.sessions * test.generate / (max(last) - max(first)) if test.sessions > 1 else (
                test.generate / (last[0] - first[0])
            )  # fmt: skip
        return test.sessions * test.prompt / (max(first) - min(t.started or 0.0 for t in times))


def run_bench(
    tests: Sequence[BenchTest],
    ours: Runner,
    *,
    repeat: int,
    peer: Runner | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[BenchResult]:
    """Return the results of every test, repeated in turns with the peer after one unmeasured run of each."""
    results = [BenchResult(t) for t in tests]
    for result in results:
        for turn in range(repeat + 1):
            rates = [ours.run(result.test)], [peer.run(result.test)] if peer is not None else []
            if turn:
                result.ours += rates[0]
                result.peer += rates[1]
            advance(1)
    return results


class PrivateMemory:
    """Watches the process's own memory: anonymous and shared pages, not the page cache. Linux only, 0 elsewhere."""

    def __init__(self, every_s: float = 0.02) -> None:
        self.peak = 0
        self._every = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.peak = private_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.peak = max(self.peak, private_bytes())


def private_bytes() -> int:
    """Return the bytes of anonymous and shared memory resident now."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(n) for n in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))
