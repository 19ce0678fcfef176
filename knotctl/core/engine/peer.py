"""llama-server as a peer to measure against: started on loopback, asked for the same tokens, stopped at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from knotctl.core.engine.bench import BenchTest, bench_prompt
from knotctl.core.errors import SourceError

# Loading a model of some gigabytes from a cold disk.
_START_SECONDS = 300
_REQUEST_SECONDS = 3600


class LlamaServer:
    """A running llama-server; its own timings are what is reported."""

    def __init__(self, client: httpx2.Client, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size

    def run(self, test: BenchTest) -> float:
        """Return tokens per second of one run, as the server itself measured them."""
        if test.sessions == 1:
            timings = self._complete(test, 0)
            return float(timings["predicted_per_second" if test.generate else "prompt_per_second"])
        with ThreadPoolExecutor(test.sessions) as pool:
            all_timings = list(pool.map(lambda salt: self._complete(test, salt), range(test.sessions)))
        # each session's own rate while the others ran; the server gives no clock of the whole
        key = "predicted_per_second" if test.generate else "prompt_per_second"
        return sum(float(t[key]) for t in all_timings)

    def _complete(self, test: BenchTest, salt: int) -> dict[str, float]:
        reply = self._client.post(
            "/completion",
            json={
                "prompt": bench_prompt(test.prompt + test.depth or 1, self._vocab_size, salt),
                # one more than is counted, as for ours: the first one belongs to the prompt
                "n_predict": test.generate + 1 if test.generate else 1,
                "cache_prompt": False,
                "ignore_eos": True,
                "temperature": 0,
            },
        )
        timings: dict[str, float] = reply.raise_for_status().json()["timings"]
        return timings


@contextlib.contextmanager
def llama_server(
    binary: Path,
    model: Path,
    *,
    threads: int,
    tests: Sequence[BenchTest],
    vocab_size: int,
    options: Sequence[str] = (),
) -> Iterator[LlamaServer]:
    """Run llama-server on a GGUF and yield it, with f16 keys and values and as many threads as ours has.

    Raises: SourceError peer-failed with the last lines that it printed.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    slots = max(t.sessions for t in tests)
    context = max(t.context for t in tests) + 64 * slots
    argv = [
        binary, "-m", model, "-t", threads, "-c", context, "-np", slots, "--port", port, "--host", "127.0.0.1",
        "--no-webui", "-ngl", 0, *options,
    ]  # fmt: skip
    libraries = os.pathsep.join(p for p in (str(binary.parent), os.environ.get("LD_LIBRARY_PATH", "")) if p)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [str(a) for a in argv], stdout=log, stderr=log, env={**os.environ, "LD_LIBRARY_PATH": libraries}
            )
        except OSError as e:
            raise SourceError("peer-failed", f"{binary}: {e.strerror}") from e
        try:
            with httpx2.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_SECONDS, trust_env=False
            ) as client:
                _await(client, process, binary, log.fileno())
                yield LlamaServer(client, vocab_size)
        finally:
            process.terminate()
            process.wait()


def _await(client: httpx2.Client, process: subprocess.Popen[bytes], binary: Path, log: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx2.TransportError):
            if client.get("/health").status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    tail = os.pread(log, 1 << 20, 0).decode("utf-8", "replace").splitlines()[-5:]
    illegal = process.returncode == -signal.SIGILL
    raise SourceError(
        "peer-failed",
        f"{binary}: did not come up (status {process.returncode}):\n  " + "\n  ".join(tail),
        hint="it was built for another CPU; --peer-option=--no-repack may avoid the kernel at fault"
        if illegal
        else None,
    )
