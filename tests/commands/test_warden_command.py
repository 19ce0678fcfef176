"""`warden` as a process beside shards and stations as commands: the same frames, and what each level was asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from store_doubles import free_port, point_s3_at, program, put_s3, serve

from knotctl.cli import main
from knotctl.core.caches import cache_folder
from knotctl.core.knot.reader import open_knot
from knotctl.core.model.embed import Shard
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.http_call import Peer
from knotctl.core.source.opening import open_source
from knotctl.core.spans import VocabSpan

TOKEN = "cluster-token-0001"


class Process:
    """A knotctl command that serves, once it is ready."""

    def __init__(self, *argv: str, within: Sequence[str] = (), **env: str) -> None:
        self.popen = subprocess.Popen(
            [*within, sys.executable, "-m", "knotctl", *argv, "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env,
        )  # fmt: skip
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.popen.communicate()[1]
        self.about: dict[str, Any] = json.loads(line)
        self.url = self.about["url"]
        deadline = time.monotonic() + 30
        while httpx2.get(f"{self.url}/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        lines = httpx2.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text.splitlines()
        return {x.rpartition(" ")[0]: float(x.rpartition(" ")[2]) for x in lines if not x.startswith("#")}

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.popen.send_signal(number)
        _, err = self.popen.communicate(timeout=45)
        return self.popen.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*argv: str, within: Sequence[str] = (), **env: str) -> Process:
        started.append(Process(*argv, within=within, **env))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    port = free_port()
    yield from serve([program("moto_server"), "-p", str(port)], port)


@pytest.fixture
def stored(moto: str, monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path]) -> str:
    """The tiny knot as an object of moto's S3."""
    point_s3_at(monkeypatch, moto)
    return put_s3("tiny.knot", tiny("tiny").read_bytes())


def embedded(knot: str, tmp_path: Path, *options: str) -> bytes:
    out = tmp_path / "embed.frame"
    ids = [] if "--tokens" in options else ["--tokens", "5,17,200,3,44,44,91,120,7,63,301"]
    assert main(["shard-embed", knot, *ids, "-o", str(out), *options]) == 0
    return out.read_bytes()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[bytes, dict[str, Any]]]:
    """`run(knot, *options)` is what a station of all layers writes, and its report."""
    embed, hidden, out = (str(tmp_path / n) for n in ("embed.frame", "hidden.frame", "out.frame"))

    def work(knot: str, *options: str) -> tuple[bytes, dict[str, Any]]:
        embedded(knot, tmp_path)
        assert main(["merge", embed, "-o", hidden]) == 0
        capsys.readouterr()
        assert main(["run-station", knot, "--layers", ":", "-i", hidden, "-o", out, *options, "--json"]) == 0
        return Path(out).read_bytes(), json.loads(capsys.readouterr().out)

    return work


def test_stations_and_shards_give_the_same_frames_through_wardens(
    tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process], run: Callable[..., Any]
) -> None:
    knot = str(tiny("tiny"))
    plain, report = run(knot)
    assert report["peak_weight_bytes"] > 0
    layers = start("warden", knot, "--layers", ":", "--budget", "64MiB")
    assert layers.about["role"] == "layer-warden"
    assert layers.about["identity"].endswith("|0-3")
    for n in range(2):
        before = layers.metrics()["knot_store_read_bytes_total"]
        through, report = run(knot, "--warden", layers.url)
        assert through == plain
        assert report["peak_weight_bytes"] == 0, "it multiplies in the warden's memory"
        read = layers.metrics()["knot_store_read_bytes_total"] - before
        assert (read > 0) is (n == 0), "warm: nothing is read"
    rows = start("warden", knot, "--rows", ":", "--kv", f"sqlite:///{tmp_path}/rows.db", "--budget", "1MiB")
    expected = embedded(knot, tmp_path)
    for _ in range(2):
        assert embedded(knot, tmp_path, "--warden", rows.url) == expected
    assert rows.metrics()['knot_cache_hits_total{tier="ram"}'] >= 10
    for process in (layers, rows):
        code, err = process.end()
        assert (code, "Traceback" in err) == (0, False), err


def test_a_shard_keeps_rows_over_the_end_of_its_process(
    tiny: Callable[[str], Path], tmp_path: Path, redis_server: Any
) -> None:
    knot = str(tiny("tiny"))
    expected = embedded(knot, tmp_path)
    for kv in (f"sqlite:///{tmp_path}/rows.db", redis_server.url):
        for _ in range(2):
            assert embedded(knot, tmp_path, "--kv", kv) == expected
    redis_server.stop()
    assert embedded(knot, tmp_path, "--kv", redis_server.url) == expected, "a level that is down fails nothing"


