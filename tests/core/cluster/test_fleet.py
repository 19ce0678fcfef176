"""The fleet: registry, planner and heartbeats in step, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from knotctl.core.cluster.fleet import Beat, Fleet
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.presets import preset_of
from knotctl.core.cluster.reconcile import Kind, Order
from knotctl.core.cluster.registry import REGISTRY, Lease, Registry
from knotctl.core.cluster.slashing import SpeedSample
from knotctl.core.cluster.store import Database, open_database
from knotctl.core.errors import RequestError
from knotctl.core.spans import LayerSpan

MODEL = preset_of(
    {"model": "m", "n_layers": 4, "bytes_per_layer": {"int8": 100}, "embedding_bytes": 0, "head_bytes": 0}, "m"
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    def __init__(self, database: Database) -> None:
        self.clock = Clock()
        self.registry = Registry(database, "m")
        self.database = database
        self.fleet = self.lead()

    def lead(self) -> Fleet:
        lease = Lease(self.database, "m", "http://t:1", ttl_s=10, clock=self.clock)
        while not lease.tick():
            self.clock.now += 11
        return Fleet(MODEL, Policy(), self.registry, lease, silent_s=12, clock=self.clock)

    def join(self, name: str, layers: int, speed: float = 10.0, held: tuple[LayerSpan, ...] = ()) -> None:
        document: dict[str, Any] = {
            "node_id": name, "vram_bytes": int(100 * layers / 0.8) + 1, "quantizations": ["int8"],
            "benchmark_tokens_per_sec": speed,
        }  # fmt: skip
        self.fleet.register(document, f"http://{name}:1", "boot", held)

    def beat(
        self, name: str, *spans: LayerSpan, answers: dict[int, bool] | None = None, boot: str = "boot"
    ) -> list[Any]:
        return self.fleet.heartbeat(name, Beat(boot, spans, answers or {}))

    def obey(self, name: str, *spans: LayerSpan) -> list[LayerSpan]:
        """Do what a node is told until it is told no more; what it holds then."""
        held = list(spans)
        while told := self.beat(name, *held):
            for d in told:
                held = [*held, d.order.span] if d.order.kind == "LOAD_SHARD" else [s for s in held if s != d.order.span]
            self.beat(name, *held, answers={d.epoch: True for d in told})
        return held

    def rows(self) -> dict[str, tuple[LayerSpan, ...]]:
        return {r.node_id: r.held for r in self.registry.nodes()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_database(str(tmp_path / "fleet.db"), REGISTRY) as database:
        yield World(database)


def test_nodes_are_told_to_cover_the_model_and_what_they_hold_is_written_once_they_say_so(world: World) -> None:
    world.join("a", 2)
    world.join("b", 2)
    (told,) = world.beat("a")
    assert world.rows() == {"a": (), "b": ()}
    world.beat("a", told.order.span, answers={told.epoch: True})
    assert world.rows()["a"] == (told.order.span,)
    world.obey("b")
    assert world.fleet.to_json()["covered"]


def test_every_node_hears_why_it_has_its_layers_or_none(world: World) -> None:
    world.join("a", 4)
    assert "holds all 4 layers" in world.fleet.why("a") or "gap" in world.fleet.why("a")
    world.obey("a")
    world.join("small", 0)
    assert "no layer fits" in world.fleet.why("small")
    assert world.beat("small") == []
    world.fleet.quarantine("a", "wrong-answer")
    assert world.fleet.why("a") == "quarantined: wrong-answer"
    world.join("tiny", 1)
    assert world.fleet.why("tiny")
    assert all(n["why"] == world.fleet.why(n["node_id"]) for n in world.fleet.to_json()["nodes"])


def test_a_load_that_failed_holds_nothing(world: World) -> None:
    world.join("a", 4)
    (told,) = world.beat("a")
    world.beat("a", answers={told.epoch: False})
    assert world.rows() == {"a": ()}
    assert world.fleet.to_json()["nodes"][0]["hold_down_level"] == 1


def test_a_node_of_another_start_is_to_register_again(world: World) -> None:
    world.join("a", 4)
    for name, boot in (("a", "other"), ("nobody", "boot")):
        with pytest.raises(RequestError) as e:
            world.beat(name, boot=boot)
        assert (e.value.code, e.value.status) == ("unknown-node", 404)


def test_what_a_node_lost_is_not_believed_any_more(world: World) -> None:
    world.join("a", 4)
    assert world.obey("a") == [LayerSpan(0, 4)]
    assert world.fleet.to_json()["covered"]
    world.beat("a")
    assert world.rows() == {"a": ()}
    assert not world.fleet.to_json()["covered"]


def test_a_silent_node_is_forgotten_and_others_get_its_layers(world: World) -> None:
    world.join("a", 4)
    held = world.obey("a")
    world.clock.now += 10
    world.join("b", 4)
    world.beat("b")
    world.clock.now += 3
    assert world.fleet.expire() == ["a"]
    assert set(world.rows()) == {"b"}
    assert world.obey("b") == held


def test_a_drop_is_withdrawn_where_its_layers_have_nobody_else_by_then(world: World) -> None:
    world.join("a", 4, held=(LayerSpan(0, 4),))
    world.join("b", 4, held=(LayerSpan(0, 4),))
    controller = world.fleet.controller
    order = Order(Kind.DROP, "a", LayerSpan(2, 4), "int8", "a test")
    controller.books.begin(order)
    directive = controller.directives.issue(order, world.clock.now + 60)
    assert directive in world.beat("a", LayerSpan(0, 4))
    assert world.fleet.confirm("a", directive.epoch)
    world.fleet.leave("b")
    assert not world.fleet.confirm("a", directive.epoch)
    assert world.rows() == {"a": (LayerSpan(0, 4),)}


def test_the_next_leader_knows_the_nodes_and_its_orders_are_newer(world: World) -> None:
    world.join("a", 4)
    (told,) = world.beat("a")
    world.obey("a")
    world.fleet = world.lead()
    assert world.fleet.to_json()["covered"]
    world.beat("a", LayerSpan(0, 4))
    world.join("b", 4)
    assert all(d.epoch > told.epoch for d in world.beat("b"))


def test_a_quarantined_node_has_no_layers_that_count(world: World) -> None:
    world.join("a", 4)
    world.obey("a")
    world.fleet.quarantine("a", "wrong-answer")
    assert not world.fleet.to_json()["covered"]
    (row,) = world.registry.nodes()
    assert row.quarantine == "wrong-answer"
    assert world.beat("a", LayerSpan(0, 4)) == []


def test_a_claim_is_judged_by_what_was_measured_and_a_restart_does_not_help(world: World) -> None:
    world.join("liar", 4, speed=100)
    world.obey("liar")
    sample = SpeedSample(16, 8_000_000)  # 2 tokens a second
    found = [world.fleet.measured("liar", sample) for _ in range(5)]
    assert found[:4] == [None] * 4
    assert found[4] is not None
    assert found[4].flagged
    world.join("liar", 4, speed=100)
    assert world.fleet.to_json()["nodes"][0]["measured_tokens_per_sec"] == 2


def test_an_honest_node_is_not_accused(world: World) -> None:
    world.join("a", 4, speed=100)
    world.obey("a")
    assert [world.fleet.measured("a", SpeedSample(16, 200_000)) for _ in range(40)] == [None] * 40
