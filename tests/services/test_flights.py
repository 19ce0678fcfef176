"""What is counted of a tracker's streams: states, routes, and waits for tokens."""

from __future__ import annotations

import pytest

from knotctl.services import flights
from knotctl.services.flights import Flights
from knotctl.services.token_metrics import TokenMetrics

ROUTE = [("a", 2), ("b", 3)]


def test_a_stream_is_listed_from_its_begin_to_its_end_with_the_route_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = TokenMetrics()
    flying = Flights("m", metrics)
    flight = flying.begin(7)

    def state() -> str:
        return str(flying.sections()["streams"][0]["state"])

    assert state() == "waiting"
    assert flying.sections()["requests"] == {"running": 0, "waiting": 1, "recoveries": 0}
    flight.passes(ROUTE)
    assert state() == "prompt"
    flight.generated(1)
    flight.generated(3)
    found = flying.sections()
    assert state() == "generating"
    assert found["streams"][0] | {"seconds": 0, "tokens_per_s": 0} == {
        "id": flight.id, "state": "generating", "model": "m", "route": ["a", "b"], "prompt_tokens": 7,
        "generated_tokens": 4, "tokens_per_s": 0, "seconds": 0,
    }  # fmt: skip
    stages = [
        {"node_id": "a", "start_layer": 0, "end_layer": 2},
        {"node_id": "b", "start_layer": 2, "end_layer": 5},
    ]
    assert found["routes"] == [{"stages": stages, "streams": 1}]
    assert {k: v["count"] for k, v in metrics.totals()["latency"].items()} == {"first_token": 1, "next_token": 3}
    monkeypatch.setattr(flights, "_STALLED_SECONDS", 0.0)
    assert state() == "stalled"
    flying.end(flight)
    assert flying.sections()["streams"] == []


def test_another_route_is_a_recovery_and_the_same_one_again_is_none() -> None:
    flying = Flights("m", TokenMetrics())
    flight = flying.begin(1)
    flight.passes(ROUTE)
    flight.passes(ROUTE)
    assert flying.sections()["requests"]["recoveries"] == 0
    flight.passes(())
    assert flying.sections()["routes"] == []
    flight.passes([("a", 2), ("c", 3)])
    flying.end(flight)
    assert flying.sections()["requests"] == {"running": 0, "waiting": 0, "recoveries": 1}