def test_from_a_store_only_owned_bytes_are_fetched_and_warm_none(
    stored: str, tmp_path: Path, tiny: Callable[[str], Path], start: Callable[..., Process], run: Callable[..., Any]
) -> None:
    knot = str(tiny("tiny"))
    expected = embedded(knot, tmp_path)
    with open_knot(knot) as k:
        header = k.header
        table = header.tensors[0]
        assert table.name == "token_embd_weight"
        opening = 256 << 10
    db = f"sqlite:///{tmp_path}/rows.db"
    rows = start("warden", stored, "--rows", ":", "--kv", db)
    assert embedded(stored, tmp_path, "--warden", rows.url) == expected
    cold = rows.metrics()["knot_store_read_bytes_total"]
    assert cold <= min(opening, header.file_bytes) + 1.02 * table.length
    assert embedded(stored, tmp_path, "--warden", rows.url) == expected
    assert rows.metrics()["knot_store_read_bytes_total"] == cold
    rows.end()
    again = start("warden", stored, "--rows", ":", "--kv", db)
    opened = again.metrics()["knot_store_read_bytes_total"]
    assert embedded(stored, tmp_path, "--warden", again.url) == expected
    assert again.metrics()["knot_store_read_bytes_total"] == opened, "memory is lost, the level below is not"
    owned = sum(e.length for e in header.tensors if e.name.startswith(("blk_", "output", "rope")))
    layers = start("warden", stored, "--layers", ":")
    plain, _ = run(knot)
    opened = layers.metrics()["knot_store_read_bytes_total"]
    for n in range(3):
        assert run(stored, "--warden", layers.url)[0] == plain
        if n == 0:
            cold = layers.metrics()["knot_store_read_bytes_total"]
            assert cold <= opening + 1.02 * owned
        assert layers.metrics()["knot_store_read_bytes_total"] == cold


def test_a_shard_over_a_store_reads_a_row_once_and_near_ones_together(stored: str) -> None:
    with open_knot(CountedSource(open_source(stored))) as knot:
        source: Any = knot.source
        shard = Shard(knot, VocabSpan(0, 300))
        before = source.reads
        shard.rows([3, 5, 9, 3])
        shard.rows([4, 9])
        assert source.reads == before + 1
        shard.close()


def test_a_warden_that_is_killed_costs_nothing_but_time(
    tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process], run: Callable[..., Any]
) -> None:
    knot = str(tiny("tiny"))
    plain, _ = run(knot)
    layers = start("warden", knot, "--layers", ":")
    layers.end(signal.SIGKILL)
    assert run(knot, "--warden", layers.url)[0] == plain


def test_a_full_disk_under_the_key_value_level_costs_no_row(
    tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process]
) -> None:
    """On a real file system, of 128 KiB, that only the warden sees."""
    knot, disk = str(tiny("tiny")), tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=128k disk "$0" && exec "$@"'
    small_disk = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(disk)]
    kv = ["--kv", f"sqlite:///{disk}/rows.db", "--budget", "16KiB"]
    rows = start("warden", knot, "--rows", ":", *kv, within=small_disk)
    assert not list(disk.iterdir()), "it is another file system there"
    every = ["--tokens", ",".join(map(str, range(400)))]
    expected = embedded(knot, tmp_path, *every)
    for _ in range(3):
        assert embedded(knot, tmp_path, *every, "--warden", rows.url) == expected
    metrics = rows.metrics()
    assert metrics['knot_cache_errors_total{tier="kv"}'] > 0, "the disk was not full"
    assert metrics['knot_cache_bytes{tier="ram"}'] > 0
    code, err = rows.end()
    assert (code, "Traceback" in err) == (0, False), err


