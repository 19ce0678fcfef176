"""Wardens on real sockets: right bytes, only ever of the model asked for; clients that go on whatever a warden does."""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from knotctl.core.errors import SourceError, UsageError, WrongIdentity
from knotctl.core.knot.layout import DIGEST_CHUNK
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.embed import Shard, token_frame
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.kv import open_kv
from knotctl.core.source.opening import open_source
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.tensor import warden_source
from knotctl.core.tensor.open_rows import open_rows
from knotctl.core.tensor.records import RecordKind, encode_record, open_record, split_records
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.rows import embedding_table, knot_rows
from knotctl.core.tensor.warden_source import behind_warden
from knotctl.core.wire.merge import merge_partials
from knotctl.services.edge import EdgeConfig
from knotctl.services.keys import ApiKeys
from knotctl.services.warden import LayerWarden, RowWarden

TOKEN = "cluster-0123456789"
ROWS = [3, 17, 18, 200, 5]
# One for all: making a client reads the system's certificates.
HTTP = httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=0))


def counted(path: Path) -> Knot:
    return open_knot(CountedSource(open_source(str(path))))


class Started:
    """A warden of each kind over the tiny knot, on a port of its own."""

    def __init__(self, serve_app: Callable[..., Any], path: Path, kv: Path) -> None:
        self.path, self.kv = path, kv
        self._serve = serve_app
        self._stack = ExitStack()

    def layers(self, budget: int = 1 << 30, span: LayerSpan | None = None, **config: Any) -> tuple[LayerWarden, Any]:
        knot = counted(self.path)
        span = span or LayerSpan(0, knot.header.config.n_layers)
        return self._run(LayerWarden(knot, span, budget, lambda: counted(self.path)), **config)

    def rows(self, span: VocabSpan | None = None, **config: Any) -> tuple[RowWarden, Any]:
        knot = self._stack.enter_context(counted(self.path))
        levels = RowLevels(knot.id, embedding_table(knot), knot_rows(knot), kv=open_kv(str(self.kv)))
        span = span or VocabSpan(0, knot.header.config.vocab_size)
        return self._run(RowWarden(knot, span, levels), **config)

    def knot(self) -> Knot:
        return self._stack.enter_context(counted(self.path))

    def close(self) -> None:
        self._stack.close()

    def _run(self, node: Any, **config: Any) -> tuple[Any, Any]:
        server = self._stack.enter_context(self._serve(node.app(EdgeConfig(**config)), on_drain=node.drain))
        deadline = time.monotonic() + 10
        while HTTP.get(f"{server.url}/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return node, server


@pytest.fixture
def start(serve_app: Callable[..., Any], tiny_knot: Path, tmp_path: Path) -> Iterator[Started]:
    started = Started(serve_app, tiny_knot, tmp_path / "rows.db")
    yield started
    started.close()


def headers(node: LayerWarden | RowWarden) -> dict[str, str]:
    noun = "Layer" if isinstance(node, LayerWarden) else "Vocab"
    return {
        "X-Knot-Id": node.knot.id, f"X-{noun}-Start": str(node.part.start), f"X-{noun}-End": str(node.part.end)
    }  # fmt: skip


def metric(server: Any, name: str, tier: str = "") -> float:
    text = HTTP.get(f"{server.url}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("tier", "") == tier:
                return sample.value
    raise AssertionError(f"{name}: not in /metrics")


def reads(knot: Knot) -> int:
    source: Any = knot.source
    return int(source.bytes)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


# ---- the layer warden's endpoints


def test_a_tensor_is_the_knot_s_and_carries_its_digest(start: Started) -> None:
    node, server = start.layers()
    knot = start.knot()
    for entry in (knot.entry("blk_1_ffn_up_weight"), knot.entry("output_norm_weight")):
        reply = HTTP.get(f"{server.url}/tensors/{entry.name}", headers=headers(node))
        assert reply.status_code == 200
        assert reply.content == knot.read(entry.name)
        digest = base64.b64encode(hashlib.sha256(reply.content).digest()).decode()
        assert reply.headers["content-digest"] == f"sha-256=:{digest}:"
        part = HTTP.get(f"{server.url}/tensors/{entry.name}", headers={**headers(node), "Range": "bytes=3-9"})
        assert (part.status_code, part.content) == (206, reply.content[3:10])
        assert part.headers["content-range"] == f"bytes 3-9/{entry.length}"


def test_a_batch_is_records_of_the_tensors(start: Started) -> None:
    node, server = start.layers()
    knot = start.knot()
    names = ["blk_0_attn_q_weight", "blk_2_ffn_down_weight", "output_norm_weight"]
    reply = HTTP.post(f"{server.url}/tensors", json={"names": names}, headers=headers(node))
    entries = [knot.entry(name) for name in names]
    for entry, (kind, index, record) in zip(entries, split_records(reply.content, 3), strict=True):
        data = open_record(record, RecordKind.STORED, bytes.fromhex(knot.id), entry.offset, entry.length)
        assert (kind, index, data) == (RecordKind.STORED, entry.offset, knot.read(entry.name))


def test_what_is_held_is_read_once_and_the_rest_passes_through(start: Started) -> None:
    knot = start.knot()
    total = sum(e.length for e in knot.header.tensors if e.name.startswith("blk_"))
    node, server = start.layers(budget=total // 2)
    names = [e.name for e in knot.header.tensors if e.name.startswith("blk_")]

    def sweep() -> int:
        before = reads(node.knot)
        for name in names:
            reply = HTTP.get(f"{server.url}/tensors/{name}", headers=headers(node))
            assert reply.content == knot.read(name)
        return reads(node.knot) - before

    sweep()
    held = {name for _, held in node.cache.held for name in held}
    streamed = sum(knot.entry(n).length for n in names if n not in held)
    assert 0 < streamed < total
    for _ in range(3):
        assert sweep() == streamed, "a cyclic sweep hits what is held, every time"
    assert metric(server, "knot_cache_bytes", "layers") <= total // 2


@pytest.mark.parametrize("path", ["/tensors/blk_0_ffn_up_weight", "/segments", "/segments/blk_0_ffn_up_weight"])
def test_a_request_for_another_model_or_span_is_a_conflict(start: Started, path: str) -> None:
    node, server = start.layers()
    right = headers(node)
    assert HTTP.get(server.url + path, headers=right).status_code == 200
    for name, wrong in (("X-Knot-Id", "00" * 16), ("X-Layer-Start", "1"), ("X-Layer-End", "2")):
        reply = HTTP.get(server.url + path, headers={**right, name: wrong})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "wrong-identity")
        left_out = {k: v for k, v in right.items() if k != name}
        reply = HTTP.get(server.url + path, headers=left_out)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "missing-identity")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/tensors/no_such", None, 400, "not-found"),
        ("GET", "/tensors/knot_tokenizer", None, 400, "not-found"),
        ("POST", "/tensors", b"[]", 400, "bad-json"),
        ("POST", "/tensors", b'{"names": [1]}', 400, "bad-request"),
        ("POST", "/tensors", b'{"names": ["no_such"]}', 400, "not-found"),
        ("POST", "/tensors", json.dumps({"names": ["output_norm_weight"] * 300}).encode(), 413, "too-large"),
        ("POST", "/configure", b'{"knotId": "x", "layerStart": true, "layerEnd": 2}', 400, "bad-request"),
        ("POST", "/configure", b'{"knotId": "x", "layerStart": 0, "layerEnd": 2}', 409, "wrong-identity"),
        ("POST", "/configure", b'{"knotId": "x", "layerStart": 2, "layerEnd": 0}', 400, "bad-span"),
        ("POST", "/invalidate/no_such", b"", 400, "not-found"),
        ("DELETE", "/tensors/output_norm_weight", None, 405, "method-not-allowed"),
    ],
)
def test_bad_requests_are_named(
    start: Started, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    node, server = start.layers()
    reply = HTTP.request(method, server.url + path, content=body, headers=headers(node))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "asked", ["bytes=0-", "bytes=5-2", "bytes=-5", "bytes=0-99999999", "chars=0-1", "bytes=0-1,3-4"]
)
def test_a_range_that_is_not_within_the_tensor_is_refused(start: Started, asked: str) -> None:
    node, server = start.layers()
    reply = HTTP.get(f"{server.url}/tensors/output_norm_weight", headers={**headers(node), "Range": asked})
    assert reply.status_code == 416


