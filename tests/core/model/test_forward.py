from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
import pytest
from running import TOKENS, embed, run

from knotctl.core.kernels.threads import get_threads, set_threads
from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.kv import KvType


def test_logits_come_close_to_plain_float32_numpy(knot: Knot) -> None:
    ours, gold = run(knot), oracle.forward(knot, TOKENS)
    assert ours.shape == gold.shape == (len(TOKENS), knot.header.config.vocab_size)
    # int8 activations are good to about 1 % of a matrix product's spread; a wrong rope, head or bias is far off
    error = np.sqrt(((ours - gold) ** 2).mean()) / gold.std()
    assert error < 0.05, error
    assert gold.std() > 0.1, "a model whose logits are all alike proves nothing"


@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
def test_the_split_into_stations_changes_no_bit(knot: Knot, cuts: tuple[int, ...]) -> None:
    assert run(knot, cuts=cuts[: knot.header.config.n_layers - 1]).tobytes() == run(knot).tobytes()


@pytest.mark.parametrize("chunks", [[1] * 20, [7, 7, 6], [19, 1], [1, 19]])
def test_the_chunking_of_a_prompt_changes_no_bit(knot: Knot, chunks: list[int]) -> None:
    assert run(knot, chunks=chunks).tobytes() == run(knot).tobytes()


def test_the_number_of_shards_changes_no_bit(knot: Knot) -> None:
    assert embed(knot, TOKENS, shards=8).payload.tobytes() == embed(knot, TOKENS).payload.tobytes()


@pytest.mark.parametrize("residency", list(Residency))
def test_the_residency_changes_no_bit(knot: Knot, residency: Residency) -> None:
    assert run(knot, residency=residency, budget=64 << 20).tobytes() == run(knot).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(knot: Knot, threads: int) -> None:
    whole, before = run(knot), get_threads()
    set_threads(threads)
    try:
        assert run(knot).tobytes() == whole.tobytes()
    finally:
        set_threads(before)


def test_f16_keys_and_values_stay_close_and_are_as_invariant(knot: Knot) -> None:
    half, full = run(knot, kv_type=KvType.F16), run(knot)
    assert half.tobytes() != full.tobytes()
    assert np.sqrt(((half - full) ** 2).mean()) < 0.02 * full.std()
    assert run(knot, kv_type=KvType.F16, cuts=(1,), chunks=[7, 7, 6]).tobytes() == half.tobytes()


def test_a_batch_of_two_requests_gives_each_what_it_gets_alone(tiny: Callable[[str], Path]) -> None:
    from dataclasses import replace

    from knotctl.core.knot.reader import open_knot
    from knotctl.core.model.station import Station, StationSpec
    from knotctl.core.spans import LayerSpan
    from knotctl.core.wire.frame import Segment

    with open_knot(str(tiny("tiny"))) as knot:
        station = Station(knot, StationSpec(LayerSpan(0, knot.header.config.n_layers), logits_rows=20))
        one, two = embed(knot, TOKENS[:9]), embed(knot, TOKENS[9:])
        both = replace(
            one,
            segments=(Segment(b"a" * 16, 0, 9), Segment(b"b" * 16, 0, 11)),
            payload=np.concatenate([one.payload, two.payload]),
            meta={"logits": "all"},
        )
        got = station.forward(both).payload
        alone = [run(knot, TOKENS[:9]), run(knot, TOKENS[9:])]
        assert got.tobytes() == np.concatenate(alone).tobytes()
