"""`fixtures/cluster.sh` on a real model in a store: the official client hears what `generate` says, token for token.

KNOTCTL_SHOW_MODEL=coder-1.5b and KNOTCTL_SHOW_STORE=rclone show it on another model and over another store.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from store_doubles import free_port, point_s3_at, program, put_s3, serve

from knotctl.cli import main
from knotctl.core.caches import cache_folder
from knotctl.core.knot.reader import open_knot

MODEL = os.environ.get("KNOTCTL_SHOW_MODEL", "smollm2")
STORE = os.environ.get("KNOTCTL_SHOW_STORE", "moto")
SCRIPT = Path(__file__).parents[2] / "fixtures" / "cluster.sh"
TOKEN = "a-token-between-the-nodes"
QUESTION = "Write a Python function that reverses a string, then say “fertig” 😀."
N = 24


@pytest.fixture
def stored(
    knot_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """The model as an object of the store, and as a file."""
    knot, port = knot_of(MODEL), free_port()
    command = [program("moto_server"), "-p", str(port)]
    if STORE == "rclone":
        (tmp_path / "store" / "models").mkdir(parents=True)
        os.link(knot, tmp_path / "store" / "models" / "model.knot")
        command = [program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", os.devnull]
        command += ["--auth-key", "testing,testing-secret", str(tmp_path / "store")]
    for url in serve(command, port):
        point_s3_at(monkeypatch, url)
        yield "s3://models/model.knot" if STORE == "rclone" else put_s3("model.knot", knot.read_bytes()), knot


class Shown:
    """A cluster of the script's, once its head is ready."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def caches(self) -> Counter[str]:
        """Hits of each level and reads of the store, of all nodes together."""
        found: Counter[str] = Counter()
        for about in self._folder.glob("tmp.*/*"):
            url = json.loads(about.read_text())["url"]
            text = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
            for name, value in re.findall(r"^knot_(cache_hits_total\S+|store_reads_total) (\S+)$", text, re.MULTILINE):
                found[name] += int(float(value))
        return found


@contextmanager
def shown(knot: str, n_layers: int, folder: Path) -> Iterator[Shown]:
    """The cluster: 8 shards, a row warden, 2 stations, a layer warden, and the head."""
    work = folder / "work"
    work.mkdir()
    command = [str(SCRIPT), knot, "0"]
    env = {
        "WARDENS": "1", "SHARDS": "8", "STATIONS": f"0:{n_layers // 2} {n_layers // 2}:{n_layers}", "TMPDIR": str(work),
        "KNOTCTL": str(Path(sys.executable).parent / "knotctl"), "KNOTCTL_CLUSTER_TOKEN": TOKEN,
        "KNOTCTL_CACHE_DIR": str(folder / "cache"), "KNOTCTL_SERVE_ALIAS": MODEL,
        "KNOTCTL_WARDEN_BUDGET": "1200MiB",  # coder-1.5b is a little more than the usual GiB
    }  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env) as script:
        try:
            assert script.stdout is not None
            began = time.monotonic()
            url = json.loads(script.stdout.readline())["url"]
            while httpx2.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.1)
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            yield Shown(url, work)
            script.send_signal(signal.SIGTERM)
            assert script.wait(60) == 0
        finally:
            script.kill()
    work.rmdir()


@pytest.mark.model
def test_a_cluster_over_a_store_says_what_generate_says_and_warm_tokens_read_nothing(
    stored: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref, path = stored
    (tmp_path / "cache").mkdir()
    # all but the compiled kernels, which take a minute to make
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder("kernels"))
    capsys.readouterr()
    assert main(["generate", str(path), QUESTION, "--chat", "-n", str(N), "--temp", "0", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    with open_knot(str(path)) as k:
        n_layers = k.header.config.n_layers
    fields: Any = {
        "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": N, "temperature": 0,
        "logprobs": True,
    }  # fmt: skip
    for turn in ("cold", "rows in the key-value level"):
        with (
            shown(ref, n_layers, tmp_path) as cluster,
            openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
        ):
            whole = client.chat.completions.create(**fields)
            warm = cluster.caches()
            chunks = list(client.chat.completions.create(**fields, stream=True))
            after = cluster.caches()
        if "KNOTCTL_SHOW_MODEL" in os.environ:
            with capsys.disabled():
                print(f"{turn}: before {dict(warm)}, after {dict(after)}", flush=True)
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            len(expected["prompt_tokens"]), len(expected["tokens"]),
        )  # fmt: skip
        assert whole.choices[0].message.content == expected["text"]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected["text"]
        assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == expected["finish_reason"]
        pieces = [t.bytes for t in _logprobs(whole.choices[0])]
        assert pieces == [t.bytes for c in chunks for t in _logprobs(c.choices[0])]
        assert len(pieces) == len(expected["tokens"])
        assert after["store_reads_total"] == warm["store_reads_total"], "a warm token read the store"
        hits = {tier: after[f'cache_hits_total{{tier="{tier}"}}'] for tier in ("ram", "kv", "layers", "warden")}
        assert (hits.pop("kv") > 0) is (turn != "cold"), "the first cluster's rows are the second one's"
        assert all(hits.values()), hits
        assert after['cache_hits_total{tier="ram"}'] > warm['cache_hits_total{tier="ram"}']


def _logprobs(choice: Any) -> list[Any]:
    return [] if choice.logprobs is None else choice.logprobs.content or []