def test_a_token_is_asked_for(start: Started) -> None:
    node, server = start.layers(keys=ApiKeys([TOKEN]))
    url = f"{server.url}/tensors/output_norm_weight"
    assert HTTP.get(url, headers=headers(node)).status_code == 401
    assert HTTP.get(url, headers={**headers(node), "Authorization": f"Bearer {TOKEN}"}).status_code == 200
    with behind_warden(start.knot(), server.url, LayerSpan(0, 1), token=TOKEN) as knot:
        knot.read("output_norm_weight")
        assert counts(knot)["hits"] == 1


def test_configure_moves_the_warden_and_the_old_identity_is_gone(start: Started) -> None:
    node, server = start.layers()
    before = headers(node)
    wanted = {"knotId": node.knot.id, "layerStart": 1, "layerEnd": 2, "budgetBytes": 4096}
    reply = HTTP.post(f"{server.url}/configure", json=wanted)
    assert reply.json() == {"identity": f"{node.knot.id}|1-2", "budgetBytes": 4096}
    assert HTTP.get(f"{server.url}/segments", headers=before).status_code == 409
    assert HTTP.get(f"{server.url}/tensors/blk_1_ffn_up_weight", headers=headers(node)).status_code == 200
    assert HTTP.get(f"{server.url}/tensors/blk_0_ffn_up_weight", headers=headers(node)).status_code == 400
    for wrong in ({"layerEnd": 99}, {"knotKey": "other.knot"}):
        assert HTTP.post(f"{server.url}/configure", json=wanted | wrong).status_code in (409, 501)
    assert node.cache.identity == f"{node.knot.id}|1-2"