def test_an_object_that_is_replaced_under_a_cluster_is_an_error_and_never_mixed(
    stored: str, tiny: Callable[[str], Path], start: Callable[..., Process]
) -> None:
    """The last station reads its weights from the store with every token; the model there becomes another one."""
    shard = start("shard-embed", stored, "--shard", "0/1", "--serve")
    stations = [start("run-station", stored, "--layers", s, "--serve") for s in ("0:1", "1:3")]
    nodes = ["--shard-at", shard.url, *(x for s in stations for x in ("--station-at", s.url))]
    head = start("serve", stored, *nodes, "--port", "0", "--alias", "m")
    expected = greedy(head.url)
    assert put_s3("tiny.knot", tiny("tiny-llama").read_bytes()) == stored
    body = {"model": "m", "prompt": "hello", "max_tokens": 12, "temperature": 0}
    reply = httpx2.post(f"{head.url}/v1/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "object-changed")
    lines = httpx2.post(f"{head.url}/v1/completions", json=body | {"stream": True}, timeout=60).text
    assert '"code":"object-changed"' in lines.replace(" ", "")
    assert "[DONE]" not in lines
    assert put_s3("tiny.knot", tiny("tiny").read_bytes()) == stored
    assert greedy(head.url) == expected, "the same bytes again are the same object: its ETag is their digest"


def test_a_stopped_warden_is_waited_for_once(
    tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    knot = str(tiny("tiny"))
    expected = embedded(knot, tmp_path)
    rows = start("warden", knot, "--rows", ":", "--kv", "none")
    os.kill(rows.about["pid"], signal.SIGSTOP)
    waits: list[str] = []
    call = Peer.call

    def counted(self: Peer, method: str, path: str, *args: Any, **options: Any) -> Any:
        waits.append(path)
        return call(self, method, path, *args, **options)

    monkeypatch.setattr(Peer, "call", counted)
    assert embedded(knot, tmp_path, "--warden", rows.url) == expected
    assert waits == ["/health"]
    os.kill(rows.about["pid"], signal.SIGCONT)


def test_beyond_this_machine_a_token_is_needed(
    tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process], capsys: pytest.CaptureFixture[str]
) -> None:
    knot = str(tiny("tiny"))
    assert main(["warden", knot, "--rows", ":", "--listen", "0.0.0.0:0"]) == 2
    assert "API key" in capsys.readouterr().err
    rows = start("warden", knot, "--rows", ":", "--kv", "none", KNOTCTL_CLUSTER_TOKEN=TOKEN)
    expected = embedded(knot, tmp_path)
    assert embedded(knot, tmp_path, "--warden", rows.url) == expected
    assert rows.metrics()['knot_cache_misses_total{tier="ram"}'] == 1, "the probe's: nobody else was let in"
    (tmp_path / "token").write_text(TOKEN)
    assert embedded(knot, tmp_path, "--warden", rows.url, "--token-file", str(tmp_path / "token")) == expected
    assert rows.metrics()['knot_cache_misses_total{tier="ram"}'] > 1


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--rows", ":", "--layers", ":"],
        ["--layers", ":", "--kv", "none"],
        ["--layers", "0:99"],
        ["--rows", "5:2"],
        ["--rows", ":", "--budget", "much"],
        ["--rows", ":", "--kv", "memcached://h"],
        ["--rows", ":", "--listen", "nowhere"],
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Callable[[str], Path], options: list[str]) -> None:
    assert main(["warden", str(tiny("tiny")), *options]) == 2


# ---- a cluster


def child_arguments(pid: int) -> list[list[str]]:
    """The command lines of a process's children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found.append((folder / "cmdline").read_text().split("\0"))
        except (OSError, ValueError):
            continue  # it has ended meanwhile
    return found


def test_a_cluster_from_a_store_reads_it_once_and_nothing_for_warm_tokens(
    stored: str, tiny: Callable[[str], Path], tmp_path: Path, start: Callable[..., Process]
) -> None:
    expected = greedy(start("serve", str(tiny("tiny")), "--port", "0", "--alias", "m").url)
    cache = tmp_path / "cache"
    cache.mkdir()
    # all but the compiled kernels, which take a minute to make
    (cache / "kernels").symlink_to(cache_folder("kernels"))
    argv = ["serve", stored, "--processes", "--wardens", "--shards", "3", "--stations", "2", "--port", "0"]
    served = start(*argv, "--alias", "m", KNOTCTL_CACHE_DIR=str(cache))
    assert greedy(served.url) == expected
    workers = [a for a in child_arguments(served.about["pid"]) if "--warden" in a]
    assert len(workers) == 5
    wardens = {a[a.index("--warden") + 1] for a in workers}
    assert len(wardens) == 2
    token = next(
        x.partition("=")[2]
        for folder in Path("/proc").glob("[0-9]*")
        if str(served.about["pid"]) in (folder / "stat").read_text().rpartition(")")[2].split()[1:2]
        for x in (folder / "environ").read_text().split("\0")
        if x.startswith("KNOTCTL_CLUSTER_TOKEN=")
    )

    def metrics() -> dict[str, float]:
        found: dict[str, float] = {}
        for url in wardens:
            text = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
            for line in text.splitlines():
                if line.startswith(("knot_cache_hits", "knot_store_read_bytes")):
                    found[line.rpartition(" ")[0]] = found.get(line.rpartition(" ")[0], 0) + float(line.split()[-1])
        return found

    cold = metrics()
    assert greedy(served.url) == expected
    warm = metrics()
    assert warm["knot_store_read_bytes_total"] == cold["knot_store_read_bytes_total"], "no store reads a warm token"
    assert cold['knot_cache_hits_total{tier="layers"}'] > 0
    assert served.end()[0] == 0


def greedy(url: str) -> str:
    body = {"model": "m", "prompt": "hello", "max_tokens": 12, "temperature": 0}
    reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    return str(reply.json()["choices"][0]["text"])
