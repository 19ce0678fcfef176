"""The eleven traps of seed 000 section 8 (DESIGN section 4): each made again the old way, then shown stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

from knotctl.cli import main
from knotctl.core.engine.mesh import Mesh
from knotctl.core.engine.recovery import Replicas
from knotctl.core.errors import KnotError, ModelError
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.knot.layout import stale_payload_offset
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.embed import Shard, token_frame
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.qtypes import COMPUTABLE, QTYPES
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.http_call import Peer
from knotctl.core.source.kv import open_kv
from knotctl.core.source.opening import open_source
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.tensor.open_rows import open_rows
from knotctl.core.tensor.records import RecordKind, encode_record
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.rows import embedding_table, knot_rows
from knotctl.core.tensor.warden_source import behind_warden
from knotctl.core.wire.merge import merge_partials

KNOTS = Path(__file__).parents[2] / "fixtures" / "knots"
ROWS = [3, 17, 200]


@pytest.fixture
def path(tiny: Callable[[str], Path]) -> str:
    return str(tiny("tiny"))


@pytest.fixture
def knot(path: str) -> Iterator[Knot]:
    with open_knot(CountedSource(open_source(path))) as opened:
        yield opened


class Warden:
    """`knotctl warden` as a process."""

    def __init__(self, knot: str, *argv: str) -> None:
        command = [sys.executable, "-m", "knotctl", "warden", knot, *argv, "--json", "--until-eof"]
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        m = re.search(r"http://[^\"]+", line)
        assert m, line
        self.url = m[0]
        deadline = time.monotonic() + 20
        while self.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        return next(float(x.rpartition(" ")[2]) for x in self.get("/metrics").text.splitlines() if x.startswith(name))

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        self.popen.communicate(timeout=30)
        return self.popen.returncode


@pytest.fixture
def warden() -> Iterator[Callable[..., Warden]]:
    started: list[Warden] = []

    def start(knot: str, *argv: str) -> Warden:
        started.append(Warden(knot, *argv))
        return started[-1]

    yield start
    for each in started:
        each.popen.kill()
        each.popen.communicate()


def row_levels(knot: Knot, kv: Path) -> RowLevels:
    return RowLevels(knot.id, embedding_table(knot), knot_rows(knot), kv=open_kv(str(kv)))


def test_payload_offset_off_by_one() -> None:
    """An old encoder's knot through the canonical formula: every block is read one byte late, and nothing throws."""
    data = (KNOTS / "stale-layout.knot").read_bytes()
    meta_len = int.from_bytes(data[6:10], "little")
    real, canonical = stale_payload_offset(meta_len), ((10 + meta_len + 3) & ~3) + 1
    assert canonical - (real or 0) == 1
    with pytest.raises(KnotError) as e:
        open_knot(str(KNOTS / "stale-layout.knot"))
    assert e.value.code == "stale-layout"


def test_unknown_qtype_decoded_as_zeros(knot: Knot) -> None:
    """A decoder that knew F32 alone gave zeros for the rest, with a warning in a log."""
    rng = np.random.default_rng(1)
    for name in sorted(COMPUTABLE):
        qtype = QTYPES[name]
        block = rng.integers(1, 60, qtype.block_bytes, np.uint8).tobytes()
        assert np.count_nonzero(decode_rows(qtype, block, qtype.block))
    for name in set(QTYPES) - COMPUTABLE:
        with pytest.raises(ModelError) as e:
            decode_rows(QTYPES[name], bytes(QTYPES[name].block_bytes), QTYPES[name].block)
        assert e.value.code == "unsupported-type"
    assert np.count_nonzero(Shard(knot, VocabSpan(0, 300)).rows(ROWS))


def test_type_against_tensor_type() -> None:
    """A reader of the wrong field saw no type anywhere, and took what it saw for F32."""
    with open_knot(str(KNOTS / "small.knot")) as plain, open_knot(str(KNOTS / "legacy-type-field.knot")) as legacy:
        name = "blk_0_ffn_up_weight"
        assert legacy.entry(name).qtype == plain.entry(name).qtype == QTYPES["Q4_0"]
    with pytest.raises(KnotError) as e:
        open_knot(str(KNOTS / "type-conflict.knot"))
    assert e.value.code == "type-conflict"


