"""Nodes put together by hand: the example script, HTTPS between them, and what is refused before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from knotctl.cli import main
from knotctl.core.caches import cache_folder
from knotctl.core.engine.session import Engine, EngineSpec

ROOT = Path(__file__).parents[2]
HELLO = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nodes") / "tiny.knot"
    assert main(["encode", str(ROOT / "fixtures" / "tiny.gguf"), str(path)]) == 0
    return str(path)


@pytest.fixture(scope="module")
def expected(knot: str) -> str:
    from knotctl.core.tokens.sampler import SamplingParams

    with Engine.open(knot, EngineSpec(context=512)) as e:
        stream = e.submit(e.tokenizer.encode("hello"), SamplingParams(temperature=0), 16)
        return e.tokenizer.decode([step.token for step in stream])


def started(*argv: str, **env: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env, start_new_session=True
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline() or "{}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=45)
    return process.returncode, err


def wait_until_ready(url: str, **options: Any) -> None:
    end = time.monotonic() + 60
    while httpx2.get(f"{url}/readyz", **options).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("wardens", ["", "1"])
def test_the_script_puts_a_cluster_together_and_takes_it_apart(
    knot: str, expected: str, tmp_path: Path, wardens: str
) -> None:
    # a cache folder of its own, with the kernels, which take a minute to compile
    (tmp_path / "kernels").symlink_to(cache_folder("kernels"))
    process, about = started(
        str(ROOT / "fixtures" / "cluster.sh"), knot, "0",
        KNOTCTL=str(Path(sys.executable).parent / "knotctl"), SHARDS="3", STATIONS="0:1 1:2 2:3",
        WARDENS=wardens, KNOTCTL_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    try:
        wait_until_ready(about["url"])
        assert httpx2.get(f"{about['url']}/health").json()["spans"] == [[0, 1], [1, 2], [2, 3]]
        reply = httpx2.post(f"{about['url']}/v1/completions", json=HELLO, timeout=30).json()
        assert reply["choices"][0]["text"] == expected
        group = process.pid
        status, err = ended(process)
        assert status == 0, err
        end = time.monotonic() + 20
        while _group_lives(group):
            assert time.monotonic() < end, "the script left processes behind"
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()


def test_nodes_talk_https_where_they_are_given_certificates(knot: str, expected: str, tmp_path: Path) -> None:
    cert, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    token.write_text("a-token-between-nodes\n")
    knotctl = [sys.executable, "-m", "knotctl"]
    safe = ["--token-file", str(token), "--tls-cert", str(cert), "--tls-key", str(key), "--json"]
    with ExitStack() as stack:
        processes = []

        def start(*argv: str) -> dict[str, Any]:
            process, about = started(*knotctl, *argv, *safe)
            processes.append(process)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return about

        listen = ["--serve", "--listen", "0.0.0.0:0"]
        shard = start("shard-embed", knot, "--shard", "0/1", *listen)
        trust = ["--tls-ca", str(cert)]
        first = start("run-station", knot, "--layers", "0:1", *listen, *trust)
        second = start("run-station", knot, "--layers", "1:3", *listen, *trust)
        urls = [a["url"].replace("0.0.0.0", "127.0.0.1") for a in (shard, first, second)]
        assert all(u.startswith("https://") for u in urls)
        head = start(
            "serve", knot, "--port", "0", *trust,
            "--shard-at", urls[0], "--station-at", urls[1], "--station-at", urls[2],
        )  # fmt: skip
        import ssl

        context = ssl.create_default_context(cafile=str(cert))
        wait_until_ready(head["url"], verify=context)
        reply = httpx2.post(f"{head['url']}/v1/completions", json=HELLO, timeout=30, verify=context).json()
        assert reply["choices"][0]["text"] == expected
        assert [ended(p)[0] for p in reversed(processes)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["run-station", "KNOT", "--layers", "0:1"], 2, "--serve"),
        (["run-station", "KNOT", "--layers", "0:1", "--serve", "-i", "x"], 2, "over HTTP"),
        (["run-station", "KNOT", "--layers", "0:9", "--serve"], 2, "0:9"),
        (["run-station", "KNOT", "--layers", "0:1", "--serve", "--listen", "0.0.0.0:0"], 2, "KNOTCTL_CLUSTER_TOKEN"),
        (["run-station", "KNOT", "--layers", "0:1", "--serve", "--listen", "nowhere"], 2, "HOST:PORT"),
        (["shard-embed", "KNOT", "--serve", "--tokens", "1"], 2, "over HTTP"),
        (["shard-embed", "KNOT", "--serve", "--shard", "9"], 2, "I/N"),
        (["shard-embed", "KNOT", "--serve", "--tls-cert", "x"], 2, "both or neither"),
        (["shard-embed", "KNOT", "--serve", "--tls-cert", "x", "--tls-key", "y"], 2, "x"),
        (["serve", "KNOT", "--port", "0", "--processes", "--shard-at", "http://a:1"], 2, "--processes"),
        (["serve", "KNOT", "--port", "0", "--shard-at", "http://a:1"], 2, "--station-at"),
        (["serve", "KNOT", "--port", "0", "--shard-at", "nowhere", "--station-at", "x"], 2, "nowhere"),
        (["serve", "KNOT", "--port", "0", "--processes", "--stations", "9"], 2, "stations 9"),
    ],
)
def test_refused_before_any_work(
    knot: str, argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([knot if a == "KNOT" else a for a in argv]) == status
    assert words in capsys.readouterr().err


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
