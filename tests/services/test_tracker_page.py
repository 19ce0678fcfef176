"""man/knot-service.5, TRACKER and WORKERS, says what the services do: routes, codes, numbers and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from test_knot_service_page import calls, section

from knotctl.core.cluster.registry import LEASE_S
from knotctl.services import dispatch, gateway, head_work, relay, speed_probe, tracker, worker
from knotctl.services.tracker_metrics import GAUGES, TrackerMetrics

SERVICES = Path(tracker.__file__).parent
TRACKER = section("TRACKER").replace("\\-", "-")
WORKERS = section("WORKERS").replace("\\-", "-")


def routes(text: str) -> set[str]:
    (body,) = re.findall(r"^\.TS\n.*?\n(.*?)^\.TE", text, re.M | re.S)
    return {line.split("\t")[0].split()[1] for line in body.splitlines()}


def made(*modules: object) -> set[object]:
    return {args[0] for m in modules for name, args in calls(Path(str(m.__file__))) if name == "Route"}  # type: ignore[attr-defined]


def test_routes() -> None:
    assert routes(TRACKER) == made(tracker, gateway)
    assert routes(WORKERS) == made(head_work)


def test_numbers() -> None:
    assert f"within {LEASE_S:g} seconds of its end" in TRACKER
    assert f"for {dispatch._WAIT_SECONDS:g} seconds before it begins" in TRACKER
    assert f"or for {relay.PATIENCE_SECONDS:g} after" in TRACKER
    assert f"with a frame of {speed_probe.PROBE_TOKENS}\ntokens" in TRACKER
    assert f"heard of for {worker._PIN_SECONDS:g} seconds" in TRACKER
    assert relay.MAX_CRASHES == 2  # "two nodes"


def test_codes_are_raised() -> None:
    code = "".join(p.read_text() for p in (*SERVICES.glob("*.py"), *(SERVICES.parent / "core/cluster").glob("*.py")))
    for name in (
        "unknown-node",
        "in-progress",
        "already-served",
        "not-served",
        "operation-mismatch",
        "tracker-decides",
    ):
        assert f'"{name}"' in code
        assert name in TRACKER + WORKERS


def test_metrics() -> None:
    text = TrackerMetrics(lambda: dict.fromkeys(GAUGES, 0.0)).exposition().decode()
    found = {m for m in re.findall(r"^# TYPE (\S+) ", text, re.M) if not m.endswith("_created")}
    elsewhere = {
        "knot_requests_total", "knot_request_duration_seconds", "knot_build_info", "knot_prompt_tokens_total",
        "knot_generation_tokens_total", "knot_time_to_first_token_seconds", "knot_time_per_output_token_seconds",
    }  # fmt: skip
    assert set(re.findall(r"^\.B (knot_\w+)$", TRACKER, re.M)) == found - elsewhere
