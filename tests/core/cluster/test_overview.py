"""What is shown of a fleet: the nodes as they say themselves, and those that are silent or under quarantine as such."""

from __future__ import annotations

from typing import Any

import pytest
from test_fleet import World, world

from knotctl.core.cluster.figures import figures_of
from knotctl.core.cluster.fleet import Beat
from knotctl.core.cluster.overview import SECTIONS, fleet_sections
from knotctl.core.errors import FormatError
from knotctl.core.spans import LayerSpan

__all__ = ["world"]
LEVEL = {"tier": "ram", "hits": 3, "misses": 1, "poisoned": 0, "evictions": 0, "errors": 0, "dropped": 0, "bytes": 64}
TOLD = {"weight_bytes": 150, "peak_weight_bytes": 180, "kv_bytes": 7, "caches": [LEVEL]}


def nodes(world: World) -> dict[str, dict[str, Any]]:
    return {n["node_id"]: n for n in fleet_sections(world.fleet)["nodes"]}


def test_what_nodes_say_they_hold_is_shown_and_cache_levels_are_added_up(world: World) -> None:
    for name in ("a", "b"):
        world.join(name, 2, held=(LayerSpan(0, 2),) if name == "a" else (LayerSpan(2, 4),))
        held = world.fleet.controller.books.held[name]
        world.fleet.heartbeat(name, Beat("boot", tuple(held), {}, figures_of(TOLD)))
    found = fleet_sections(world.fleet)
    assert set(found) == set(SECTIONS)
    assert [n["weight_bytes"] for n in found["nodes"]] == [150, 150]
    assert found["caches"] == [LEVEL | {"hits": 6, "misses": 2, "bytes": 128}]


def test_a_node_is_silent_before_it_has_left_and_quarantined_when_it_answered_wrongly(world: World) -> None:
    world.join("a", 4, held=(LayerSpan(0, 4),))
    world.join("b", 4, held=(LayerSpan(0, 4),))
    assert {n["state"] for n in nodes(world).values()} == {"serving"}
    world.clock.now += 5
    world.beat("b", LayerSpan(0, 4))
    assert {i: n["state"] for i, n in nodes(world).items()} == {"a": "silent", "b": "serving"}
    world.fleet.quarantine("b", "wrong-answer")
    assert nodes(world)["b"]["state"] == "quarantined"
    assert nodes(world)["b"]["reason"] == "wrong-answer"
    assert nodes(world)["b"]["spans"] == []
    world.clock.now += 8
    world.fleet.expire()
    assert set(nodes(world)) == {"b"}


def test_a_node_without_room_for_a_layer_is_shown_with_the_reason(world: World) -> None:
    world.join("small", 0)
    assert nodes(world)["small"]["reason"] == "no room for a layer"
    assert nodes(world)["small"]["state"] == "idle"


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_bytes": -1}, {"kv_bytes": 1.5}, {"peak_weight_bytes": None}, {"caches": [LEVEL] * 9},
        {"caches": [LEVEL | {"tier": "\x1b[2J"}]}, {"caches": [{"tier": "ram"}]}, {"caches": {}},
    ],
    ids=str,
)  # fmt: skip
def test_figures_are_checked_whole(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as refused:
        figures_of(TOLD | wrong)
    assert refused.value.code == "bad-figures"
