"""`serve` as a process: what it prints, how it ends, where a GGUF goes, and what it refuses before any work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from knotctl.cli import main
from knotctl.core.caches import cache_folder
from knotctl.core.knot.reader import open_knot
from knotctl.core.tokens.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
KEY = "sk-0123456789abcdef"


class Process:
    """`knotctl serve … --port 0 --json`, once it listens."""

    def __init__(self, *argv: str, **env: str) -> None:
        command = [sys.executable, "-m", "knotctl", "serve", *argv, "--port", "0", "--json"]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env
        )
        assert self.popen.stdout is not None
        self.line = self.popen.stdout.readline()
        self.about: dict[str, Any] = json.loads(self.line) if self.line else {}

    @property
    def url(self) -> str:
        return str(self.about["url"])

    def end(self, *signals: int) -> tuple[int, str]:
        """Exit status and stderr after the signals."""
        for number in signals:
            self.popen.send_signal(number)
            time.sleep(0.3)
        _, err = self.popen.communicate(timeout=45)
        return self.popen.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts servers with a cache folder of their own and, whatever happens, ends them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    # All but the compiled kernels, which take a minute to make and are not what is tested here.
    (cache / "kernels").symlink_to(cache_folder("kernels"))
    started = []

    def begin(*argv: str, **env: str) -> Process:
        started.append(Process(*argv, **({"KNOTCTL_CACHE_DIR": str(cache)} | env)))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("serve") / "tiny.knot"
    assert main(["encode", str(FIXTURES / "tiny.gguf"), str(path)]) == 0
    return str(path)


def wait_until_ready(process: Process) -> None:
    end = time.monotonic() + 60
    while httpx2.get(f"{process.url}/readyz").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_status_0(start: Callable[..., Process], knot: str, number: int) -> None:
    process = start(knot, "--shards", "2", "--stations", "0:1,1:3", "--alias", "mine")
    assert (process.about["model"], process.about["pid"]) == ("mine", process.popen.pid)
    wait_until_ready(process)
    document = httpx2.get(f"{process.url}/health").json()
    assert (document["spans"], document["knot_id"]) == ([[0, 1], [1, 3]], process.about["knot_id"])
    status, err = process.end(number)
    assert status == 0
    assert f"serving mine at {process.url}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("signals", "finished"), [([signal.SIGTERM], True), ([signal.SIGINT, signal.SIGTERM], False)], ids=["one", "two"]
)
def test_a_signal_lets_streams_finish_and_a_second_one_does_not(
    start: Callable[..., Process], knot: str, signals: list[int], finished: bool
) -> None:
    """Each stream fills the context, so that they run one after the other, for seconds."""
    fields: dict[str, Any] = {"model": "tiny", "prompt": [7], "max_tokens": 500, "stream": True}
    fields["logit_bias"] = {str(i): -100 for i in stop_ids(knot)}
    process = start(knot, "--threads", "1", "--residency", "fluid", "--ctx-size", "512")
    wait_until_ready(process)
    with httpx2.Client(timeout=60) as client, ExitStack() as streams:
        url = f"{process.url}/v1/completions"
        replies = [streams.enter_context(client.stream("POST", url, json=fields)) for _ in range(2 if finished else 8)]
        for number in signals:
            process.popen.send_signal(number)
            time.sleep(0.05)
        try:
            last = list(replies[-1].iter_lines())
        except httpx2.TransportError:
            last = []
        assert ("data: [DONE]" in last) is finished
    assert (process.end()[0] == 0) is finished


def test_a_gguf_is_encoded_into_the_cache_once(start: Callable[..., Process], tmp_path: Path) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes((FIXTURES / "tiny.gguf").read_bytes())
    first = start(str(gguf))
    assert first.about["model"] == "small"
    assert "encoding" in first.end(signal.SIGTERM)[1]
    (made,) = (tmp_path / "cache" / "knots").rglob("*.knot")
    changed = made.stat().st_mtime_ns
    second = start(str(gguf))
    assert second.about["knot_id"] == first.about["knot_id"]
    assert "encoding" not in second.end(signal.SIGTERM)[1]
    assert made.stat().st_mtime_ns == changed
    # Cut short, it is not whole, and made again.
    made.write_bytes(made.read_bytes()[:-1])
    third = start(str(gguf))
    assert "encoding" in third.end(signal.SIGTERM)[1]
    assert main(["verify", str(made)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "small.gguf"], "nothing is put beside the model"


def test_keys_close_it_and_open_it(start: Callable[..., Process], knot: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\n{KEY}\n\nanother-key-0001\n")
    process = start(
        knot, "--host", "0.0.0.0", "--api-key-file", str(keys), "--log-requests", KNOTCTL_API_KEY="third-key-0001"
    )
    url = f"http://127.0.0.1:{process.url.rsplit(':', 1)[1]}"
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    for key in (KEY, "another-key-0001", "third-key-0001"):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
            assert client.models.list().data[0].id == "tiny"
    status, err = process.end(signal.SIGTERM)
    assert status == 0
    assert "GET /v1/models 401" in err
    assert KEY not in err


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "give a MODEL or --demo"),
        (["KNOT", "--demo"], 2, "give a MODEL or --demo"),
        (["KNOT", "--once"], 2, "--once goes with --demo"),
        (["KNOT", "--host", "0.0.0.0"], 2, "needs an API key"),
        (["KNOT", "--host", "::"], 2, "needs an API key"),
        (["KNOT", "--host", "no such host"], 2, "no such host"),
        (["KNOT", "--residency", "none"], 2, "fluid, pinned"),
        (["KNOT", "--stations", "9"], 2, "stations 9"),
        (["KNOT", "--api-key-file", "none"], 4, "none"),
        (["none.knot"], 4, "none.knot"),
        (["README.md"], 3, "README.md"),
    ],
)
def test_refused_before_any_work(
    knot: str, argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *(knot if a == "KNOT" else a for a in argv), "--port", "0"]) == status
    assert words in capsys.readouterr().err


def test_an_address_in_use_is_status_4_and_says_what_to_do(knot: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", knot, "--port", str(taken.getsockname()[1])]) == 4
    assert "--port 0" in capsys.readouterr().err


def stop_ids(knot: str) -> frozenset[int]:
    with open_knot(knot) as k:
        return load_tokenizer(k.tokenizer_keys()).stop_ids


@pytest.fixture
def demo(start: Callable[..., Process], gguf_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., Process]:
    """Starts the demo with its model fetched already."""
    models = tmp_path / "cache" / "models"
    models.mkdir()
    gguf = gguf_of("smollm2")
    (models / gguf.name).symlink_to(gguf)
    return lambda *argv: start("--demo", *argv)


@pytest.mark.model
def test_the_demo_asks_once_and_ends(demo: Callable[..., Process], tmp_path: Path) -> None:
    process = demo("--once")
    about = process.about
    assert about["model"] == "demo"
    assert about["tokens"] > 10
    assert "language model" in about["answer"].lower()
    assert about["tokens_per_s"] > 0
    (knot,) = (tmp_path / "cache" / "knots").rglob("demo.knot")
    assert 0 < about["peak_weight_bytes"] <= knot.stat().st_size
    status, err = process.end()
    assert (status, about["question"] in err) == (0, True)


@pytest.mark.model
def test_the_demo_goes_on_and_prints_lines_that_work(demo: Callable[..., Process]) -> None:
    process = demo()
    assert httpx2.get(f"{process.url}/readyz").status_code == 200
    spans = httpx2.get(f"{process.url}/health").json()["spans"]
    status, err = process.end(signal.SIGTERM)
    assert (status, spans) == (0, [[0, 15], [15, 30]])
    curl, _, python = err.partition("Going on at ")[2].partition("\n\n")[2].partition("\n\npip install openai")
    assert curl.startswith(f"curl {process.url}/v1/chat/completions")
    body = json.loads(curl.partition("-d '")[2].removesuffix("'"))
    assert body["model"] == "demo"
    compile(python.partition("<<'EOF'\n")[2].partition("EOF")[0], "lines to type", "exec")
