"""One module knows the names, and their order makes every phase one range."""

from __future__ import annotations

import random

import pytest

from knotctl.core.errors import UsageError
from knotctl.core.gguf import names
from knotctl.core.model.config import INTERLEAVED_ROPE


def test_a_knots_name_has_underscores_for_dots() -> None:
    assert names.knot_name("blk.7.attn_q.weight") == "blk_7_attn_q_weight"


def test_tensors_are_ordered_as_they_are_used() -> None:
    expected = ["token_embd.weight", "rope_freqs.weight", "another.weight", "vision.bias"]
    for layer in range(12):
        expected += [t.gguf for phase in names.PHASES for t in names.layer_tensors(phase, layer)]
        expected += [f"blk.{layer}.a_new_part.weight", f"blk.{layer}.ffn_up.scale"]
    expected += ["output_norm.weight", "output.weight"]
    shuffled = random.Random(1).sample(expected, len(expected))
    assert sorted(shuffled, key=names.order_key) == expected


def test_parts_of_the_attention_phase_come_in_the_order_of_use() -> None:
    assert [(t.part, t.required) for t in names.layer_tensors("attn", 3)] == [
        ("attn_norm_weight", True), ("attn_q_weight", True), ("attn_q_bias", False), ("attn_k_weight", True),
        ("attn_k_bias", False), ("attn_v_weight", True), ("attn_v_bias", False), ("attn_q_norm_weight", False),
        ("attn_k_norm_weight", False), ("attn_output_weight", True), ("attn_output_bias", False),
    ]  # fmt: skip
    first = names.layer_tensors("attn", 3)[0]
    assert (first.gguf, first.knot) == ("blk.3.attn_norm.weight", "blk_3_attn_norm_weight")


def test_a_layer_has_one_name() -> None:
    assert names.split_layer("blk.7.ffn_up.weight") == (7, "ffn_up.weight")
    for name in ("blk.07.ffn_up.weight", "blk.-1.ffn_up.weight", "blk.٣.x", "blk.7", "xblk.7.x", "blk.100000.x"):
        assert names.split_layer(name) is None, name


def test_a_part_knows_its_phase() -> None:
    found = [names.phase_of(f"blk.0.{p}") for p in ("attn_q.bias", "ffn_norm.weight", "ffn_up.weight", "x.weight")]
    assert found == ["attn", "ffn_gate", "ffn_up", None]
    assert names.phase_of("output.weight") is None


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of attn, ffn_gate, ffn_up, ffn_down"):
        names.layer_tensors("mlp", 0)


def test_required_tensors_follow_the_architecture() -> None:
    assert "blk.1.attn_q.bias" in list(names.required_tensors("qwen2", 2))
    assert "blk.1.attn_k_norm.weight" in list(names.required_tensors("qwen3", 2))
    assert not [n for n in names.required_tensors("llama", 2) if "bias" in n or "q_norm" in n]


def test_encode_knows_the_architectures_that_the_engine_runs() -> None:
    assert set(names.ARCHITECTURES) == set(INTERLEAVED_ROPE)