# ---- a station's source over it


def counts(knot: Knot) -> Any:
    source: Any = knot.source
    return source.counts


def whole(knot: Knot) -> bytes:
    """The layers' bytes, in pieces that cut tensors."""
    first, last = knot.range_of("blk_0_attn_norm_weight").start, knot.source.size
    step = 70_001
    return b"".join(knot.source.read(at, min(step, last - at)) for at in range(first, last, step))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("budget", [1 << 30, 30_000, 0])
def test_a_source_over_a_warden_gives_the_knot_s_bytes(
    start: Started, monkeypatch: pytest.MonkeyPatch, mapped: bool, budget: int
) -> None:
    if not mapped:
        monkeypatch.setattr(warden_source, "map_segment", lambda *_: None)
    _, server = start.layers(budget=budget)
    plain = start.knot()
    span = LayerSpan(0, plain.header.config.n_layers)
    with behind_warden(start.knot(), server.url, span) as knot:
        assert whole(knot) == whole(plain)
        assert (counts(knot)["hits"] > 0) is (budget > 0)
        assert counts(knot)["misses"] == counts(knot)["poisoned"] == 0
        out = bytearray(7)
        at = knot.range_of("blk_1_ffn_up_weight").start
        knot.source.read_into(at, memoryview(out))
        assert out == plain.source.read(at, 7)
        with pytest.raises(SourceError) as e:
            knot.source.read(knot.source.size, 1)
        assert e.value.code == "out-of-range"


