"""The forward pass of a span of layers: load a phase, compute it, evict it.

Source: Llama (Touvron et al. 2023) and Qwen2 (Yang et al. 2024): pre-norm attention with rope and grouped KV heads,
then a gated feed-forward; seed 000 section 2 for the phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from knotctl.core.kernels.attention import attention
from knotctl.core.kernels.elementwise import swiglu
from knotctl.core.kernels.norm import rms_norm
from knotctl.core.kernels.rope import rope
from knotctl.core.model.config import ModelConfig
from knotctl.core.model.kv import KvCache
from knotctl.core.model.phases import LayerPhases
from knotctl.core.tensor.residency import Floats, HeldPhase, Input, Phase, Weights


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, end) of a batch: consecutive tokens of one session, the first one at `position`."""

    kv: KvCache
    position: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rope:
    """The rope of a model. Shapes: inverse_frequencies float32 [rope_dim / 2]."""

    inverse_frequencies: Floats
    interleaved: bool


def forward(
    x: Floats,
    batch: Sequence[Rows],
    layers: Iterable[LayerPhases],
    weights: Weights,
    config: ModelConfig,
    rope_table: Rope,
    check: Callable[[], None],
) -> None:
    """Run x float32 [tokens, hidden_size] through the layers, in place; `check` runs before each phase and may raise.

    Each session's KV grows by its rows; the caller has truncated it to the rows' position beforehand.
    """
    positions = np.concatenate([np.arange(r.position, r.position + r.end - r.start) for r in batch])
    for layer in layers:
        check()
        with weights.hold(layer.attn) as w:
            x += attend(w, x, positions, batch, layer.index, config, rope_table)
        check()
        with weights.hold(layer.ffn_gate) as w:
            normed = Input(norm(x, w.vector("ffn_norm_weight"), config))
            gate = w.multiply("ffn_gate_weight", normed)
        check()
        with weights.hold(layer.ffn_up) as w:
            up = w.multiply("ffn_up_weight", normed)
        check()
        with weights.hold(layer.ffn_down) as w:
            swiglu(gate, up, gate)
            x += w.multiply("ffn_down_weight", Input(gate))


def attend(
    w: HeldPhase,
    x: Floats,
    positions: npt.NDArray[np.int64],
    batch: Sequence[Rows],
    layer: int,
    config: ModelConfig,
    rope_table: Rope,
) -> Floats:
    """Return what attention of one layer adds to x; the layer's keys and values of these rows enter the KV caches."""
    normed = Input(norm(x, w.vector("attn_norm_weight"), config))
    q, k, v = (project(w, part, normed, config) for part in ("attn_q", "attn_k", "attn_v"))
    for heads in (q, k):
        rope(heads, positions, rope_table.inverse_frequencies, rope_table.interleaved)
    mixed = np.empty_like(q)
    for r in batch:
        keys, values = r.kv.store(layer, r.position, k[r.start : r.end], v[r.start : r.end])
        attention(q[r.start : r.end], keys, values, r.position, mixed[r.start : r.end])
    out = w.multiply("attn_output_weight", Input(mixed.reshape(len(x), config.q_size)))
    if "attn_output_bias" in w:
        out += w.vector("attn_output_bias")
    return out


def project(w: HeldPhase, part: str, normed: Input, config: ModelConfig) -> Floats:
    """Return queries, keys or values float32 [tokens, heads, head_dim], biased and normed where the model asks it."""
    out = w.multiply(f"{part}_weight", normed)
    if f"{part}_bias" in w:
        out += w.vector(f"{part}_bias")
    heads = out.reshape(len(out), -1, config.head_dim)
    if f"{part}_norm_weight" in w:
        heads = norm(heads.reshape(-1, config.head_dim), w.vector(f"{part}_norm_weight"), config).reshape(heads.shape)
    return heads


def head(x: Floats, phase: Phase, weights: Weights, config: ModelConfig) -> Floats:
    """Return the logits float32 [tokens, vocab_size] of hidden states; rows of padding get none."""
    with weights.hold(phase) as w:
        return w.multiply("output_weight", Input(norm(x, w.vector("output_norm_weight"), config)), config.vocab_size)


def norm(x: Floats, weight: Floats, config: ModelConfig) -> Floats:
    """Return x divided by its root mean square, row by row, times weight."""
    out = np.empty_like(x)
    rms_norm(x, weight, config.rms_eps, out)
    return out
