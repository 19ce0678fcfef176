"""man/knot-service.5, WARDENS, says what wardens do: routes, headers, caps, the record and the metrics."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from starlette.routing import Route

from knotctl.core.knot.reader import open_knot
from knotctl.core.source import kv, kv_guard
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.opening import open_source
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.tensor import layer_policy, records
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.rows import embedding_table, knot_rows
from knotctl.core.tensor.warden_rows import ROWS_AT_ONCE
from knotctl.services import warden
from knotctl.services.cache_metrics import CacheCollector
from knotctl.services.warden import LayerWarden, RowWarden, Warden

PAGE = (Path(__file__).parents[2] / "man" / "knot-service.5").read_text()
TEXT = PAGE.split(".SH WARDENS\n")[1].split("\n.SH ")[0]
PLAIN = re.sub(r"\\-", "-", " ".join(re.sub(r"^\.\w+ ?", "", line) for line in TEXT.splitlines()))


def test_routes(tiny_knot: Path) -> None:
    with open_knot(str(tiny_knot)) as knot:
        rows = RowLevels(knot.id, embedding_table(knot), knot_rows(knot))
        nodes: list[Warden] = [
            LayerWarden(knot, LayerSpan(0, 1), 1 << 20, lambda: knot), RowWarden(knot, VocabSpan(0, 9), rows)
        ]  # fmt: skip
        common = {"/livez", "/readyz", "/health", "/metrics"}
        made = {
            (method, r.path)
            for node in nodes
            for r in node.routes
            if isinstance(r, Route) and r.path not in common
            for method in (r.methods or set()) - {"HEAD"}
        }
        assert set(re.findall(r"^(GET|POST|DELETE) (\S+)\t", TEXT, re.M)) == made
        for node in nodes:
            assert node.role in PLAIN
            for end in ("Start", "End"):
                assert f"X-{node.noun.title()}-{end}" in PLAIN


def test_caps() -> None:
    assert f"at most {warden.BATCH_NAMES} tensors" in PLAIN
    assert f"at most {ROWS_AT_ONCE} rows" in PLAIN
    assert f"below {layer_policy.SMALL_BYTES >> 20} MiB" in PLAIN
    assert f"for {kv.TTL_SECONDS // 3600} hours" in PLAIN
    assert kv_guard.FAILURES == 3
    assert (
        f"for {kv_guard.FIRST_PAUSE_SECONDS:g} second, then for twice as long, up to {kv_guard.MAX_PAUSE_SECONDS:g}"
        in PLAIN
    )


def test_the_record_is_laid_out_as_the_page_has_it() -> None:
    rows = [r.split("\t") for r in re.findall(r"^\d+\t.*$", TEXT, re.M)]
    offsets, sizes = [int(r[0]) for r in rows], [int(r[1]) for r in rows if r[1]]
    assert offsets == [sum(sizes[:i]) for i in range(len(rows))]
    assert offsets[-1] == records.RECORD_BYTES
    record = records.encode_record(records.RecordKind.FLOATS, bytes(range(16)), 7, b"data")
    assert record[:4] == rows[0][2].strip('"').encode() == b"KREC"
    assert (record[4], record[5], record[8:24], record[24], record[32]) == (1, 1, bytes(range(16)), 7, 4)


def test_metrics(tiny_knot: Path) -> None:
    registry, source = CollectorRegistry(), CountedSource(open_source(str(tiny_knot)))
    registry.register(CacheCollector(lambda: [CacheCounts("ram")], lambda: source))
    made = re.findall(r"^# TYPE (\S+) ", generate_latest(registry).decode(), re.M)
    source.close()
    assert re.findall(r"^\.B (knot_\w+)$", TEXT, re.M) == made
    for tier in ("ram", "kv", "layers", "warden"):
        assert tier in PLAIN