def test_a_warm_warden_spares_the_store(start: Started) -> None:
    node, server = start.layers()
    span = LayerSpan(0, node.knot.header.config.n_layers)
    for n in range(3):
        inner = start.knot()
        before = reads(node.knot)
        with behind_warden(inner, server.url, span) as knot:
            began = reads(inner)
            for name in (n for _, names in node.cache.held for n in names):
                knot.read(name)
            assert reads(inner) == began, "nothing from the client's own store"
        if n:
            assert reads(node.knot) == before, "nor, once warm, from the warden's"


def test_a_view_is_the_warden_s_memory_and_outlives_it(start: Started) -> None:
    knot = start.knot()
    node, server = start.layers()
    name = "blk_1_ffn_up_weight"
    span = knot.range_of(name)
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as behind:
        source: Any = behind.source
        view = source.view(span.start, len(span))
        assert view is not None
        assert view.readonly
        assert source.view(0, 10) is None
    node.cache.invalidate(name)
    server.server.stop()
    assert bytes(view) == knot.read(name)


@pytest.mark.parametrize("budget", [1 << 30, 60_000])
def test_a_station_computes_in_the_warden_s_memory(start: Started, budget: int) -> None:
    _, server = start.layers(budget=budget)
    plain = start.knot()
    span = LayerSpan(0, plain.header.config.n_layers)
    spec = StationSpec(span, kv_tokens=64, batch_tokens=8)
    ids = token_frame(plain.id, [5, 17, 200], 0, bytes(16))
    hidden = replace(merge_partials([Shard(plain, VocabSpan(0, plain.header.config.vocab_size)).embed(ids)]), meta={})
    expected = Station(plain, spec).forward(hidden)
    inner = start.knot()
    with behind_warden(inner, server.url, span) as knot:
        station = Station(knot, spec)
        before = reads(inner)
        for _ in range(2):
            assert station.forward(hidden).payload.tobytes() == expected.payload.tobytes()
        assert counts(knot)["hits"] > 0
        if budget == 1 << 30:
            assert reads(inner) == before
            assert station.weights.ledger.peak == 0, "no weights of its own"
        else:
            assert 0 < station.weights.ledger.peak <= station.plan.passing_bytes


def test_the_warden_s_memory_cannot_be_written_or_cut(start: Started) -> None:
    """What is mapped elsewhere would change under its readers, or kill them with SIGBUS."""
    node, server = start.layers()
    reply = HTTP.get(f"{server.url}/segments/blk_1_ffn_up_weight", headers=headers(node)).json()
    with pytest.raises(OSError), open(reply["name"], "r+b") as f:  # noqa: PTH123
        f.truncate(1)
    with pytest.raises(OSError):
        fd = os.open(reply["name"], os.O_RDWR)
        try:
            os.write(fd, b"x")
        finally:
            os.close(fd)


def test_threads_share_a_source(start: Started) -> None:
    _, server = start.layers()
    plain = whole(start.knot())
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as knot, ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: whole(knot), range(6))) == {plain}