def test_cached_rows_of_the_wrong_length(knot: Knot, tmp_path: Path) -> None:
    """A writer with a row size of its own filled the level with short rows, which were served for 24 hours."""
    levels = row_levels(knot, tmp_path / "rows.db")
    assert levels.kv is not None
    wrong = bytes(knot.header.config.hidden_size)  # as many bytes as there should be numbers
    bad = {levels._key(r): encode_record(RecordKind.FLOATS, bytes.fromhex(knot.id), r, wrong) for r in ROWS}
    levels.kv.kv.put_many(bad)
    with pytest.raises(ValueError, match=r"broadcast"):  # the old reader: no check before it is used
        np.zeros((3, knot.header.config.hidden_size), np.float32)[0] = np.frombuffer(wrong, np.float32)
    shard = Shard(knot, VocabSpan(0, 300), levels)
    assert shard.rows(ROWS).tobytes() == Shard(knot, VocabSpan(0, 300)).rows(ROWS).tobytes()
    assert levels.kv.counts["poisoned"] == len(ROWS)
    levels.kv.flush()
    assert not bad.items() & levels.kv.kv.get_many(list(bad)).items()
    shard.close()


LEAVE_AT_ONCE = """
import sys, time, threading
from knotctl.core.knot.reader import open_knot
from knotctl.core.source.kv import open_kv
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.rows import embedding_table, knot_rows
path, db, old = sys.argv[1:]
knot, kv = open_knot(path), open_kv(db)
levels = RowLevels(knot.id, embedding_table(knot), knot_rows(knot), kv=kv)
slow = kv.put_many
kv.put_many = lambda items: (time.sleep(0.5), slow(items))
if old == "old":
    levels.kv.put_later = lambda make: threading.Thread(target=lambda: kv.put_many(make()), daemon=True).start()
levels.take([3, 17, 200])
# the answer is out; nobody closes anything
"""


@pytest.mark.parametrize(("way", "kept"), [("old", 0), ("new", 3)])
def test_cache_writes_orphaned_after_the_response(knot: Knot, path: str, tmp_path: Path, way: str, kept: int) -> None:
    """A write that nothing waits for dies with the process, and the level stays empty for ever."""
    db = tmp_path / "rows.db"
    subprocess.run([sys.executable, "-c", LEAVE_AT_ONCE, path, str(db), way], check=True)
    levels = row_levels(knot, db)
    levels.take(ROWS)
    assert levels.kv is not None
    assert levels.kv.counts["hits"] == kept
    levels.close()


def test_cache_writes_survive_the_end_of_a_warden(knot: Knot, path: str, tmp_path: Path, warden: Any) -> None:
    db = tmp_path / "rows.db"
    process = warden(path, "--rows", ":", "--kv", f"sqlite:///{db}")
    vocab = str(knot.header.config.vocab_size)
    identity = {"X-Knot-Id": knot.id, "X-Vocab-Start": "0", "X-Vocab-End": vocab}
    reply = httpx2.post(f"{process.url}/tensors", json={"rows": ROWS}, headers=identity)
    assert process.end() == 0
    assert reply.status_code == 200
    levels = row_levels(knot, db)
    levels.take(ROWS)
    assert levels.kv is not None
    assert levels.kv.counts["hits"] == len(ROWS)
    levels.close()


def test_one_shard_s_failure_poisons_the_prefill(knot: Knot) -> None:
    """All shards or none: one timeout failed the prompt. And a shard left out made its tokens zero in silence."""
    vocab, ids = knot.header.config.vocab_size, token_frame(knot.id, ROWS, 0, bytes(16))
    spans = [VocabSpan.shard(i, 4, vocab) for i in range(4)]
    right = merge_partials([Shard(knot, span).embed(ids) for span in spans])
    old = sum(Shard(knot, span).embed(ids).payload for span in spans[1:])
    assert not old[0].any(), "the sum of those that answered"
    gone = "http://127.0.0.1:9"
    mesh = Mesh(knot, [(span, Replicas([gone], time.monotonic)) for span in spans], Peer)
    assert mesh.embed(ids, lambda: None).payload.tobytes() == right.payload.tobytes()
    assert mesh.failures != [0] * 4
    mesh.close()


def test_missing_tensor_skipped_in_a_phase(path: str) -> None:
    """A phase loaded without one of its tensors computed on with whatever lay in its place."""
    with open_knot(path) as knot:
        missing = "blk_1_ffn_up_weight"
        del knot._entries[missing]
        with pytest.raises(ModelError, match=r"phase ffn_up of layer 1: tensor blk_1_ffn_up_weight") as e:
            Station(knot, StationSpec(LayerSpan(0, 2), kv_tokens=8, batch_tokens=1))
        assert e.value.code == "missing-tensor"


@pytest.mark.parametrize(("way", "rejections"), [("old", 3), ("new", 1)])
def test_a_bad_warden_entry_served_for_ever(
    path: str, serve_layers: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, way: str, rejections: int
) -> None:
    """A station that only turned to the store left the entry where it was, for the next request, and the next."""
    running = serve_layers(path)
    name = "blk_1_ffn_up_weight"
    with open_knot(path) as plain:
        right = plain.read(name)
    running.poison(name)
    for _ in range(3):
        with behind_warden(open_knot(path), running.url, LayerSpan(0, 2)) as knot:
            source: Any = knot.source
            if way == "old":
                monkeypatch.setattr(source._client, "invalidate", lambda *_: None)
            assert knot.read(name) == right
            running.rejected += source.counts["poisoned"]
    assert running.rejected == rejections


