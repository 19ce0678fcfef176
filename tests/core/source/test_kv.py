"""The key-value level: one suite over both stores; a level that fails, is slow or full harms nobody."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from knotctl.core.errors import SourceError, UsageError
from knotctl.core.source import kv_guard
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.source.kv import KeyValue, open_kv
from knotctl.core.source.kv_guard import Breaker, GuardedKv
from knotctl.core.source.kv_sqlite import SqliteKv

KEYS = [f"row:{i}".encode() for i in range(1300)]


@pytest.fixture(params=["sqlite", "redis"])
def ref(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/kv.db"
    return str(request.getfixturevalue("redis_server").url)


@pytest.fixture
def kv(ref: str) -> Iterator[KeyValue]:
    opened = open_kv(ref)
    yield opened
    opened.close()


def test_values_come_back_and_others_are_absent(kv: KeyValue) -> None:
    items = {key: bytes([i % 256]) * (i % 97) for i, key in enumerate(KEYS)}
    kv.put_many(items)
    assert kv.get_many([*KEYS, b"no such"]) == items
    assert kv.get_many([]) == {}


def test_a_second_put_replaces_and_a_delete_forgets(kv: KeyValue) -> None:
    kv.put_many({b"a": b"1", b"b": b"2"})
    kv.put_many({b"a": b"3"})
    kv.delete_many([b"b", b"c"])
    kv.delete_many([])
    assert kv.get_many([b"a", b"b"]) == {b"a": b"3"}


def test_another_process_reads_what_was_written(ref: str, kv: KeyValue) -> None:
    kv.put_many({b"k": b"from here"})
    script = f"from knotctl.core.source.kv import open_kv; print(open_kv({ref!r}).get_many([b'k']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "from here" in done.stdout


def test_a_value_expires(ref: str) -> None:
    short = open_kv(ref, ttl_seconds=1)
    short.put_many({b"k": b"v"})
    assert short.get_many([b"k"]) == {b"k": b"v"}
    deadline = time.monotonic() + 10
    while short.get_many([b"k"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    short.close()


def test_many_threads_at_once(kv: KeyValue) -> None:
    errors = []

    def work(n: int) -> None:
        try:
            for i in range(30):
                kv.put_many({f"{n}:{i}".encode(): b"x" * 5000})
                assert kv.get_many([f"{n}:{i}".encode()])
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


@pytest.mark.parametrize("ref", ["sqlite://", "sqlite:///", "sqlite:///redis://x", "memcached://h", "redis://h:port/0"])
def test_a_reference_that_names_no_level_is_refused(ref: str) -> None:
    with pytest.raises(UsageError) as e:
        open_kv(ref)
    assert e.value.code == "bad-kv"


def test_a_password_is_never_shown() -> None:
    kv = open_kv("redis://user:geheim@127.0.0.1:1/0")
    with pytest.raises(SourceError) as e:
        kv.get_many([b"k"])
    kv.close()
    assert "geheim" not in kv.name + e.value.message


# ---- SQLite


def test_another_program_s_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (id)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(SourceError, match="another program"):
        open_kv(str(path))
    assert path.read_bytes() == before
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 1000)
    with pytest.raises(SourceError, match="not a database"):
        open_kv(str(tmp_path / "model.gguf"))


def test_an_entry_from_the_future_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back by two hours: what was written before would live two hours too long."""
    kv = SqliteKv(tmp_path / "kv.db", 3600)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    kv.put_many({b"k": b"v"})
    assert kv.get_many([b"k"])
    monkeypatch.setattr(time, "time", lambda: now)
    assert kv.get_many([b"k"]) == {}
    kv.close()


def test_a_full_file_makes_room_by_its_oldest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = SqliteKv(tmp_path / "kv.db", 3600, max_bytes=1 << 20)
    now = time.time()
    for i in range(200):
        monkeypatch.setattr(time, "time", lambda i=i: now - 1000 + i)
        kv.put_many({f"{i}".encode(): bytes(16 << 10)})
    monkeypatch.undo()
    assert (tmp_path / "kv.db").stat().st_size <= 1 << 20
    assert kv.get_many([b"199"])
    assert kv.get_many([b"0"]) == {}
    kv.close()


def test_a_value_of_another_type_reads_as_one_that_cannot_be_right(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "kv.db", 3600)
    kv.put_many({b"k": b"v"})
    with sqlite3.connect(tmp_path / "kv.db") as db:
        db.execute("UPDATE entries SET value = 'text'")
    db.close()
    assert kv.get_many([b"k"]) == {b"k": b""}
    kv.close()


