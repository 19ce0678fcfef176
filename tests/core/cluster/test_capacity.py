"""What fits a node, and what a token takes there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cluster_samples import GB, PLAIN, a_model, a_node, models
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.cluster.capacity import Capacity, capacity_of, too_small
from knotctl.core.cluster.layers import LayerSizes, ModelLayers
from knotctl.core.cluster.policy import Policy
from knotctl.core.cluster.quantizations import CATALOGUE, canonical
from knotctl.core.cluster.speed import SECOND, parameters_in, time_text
from knotctl.core.spans import LayerSpan


def capacity(gigabytes: float, model: ModelLayers, policy: Policy = PLAIN, tokens_per_s: float = 10.0) -> Capacity:
    found = capacity_of(a_node("a", gigabytes, tokens_per_s), model, policy)
    assert isinstance(found, Capacity)
    return found


@given(models(), st.integers(0, 200 * GB), st.data())
def test_the_furthest_end_and_start_are_the_furthest(model: ModelLayers, room: int, data: st.DataObject) -> None:
    sizes = model.sizes_at("nf4")
    assert sizes is not None
    n, at = model.n_layers, data.draw(st.integers(0, model.n_layers))
    ends = [e for e in range(at + 1, n + 1) if sizes.span_bytes(at, e) <= room]
    assert sizes.end_from(at, room) == max(ends, default=at)
    starts = [s for s in range(at) if sizes.span_bytes(s, at) <= room]
    assert sizes.start_to(at, room) == min(starts, default=at)
    longest = max(sizes.end_from(s, room) - s for s in range(n))
    assert longest <= sizes.most_layers(room)


def test_a_table_that_embedding_and_head_share_counts_once_on_one_node() -> None:
    sizes = LayerSizes.of("nf4", [10, 10, 10], embedding=5, head=6, shared=5)
    assert sizes.span_bytes(0, 2) == 25
    assert sizes.span_bytes(1, 3) == 26
    assert sizes.span_bytes(0, 3) == 36
    assert sizes.span_bytes(1, 1) == 0
    assert sizes.end_from(0, 36) == 3 and sizes.end_from(0, 35) == 2


def test_room_is_memory_less_headroom_activations_and_other_models() -> None:
    model = a_model(10, activation_bytes=GB)
    c = capacity(10, model, Policy(kv_headroom=0.2))
    assert (c.kv_bytes, c.usable_bytes, c.most_layers) == (2 * GB, 7 * GB, 7)
    assert capacity(10, model, Policy(kv_bytes=GB)).usable_bytes == 8 * GB
    assert capacity(1, model, Policy(kv_bytes=3 * GB)).usable_bytes == 0


def test_what_a_node_says_that_it_needs_goes_before_what_the_model_says() -> None:
    model, policy = a_model(10, activation_bytes=GB), Policy(kv_headroom=0.2)
    for said, room in ((None, 7 * GB), (0, 8 * GB), (3 * GB, 5 * GB)):
        c = capacity_of(replace(a_node("a", 10), overhead_bytes=said), model, policy)
        assert isinstance(c, Capacity)
        assert c.usable_bytes == room
        assert too_small(c) is None


@given(st.integers(GB // 64, 3 * GB), st.integers(0, 3 * GB), st.sampled_from([0.0, 0.2, 0.5]))
def test_a_node_without_room_hears_with_how_much_it_would_have_a_layer(memory: int, said: int, share: float) -> None:
    model, policy = a_model(3), Policy(kv_headroom=share)

    def at(size: int) -> Capacity:
        c = capacity_of(replace(a_node("a", size / GB), overhead_bytes=said), model, policy)
        assert isinstance(c, Capacity)
        return c

    c = at(memory)
    if c.most_layers:
        return
    why = too_small(c)
    assert why is not None
    ((size, unit),) = re.findall(r"with ([\d.]+) (\w+) it would have one", why)
    named = float(size) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    # the text has one decimal
    assert at(round(named * 1.06)).most_layers == 1
    assert at(round(named * 0.94)).most_layers == 0


def test_time_goes_with_layers_and_the_head_with_the_last() -> None:
    c = capacity(99, a_model(8, GB, head_bytes=2 * GB))
    assert c.time_of(LayerSpan(0, 8)) == pytest.approx(SECOND / 10, rel=1e-6)
    assert c.time_of(LayerSpan(0, 4)) == pytest.approx(SECOND / 10 * 4 / 10, rel=1e-6)
    assert c.time_of(LayerSpan(4, 8)) == pytest.approx(SECOND / 10 * 6 / 10, rel=1e-6)


def test_a_benchmark_on_another_model_counts_by_its_size() -> None:
    model = a_model(10, parameters=70 * GB)
    times = {}
    for name in (None, "m", "Llama-3-8B", "mystery"):
        c = capacity_of(a_node("a", 99, 10, benchmark_model=name), model, PLAIN)
        assert isinstance(c, Capacity)
        times[name] = c.time_of(model.span)
    assert times[None] == times["m"] == times["mystery"]
    assert times["Llama-3-8B"] == pytest.approx(times["m"] * 70 / 8, rel=1e-6)


def test_twice_the_bytes_take_twice_the_time() -> None:
    model = a_model(10, bytes_per_layer={"nf4": GB, "int8": 2 * GB})
    node = a_node("a", 99, 10, held="0:5", quantizations=("nf4", "int8"))
    small = capacity_of(node, model, PLAIN)
    large = capacity_of(replace(node, current=(replace(node.current[0], quantization="int8"),)), model, PLAIN)
    assert isinstance(small, Capacity) and isinstance(large, Capacity)
    assert (small.quantization, large.quantization) == ("nf4", "int8")
    assert large.step == pytest.approx(2 * small.step, rel=1e-6)


def test_a_node_without_a_quantisation_of_the_model_says_why() -> None:
    assert "none of which m has" in str(capacity_of(a_node("a", 99, quantizations=("fp8",)), a_model(), PLAIN))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3-8B", 8 * GB), ("SmolLM2-135M-Instruct", 135 * 10**6), ("qwen2.5-coder-1.5b", 1.5 * GB),
        ("llama-3-70b-instruct", 70 * GB), ("gpt2", None), ("Mixtral-8x7B", None), ("", None), ("0b", None),
    ],
)  # fmt: skip
def test_parameters_in_a_name(name: str, parameters: float | None) -> None:
    assert parameters_in(name) == parameters


def test_one_name_for_each_quantisation() -> None:
    assert [canonical(q) for q in ("BF16", "fp16", "q4_k_m", "Q4_K", "nf4", "mine")] == [
        "bfloat16", "float16", "Q4_K", "Q4_K", "nf4", "mine",
    ]  # fmt: skip
    assert CATALOGUE["Q4_K"].bytes_of(256) == 144 and CATALOGUE["nf4"].bytes_of(65) == 72


@pytest.mark.parametrize(
    ("ms", "text"), [(12.345, "12.3 ms"), (999, "999 ms"), (1460, "1.46 s"), (2e6, "2,000 s"), (0, "0 ms")]
)
def test_times_for_people(ms: float, text: str) -> None:
    assert time_text(round(ms * SECOND / 1000)) == text