@pytest.mark.parametrize("mapped", [True, False])
def test_a_poisoned_tensor_is_rejected_forgotten_and_right_the_next_time(
    start: Started, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if not mapped:
        monkeypatch.setattr(warden_source, "map_segment", lambda *_: None)
    node, server = start.layers()
    name = "blk_1_ffn_up_weight"
    expected = start.knot().read(name)
    poison(node, name)
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as knot:
        assert knot.read(name) == expected
        assert (counts(knot)["poisoned"], counts(knot)["hits"]) == (1, 0)
        wait_for(lambda: metric(server, "knot_cache_poisoned_total", "layers") == 1)
        assert knot.read(name) == expected
        assert (counts(knot)["poisoned"], counts(knot)["hits"]) == (1, 1), "the second read is a hit"


def test_a_flipped_bit_in_a_part_of_a_tensor_is_found_by_the_chunk_digests(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warden_source, "map_segment", lambda *_: None)
    node, server = start.layers()
    entry = node.knot.entry("blk_1_attn_v_weight")
    assert entry.length >= 2 * DIGEST_CHUNK
    expected = start.knot().read(entry.name)
    poison(node, entry.name)
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as knot:
        at = knot.range_of(entry.name).start
        assert knot.source.read(at + 1, entry.length - 1) == expected[1:]
        assert counts(knot)["poisoned"] == 1


def poison(node: LayerWarden, name: str) -> None:
    """Flip a bit in the memory of the warden, as bad hardware would: its segment is made anew from wrong bytes."""
    from knotctl.core.tensor.segments import Segment

    place = node.cache._places[name]
    data = bytearray(node.knot.source.read(place.range.start, len(place.range)))
    at = node.knot.range_of(name).start - place.range.start
    data[at + node.knot.entry(name).length // 2] ^= 4

    def fill(out: memoryview) -> None:
        out[:] = data

    place.segment = Segment(place.range, fill)


def test_nothing_is_left_open_by_much_use(start: Started) -> None:
    node, server = start.layers()
    knot = start.knot()
    names = [name for _, names in node.cache.held for name in names][:12]

    def use() -> None:
        with behind_warden(counted(start.path), server.url, LayerSpan(0, 2)) as behind:
            for name in names:
                assert behind.read(name) == knot.read(name)
        for name in names:
            HTTP.post(f"{server.url}/invalidate/{name}", headers=headers(node))

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        use()
    gc.collect()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208
    assert node.cache.counts.bytes == 0


@pytest.mark.model
def test_a_real_model_s_station_holds_no_weights_beside_its_warden(
    serve_app: Callable[..., Any], knot_of: Callable[[str], Path]
) -> None:
    path = knot_of("smollm2")
    with ExitStack() as stack:
        plain, own = (stack.enter_context(counted(path)) for _ in range(2))
        span = LayerSpan(0, plain.header.config.n_layers)
        node = LayerWarden(own, span, 1 << 30, lambda: counted(path))
        server = stack.enter_context(serve_app(node.app(EdgeConfig())))
        behind = stack.enter_context(behind_warden(counted(path), server.url, span))
        shard = Shard(plain, VocabSpan(0, plain.header.config.vocab_size))
        spec = StationSpec(span, kv_tokens=64, batch_tokens=8)
        stations = [Station(k, spec) for k in (plain, behind)]
        for position, token in enumerate([504, 3575, 282, 4649]):
            ids = token_frame(plain.id, [token], position, bytes(16))
            hidden = replace(merge_partials([shard.embed(ids)]), meta={})
            first, second = (s.forward(hidden).payload.tobytes() for s in stations)
            assert first == second
        assert stations[0].weights.ledger.peak > 0
        assert stations[1].weights.ledger.peak == 0


def test_a_warden_that_is_always_wrong_is_not_asked_for_ever(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    node, server = start.layers()
    name = "blk_1_ffn_up_weight"
    expected = start.knot().read(name)
    monkeypatch.setattr(node.cache, "invalidate", lambda _: False)
    poison(node, name)
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as knot:
        for _ in range(6):
            assert knot.read(name) == expected
        assert counts(knot)["poisoned"] == 3


def test_a_store_that_gives_wrong_bytes_is_not_kept(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    node, server = start.layers()

    def wrong(offset: int, out: memoryview) -> None:
        out[:] = bytes(len(out))

    with monkeypatch.context() as m:
        m.setattr(node.knot.source, "read_into", wrong)
        reply = HTTP.get(f"{server.url}/tensors/blk_1_ffn_up_weight", headers=headers(node))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "digest-mismatch")
    reply = HTTP.get(f"{server.url}/tensors/blk_1_ffn_up_weight", headers=headers(node))
    assert reply.content == start.knot().read("blk_1_ffn_up_weight")


def test_a_warden_of_another_model_is_an_error_at_the_start(
    start: Started, tiny: Callable[[str], Path], serve_app: Callable[..., Any]
) -> None:
    other = counted(tiny("tiny-llama"))
    node = LayerWarden(other, LayerSpan(0, 1), 1 << 20, lambda: other)
    with serve_app(node.app(EdgeConfig())) as server, pytest.raises(WrongIdentity, match=other.id):
        behind_warden(start.knot(), server.url, LayerSpan(0, 1))
    _, server = start.layers(span=LayerSpan(0, 1))
    with pytest.raises(WrongIdentity, match="0:2"):
        behind_warden(start.knot(), server.url, LayerSpan(0, 2))
    _, rows = start.rows()
    with pytest.raises(UsageError, match="row-warden"):
        behind_warden(start.knot(), rows.url, LayerSpan(0, 1))


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://x", "http://[", "", "http://h/path"])
def test_a_url_that_is_none_is_refused(start: Started, url: str) -> None:
    with pytest.raises(UsageError) as e:
        behind_warden(start.knot(), url, LayerSpan(0, 1))
    assert e.value.code == "bad-url"


def test_a_station_goes_on_when_its_warden_dies_or_never_was(start: Started) -> None:
    plain = whole(start.knot())
    with behind_warden(start.knot(), "http://127.0.0.1:1", LayerSpan(0, 2)) as knot:
        assert whole(knot) == plain
    _, server = start.layers()
    with behind_warden(counted(start.path), server.url, LayerSpan(0, 2)) as knot:
        knot.read("blk_0_ffn_up_weight")
        start.close()
        assert whole(knot) == plain
        assert counts(knot)["misses"] > 0


def test_a_warden_that_became_another_model_s_is_left_out(start: Started) -> None:
    node, server = start.layers()
    plain = whole(start.knot())
    with behind_warden(start.knot(), server.url, LayerSpan(0, 2)) as knot:
        node.knot.header = type(node.knot.header)(**{
            f: getattr(node.knot.header, f) for f in node.knot.header.__slots__
        } | {"knot_id": "ff" * 16})  # fmt: skip
        assert whole(knot) == plain
        assert counts(knot)["hits"] == 0


# ---- rows


def test_rows_come_as_records_and_warm_ones_read_nothing(start: Started) -> None:
    node, server = start.rows()
    table = embedding_table(node.knot)

    def ask() -> bytes:
        return HTTP.post(f"{server.url}/tensors", json={"rows": ROWS}, headers=headers(node)).content

    for kind, row, record in split_records(ask(), 5):
        data = open_record(record, kind, bytes.fromhex(node.knot.id), row, table.row_bytes)
        at = table.row_range(row, row + 1)
        assert data == node.knot.source.read(at.start, len(at))
    before = reads(node.knot)
    ask()
    assert reads(node.knot) == before
    assert metric(server, "knot_cache_hits_total", "ram") >= len(ROWS)
    assert metric(server, "knot_store_read_bytes_total") == before


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "bad-request"),
        ({"rows": "all"}, 400, "bad-request"),
        ({"rows": [True]}, 400, "bad-request"),
        ({"rows": [-1]}, 400, "not-owned"),
        ({"rows": [1 << 40]}, 400, "not-owned"),
        ({"rows": [0] * 4097}, 413, "too-large"),
    ],
)
def test_rows_that_nobody_owns_are_refused(start: Started, body: Any, status: int, code: str) -> None:
    node, server = start.rows()
    reply = HTTP.post(f"{server.url}/tensors", json=body, headers=headers(node))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    wrong = {**headers(node), "X-Vocab-End": "7"}
    assert HTTP.post(f"{server.url}/tensors", json={"rows": [0]}, headers=wrong).status_code == 409


