"""What a layer warden holds: chosen once, within the budget, whole phases, the small and the shared first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import ModelError
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.qtypes import QTYPES
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.layer_policy import SMALL_BYTES, held_runs, is_resident, span_tensors

MIB = 1 << 20


def phases(sizes: list[list[int]]) -> list[list[TensorEntry]]:
    """Phases of tensors of these sizes, one after the other in the payload."""
    at, made = 0, []
    for i, phase in enumerate(sizes):
        made.append([])
        for j, size in enumerate(phase):
            made[-1].append(TensorEntry(f"blk_{i}_part{j}", QTYPES["I8"], (size,), at, size, None))
            at += size
    return made


def names(runs: list[list[TensorEntry]]) -> list[list[str]]:
    return [[e.name for e in run] for run in runs]


def test_norms_ends_and_whatever_is_small_stay() -> None:
    def entry(name: str, size: int) -> TensorEntry:
        return TensorEntry(name, QTYPES["I8"], (size,), 0, size, None)

    for name in ("blk_3_attn_norm_weight", "token_embd_weight", "output_norm_weight", "output_weight"):
        assert is_resident(entry(name, 400 * MIB))
    assert is_resident(entry("blk_3_attn_k_weight", SMALL_BYTES - 1))
    assert not is_resident(entry("blk_3_attn_k_weight", SMALL_BYTES))


def test_small_tensors_come_before_matrices_and_phases_in_the_order_of_use() -> None:
    layers = phases([[4096, 8 * MIB], [4096, 8 * MIB], [4096, 8 * MIB]])
    assert names(held_runs(layers, 3 * 4096)) == [["blk_0_part0"], ["blk_1_part0"], ["blk_2_part0"]]
    held = names(held_runs(layers, 3 * 4096 + 8 * MIB))
    assert held == [["blk_0_part0", "blk_0_part1"], ["blk_1_part0"], ["blk_2_part0"]]
    assert len(held_runs(layers, 1 << 40)) == 3, "no run is longer than a phase"


def test_a_phase_that_does_not_fit_leaves_room_for_a_later_one() -> None:
    layers = phases([[8 * MIB], [3 * MIB], [2 * MIB]])
    assert names(held_runs(layers, 5 * MIB)) == [["blk_1_part0"], ["blk_2_part0"]]


@given(st.lists(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=4), max_size=6), st.integers(0, 20 * MIB))
def test_what_is_held_is_within_the_budget_and_lies_in_one_phase(sizes: list[list[int]], budget: int) -> None:
    layers = phases(sizes)
    runs = held_runs(layers, budget)
    held = [e.name for run in runs for e in run]
    assert len(held) == len(set(held))
    assert sum(-(-sum(e.length for e in run) // 4096) * 4096 for run in runs) <= budget
    for run in runs:
        assert all(a.end == b.offset for a, b in pairwise(run))
        assert any(set(names([run])[0]) <= {e.name for e in phase} for phase in layers)
    assert names(held_runs(layers, budget)) == names(runs), "the choice does not change"
    more = {e.name for run in held_runs(layers, 1 << 40) for e in run}
    assert more == {e.name for phase in layers for e in phase if e.length}


@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "tiny-qwen3"])
def test_everything_that_a_station_loads_is_among_the_span_s_tensors(tiny: Callable[[str], Path], model: str) -> None:
    with open_knot(str(tiny(model))) as knot:
        n = knot.header.config.n_layers
        for span in (LayerSpan(0, 1), LayerSpan(1, n), LayerSpan(0, n)):
            served = {e.name for phase in span_tensors(knot, span) for e in phase}
            station = Station(knot, StationSpec(span, Residency.FLUID, kv_tokens=8, batch_tokens=1))
            for phase in station.weights._phases:
                assert {t.name for t in phase.tensors.values()} <= served


def test_a_span_outside_the_model_is_refused(knot: Knot) -> None:
    for span in (LayerSpan(0, 9), LayerSpan(3, 4), LayerSpan(1, 1)):
        with pytest.raises(ModelError) as e:
            span_tensors(knot, span)
        assert e.value.code == "bad-span"
