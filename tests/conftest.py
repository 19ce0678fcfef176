"""Real models for tests marked `model`, fetched and encoded once a session; the tiny ones; a real Redis server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Nothing is timed in a test: a machine that is busy with something else is no failure.
settings.register_profile("knotctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("knotctl")

pytest_plugins = ("databases",)

# A shell's background job ignores SIGINT, and so would every process started here: tests that interrupt would fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MODELS = Path(os.environ.get("KNOTCTL_MODELS", "~/.cache/knotctl-models")).expanduser()
FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}
FIXTURES = Path(__file__).parent.parent / "fixtures"
# Right answers on real models; laid beside the checkout on the developers' and CI's machines.
REFERENCE = Path(os.environ.get("KNOTCTL_REFERENCE", Path(__file__).parent.parent.parent / "shared" / "reference"))


def require(path: Path) -> Path:
    """The path, or a skip; a failure where CI promised that models are there (KNOTCTL_REQUIRE_MODELS=1)."""
    if not path.exists():
        if os.environ.get("KNOTCTL_REQUIRE_MODELS"):
            pytest.fail(f"{path} is absent")
        pytest.skip(f"{path} is absent (.ci/run fetches it)")
    return path


@pytest.fixture(scope="session")
def gguf_of() -> Callable[[str], Path]:
    """`gguf_of("coder-1.5b")` is the real GGUF file, or a skip."""
    return lambda name: require(MODELS / FILES[name])


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Path]:
    """`reference("coder-1.5b.json")` is a file of right answers, or a skip."""
    return lambda name: require(REFERENCE / name)


@pytest.fixture(scope="session")
def knot_of(gguf_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`knot_of("coder-1.5b")` is the model's knot, encoded once a session by the code under test."""
    done: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in done:
            from knotctl.cli import main

            knot = tmp_path_factory.mktemp("knots") / f"{name}.knot"
            assert main(["encode", str(gguf_of(name)), str(knot)]) == 0
            done[name] = knot
        return done[name]

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny("tiny-llama")` is the knot of that fixture, encoded by the code under test."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        path = folder / f"{name}.knot"
        if not path.exists():
            from knotctl.cli import main

            assert main(["encode", str(FIXTURES / f"{name}.gguf"), str(path)]) == 0
        return path

    return make


class RedisServer:
    """A redis-server of the system's package on a free port, empty at each start; `stop` and `start` as tests need."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
            for _ in range(500):
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", self.port)) == 0:
                        return
                time.sleep(0.02)
            pytest.fail("redis-server does not listen")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis server; a failure in CI, which installs it, where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        if os.environ.get("KNOTCTL_REQUIRE_REDIS"):
            pytest.fail("redis-server is absent")
        pytest.skip("redis-server is absent (.ci/run installs it)")
    server = RedisServer(program, tmp_path)
    server.start()
    yield server
    server.stop()
