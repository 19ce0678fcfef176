"""What the planner knows of a knot: its bytes by layer, and what a station needs beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.core.knot.layer_bytes import model_layers, station_bytes
from knotctl.core.knot.reader import open_knot
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan

TINY = ["tiny-llama", "tiny-qwen3"]


@pytest.mark.parametrize("name", TINY)
def test_layers_weigh_what_their_tensors_do(name: str, tiny: Callable[[str], Path]) -> None:
    with open_knot(str(tiny(name))) as knot:
        model = model_layers(knot.header, name)
        sizes = model.sizes_at(model.native or "")
        assert sizes is not None
        for k in range(1, model.n_layers - 1):
            tensors = [t.length for t in knot.header.tensors if t.name.startswith(f"blk_{k}_")]
            assert sizes.span_bytes(k, k + 1) == sum(tensors) > 0
        layers = sum(t.length for t in knot.header.tensors if t.name.startswith("blk_"))
        assert sizes.prefix[-1] == layers
        table = knot.entry("token_embd_weight").length
        tied = not knot.has("output_weight")
        assert sizes.shared == (table if tied else 0)
        assert sizes.head == knot.entry("output_norm_weight").length + (
            table if tied else knot.entry("output_weight").length
        )
        station = Station(knot, StationSpec(LayerSpan(0, 1)))
        assert model.kv_token_bytes * station.plan.kv_tokens == station.plan.kv_bytes


@pytest.mark.parametrize("name", TINY)
def test_other_quantisations_are_reckoned_from_the_elements(name: str, tiny: Callable[[str], Path]) -> None:
    with open_knot(str(tiny(name))) as knot:
        model = model_layers(knot.header, name)
        half, single = model.sizes_at("float16"), model.sizes_at("float32")
        assert half is not None and single is not None and model.sizes_at("mine") is None
        vectors = sum(t.length for t in knot.header.tensors if t.name.startswith("blk_") and len(t.shape) == 1)
        assert single.prefix[-1] - vectors == 2 * (half.prefix[-1] - vectors)


@pytest.mark.parametrize("name", TINY)
def test_a_station_needs_no_more_beside_weights_and_kv_than_the_planner_keeps(
    name: str, tiny: Callable[[str], Path]
) -> None:
    with open_knot(str(tiny(name))) as knot:
        plan = Station(knot, StationSpec(LayerSpan(0, knot.header.config.n_layers))).plan
        beside = plan.total_bytes - plan.buffer_bytes - plan.pinned_bytes - plan.kv_bytes
        assert beside <= station_bytes(knot.header.config) < beside + (64 << 20)


@pytest.mark.model
def test_a_real_knot_has_its_parameters(knot_of: Callable[[str], Path]) -> None:
    with open_knot(str(knot_of("smollm2"))) as knot:
        model = model_layers(knot.header, "smollm2")
        assert model.parameters == pytest.approx(135e6, rel=0.02)
        sizes = model.sizes_at(model.native or "")
        assert sizes is not None
        payload = sum(t.length for t in knot.header.tensors if t.name not in ("knot_digests", "rope_freqs_weight"))
        assert sizes.total == payload
