"""man/knot-service.5, NODES, against the code: routes, metadata, codes, limits and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.routing import Route
from test_knot_service_page import calls, section

from knotctl.core.engine import hop, mesh, recovery
from knotctl.core.model import shard_head
from knotctl.services import shard, station, station_jobs
from knotctl.services.node_metrics import GAUGES, NodeMetrics

ROOT = Path(__file__).parents[2]
TEXT = section("NODES").replace("\\-", "-")
TABLES = [
    [line.split("\t") for line in body.splitlines()]
    for body in re.findall(r"^\.TS\n.*?\n(.*?)^\.TE", TEXT, re.M | re.S)
]


def test_routes() -> None:
    named = {row[0].split()[1] for row in TABLES[0]}
    made = {args[0] for m in (shard, station) for name, args in calls(Path(m.__file__)) if name == "Route"}
    assert named == made
    assert Route


def test_codes_are_raised_where_the_page_says() -> None:
    files = ["services/station.py", "services/station_jobs.py", "services/shard.py", "core/engine/choose.py"]
    files += ["core/model/station.py", "core/source/http_call.py", "core/engine/hop.py", "core/engine/mesh.py"]
    text = "".join((ROOT / "knotctl" / f).read_text() for f in files)
    for code, *_ in TABLES[1]:
        assert f'"{code}"' in text, code


def test_limits_and_names() -> None:
    assert f"at most {station.MAX_LOGITS} in all" in TEXT
    assert f"1 to {shard_head.MAX_TOP}" in TEXT
    assert f"for {station.SESSION_SECONDS:g} seconds is dropped, or for {station._SHORT_SESSION_SECONDS:g}" in TEXT
    assert hop.FRAME_TYPE in TEXT
    assert hop.FAILED_HEADER in TEXT
    assert hop.PATIENCE_HEADER in TEXT
    words = " ".join(TEXT.split())
    assert f"take {recovery._SLOW_TIMES:g} times the usual and over {recovery._SLOW_SECONDS:g} seconds" in words
    assert f"for {recovery._FIRST_BAN:g} to {recovery._MOST_BAN:g} seconds" in words
    assert f"took over {mesh.SHARD_SECONDS:g} seconds" in words
    assert "up to 64 characters" in TEXT
    assert "<= 64" in Path(station_jobs.__file__).read_text()


def test_metrics() -> None:
    text = NodeMetrics("station", (), lambda: dict.fromkeys(GAUGES, 0.0)).exposition().decode()
    made = {m for m in re.findall(r"^# TYPE (\S+) ", text, re.M) if not m.endswith("_created")}
    elsewhere = {"knot_requests_total", "knot_request_duration_seconds", "knot_build_info"}
    assert set(re.findall(r"^\.B (knot_\w+)$", TEXT, re.M)) == made - elsewhere