def test_a_warden_bound_to_another_model_s_file(
    tiny: Callable[[str], Path], tmp_path: Path, warden: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file was set by a default that nobody had changed: it served that model's bytes to whoever asked."""
    theirs = warden(str(tiny("tiny-llama")), "--layers", ":")
    mine = tmp_path / "mine.knot"
    mine.write_bytes(tiny("tiny").read_bytes())
    frame = tmp_path / "ids.frame"
    assert main(["shard-embed", str(mine), "--tokens", "1,2", "-o", str(frame)]) == 0
    assert main(["merge", str(frame), "-o", str(frame)]) == 0
    station = ["run-station", str(mine), "--layers", "0:1", "-i", str(frame), "-o", str(tmp_path / "out")]
    assert main([*station, "--warden", theirs.url]) == 5
    assert "expected a warden of knot" in capsys.readouterr().err
    # and a file that is replaced under a running warden
    own = warden(str(mine), "--layers", "0:1")
    other = tmp_path / "other.knot"
    other.write_bytes(tiny("tiny-llama").read_bytes())
    os.replace(other, mine)  # noqa: PTH105
    with open_knot(str(mine)) as knot:
        ask = {"knotId": knot.id, "layerStart": 0, "layerEnd": 1}
        wrong = {"X-Knot-Id": knot.id, "X-Layer-Start": "0", "X-Layer-End": "1"}
        assert own.get("/tensors/blk_0_ffn_up_weight", headers=wrong).status_code == 409
        assert httpx2.post(f"{own.url}/configure", json=ask).status_code == 200
        assert own.get("/tensors/blk_0_ffn_up_weight", headers=wrong).content == knot.read("blk_0_ffn_up_weight")


def test_a_cache_that_is_built_but_never_consulted(knot: Knot, path: str, tmp_path: Path, warden: Any) -> None:
    """The warden stood for weeks beside shards that read the store on every request."""
    process = warden(path, "--rows", ":", "--kv", "none")
    source: Any = knot.source
    span = VocabSpan(0, 300)
    shard = Shard(knot, span, open_rows(knot, span, warden=process.url))
    before, cold = source.reads, 0.0
    for n in range(3):
        shard.rows(ROWS)
        assert process.metric('knot_cache_hits_total{tier="ram"}') == n * len(ROWS)
        cold = cold or process.metric("knot_store_reads_total")
        assert process.metric("knot_store_reads_total") == cold
    assert source.reads == before, "the shard reads nothing itself"
    shard.close()
    # what is behind memory is consulted on a miss in memory, before the store
    levels = row_levels(knot, tmp_path / "rows.db")
    levels.take(ROWS)
    levels.close()
    again, before = row_levels(knot, tmp_path / "rows.db"), source.reads
    again.take(ROWS)
    assert source.reads == before
    again.close()


def test_rows_off_the_256_grid() -> None:
    """A row that ends within a block was cut there: numbers of the next one, without an error."""
    qtype = QTYPES["Q4_K"]
    assert qtype.row_bytes(256 * 14) == 14 * qtype.block_bytes
    assert qtype.row_bytes(3600) is None
    with pytest.raises(KnotError) as e:
        open_knot(str(KNOTS / "off-block-row.knot"))
    assert e.value.code == "off-block-row"


@pytest.fixture
def serve_layers() -> Iterator[Callable[[str], Any]]:
    """`serve_layers(path)` is a layer warden on a socket, in a thread, so that its memory can be spoilt."""
    import threading

    from knotctl.core.tensor.segments import Segment
    from knotctl.services.edge import EdgeConfig
    from knotctl.services.server import Server, bind, url_of
    from knotctl.services.warden import LayerWarden

    running = []

    def start(path: str) -> Any:
        knot = open_knot(path)
        node = LayerWarden(knot, LayerSpan(0, knot.header.config.n_layers), 1 << 30, lambda: open_knot(path))
        listener = bind("127.0.0.1", 0)
        server = Server(node.app(EdgeConfig()))
        thread = threading.Thread(target=server.run_on, args=(listener,))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        running.append((server, thread, listener))

        def poison(name: str) -> None:
            place = node.cache._places[name]
            data = bytearray(knot.source.read(place.range.start, len(place.range)))
            data[knot.range_of(name).start - place.range.start] ^= 1

            def fill(out: memoryview) -> None:
                out[:] = data

            place.segment = Segment(place.range, fill)

        return SimpleNamespace(url=url_of(listener), poison=poison, rejected=0)

    yield start
    for server, thread, listener in running:
        server.stop()
        thread.join(40)
        listener.close()