def test_shards_over_a_warden_embed_as_without(start: Started) -> None:
    node, server = start.rows()
    knot = start.knot()
    vocab = knot.header.config.vocab_size
    for i in range(4):
        span = VocabSpan.shard(i, 4, vocab)
        ids = [span.start, span.end - 1, span.start, span.start + 3]
        shard = Shard(knot, span, open_rows(knot, span, warden=server.url))
        assert shard.rows(ids).tobytes() == Shard(knot, span).rows(ids).tobytes()
        shard.close()
    assert node.rows.ram.counts["misses"] > 0


def test_a_warden_that_lost_its_memory_answers_from_the_key_value_level(start: Started) -> None:
    knot = start.knot()
    span = VocabSpan(0, 300)
    expected = Shard(knot, span).rows(ROWS).tobytes()
    node, server = start.rows()
    shard = Shard(knot, span, open_rows(knot, span, warden=server.url))
    shard.rows(ROWS)
    shard.close()
    assert node.rows.kv is not None
    node.rows.kv.flush()
    again, server = start.rows()
    before = reads(again.knot)
    shard = Shard(knot, span, open_rows(knot, span, warden=server.url))
    assert shard.rows(ROWS).tobytes() == expected
    shard.close()
    assert again.rows.kv is not None
    assert again.rows.kv.counts["hits"] == len(ROWS) + 1, "and the probe's"
    assert reads(again.knot) == before