def test_a_key_of_another_type_in_redis_reads_as_one_that_cannot_be_right(redis_server: Any) -> None:
    kv: Any = open_kv(redis_server.url)
    kv._client.lpush(b"k", b"v")
    assert kv.get_many([b"k", b"l"]) == {b"k": b""}
    kv.delete_many([b"k"])
    assert kv.get_many([b"k"]) == {}
    kv.close()


# ---- the guard


class Broken:
    """A level that fails, or is slow, as long as it is told to."""

    name = "broken"

    def __init__(self) -> None:
        self.calls = 0
        self.fails = True
        self.held: dict[bytes, bytes] = {}

    def _work(self) -> None:
        self.calls += 1
        if self.fails:
            raise SourceError("kv-failed", "broken: as told")

    def get_many(self, keys: Any) -> dict[bytes, bytes]:
        self._work()
        return {k: self.held[k] for k in keys if k in self.held}

    def put_many(self, items: Mapping[bytes, bytes]) -> None:
        self._work()
        self.held.update(items)

    def delete_many(self, keys: Any) -> None:
        self._work()
        for k in keys:
            self.held.pop(k, None)

    def close(self) -> None: ...


def test_a_failing_level_is_left_alone_and_taken_back() -> None:
    now = [0.0]
    broken = Broken()
    guarded = GuardedKv(broken, CacheCounts("kv"))
    guarded.reads = Breaker(lambda: now[0])
    for _ in range(10):
        assert guarded.get_many([b"k"]) == {}
    assert broken.calls == guarded.counts["errors"] == kv_guard.FAILURES
    for pause in (1, 2, 4, 8, 16, 30, 30):
        now[0] += pause - 0.01
        guarded.get_many([b"k"])
        before = broken.calls
        now[0] += 0.02
        for _ in range(5):
            guarded.get_many([b"k"])
        assert broken.calls == before + 1, "one attempt after each pause, which doubles"
    broken.fails, broken.held = False, {b"k": b"v"}
    now[0] += 31
    assert guarded.get_many([b"k"]) == {b"k": b"v"}
    assert not guarded.reads.is_open
    guarded.close()


def test_a_slow_level_counts_as_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_guard, "SLOW_SECONDS", -1.0)
    broken = Broken()
    broken.fails = False
    guarded = GuardedKv(broken, CacheCounts("kv"))
    for _ in range(10):
        guarded.get_many([b"k"])
    assert broken.calls == kv_guard.FAILURES
    guarded.close()


def test_a_level_that_was_waited_for_in_vain_is_left_alone_at_once() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    assert breaker.trip()
    assert not breaker.allow()
    now[0] += 1.1
    assert breaker.allow()
    assert not breaker.trip()
    now[0] += 1.1
    assert not breaker.allow(), "the pause has doubled"


def test_writes_that_fail_do_not_stop_reads() -> None:
    """A full disk."""
    broken = Broken()
    guarded = GuardedKv(broken, CacheCounts("kv"))
    for _ in range(10):
        guarded.put_later(lambda: {b"k": b"v"})
    guarded.flush()
    assert broken.calls == guarded.counts["errors"] == kv_guard.FAILURES
    assert guarded.counts["dropped"] == 10 - kv_guard.FAILURES
    broken.fails, broken.held = False, {b"k": b"v"}
    assert guarded.get_many([b"k"]) == {b"k": b"v"}
    guarded.close()


def test_writes_beyond_the_queue_are_dropped_and_none_after_close() -> None:
    broken, gate = Broken(), threading.Event()
    broken.fails = False
    guarded = GuardedKv(broken, CacheCounts("kv"))
    guarded.put_later(lambda: {b"first": b""} if gate.wait(10) else {})
    for i in range(kv_guard.MAX_WAITING + 5):
        guarded.put_later(lambda i=i: {str(i).encode(): b""})
    gate.set()
    guarded.close()
    assert len(broken.held) == kv_guard.MAX_WAITING
    assert guarded.counts["dropped"] == 6
    guarded.put_later(dict)
    assert guarded.counts["dropped"] == 7


def test_a_redis_that_is_stopped_and_started_is_used_again(redis_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_guard, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(kv_guard, "MAX_PAUSE_SECONDS", 0.1)
    guarded = GuardedKv(open_kv(redis_server.url), CacheCounts("kv"))
    guarded.put_later(lambda: {b"k": b"v"})
    guarded.flush()
    assert guarded.get_many([b"k"]) == {b"k": b"v"}
    redis_server.stop()
    for _ in range(5):
        assert guarded.get_many([b"k"]) == {}
    assert guarded.reads.is_open
    redis_server.start()
    deadline = time.monotonic() + 20
    while not guarded.get_many([b"k"]):
        assert time.monotonic() < deadline
        guarded.put_later(lambda: {b"k": b"v"})
        time.sleep(0.02)
    guarded.close()
