from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from running import REQUEST, TOKENS, embed

from knotctl.core.errors import BudgetError, Cancelled, Conflict, FrameError, ModelError, UsageError, WrongIdentity
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.kv import KvCache, KvType
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.opening import open_source
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.passing import Io
from knotctl.core.wire.frame import Segment


@pytest.fixture
def knot(tiny: Callable[[str], Path]) -> Iterator[Knot]:
    with open_knot(str(tiny("tiny"))) as k:
        yield k


def station(knot: Knot, a: int = 0, b: int | None = None, **spec: object) -> Station:
    end = knot.header.config.n_layers if b is None else b
    return Station(knot, StationSpec(LayerSpan(a, end), **spec))  # type: ignore[arg-type]


def test_a_fluid_station_never_holds_more_than_its_largest_phase(knot: Knot) -> None:
    s = station(knot)
    s.forward(embed(knot, TOKENS))
    largest = max(u.bytes for u in s.uses if u.layer is not None)
    assert 0 < s.weights.ledger.peak <= largest
    assert s.weights.ledger.held == 0
    head = next(u for u in s.uses if u.layer is None)
    assert head.tiles == -(-head.bytes // largest) or head.bytes <= largest


def test_a_small_budget_means_row_tiles_and_the_same_bytes(knot: Knot) -> None:
    whole = station(knot).forward(embed(knot, TOKENS))
    for room in (40_000, 20_000, 9_000):
        one_token = station(knot, batch_tokens=1, kv_tokens=len(TOKENS), io=Io.PREAD)
        least = one_token.plan.total_bytes - one_token.plan.buffer_bytes
        frames = 2 * (len(TOKENS) - 1) * knot.header.config.hidden_size * 4
        s = station(knot, kv_tokens=len(TOKENS), batch_tokens=len(TOKENS), memory_budget=least + frames + room)
        out = s.forward(embed(knot, TOKENS))
        assert out.payload.tobytes() == whole.payload.tobytes()
        assert s.weights.ledger.peak <= s.plan.buffer_bytes <= room
        assert s.plan.total_bytes <= s.plan.budget_bytes
        assert any(u.tiles > 1 for u in s.uses)


def test_a_budget_that_cannot_work_is_refused_with_the_table(knot: Knot) -> None:
    with pytest.raises(BudgetError, match="the least that works is") as e:
        station(knot, memory_budget=100_000)
    assert e.value.code == "budget-too-small"
    assert "keys and values" in e.value.message


def test_pinned_phases_are_read_once_and_the_rest_streams(tiny: Callable[[str], Path]) -> None:
    source = CountedSource(open_source(str(tiny("tiny"))))
    with open_knot(source) as knot:
        plan = station(knot, kv_tokens=64, batch_tokens=1).plan
        budget = plan.total_bytes + plan.weight_bytes // 2
        s = station(knot, kv_tokens=64, batch_tokens=1, memory_budget=budget, residency=Residency.PINNED)
        assert s.plan.residency is Residency.PINNED
        assert 0 < s.weights.ledger.held <= s.plan.pinned_bytes
        for position, token in enumerate(TOKENS[:3]):
            frame = embed(knot, [token], position)
            before = source.bytes
            s.forward(frame)
            assert source.bytes - before == plan.weight_bytes - sum(u.bytes for u in s.weights.pinned)


def test_a_last_station_without_the_head_holds_none_and_says_so_when_logits_are_asked_of_it(knot: Knot) -> None:
    whole = station(knot, 2, residency=Residency.RESIDENT)
    bare = station(knot, 2, residency=Residency.RESIDENT, head=False)
    assert (bare.role, bare.has_head) == ("exit", False)
    head = next(u.bytes for u in whole.uses if u.layer is None)
    assert bare.weights.ledger.held < whole.weights.ledger.held - head
    assert bare.plan.frame_bytes < whole.plan.frame_bytes
    frame = replace(embed(knot, TOKENS), meta={"logits": "none"})
    assert bare.forward(frame).payload.tobytes() == whole.forward(frame).payload.tobytes()
    with pytest.raises(UsageError) as e:
        bare.forward(embed(knot, TOKENS))
    assert e.value.code == "no-head"


def test_a_phase_is_one_range_read(tiny: Callable[[str], Path]) -> None:
    source = CountedSource(open_source(str(tiny("tiny"))))
    with open_knot(source) as knot:
        s = station(knot, 0, 1)
        frame = embed(knot, TOKENS)
        before = source.reads
        s.forward(frame)
        assert source.reads - before == 4


def test_a_missing_tensor_is_named_with_phase_and_layer_before_anything_is_computed(knot: Knot) -> None:
    for name, phase in (("blk_1_ffn_up_weight", "ffn_up"), ("blk_2_attn_q_bias", "attn")):
        header = replace(knot.header, tensors=tuple(t for t in knot.header.tensors if t.name != name))
        with pytest.raises(ModelError, match=f"phase {phase} of layer {name[4]}: tensor {name} is missing") as e:
            station(Knot(header, knot.source))
        assert e.value.code == "missing-tensor"
        station(knot, 2)


def test_a_tensor_that_would_not_be_computed_with_is_refused(knot: Knot) -> None:
    strange = replace(knot.header.tensors[-3], name="blk_1_attn_sinks_weight")
    with pytest.raises(ModelError, match="blk_1_attn_sinks_weight"):
        station(Knot(replace(knot.header, tensors=(*knot.header.tensors, strange)), knot.source))


@pytest.mark.parametrize(
    ("key", "value"), [("expert_count", 8), ("attention.sliding_window", 512), ("rope.scaling.type", "yarn")]
)
def test_a_feature_that_changes_the_computation_is_refused(knot: Knot, key: str, value: object) -> None:
    config = knot.header.config
    changed = replace(config, gguf={**config.gguf, f"{config.architecture}.{key}": value})
    with pytest.raises(ModelError, match=key):
        station(Knot(replace(knot.header, config=changed), knot.source))


def test_positions_go_back_but_never_ahead(knot: Knot) -> None:
    s = station(knot)
    whole = s.forward(replace(embed(knot, TOKENS), meta={"logits": "all"})).payload
    replay = s.forward(replace(embed(knot, TOKENS[4:9], 4), meta={"logits": "all"})).payload
    assert replay.tobytes() == whole[4:9].tobytes()
    assert s.sessions[REQUEST].length == 9
    with pytest.raises(Conflict, match="expected position 9 or below, found 10") as e:
        s.forward(embed(knot, TOKENS[:1], 10))
    assert e.value.code == "position-gap"
    assert s.sessions[REQUEST].length == 9


def test_cancelled_work_leaves_the_session_as_it_was(knot: Knot) -> None:
    s = station(knot)
    whole = s.forward(embed(knot, TOKENS)).payload
    calls = iter(range(5))

    def check() -> None:
        if next(calls, None) is None:
            raise Cancelled("cancelled", "gone")

    with pytest.raises(Cancelled):
        s.forward(embed(knot, [1, 2, 3], len(TOKENS)), check)
    assert s.sessions[REQUEST].length == len(TOKENS)
    assert s.forward(embed(knot, TOKENS[-1:], len(TOKENS) - 1)).payload.tobytes() == whole.tobytes()


def test_frames_of_another_model_width_or_with_nan_are_refused(knot: Knot) -> None:
    s, frame = station(knot), embed(knot, TOKENS)
    with pytest.raises(WrongIdentity):
        s.forward(replace(frame, knot_id=bytes(16)))
    with pytest.raises(UsageError, match="width"):
        s.forward(replace(frame, payload=frame.payload[:, :-1]))
    bad = frame.payload.copy()
    bad[3, 7] = np.nan
    with pytest.raises(FrameError) as e:
        s.forward(replace(frame, payload=bad))
    assert e.value.code == "bad-activation"
    with pytest.raises(UsageError, match="two segments of one request"):
        s.forward(replace(frame, segments=(Segment(REQUEST, 0, 10), Segment(REQUEST, 10, 10))))
    assert not any(kv.length for kv in s.sessions.values())


def test_more_tokens_than_the_plan_holds_are_refused(knot: Knot) -> None:
    s = station(knot, kv_tokens=16)
    with pytest.raises(BudgetError) as e:
        s.forward(embed(knot, TOKENS))
    assert e.value.code == "kv-full"


def test_f16_takes_half_the_bytes_and_its_files_are_not_f32s(knot: Knot, tmp_path: Path) -> None:
    s, full = station(knot, 0, 2, kv_type=KvType.F16), station(knot, 0, 2)
    assert 2 * s.kv_shape.token_bytes == full.kv_shape.token_bytes
    assert 2 * s.plan.kv_bytes == full.plan.kv_bytes
    s.forward(embed(knot, TOKENS))
    s.sessions[REQUEST].save(tmp_path / "half.kv")
    assert KvCache.load(tmp_path / "half.kv", s.kv_shape).length == len(TOKENS)
    with pytest.raises(WrongIdentity, match="f32"):
        KvCache.load(tmp_path / "half.kv", full.kv_shape)


def test_kv_files_hold_a_session_and_are_checked_whole(knot: Knot, tmp_path: Path) -> None:
    path, s = tmp_path / "span.kv", station(knot, 0, 2)
    s.forward(embed(knot, TOKENS))
    s.sessions[REQUEST].save(path)
    loaded = KvCache.load(path, s.kv_shape)
    assert loaded.length == len(TOKENS)
    assert loaded._data.tobytes() == s.sessions[REQUEST]._data[:, :, :, : len(TOKENS)].tobytes()
    with pytest.raises(WrongIdentity, match=r"found .* layers \[0, 2\]"):
        KvCache.load(path, station(knot, 2).kv_shape)
    data = path.read_bytes()
    for broken in (
        b"",
        data[:6],
        data[:100],
        data[:-1],
        data + b"x",
        b"XXXX" + data[4:],
        data[:-40] + b"\1" + data[-39:],
    ):
        path.write_bytes(broken)
        with pytest.raises(Exception) as e:
            KvCache.load(path, s.kv_shape)
        assert getattr(e.value, "code", None) == "bad-kv-file", broken[:40]