@pytest.mark.parametrize("fault", ["flipped", "other-row", "short", "junk", "none"])
def test_a_bad_row_from_a_warden_is_rejected_and_read_from_the_knot(
    start: Started, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    node, server = start.rows()
    knot = start.knot()
    span = VocabSpan(0, 300)
    good = node._records
    table = embedding_table(knot)

    def bad(rows: list[int]) -> bytes:
        records = [r for _, _, r in split_records(good(rows), len(rows))]
        if fault == "flipped":
            records[0] = records[0][:-1] + bytes([records[0][-1] ^ 1])
        elif fault == "other-row":
            wrong = knot_rows(knot).take([9])[9].data
            records[0] = encode_record(RecordKind.STORED, bytes(16), rows[0], wrong)
        elif fault == "short":
            records[0] = encode_record(RecordKind.STORED, bytes.fromhex(knot.id), rows[0], b"short")
        elif fault == "junk":
            return b"junk"
        else:
            records = records[1:]
        return b"".join(records)

    seen = []
    monkeypatch.setattr(node, "_records", bad)
    monkeypatch.setattr(node.rows, "invalidate", lambda rows=None: seen.append(rows) or 0)
    rows: Any = open_rows(knot, span, warden=server.url)
    shard = Shard(knot, span, rows)
    assert np.array_equal(shard.rows(ROWS), Shard(knot, span).rows(ROWS))
    assert table.rows > 300
    if fault == "junk":
        assert rows.counts[0]["errors"] == 1
    else:
        assert rows.counts[0]["poisoned"] == 1
        wait_for(lambda: bool(seen))
        assert seen == [[sorted(ROWS)[0]]]
    shard.close()


def test_many_clients_at_once(start: Started) -> None:
    node, server = start.rows()
    knot = start.knot()
    span = VocabSpan(0, 300)
    expected = Shard(knot, span).rows(list(range(0, 300, 3))).tobytes()
    barrier = threading.Barrier(8)

    def ask(_: int) -> bytes:
        shard = Shard(knot, span, open_rows(knot, span, warden=server.url))
        barrier.wait(10)
        try:
            return shard.rows(list(range(0, 300, 3))).tobytes()
        finally:
            shard.close()

    before = reads(node.knot)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {expected}
    assert reads(node.knot) - before == 99 * embedding_table(knot).row_bytes, "each row once (the probe had row 0)"


def test_health_tells_whose_warden_it_is(start: Started) -> None:
    node, server = start.rows(span=VocabSpan(0, 100))
    about = HTTP.get(f"{server.url}/health").json()
    assert about["role"] == "row-warden"
    assert about["identity"] == f"{start.path}|0-100"
    assert about["knot_id"] == node.knot.id
    node2, server = start.layers(span=LayerSpan(1, 2))
    about = HTTP.get(f"{server.url}/health").json()
    assert about["identity"] == f"{node2.knot.id}|1-2"
    assert about["budget_bytes"] >= about["held_bytes"] > 0
